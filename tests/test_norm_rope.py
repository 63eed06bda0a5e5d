"""rms_norm_rope: its tables, and the accuracy of gradients if the output y is saved.

`test_norm` tests other values.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import scalar
from norms import check, expected_of, normal, tables
from programs import equations
from reference import DTYPES, exact, relative_error, unit_roundoff

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each_order = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
SHAPE = 2, 8, 4, 64


def parameter(cols=64):
    return normal((cols,), "float32", 1, scale=0.3, shift=1.0)


def gradients(x, scale, cos, sin, save, **options):
    """Return the gradients of x and scale, and the gradients in float64 of all operands.

    The float64 gradient of the scale has the shape of x: a term of a sum for each element.
    """
    d = normal(x.shape, x.dtype, 9)
    _, vjp = jax.vjp(lambda *a: jaxnorm.rms_norm_rope(*a, cos, sin, save=save, **options), x, scale)
    operands = {"x": x, "scale": jnp.broadcast_to(scale, x.shape), "cos": cos, "sin": sin}
    return map(exact, vjp(d)), expected_of("rms_norm_rope", operands, [d], **options)[1]


def dscale_of(*arguments, **options):
    """Return the gradient of the scale, and its terms in float64, with the shape (rows, cols)."""
    (_, dscale), expected = gradients(*arguments, **options)
    return dscale, expected["scale"].reshape(-1, len(dscale))


def test_float64_tables_are_rounded(x64):
    """float64 tables are rounded to float32 if x and y are float32."""
    x, scale, wide = normal(SHAPE, "float32", 0), parameter(), tables((8, 1, 32), "float64")
    y = jaxnorm.rms_norm_rope(x, scale, *wide)
    assert y.dtype == "float32"
    narrow = [table.astype("float32") for table in wide]
    np.testing.assert_array_equal(y, jaxnorm.rms_norm_rope(x, scale, *narrow))


def test_tables_of_two_dtypes():
    """The rotary tables cos and sin may have different dtypes.

    They are promoted to a common dtype. The gradient of each table has the dtype of this table.
    """
    x, scale, (cos, sin) = normal(SHAPE, "float32", 0), parameter(), tables((8, 1, 32))
    cos = cos.astype("bfloat16")
    y, vjp = jax.vjp(lambda *t: jaxnorm.rms_norm_rope(x, scale, *t), cos, sin)
    wide = jaxnorm.rms_norm_rope(x, scale, cos.astype("float32"), sin)
    np.testing.assert_array_equal(y, wide)
    assert [d.dtype for d in vjp(y)] == ["bfloat16", "float32"]


# --------------------------------------------------------------- the accuracy of saving the output


@each_dtype
def test_a_pair_whose_tables_are_zero(dtype):
    """If cos and sin of a rotated pair are 0, y is 0 in both columns of the pair.

    If y is saved, gradients are finite, but dx is wrong in these columns: x_hat cannot be
    recovered. With save="input", all gradients are correct.
    """
    x, scale = normal(SHAPE, dtype, 0), parameter()
    cos, sin = (table.at[..., 3].set(0) for table in tables((8, 1, 32)))
    check("rms_norm_rope", x, scale=scale, cos=cos, sin=sin, save="input")
    (dx, dscale), expected = gradients(x, scale, cos, sin, "output")
    pair = [3, 35]
    others = np.setdiff1d(np.arange(64), pair)
    np.testing.assert_array_equal(dx[..., pair], 0)
    np.testing.assert_array_equal(dscale[pair], 0)
    bound = 4 * unit_roundoff(dtype)
    assert relative_error(dx[..., others], expected["x"][..., others]) < bound
    of_scale = expected["scale"].sum((0, 1, 2))
    assert relative_error(dscale[others], of_scale[others]) < bound


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rotated", [64, 32])
def test_check_params_predicts_the_error(rotated, dtype):
    """check_params predicts each column's error up to a factor of about sqrt(2).

    rms_norm_rope computes ``n = x_hat * scale`` and rotates n to y. The rotation mixes pairs of
    columns, i and j, whose scales are g_i and g_j. Rounding causes a relative error in each element
    of y, with the root mean square u. The backward rotates y back to n, which mixes the errors of
    both columns. The mean square error of n_i is ``u^2 * (c^2 * y_i^2 + s^2 * y_j^2)``, where c and
    s are cos and sin of the angle. With the mean squares of y_i and y_j, the mean of this error
    over all angles is ``u^2 * (3 * g_i^2 + g_j^2) / 4``.

    check_params assumes that the two columns of a pair are rotated by 45 degrees. Then the squared
    error is proportional to ``(g_i^2 + g_j^2) / 2``. The ratio of the true mean to this value is
    between 1/2 and 3/2. The bounds of this test also allow the sampling error of some 1000 rows.
    """
    scale = jnp.asarray(2 ** np.random.default_rng(4).uniform(-3, 3, size=64), jnp.float32)
    cos, sin = tables((256, 1, rotated // 2))
    x = normal((1, 256, 4, 64), dtype, 0)
    dscale, terms = dscale_of(x, scale, cos, sin, "output")
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
    magnitude = np.linalg.norm(terms, axis=0)[worse]
    measured = np.abs(exact(dscale) - terms.sum(0))[worse] / (predicted * magnitude)
    assert 0.7 / np.sqrt(2) < np.sqrt(np.mean(measured**2)) < 1.4 * np.sqrt(2)


@each_order
@each_dtype
def test_scales_of_zero(dtype, interleaved):
    """If only one scale of a rotated pair is 0, the gradient of this scale is wrong but finite.

    All other gradients are correct. The gradients are all correct if both scales of the pair are 0:
    the forward computes y with 2^-60 instead of these scales, so x_hat can be recovered from y.
    """
    lost, partner = (6, 7) if interleaved else (6, 38)
    scale, (cos, sin) = parameter().at[lost].set(0), tables((8, 1, 32))
    x = normal(SHAPE, dtype, 0)
    options = {"cos": cos, "sin": sin, "interleaved": interleaved}
    check("rms_norm_rope", x, scale=scale, save="input", **options)
    (dx, dscale), expected = gradients(x, scale, cos, sin, "output", interleaved=interleaved)
    assert np.all(np.isfinite(dx))
    assert np.all(np.isfinite(dscale))
    of_scale = expected["scale"].sum((0, 1, 2))
    assert relative_error(dscale[partner], of_scale[partner]) < 8 * unit_roundoff(dtype)
    if dtype != "float16":  # It has no numbers near 2^-60, so its scales are not replaced.
        check("rms_norm_rope", x, scale=scale, save="output", **options)
        check("rms_norm_rope", x, scale=scale.at[partner].set(0), save="output", **options)
        # A norm whose scales all start at 0 can be trained.
        dscale, terms = dscale_of(x, 0 * scale, cos, sin, "output", interleaved=interleaved)
        assert relative_error(dscale, terms.sum(0)) < 4 * unit_roundoff(dtype)


def test_outputs_beyond_float16():
    """If an element of y is infinite in float16, only gradients of its pair of columns are wrong.

    The cotangent d of the infinite element is 0 here. The backward replaces the infinity in y by
    float16's largest number. The gradients of other columns depend on this element only through a
    sum over the row, ``sum(d * y)``. In this sum, the element of y is multiplied by d = 0, so it
    has no effect.
    """
    scale, (cos, sin) = parameter().at[5].set(5e4), tables((8, 1, 32))
    x = normal((16, 8, 4, 64), "float32", 0)

    def derived(save):
        function = functools.partial(jaxnorm.rms_norm_rope, dtype="float16", save=save)
        y, vjp = jax.vjp(lambda *a: function(*a, cos, sin), x, scale)
        bounded = 1 - jnp.tanh(y.astype("float32")) ** 2
        return exact(y), *vjp((normal(y.shape, "float32", 4) * bounded).astype("float16"))

    (y, *ours), (_, *expected) = derived("output"), derived("input")
    assert np.flatnonzero(np.isinf(y).any((0, 1, 2))).tolist() == [5, 37]
    others = ~np.isin(np.arange(64), [5, 37])
    for a, b in zip(ours, expected):
        assert np.isfinite(a).all()
        bound = 4 * unit_roundoff("float16")
        assert relative_error(a[..., others], exact(b)[..., others]) < bound


# ------------------------------------------------------------- programs do not expand the tables

X, SCALE, (COS, SIN) = normal((4, 8, 2, 16), "float32", 0), parameter(16), tables((8, 1, 8))


def test_scan_keeps_the_tables_once():
    """A scan over layers saves the shared tables once, not per layer."""
    layers = 3

    def residuals(x, scales, cos, sin):
        def layer(x, scale):
            return jnp.sin(jaxnorm.rms_norm_rope(x, scale, cos, sin)), None

        def scanned(x, scales):
            return jax.lax.scan(layer, x, scales)[0]

        return jax.tree.leaves(jax.vjp(scanned, x, scales)[1])

    kept = [a.shape for a in jax.eval_shape(residuals, X, jnp.stack([SCALE] * layers), COS, SIN)]
    assert kept.count((layers, *X.shape)) == 2  # y and its cosine
    assert kept.count((1, *COS.shape)) == 2
    assert not [shape for shape in kept if shape[-1] == 8 and layers in shape]


@pytest.mark.remat
def test_tables_are_not_broadcast():
    """Tables are not expanded to the rows of x, in either pass."""
    gradient, operands = jax.grad(scalar(jaxnorm.rms_norm_rope), (0, 1)), (X, SCALE, COS, SIN)
    text = jax.jit(gradient).lower(*operands).as_text()
    arguments = re.search(r"func\.func public @main\((.*?)\) ->", text).group(1)
    assert arguments.count("tensor<8x1x8xf32>") == 2
    jaxpr = jax.make_jaxpr(gradient)(*operands)
    made = {v.aval.shape for equation in equations(jaxpr) for v in equation.outvars}
    assert (*X.shape[:-1], 8) not in made
