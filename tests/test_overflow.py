"""float16 outputs beyond the largest number, 65504: how the backward treats an infinite y."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import normal
from reference import Norm, assert_within, exact, relative_error, unit_roundoff

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LARGEST = 65504.0
FUNCTIONS = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "rms_norm_add_rms_norm"]
# The columns that overflow. If a case normalises over the first axis, x is transposed.
WIDE = [3, 40]


def parameters(name, cols):
    """Return the parameters of the norm that computes y: its scale and, for LayerNorm, its bias."""
    scale = normal((cols,), "float32", 2, 0.3, 1.0).at[jnp.array(WIDE)].set(5e4)
    return (scale, normal((cols,), "float32", 3)) if "layer" in name else (scale,)


def call(name, x, *parameters, **options):
    """Call the function `name` and return y. If it takes a residual, the residual is x, too."""
    if name == "rms_norm_add_rms_norm":
        return jaxnorm.rms_norm_add_rms_norm(x, x, None, *parameters, **options)[0]
    if name.startswith("add"):
        return getattr(jaxnorm, name)(x, x, *parameters, **options)[0]
    return getattr(jaxnorm, name)(x, *parameters, **options)


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize(("cols", "axis"), [(256, 1), (1024, 1), (64, 0)])
@pytest.mark.parametrize("name", FUNCTIONS[:-1])
def test_a_bounded_consumer(name, cols, axis, implementation):
    """If an element of y is infinite and its cotangent is 0, dx is bounded for this element.

    The backward replaces the infinity by float16's largest number, and recovers the element's x_hat
    from this number. For all other elements, dx is correct.
    """
    x = normal((130, cols), "float32", 0)
    given = parameters(name, cols)
    function = functools.partial(
        call, name, dtype="float16", axis=axis, implementation=implementation
    )
    y, vjp = jax.vjp(function, x if axis else x.T, *given)
    infinite = np.isinf(exact(y if axis else y.T))
    assert np.flatnonzero(infinite.any(0)).tolist() == WIDE
    assert 0 < infinite.any(1).sum() < len(x)
    w = normal(y.shape, "float32", 4)
    d = (w * (1 - jnp.tanh(y.astype("float32")) ** 2)).astype("float16")
    dx, dscale, *_ = vjp(d)
    dx, d = (exact(a if axis else a.T) for a in (dx, d))

    bias = exact(given[1]) if len(given) > 1 else np.zeros(cols)
    dtypes = ("output", "float32", "float16")
    h = exact(x) * (1 + name.startswith("add"))
    ref = Norm(h, exact(given[0]), bias, d, "layer" in name, 1e-6, *dtypes)
    dx_bound, dscale_bound, _ = ref.gradient_bounds()
    # In this test, the cotangent of every infinite element of y is 0. So an infinite element does
    # not affect c2, which is the mean of (cotangent * x_hat), nor dx of other elements.
    x_hat = (np.sign(ref.y) * LARGEST - bias) / ref.gain
    lost = ref.r * np.abs(ref.c2) * np.where(infinite, np.abs(ref.xh - x_hat), 0)
    expected, bound = ref.dx, dx_bound + lost
    if name.startswith("add"):  # x is both operands of the sum.
        expected, bound = 2 * expected, 2 * bound
    assert_within(dx, expected, bound)
    assert_within(dscale, ref.dscale, dscale_bound)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents(name):
    """If some elements of y are infinite, other elements still have correct tangents.

    Their tangents with save="output" equal those with save="input" up to rounding.
    """
    x, t = normal((130, 256), "float32", 0), normal((130, 256), "float32", 1)
    t = t.at[:, jnp.array(WIDE)].set(0)
    given = parameters(name, 256)

    def tangent(save):
        function = functools.partial(call, name, dtype="float16", save=save)
        y, along = jax.jvp(lambda x: function(x, *given), (x,), (t,))
        others = np.arange(256)[~np.isin(np.arange(256), WIDE)]
        return np.isinf(exact(y)).any(), exact(along)[:, others]

    (overflows, from_output), (_, from_input) = tangent("output"), tangent("input")
    assert overflows
    # The x_hat that is recovered from y has y's rounding error, and the tangents are rounded.
    assert relative_error(from_output, from_input) < 4 * unit_roundoff("float16")


def test_nan_stays_nan():
    """A NaN in y stays NaN: only infinities are replaced by the largest number."""
    x = normal((4, 64), "float32", 0).at[1, 2].set(np.nan)
    y, vjp = jax.vjp(lambda x: jaxnorm.rms_norm(x, jnp.ones(64), dtype="float16"), x)
    dx = exact(vjp(jnp.zeros_like(y))[0])
    assert np.isnan(dx[1]).all()
    np.testing.assert_array_equal(dx[[0, 2, 3]], 0)
