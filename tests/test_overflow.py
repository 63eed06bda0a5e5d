"""float16 outputs beyond the largest number, 65504: how the backward treats an infinite y."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import normal
from reference import exact, relative_error, unit_roundoff

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

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
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bounded_consumer(name, cols, axis, implementation):
    """If an element of y is infinite and its cotangent is 0, dx is bounded for this element.

    The backward replaces the infinity by float16's largest number, and recovers the element's x_hat
    from this number. In all other columns, the gradients are correct.
    """
    x = normal((130, cols), "float32", 0)
    given = parameters(name, cols)
    function = functools.partial(
        call, name, dtype="float16", axis=axis, implementation=implementation
    )

    def derived(save):
        y, vjp = jax.vjp(functools.partial(function, save=save), x if axis else x.T, *given)
        d = normal(y.shape, "float32", 4) * (1 - jnp.tanh(y.astype("float32")) ** 2)
        dx, dscale, *_ = vjp(d.astype("float16"))
        return *(exact(a if axis else a.T) for a in (y, dx)), exact(dscale)

    (y, *ours), (_, *expected) = derived("output"), derived("input")
    infinite = np.isinf(y)
    assert np.flatnonzero(infinite.any(0)).tolist() == WIDE
    assert 0 < infinite.any(1).sum() < len(x)
    others = ~infinite.any(0)
    for a, b in zip(ours, expected):
        assert np.isfinite(a).all()
        # The x_hat that is recovered from y has y's rounding error. A cotangent of an infinite
        # element is 0, so the element has no effect on others.
        assert relative_error(a[..., others], b[..., others]) < 4 * unit_roundoff("float16")


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
