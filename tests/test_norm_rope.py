"""rms_norm_rope against float64 numpy: values, gradients, what the output carries, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from functions import rope
from norm_references import RotatedNorm
from norms import check, normal, tables
from pairs import pairwise
from program_error import analyse, assert_computes
from reference import DTYPES, SAFETY, assert_within, exact, relative_error, rounding, unit_roundoff

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# x, scale, tables, y
MIXES = [
    *((d, d, d, d) for d in DTYPES),
    ("bfloat16", "float32", "float32", "bfloat16"),
    ("float32", "float32", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "float16", "bfloat16"),
]
# x, and r.
SIZES = [((2, 8, 4, 64), 64), ((3, 16, 2, 16), 8), ((2, 5, 3, 128), 96), ((1, 8, 4, 512), 512)]
# The axes of the tables, for an x of (2, 8, 4, 64).
BROADCAST = [(8, 1), (), (1,), (2, 8, 1), (1, 1, 1), (1, 8, 1), (2, 1, 4), (4,), (8, 4), (2, 8, 4)]

each_save = pytest.mark.parametrize("save", ["output", "input"])
each_order = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def checked(x, scale, cos, sin, *, save, **options):
    given = {"scale": scale, "cos": cos, "sin": sin, "save": save}
    check("rms_norm_rope", x, **given, **options)


def reference_of(x, scale, cos, sin, d, *, save, y_dtype, interleaved=False):
    """Return the reference of the arguments of `jaxnorm.rms_norm_rope`."""
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


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize(
    ("mix", "size", "save", "interleaved"),
    pairwise(MIXES, SIZES, ["output", "input"], [False, True]),
)
def test_values_and_gradients(mix, size, save, interleaved, implementation):
    """Heads of 16 to 512 columns, all of them rotated or a part."""
    (x_dtype, p_dtype, t_dtype, y_dtype), (shape, r) = mix, size
    cos, sin = tables((shape[1], 1, r // 2), t_dtype)
    checked(
        normal(shape, x_dtype, 0, shift=0.5),
        parameter(shape[-1], p_dtype),
        cos,
        sin,
        save=save,
        y_dtype=y_dtype,
        interleaved=interleaved,
        implementation=implementation,
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@pytest.mark.parametrize("lead", BROADCAST, ids=str)
def test_tables_that_broadcast(lead, save, implementation):
    x = normal((2, 8, 4, 64), "float32", 0)
    cos, sin = tables((*lead, 32))
    checked(x, parameter(64, "float32"), cos, sin, save=save, implementation=implementation)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.2, 0.7])
def test_tables_with_a_factor(factor, dtype, save, implementation):
    """YaRN's and LongRoPE's: undone by the transpose alone, x_hat is off by factor^2."""
    cos, sin = tables((8, 1, 32), factor=factor)
    x, scale = normal((2, 8, 4, 64), dtype, 0), parameter(64, "float32")
    checked(x, scale, cos, sin, save=save, implementation=implementation)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_scale(dtype, save, implementation):
    cos, sin = tables((8, 1, 16))
    x = normal((2, 8, 4, 64), dtype, 0)
    checked(x, None, cos, sin, save=save, scale_offset=1.0, implementation=implementation)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
def test_scale_offset(save, implementation):
    """Gemma's 1 + w."""
    cos, sin = tables((8, 1, 32))
    x, scale = normal((2, 8, 4, 64), "bfloat16", 0), normal((64,), "float32", 1, scale=0.3)
    checked(x, scale, cos, sin, save=save, scale_offset=1.0, implementation=implementation)


@each_save
@pytest.mark.parametrize("shape", [(64,), (7, 64), (3, 0, 64)], ids=str)
def test_few_axes_and_rows(shape, save):
    """XLA's code runs on all platforms, because these rows are too few for a kernel."""
    cos, sin = tables((32,))
    x = normal(shape, "float32", 0)
    checked(x, parameter(64, "float32"), cos, sin, save=save, implementation="xla")


@each_order
@each_save
@pytest.mark.parametrize("t_dtype", ["float64", "float32"])
@pytest.mark.parametrize(("x_dtype", "y_dtype"), [("float64",) * 2, ("float32", "float64")])
def test_float64(x64, x_dtype, y_dtype, t_dtype, save, interleaved):
    cos, sin = tables((8, 1, 24), t_dtype)
    x, scale = normal((2, 8, 4, 64), x_dtype, 0), parameter(64, "float64")
    options = {"save": save, "y_dtype": y_dtype, "interleaved": interleaved}
    checked(x, scale, cos, sin, implementation="xla", **options)


def test_float64_tables_are_rounded(x64):
    """The arithmetic is float32 where x and y are: what else a table has is not read."""
    x, scale = normal((2, 8, 4, 64), "float32", 0), parameter(64, "float32")
    wide = tables((8, 1, 32), "float64")
    narrow = [table.astype("float32") for table in wide]
    y = jaxnorm.rms_norm_rope(x, scale, *wide)
    assert y.dtype == "float32"
    np.testing.assert_array_equal(y, jaxnorm.rms_norm_rope(x, scale, *narrow))


def test_tables_of_two_dtypes():
    """They promote to one; gradients are in each one's own."""
    x, scale = normal((2, 8, 4, 64), "float32", 0), parameter(64, "float32")
    cos, sin = tables((8, 1, 32))
    cos = cos.astype("bfloat16")
    y, vjp = jax.vjp(lambda *t: jaxnorm.rms_norm_rope(x, scale, *t), cos, sin)
    wide = jaxnorm.rms_norm_rope(x, scale, cos.astype("float32"), sin)
    np.testing.assert_array_equal(y, wide)
    assert [d.dtype for d in vjp(y)] == ["bfloat16", "float32"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_the_norm_and_its_rotation(interleaved):
    """Compare with the plain formula and, for one pair, with rms_norm and complex numbers."""
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
    # Both are rounded: y, and the norm that is turned here.
    error = 2 * analyse(ours, x, scale, cos, sin).error[..., at]
    assert_within(y[..., jnp.array(at)], np.stack([turned.real, turned.imag], -1), error)
    few = jaxnorm.rms_norm_rope(x, scale, cos[..., :8], sin[..., :8], interleaved=interleaved)
    np.testing.assert_array_equal(few[..., 16:], n[..., 16:])


# ------------------------------------------------------------------------ what the output carries


def gradients(x, scale, cos, sin, save, **options):
    d = normal(x.shape, x.dtype, 9)
    _, vjp = jax.vjp(lambda *a: jaxnorm.rms_norm_rope(*a, cos, sin, save=save, **options), x, scale)
    ref = reference_of(x, scale, cos, sin, d, save=save, y_dtype=x.dtype.name, **options)
    return vjp(d), ref


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_whose_tables_are_zero(dtype):
    """y has 0 in both columns. From the input all is right; from the output nothing is NaN."""
    x, scale = normal((2, 8, 4, 64), dtype, 0), parameter(64, "float32")
    cos, sin = (table.at[..., 3].set(0) for table in tables((8, 1, 32)))
    checked(x, scale, cos, sin, save="input", implementation="xla")
    (dx, dscale), ref = gradients(x, scale, cos, sin, "output")
    pair = [3, 35]
    others = np.setdiff1d(np.arange(64), pair)
    # n's cotangent is 0 there: so is dscale, and what dx lacks is x_hat c2 of the two columns.
    np.testing.assert_array_equal(exact(dx)[..., pair], 0)
    np.testing.assert_array_equal(exact(dscale)[pair], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        dx_bound, dscale_bound = ref.gradient_bounds()
    del dx_bound  # c2 sums over the two columns: its bound is no number
    check_stored(dscale[others], scale[others], ref.dscale[others], dscale_bound[others])
    size = np.linalg.norm(ref.dx[:, others])
    error = np.linalg.norm(exact(dx).reshape(-1, 64)[:, others] - ref.dx[:, others])
    assert error < 4 * unit_roundoff(dtype) * size


@each_order
@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 8.0), ("float16", 32.0), ("float32", 2.0**10)]
)
def test_the_law(ratio, dtype, interleaved):
    """The relative error of a column is the output's roundoff times the ratio of the scales.

    With a rotation by c and s, y's two roundings become u^2 (c^2 y_i^2 + s^2 y_j^2) in n_i, whose
    mean over all angles is u^2 (3 g_i^2 + g_j^2) / 4; u is the mean roundoff, 0.83 of a half.
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
        # In float32 each product and sum is rounded as y is: some ten times for once, and those of
        # sums over rows besides, which is all that there is of a large column's error.
        most = np.sqrt(10) if dtype == "float32" else 1.5
        assert error < most * predicted + SAFETY * 2.0**-24
        assert of is large or error > predicted / 1.5
    (_, dscale), ref = gradients(x, scale, cos, sin, "input", interleaved=interleaved)
    assert relative_error(dscale, ref.dscale) < SAFETY * 2.0**-24 * np.sqrt(64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rotated", [64, 32])
def test_check_params_predicts_the_error(rotated, dtype):
    """check_params predicts each column's error within a factor, for scales of all sizes.

    Its law assumes a rotation by 45 degrees, where both columns of a pair have the same error. Over
    all angles, the mean squares are 3/4 and 1/4 of the two scales' instead of 1/2 and 1/2. The
    prediction is therefore off by up to a factor of sqrt(2) either way, and some 1000 rows add as
    much as in rms_norm.
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
            if scale[j] <= scale[p]  # the worse one of a pair, whose error a report has
        ]
    )
    worse = np.asarray(scale) <= np.asarray(scale)[partners]
    magnitude = np.linalg.norm(ref.d * ref.xh, axis=0)[worse]
    measured = np.abs(exact(dscale) - ref.dscale)[worse] / (predicted * magnitude)
    assert 0.7 / np.sqrt(2) < np.sqrt(np.mean(measured**2)) < 1.4 * np.sqrt(2)


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_beside_a_partner_that_is_not(dtype, interleaved):
    """Lost from the output, and finite; all other columns are right. The input has it."""
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
    # The wrong gradient is bounded by sqrt(d), as x_hat is.
    of_lost = np.abs(exact(dscale[lost]) - ref.dscale[lost])
    assert of_lost <= np.sum(np.abs(ref.d[:, lost])) * 2 * np.sqrt(64)
    assert relative_error(dscale[partner], ref.dscale[partner]) < 8 * unit_roundoff(dtype)
    checked(x, scale, cos, sin, save="input", interleaved=interleaved, implementation="xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_of_a_pair_zero(dtype):
    """As in rms_norm, the forward raises both scales to 2^-60, and y contains them."""
    scale = (
        parameter(64, "float32").at[jnp.array([6, 38, 50])].set(jnp.array([0, 0, 0.5], jnp.float32))
    )
    cos, sin = tables((8, 1, 32))
    x = normal((2, 8, 4, 64), dtype, 0)
    (_, dscale), ref = gradients(x, scale, cos, sin, "output")
    for column in (6, 38):
        assert_within(dscale[column], ref.dscale[column], dscale_walk(ref, column, dtype))
    # A scale that starts at 0 trains.
    zero = jnp.zeros(64, jnp.float32)
    (_, dscale), ref = gradients(x, zero, cos, sin, "output")
    assert relative_error(dscale, ref.dscale) < 4 * unit_roundoff(dtype)


def dscale_walk(ref, column, dtype):
    """Return the sum of y's roundings in dscale of a column, equal for both columns of a pair."""
    magnitude = np.abs(ref.d[:, column]) * np.hypot(
        ref.xh[:, column], ref.xh[:, ref.partner[column]]
    )
    return 4 * unit_roundoff(dtype) * np.linalg.norm(magnitude)


def test_outputs_beyond_float16():
    """The backward treats an infinite y, before a bounded function, as the largest number.

    The cotangent is 0 there, and sum(dn n) equals that of d y for any rotation. So the other
    columns of its row are unaffected, but its partner is not.
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
