"""Norms with a residual, and parameters of groups of rows, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import check, mixes, normal
from pairs import on_each_implementation
from program_error import assert_computes
from reference import TwoNorms, assert_within, exact, rounding

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# Dtypes of x, residual, parameters and y.
MIXES = mixes("bffb", "bbfb", "fbfb", "bfbf")
SHAPES = [(70, 40), (64, 1024), (130, 768)]
SAVES = ["output", "input"]


def parameter(cols, dtype, seed):
    return normal((cols,), dtype, seed, scale=0.3, shift=1.0)


def operands(shape, x_dtype, r_dtype):
    return normal(shape, x_dtype, 0, shift=0.5), normal(shape, r_dtype, 1)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation(
    "name mix shape save", ["add_layer_norm", "add_rms_norm"], MIXES, SHAPES, SAVES
)
def test_addition_before_a_norm(name, mix, shape, save, implementation):
    x_dtype, r_dtype, p_dtype, y_dtype = mix
    x, residual = operands(shape, x_dtype, r_dtype)
    given = {"residual": residual, "scale": parameter(shape[1], p_dtype, 2)}
    if name == "add_layer_norm":
        given["bias"] = parameter(shape[1], p_dtype, 3)
    given |= {"save": save, "y_dtype": y_dtype, "implementation": implementation}
    _, gradients = check(name, x, **given)
    of_x = gradients["residual"].astype(x_dtype)
    np.testing.assert_array_equal(gradients["x"], of_x)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("mix shape", MIXES, SHAPES)
def test_addition_after_a_norm(mix, shape, implementation):
    x_dtype, r_dtype, p_dtype, _ = mix  # The result has the residual's dtype.
    x, residual = operands(shape, x_dtype, r_dtype)
    given = {"residual": residual, "scale": parameter(shape[1], p_dtype, 2)}
    check("rms_norm_add", x, implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("mix shape save", MIXES, SHAPES, SAVES)
def test_addition_between_two_norms(mix, shape, save, implementation):
    x_dtype, r_dtype, p_dtype, y_dtype = mix
    x, residual = operands(shape, x_dtype, r_dtype)
    scales = {n: parameter(shape[1], p_dtype, i) for i, n in enumerate(("scale", "next_scale"), 2)}
    given = {"residual": residual, "save": save, "y_dtype": y_dtype}
    check("rms_norm_add_rms_norm", x, implementation=implementation, **given, **scales)


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


# ------------------------------------------------------------------- parameters of groups of rows

LEADS = {
    "sample": ((4, 1), (4, 1)),
    "scale alone": ((4, 1), ()),
    "bias alone": ((), (4, 1)),
    "each row": ((4, 33), (4, 33)),
    "one group": ((1, 1), (1,)),
}


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS)
@on_each_implementation(
    "lead dtype cols save", [*LEADS], ["float32", "bfloat16"], [64, 1024], SAVES
)
def test_parameters_of_groups_of_rows(lead, dtype, cols, save, implementation):
    scale, bias = (
        normal((*lead, cols), "float32", seed, scale=0.3, shift=1.0)
        for seed, lead in zip((2, 3), LEADS[lead])
    )
    x = normal((4, 33, cols), dtype, 0, shift=0.5)
    check("layer_norm", x, scale=scale, bias=bias, save=save, implementation=implementation)


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
