"""How accurate gradients are if a norm saves its output instead of its input.

Errors are measured against float64.

Two laws predict relative errors, where u is half the unit roundoff:

- dx has an error of ``0.83 * u``, because it is rounded to x's dtype;
- dscale_j has an error of ``0.83 * u * sqrt(1 + (bias_j / scale_j)^2)``, because y is rounded.

``0.83 * u`` is the root mean square of the relative error of one rounding. The tests allow errors
of up to 1.2 times (`ROOM`) the predicted errors. x has 256 rows of 1024 columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norms import check, normal
from reference import (
    SAFETY,
    Norm,
    assert_within,
    exact,
    relative_error,
    rounding,
    unit_roundoff,
)

import jaxnorm

ROWS, COLS = 256, 1024
# For each dtype, the number u that both laws in the module's docstring use. u is half the dtype's
# unit roundoff. This is the same as a quarter of its machine epsilon.
U = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}
ROOM = 1.2
# A bound on the relative error of float32 sums of 1024 terms. The measured error is 1e-7.
F32 = 4 * 2.0**-24


def rng(seed):
    return np.random.default_rng(seed)


def near_one(cols=COLS):
    return 1 + 0.1 * rng(1).normal(size=cols)


def five_percent_zeros():
    scale = near_one()
    scale[rng(2).random(COLS) < 0.05] = 0
    return scale


def gradients(dtype, scale, bias, *, save="output", p_dtype="float32", x=None, d=None):
    """Return three things: dx, dscale, and the norm's float64 reference.

    The norm is layer_norm if a bias is given, and rms_norm otherwise.
    """
    x = rng(3).normal(size=(ROWS, COLS)) if x is None else x
    d = rng(4).normal(size=(ROWS, COLS)) if d is None else d
    x, d = jnp.asarray(x, dtype), jnp.asarray(d, dtype)
    scale = jnp.asarray(scale, p_dtype)
    bias = None if bias is None else jnp.asarray(bias, p_dtype)

    def call(x, scale):
        if bias is None:
            return jaxnorm.rms_norm(x, scale, save=save)
        return jaxnorm.layer_norm(x, scale, bias, save=save)

    _, vjp = jax.vjp(call, x, scale)
    dx, dscale = vjp(d)
    x, scale, d = map(exact, (x, scale, d))
    return dx, dscale, Norm(x, scale, d, bias is not None)


@pytest.mark.parametrize(
    ("dtype", "scale", "bias", "dx_bound", "dscale_bound"),
    [
        pytest.param("bfloat16", near_one(), None, 1.7e-3, 1.6e-3, id="bf16, scale near 1"),
        pytest.param("float16", near_one(), None, 1.7e-3 / 8, 1.6e-3 / 8, id="f16, scale near 1"),
        pytest.param("bfloat16", five_percent_zeros(), None, 1.7e-3, 1.6e-3, id="bf16, 5 % zeros"),
        pytest.param("float32", rng(5).uniform(-1e-2, 1e-2, COLS), None, F32, F32, id="f32, small"),
        pytest.param("float32", np.full(COLS, 1e-6), None, F32, F32, id="f32, 1e-6"),
        pytest.param("bfloat16", near_one(), np.full(COLS, 10.0), 1.8e-3, 1.8e-2, id="bias 10"),
        pytest.param("bfloat16", near_one(), rng(6).normal(size=COLS), 1.7e-3, 2.5e-3, id="bias"),
    ],
)
def test_gradients(dtype, scale, bias, dx_bound, dscale_bound):
    dx, dscale, ref = gradients(dtype, scale, bias)
    assert relative_error(dx, ref.dx) < ROOM * dx_bound
    assert relative_error(dscale, ref.dscale) < ROOM * dscale_bound


def test_bias_far_above_scale_is_lost_from_the_output_and_kept_from_the_input():
    """If the bias is much larger than the scale, gradients from a saved output have large errors.

    The cause is the rounding of the output. The errors are bounded, and check_params does not call
    the norm safe. With save="input", gradients are accurate.
    """
    scale, bias = rng(7).uniform(-1e-2, 1e-2, COLS), rng(8).normal(size=COLS)
    dx, dscale, ref = gradients("bfloat16", scale, bias)
    assert relative_error(dx, ref.dx) < ROOM * 1.6e-2
    assert np.abs(exact(dscale)).max() <= np.sum(np.abs(ref.d), 0).max() * np.sqrt(COLS)
    report = jaxnorm.check_params({"scale": scale, "bias": bias}, "bfloat16")
    assert not report.safe
    dx, dscale, ref = gradients("bfloat16", scale, bias, save="input")
    assert relative_error(dx, ref.dx) < ROOM * 1.7e-3
    assert relative_error(dscale, ref.dscale) < F32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_all_zero(dtype):
    """If all scales are 0, dx is about 0, and dscale is as accurate as for other scales.

    The forward replaces a scale of 0 by a tiny number, the floor. So y is not 0, and the backward
    can recover x_hat from it.
    """
    dx, dscale, ref = gradients(dtype, np.zeros(COLS), None)
    assert np.abs(exact(dx)).max() < 2.0**-50
    assert relative_error(dscale, ref.dscale) < ROOM * {"float32": F32, "bfloat16": 1.6e-3}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -1e-30])
def test_floored_output_vanishes_in_a_matmul(dtype, value):
    """A scale at or near 0 is replaced by a tiny number, the floor. So y is tiny instead of 0.

    These tiny values of y do not change the bits of a matmul's result.
    """
    x = jnp.asarray(rng(0).normal(size=(16, 64)), dtype)
    scale = jnp.asarray(near_one(64), "float32").at[::3].set(value)
    weights = jnp.asarray(rng(1).normal(size=(64, 32)), dtype)
    products = [
        jnp.matmul(jaxnorm.rms_norm(x, scale, save=save), weights) for save in ("output", "input")
    ]
    np.testing.assert_array_equal(*map(exact, products))


@pytest.mark.parametrize("case", ["ordinary", "bias much larger", "tiny scale"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_law(dtype, case):
    """check_params predicts each column's error, within the sampling error of 256 rows."""
    scale, bias = {
        "ordinary": (near_one(), rng(9).normal(size=COLS)),
        "bias much larger": (near_one() * 0.1, rng(9).normal(size=COLS)),
        "tiny scale": (np.full(COLS, 2.0**-18), np.zeros(COLS)),
    }[case]
    scale, bias = (np.asarray(a, np.float32) for a in (scale, bias))
    _, dscale, ref = gradients(dtype, scale, bias)
    # check_params predicts the typical size of a column's error. The error of a single column is
    # random. So the test divides each column's error by its prediction. The root mean square of
    # these ratios over all columns must be near 1.
    predicted = np.array(
        [
            jaxnorm.check_params({"scale": s, "bias": b}, dtype).norms[0].dscale_error
            for s, b in zip(scale, bias)
        ]
    )
    # The typical magnitude of a sum of independent terms.
    magnitude = np.linalg.norm(ref.d * ref.xh, axis=0)
    measured = np.abs(exact(dscale) - ref.dscale) / (predicted * magnitude)
    assert 0.7 < np.sqrt(np.mean(measured**2)) < 1.4


def test_recovered_x_hat_keeps_its_bound():
    """Rounding can make a recovered x_hat exceed its maximum, sqrt(N), so it is clipped."""
    scale = jnp.asarray(np.linspace(1, 2, 101), jnp.float32)

    def one_hot_row(scale):
        x = jnp.zeros(COLS, jnp.bfloat16).at[5].set(100)
        y, vjp = jax.vjp(lambda s: jaxnorm.rms_norm(x, s), jnp.full(COLS, scale))
        return y[5].astype(jnp.float32) / scale, vjp(jnp.ones_like(y))[0][5]

    recovered, dscale = jax.vmap(one_hot_row)(scale)
    assert (recovered > np.sqrt(COLS) * 1.001).any()
    assert (dscale <= np.sqrt(COLS)).all()


@pytest.mark.parametrize("subtract_mean", [True, False])
def test_float32_parameters_with_bfloat16_output(subtract_mean):
    """Both passes round a float32 bias to y's dtype, and XLA keeps this rounding in `jax.jit`."""
    x = jnp.asarray(rng(0).normal(size=(ROWS, COLS)), jnp.float32)
    d = jnp.asarray(rng(1).normal(size=(ROWS, COLS)), jnp.bfloat16)
    scale = jnp.asarray(near_one(), jnp.float32)
    bias = jnp.asarray(10 + rng(2).normal(size=COLS), jnp.float32)

    @jax.jit
    def run(x, scale, bias, d):
        def call(x, scale, bias):
            if subtract_mean:
                return jaxnorm.layer_norm(x, scale, bias, dtype=jnp.bfloat16)
            return jaxnorm.rms_norm(x, scale, dtype=jnp.bfloat16)

        return jax.vjp(call, x, scale, bias)[1](d)

    dx, dscale, _ = run(x, scale, bias, d)
    b = exact(bias) if subtract_mean else np.zeros(COLS)
    ref = Norm(exact(x), exact(scale), exact(d), subtract_mean)
    law = 0.83 * U["bfloat16"] * np.sqrt(1 + (np.abs(b) / ref.gain) ** 2)
    assert relative_error(dscale, ref.dscale) < ROOM * np.sqrt(np.mean(law**2))
    assert relative_error(dx, ref.dx) < 1.8e-3


def test_mean_ten_thousand():
    """For a mean of 1e4, the variance is accurate, because it is computed in two passes.

    The formula E[x^2] - E[x]^2 would have an error that is larger than the variance, 1.
    """
    check("layer_norm", normal((16, COLS), "float32", 0, shift=1e4), save="input")


def test_cotangent_parallel_to_x_hat():
    """If the cotangent is nearly parallel to x_hat, dx is a small difference of large terms.

    Its relative error is then about ``u * |c2| / |dx|``. Here, c2 is the mean of
    ``cotangent * x_hat``, and u is half the unit roundoff of y's dtype.
    """
    x, noise = rng(0).normal(size=(ROWS, COLS)), rng(1).normal(size=(ROWS, COLS))
    d = 0.9 * x + np.sqrt(1 - 0.9**2) * noise
    dx, _, ref = gradients("bfloat16", np.ones(COLS), None, x=x, d=d)
    law = 0.83 * U["bfloat16"] * np.sqrt(1 + np.mean(ref.c2**2) / np.mean((ref.dx / ref.r) ** 2))
    assert relative_error(dx, ref.dx) < ROOM * law


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("function", "cols"),
    [("rms_norm", 1), ("add_rms_norm", 1), ("layer_norm", 2), ("add_layer_norm", 2)],
)
def test_rows_that_are_too_short_to_save_their_output(function, cols, dtype):
    """If y depends on x only through epsilon, dx has the accuracy of the float32 arithmetic.

    Let r be rstd, d the cotangent of y, and G the scale. Such a row has mean(xh^2) = 1 - epsilon *
    r^2. So dx is exactly epsilon * r^3 * (d * G - mean(d * G)), without the mean in an RMSNorm.
    float32 arithmetic computes it as a difference of terms of the size r * d * G. The bound also
    covers the error of x - mean(x), relative to 1 / r.
    """
    x, residual, d = (jnp.asarray(rng(i).normal(size=(ROWS, cols)), dtype) for i in range(3))
    scale, is_sum = jnp.asarray(near_one(cols), jnp.float32), function.startswith("add")
    arrays = (x, residual) if is_sum else (x,)

    def norm(*arrays):
        results = getattr(jaxnorm, function)(*arrays, scale)
        return results[0] if is_sum else results

    dx = jax.vjp(norm, *arrays)[1](d)[0]
    h = exact(x + residual if is_sum else x)
    centred = h - h.mean(-1, keepdims=True) if cols == 2 else h
    dg = exact(d) * exact(scale)
    of_row = dg - dg.mean(-1, keepdims=True) if cols == 2 else dg
    r = 1 / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
    expected = 1e-6 * r**3 * of_row
    size = r * np.abs(dg).max(-1, keepdims=True) * (1 + r * np.abs(h).max(-1, keepdims=True))
    bound = SAFETY * unit_roundoff("float32") * size + rounding(expected, dtype)
    assert_within(dx, expected, bound)
