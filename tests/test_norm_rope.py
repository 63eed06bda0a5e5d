"""rms_norm_rope: dtypes of tables, and the accuracy of gradients if the output y is saved.

`test_norm` tests other values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import rope
from norm_references import RotatedNorm
from norms import check, normal, tables
from program_error import analyse, assert_computes
from reference import DTYPES, SAFETY, assert_within, exact, relative_error, rounding, unit_roundoff

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each_save = pytest.mark.parametrize("save", ["output", "input"])
each_order = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def checked(x, scale, cos, sin, *, save, **options):
    given = {"scale": scale, "cos": cos, "sin": sin, "save": save}
    check("rms_norm_rope", x, **given, **options)


def reference_of(x, scale, cos, sin, d, *, save, y_dtype, interleaved=False):
    """Return the float64 reference for the arguments of `jaxnorm.rms_norm_rope`."""
    cols = x.shape[-1]

    def of_rows(table):
        return np.broadcast_to(exact(table), (*x.shape[:-1], table.shape[-1])).reshape(
            -1, table.shape[-1]
        )

    return RotatedNorm(
        x=exact(x).reshape(-1, cols),
        gain=exact(scale),
        bias=np.zeros(cols),
        d=exact(d).reshape(-1, cols),
        subtract_mean=False,
        epsilon=1e-6,
        saved=save,
        x_dtype=x.dtype.name,
        y_dtype=y_dtype,
        cos=of_rows(cos),
        sin=of_rows(sin),
        interleaved=interleaved,
    )


def check_stored(grad, like, expected, bound):
    assert (grad.shape, grad.dtype) == (like.shape, like.dtype)
    expected, bound = expected.reshape(grad.shape), bound.reshape(grad.shape)
    assert_within(grad, expected, bound + rounding(np.abs(expected) + bound, like.dtype.name))


def parameter(cols, dtype):
    return normal((cols,), dtype, 1, scale=0.3, shift=1.0)


def test_float64_tables_are_rounded(x64):
    """float64 tables are rounded to float32 if x and y are float32."""
    x, scale = normal((2, 8, 4, 64), "float32", 0), parameter(64, "float32")
    wide = tables((8, 1, 32), "float64")
    narrow = [table.astype("float32") for table in wide]
    y = jaxnorm.rms_norm_rope(x, scale, *wide)
    assert y.dtype == "float32"
    np.testing.assert_array_equal(y, jaxnorm.rms_norm_rope(x, scale, *narrow))


def test_tables_of_two_dtypes():
    """The rotary tables cos and sin may have different dtypes.

    They are promoted to a common dtype. The gradient of each table has the dtype of this table.
    """
    x, scale = normal((2, 8, 4, 64), "float32", 0), parameter(64, "float32")
    cos, sin = tables((8, 1, 32))
    cos = cos.astype("bfloat16")
    y, vjp = jax.vjp(lambda *t: jaxnorm.rms_norm_rope(x, scale, *t), cos, sin)
    wide = jaxnorm.rms_norm_rope(x, scale, cos.astype("float32"), sin)
    np.testing.assert_array_equal(y, wide)
    assert [d.dtype for d in vjp(y)] == ["bfloat16", "float32"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_the_norm_and_its_rotation(interleaved):
    """y equals the result of the same formula in plain JAX.

    For a single pair, y also equals the result of rms_norm, rotated by a complex number.
    """
    x, scale = normal((2, 8, 4, 64), "float32", 0), parameter(64, "float32")
    cos, sin = tables((8, 1, 32))
    ours, theirs = (
        functools.partial(f, interleaved=interleaved) for f in (jaxnorm.rms_norm_rope, rope)
    )
    y = ours(x, scale, cos, sin)
    assert_computes(y, theirs, x, scale, cos, sin, like=ours)
    n = np.asarray(jaxnorm.rms_norm(x, scale))
    pair = (n[..., 4] + 1j * n[..., 5]) if interleaved else (n[..., 2] + 1j * n[..., 34])
    turned = pair * np.asarray(cos[..., 2] + 1j * sin[..., 2])
    at = [4, 5] if interleaved else [2, 34]
    # This test compares y with a rotation of rms_norm's result. Both y and this result are rounded,
    # so the bound is doubled.
    error = 2 * analyse(ours, x, scale, cos, sin).error[..., at]
    assert_within(y[..., jnp.array(at)], np.stack([turned.real, turned.imag], -1), error)
    few = jaxnorm.rms_norm_rope(x, scale, cos[..., :8], sin[..., :8], interleaved=interleaved)
    np.testing.assert_array_equal(few[..., 16:], n[..., 16:])


# --------------------------------------------------------------- the accuracy of saving the output


def gradients(x, scale, cos, sin, save, **options):
    d = normal(x.shape, x.dtype, 9)
    _, vjp = jax.vjp(lambda *a: jaxnorm.rms_norm_rope(*a, cos, sin, save=save, **options), x, scale)
    ref = reference_of(x, scale, cos, sin, d, save=save, y_dtype=x.dtype.name, **options)
    return vjp(d), ref


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_whose_tables_are_zero(dtype):
    """If cos and sin of a rotated pair are 0, y is 0 in both columns of the pair.

    If y is saved, gradients are finite, but dx is wrong in these columns. With save="input", all
    gradients are correct.
    """
    x, scale = normal((2, 8, 4, 64), dtype, 0), parameter(64, "float32")
    cos, sin = (table.at[..., 3].set(0) for table in tables((8, 1, 32)))
    checked(x, scale, cos, sin, save="input", implementation="xla")
    (dx, dscale), ref = gradients(x, scale, cos, sin, "output")
    pair = [3, 35]
    others = np.setdiff1d(np.arange(64), pair)
    # In the two columns of `pair`, cos and sin are 0. So y is 0 there, and the cotangent of the
    # normalised x (the array before the rotation) is 0, too. The exact dscale is then 0. The exact
    # dx is not 0: it contains the term x_hat * c2, where c2 is the mean of (cotangent * x_hat) over
    # the row. But the backward can recover x_hat only from y, which is 0. So it computes a dx of 0.
    np.testing.assert_array_equal(exact(dx)[..., pair], 0)
    np.testing.assert_array_equal(exact(dscale)[pair], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        dx_bound, dscale_bound = ref.gradient_bounds()
    # The bound of dx is NaN and is not used. It depends on the error of x_hat, which is NaN in the
    # two columns of `pair`, because x_hat cannot be recovered there. The mean c2 makes the bound
    # NaN in all columns.
    del dx_bound
    check_stored(dscale[others], scale[others], ref.dscale[others], dscale_bound[others])
    size = np.linalg.norm(ref.dx[:, others])
    error = np.linalg.norm(exact(dx).reshape(-1, 64)[:, others] - ref.dx[:, others])
    assert error < 4 * unit_roundoff(dtype) * size


@each_order
@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 8.0), ("float16", 32.0), ("float32", 2.0**10)]
)
def test_the_law(ratio, dtype, interleaved):
    """The relative error of a column of dscale depends on the ratio of two scales.

    rms_norm_rope computes ``n = x_hat * scale`` and rotates n to y. The rotation mixes pairs of
    columns, i and j, whose scales are g_i and g_j. Rounding causes a relative error in each element
    of y. The root mean square of these errors, u, is 0.83 times half the unit roundoff.

    The backward rotates y back to n. This mixes the errors of both columns. The mean square error
    of n_i is ``u^2 * (c^2 * y_i^2 + s^2 * y_j^2)``, where c and s are cos and sin of the angle.

    x_hat has a mean square of 1. So the mean of y_i^2 is ``c^2 * g_i^2 + s^2 * g_j^2``, and the
    mean of y_j^2 is ``s^2 * g_i^2 + c^2 * g_j^2``. With these values, the mean square error over
    all angles is ``u^2 * (3 * g_i^2 + g_j^2) / 4``. Relative to g_i, the error is
    ``u * sqrt((3 + (g_j / g_i)^2) / 4)``.
    """
    columns = np.arange(64).reshape((32, 2) if interleaved else (2, 32))
    small, large = columns.T if interleaved else columns
    scale = jnp.ones(64).at[large].set(ratio)
    cos, sin = tables((256, 1, 32))
    x = normal((4, 256, 4, 64), dtype, 0)
    (_, dscale), ref = gradients(x, scale, cos, sin, "output", interleaved=interleaved)
    for of, partner in ((small, ratio), (large, 1 / ratio)):
        predicted = 0.83 * unit_roundoff(dtype) / 2 * np.sqrt((3 + partner**2) / 4)
        error = relative_error(dscale[of], ref.dscale[of])
        # `predicted` is the error that the rounding of y causes. If y is float32, the arithmetic is
        # no more precise than y. Then about ten rounding errors have this size, so the error is
        # sqrt(10) times as large. The sums over rows cause further errors. In columns with the
        # larger scale, the errors of these sums dominate.
        most = np.sqrt(10) if dtype == "float32" else 1.5
        assert error < most * predicted + SAFETY * 2.0**-24
        assert of is large or error > predicted / 1.5
    (_, dscale), ref = gradients(x, scale, cos, sin, "input", interleaved=interleaved)
    assert relative_error(dscale, ref.dscale) < SAFETY * 2.0**-24 * np.sqrt(64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rotated", [64, 32])
def test_check_params_predicts_the_error(rotated, dtype):
    """check_params predicts each column's error up to a factor of about sqrt(2).

    check_params assumes that the two columns of a pair are rotated by 45 degrees. Then the squared
    error is proportional to ``(g_i^2 + g_j^2) / 2``, where g_i and g_j are the scales of the
    columns. The true mean over all angles is proportional to ``(3 * g_i^2 + g_j^2) / 4``, as
    `test_the_law` explains. The ratio of the true mean to the assumed value is between 1/2 and 3/2.
    So the predicted error is wrong by at most a factor of about sqrt(2). The bounds of this test
    also allow the sampling error of some 1000 rows.
    """
    scale = jnp.asarray(2 ** np.random.default_rng(4).uniform(-3, 3, size=64), jnp.float32)
    cos, sin = tables((256, 1, rotated // 2))
    x = normal((1, 256, 4, 64), dtype, 0)
    (_, dscale), ref = gradients(x, scale, cos, sin, "output")
    partners = np.arange(64)
    partners[:rotated] = np.roll(partners[:rotated], rotated // 2)
    predicted = np.array(
        [
            jaxnorm.check_params({"scale": scale[jnp.array([j, p])]}, dtype, rotated="(root)")
            .norms[0]
            .dscale_error
            for j, p in enumerate(partners)
            if scale[j] <= scale[p]  # Of a pair's two errors, check_params reports the larger one.
        ]
    )
    worse = np.asarray(scale) <= np.asarray(scale)[partners]
    magnitude = np.linalg.norm(ref.d * ref.xh, axis=0)[worse]
    measured = np.abs(exact(dscale) - ref.dscale)[worse] / (predicted * magnitude)
    assert 0.7 / np.sqrt(2) < np.sqrt(np.mean(measured**2)) < 1.4 * np.sqrt(2)


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_beside_a_partner_that_is_not(dtype, interleaved):
    """If only one scale of a rotated pair is 0, the gradient of this scale is wrong but finite.

    All other gradients are correct. With save="input", this gradient is correct, too.
    """
    lost, partner = (6, 7) if interleaved else (6, 38)
    scale = parameter(64, "float32").at[lost].set(0)
    cos, sin = tables((8, 1, 32))
    x = normal((2, 8, 4, 64), dtype, 0)
    (dx, dscale), ref = gradients(x, scale, cos, sin, "output", interleaved=interleaved)
    dx_bound, dscale_bound = ref.gradient_bounds()
    others = np.arange(64) != lost
    assert np.all(np.isfinite(exact(dx)))
    assert np.all(np.isfinite(exact(dscale)))
    assert_within(exact(dx).reshape(-1, 64)[:, others], ref.dx[:, others], dx_bound[:, others])
    check_stored(dscale[others], scale[others], ref.dscale[others], dscale_bound[others])
    # The wrong gradient is bounded, because x_hat is clipped to sqrt(N).
    of_lost = np.abs(exact(dscale[lost]) - ref.dscale[lost])
    assert of_lost <= np.sum(np.abs(ref.d[:, lost])) * 2 * np.sqrt(64)
    assert relative_error(dscale[partner], ref.dscale[partner]) < 8 * unit_roundoff(dtype)
    checked(x, scale, cos, sin, save="input", interleaved=interleaved, implementation="xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_of_a_pair_zero(dtype):
    """If both scales of a pair are 0, gradients are correct.

    The forward computes y with 2^-60 instead of these scales, so y is not 0 and x_hat can be
    recovered from it.
    """
    scale = (
        parameter(64, "float32").at[jnp.array([6, 38, 50])].set(jnp.array([0, 0, 0.5], jnp.float32))
    )
    cos, sin = tables((8, 1, 32))
    x = normal((2, 8, 4, 64), dtype, 0)
    (_, dscale), ref = gradients(x, scale, cos, sin, "output")
    for column in (6, 38):
        assert_within(dscale[column], ref.dscale[column], dscale_walk(ref, column, dtype))
    # A norm whose scales all start at 0 can be trained.
    zero = jnp.zeros(64, jnp.float32)
    (_, dscale), ref = gradients(x, zero, cos, sin, "output")
    assert relative_error(dscale, ref.dscale) < 4 * unit_roundoff(dtype)


def dscale_walk(ref, column, dtype):
    """Return the error that rounding y causes in one element of dscale.

    The formula is valid only if both columns of the rotated pair have the same scale.
    """
    magnitude = np.abs(ref.d[:, column]) * np.hypot(
        ref.xh[:, column], ref.xh[:, ref.partner[column]]
    )
    return 4 * unit_roundoff(dtype) * np.linalg.norm(magnitude)


def test_outputs_beyond_float16():
    """If an element of y is infinite in float16, only gradients of its pair of columns are wrong.

    The cotangent d of the infinite element is 0 here. The backward replaces the infinity in y by
    float16's largest number. The gradients of other columns depend on this element only through a
    sum over the row, ``sum(d * y)``. In this sum, the element of y is multiplied by d = 0, so it
    has no effect. (The backward computes the sum as ``sum(dn * n)``, from the arrays before the
    rotation. A rotation does not change this sum.)
    """
    scale = parameter(64, "float32").at[5].set(5e4)
    cos, sin = tables((8, 1, 32))
    x = normal((16, 8, 4, 64), "float32", 0)
    y, vjp = jax.vjp(lambda *a: jaxnorm.rms_norm_rope(*a, cos, sin, dtype="float16"), x, scale)
    infinite = np.isinf(exact(y))
    assert np.flatnonzero(infinite.any((0, 1, 2))).tolist() == [5, 37]
    bounded = 1 - jnp.tanh(y.astype("float32")) ** 2
    d = (normal(y.shape, "float32", 4) * bounded).astype("float16")
    dx, dscale = map(exact, vjp(d))
    ref = reference_of(x, scale, cos, sin, d, save="output", y_dtype="float16")
    dx_bound, dscale_bound = ref.gradient_bounds()
    others = ~np.isin(np.arange(64), [5, 37])
    assert np.isfinite(dx).all()
    assert_within(dx.reshape(-1, 64)[:, others], ref.dx[:, others], dx_bound[:, others])
    assert_within(dscale[others], ref.dscale[others], dscale_bound[others])
    assert np.isfinite(dscale).all()
