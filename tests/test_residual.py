"""Parameters of groups of rows, and scales that groups share; `test_norm` tests other values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norms import normal
from program_error import assert_computes
from reference import TwoNorms, assert_within, exact, rounding

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shared", ["scale", "next_scale"])
def test_gradient_of_the_scale_that_groups_share(shared, mapped, implementation):
    """The gradient of a scale that all groups of rows share is rounded to bfloat16 only once.

    The function has two scales. One is shared by all groups, and the other differs between groups.
    A kernel then computes the gradient of the shared scale separately for each group. These
    gradients must be added in float32, so that only their sum is rounded.
    """
    groups, rows, cols = 64, 4, 1024
    x, residual, dy, dh = (normal((groups, rows, cols), "float32", seed) for seed in range(4))
    scale, next_scale = (
        normal((cols,) if name == shared else (groups, 1, cols), "bfloat16", seed, 0.3, 1.0)
        for seed, name in enumerate(("scale", "next_scale"), start=4)
    )
    function = functools.partial(
        jaxnorm.rms_norm_add_rms_norm, save="input", implementation=implementation
    )
    if mapped:
        function = jax.vmap(
            function, (0, 0, *(None if p.ndim == 1 else 0 for p in (scale, next_scale)))
        )
    (_, h), vjp = jax.vjp(function, x, residual, scale, next_scale)
    gradients = dict(zip(("scale", "next_scale"), vjp((dy, dh))[2:]))
    gains = (np.broadcast_to(exact(p), x.shape) for p in (scale, next_scale))
    arrays = (exact(x), exact(h), *gains, exact(dy), exact(dh))
    ref = TwoNorms(*(a.reshape(-1, cols) for a in arrays), "input", *["float32"] * 3)
    expected = {"scale": ref.first.dscale, "next_scale": ref.last.dscale}[shared]
    bound = dict(zip(("scale", "next_scale"), ref.gradient_bounds()[2:]))[shared]
    assert gradients[shared].dtype == "bfloat16"
    stored = bound + rounding(np.abs(expected) + bound, "bfloat16")
    assert_within(gradients[shared], expected, stored)


def test_groups_whose_rows_are_not_consecutive():
    """XLA's code runs if rows with the same scale are not consecutive.

    Here, every third row has the same scale. Calls of this kind are supported, because a parameter
    may have any shape that NumPy can broadcast to x.
    """
    x = normal((4, 3, 16), "float32", 0)
    scale = normal((3, 16), "float32", 1)
    expected = jaxnorm.rms_norm(x, jnp.broadcast_to(scale, x.shape))
    np.testing.assert_array_equal(jaxnorm.rms_norm(x, scale), expected)
    plan = jaxnorm.implementation_for("rms_norm", x.shape, "float32", scale=scale, platform="cuda")
    assert "not consecutive" in plan.forward.reason


def test_groups_over_channels():
    """For NCHW arrays that are normalised over C, each sample may have its own parameters.

    The last axis of the parameters is C. The other axes have the same order as in x.
    """
    x = normal((2, 16, 3, 5), "float32", 0)
    scale, bias = (normal((2, 1, 1, 16), "float32", seed) for seed in (1, 2))

    def moved(x, scale, bias):
        return jnp.moveaxis(jaxnorm.layer_norm(jnp.moveaxis(x, 1, -1), scale, bias), -1, 1)

    assert_computes(jaxnorm.layer_norm(x, scale, bias, axis=1), moved, x, scale, bias)
