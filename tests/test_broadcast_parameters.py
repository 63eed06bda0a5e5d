"""Parameters that are broadcast along normalised axes: GroupNorm and InstanceNorm."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from program_error import analyse, assert_computes
from reference import Norm, assert_within, exact, rounding
from test_norm import normal

import jaxnorm

# x, axis, scale, bias.
CASES = {
    "group norm": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (4, 1, 8)),
    "images": ((2, 5, 8, 4, 8), (1, 2, 4), (4, 1, 1, 8), (4, 1, 1, 8)),
    "one bias of a sample": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (2, 4, 1, 8)),
    "parameters of each sample": ((2, 37, 4, 8), (1, 3), (2, 4, 1, 8), (2, 4, 1, 8)),
    "instance norm": ((2, 5, 8, 32), (1, 2), (32, 1, 1), (32, 1, 1)),
    "channels first": ((2, 4, 8, 3, 5), (2, 3, 4), (4, 8, 1, 1), (4, 8, 1, 1)),
    "unlike each other": ((2, 37, 4, 8), (1, 3), (37, 1), (4, 1, 1)),
    "one number": ((5, 16), -1, (1,), (1, 16)),
}
pytestmark = pytest.mark.usefixtures("quick_to_compile")


def rows_of(a, axes):
    """``(rows, cols)`` of an array; and of a parameter broadcast to it."""
    return np.moveaxis(a, axes, range(-len(axes), 0)).reshape(
        -1, math.prod(a.shape[i] for i in axes)
    )


def against(x_shape, axes, parameter):
    """A parameter with x's axes, of size 1 where it has none of its own."""
    padded = exact(parameter).reshape((1,) * (len(x_shape) - parameter.ndim) + parameter.shape)
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    return np.moveaxis(padded, range(len(x_shape)), [*others, *axes])


def check_gradient(actual, like, values, bounds, x_shape, axes):
    """The sum of `values`, ``(rows, cols)``, over what a parameter is broadcast along."""
    order = [axis for axis in range(len(x_shape)) if axis not in axes] + [*axes]
    padded = (1,) * (len(x_shape) - like.ndim) + like.shape
    over = tuple(i for i, size in enumerate(padded) if size == 1)
    expected, bound, magnitude = (
        a.reshape([x_shape[i] for i in order]).sum(over, keepdims=True).reshape(like.shape)
        for a in (values, bounds, np.abs(values))
    )
    bound = bound + 4 * 2.0**-24 * (math.sqrt(values.size / expected.size) + 2) * magnitude
    assert (actual.shape, actual.dtype) == (like.shape, like.dtype)
    assert_within(actual, expected, bound + rounding(np.abs(expected) + bound, like.dtype.name))


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS, refused.NARROW)
@pytest.mark.parametrize(
    ("dtype", "p_dtype", "save", "activation"),
    [
        ("float32", "bfloat16", "input", None),
        ("bfloat16", "float32", "output", None),
        ("float32", "float32", "input", "silu"),
        ("bfloat16", "float32", "input", "gelu"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype, p_dtype, save, activation, implementation):
    shape, axis, *sizes = CASES[case]
    axes = tuple(a % len(shape) for a in np.atleast_1d(axis))
    x, d = normal(shape, dtype, 0, shift=0.5), normal(shape, dtype, 1)
    scale, bias = (normal(size, p_dtype, seed, 0.3, 1.0) for seed, size in zip((2, 3), sizes))
    scale = scale.at[..., 0].set(0) if scale.shape[-1] > 1 else scale
    bias = jnp.where(scale == 0, 0, bias) if bias.shape == scale.shape else bias
    function = functools.partial(
        jaxnorm.layer_norm,
        axis=axis,
        save=save,
        activation=activation,
        implementation=implementation,
    )
    y, vjp = jax.vjp(function, x, scale, bias)
    of_rows = [
        rows_of(np.broadcast_to(a, shape), axes)
        for a in (exact(x), against(shape, axes, scale), against(shape, axes, bias), exact(d))
    ]
    values, bounds = [], []
    if save == "output":  # The forward raises a gain of 0.
        of_rows[1] = np.where(of_rows[1] == 0, 2.0**-60, of_rows[1])
    for x_row, gain, b, d_row in zip(*of_rows):
        options = True, 1e-6, save, dtype, dtype
        ref = Norm(x_row[None], gain, b, d_row[None], *options, activation=activation)
        values.append((ref.y[0], ref.dx[0], ref.dscale, ref.dbias))
        found = ref.gradient_bounds()
        bounds.append((ref.y_bound()[0], found[0][0], *found[1:]))
    values, bounds = (list(map(np.stack, zip(*each))) for each in (values, bounds))
    dx, dscale, dbias = vjp(d)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert_within(rows_of(exact(y), axes), values[0], bounds[0])
    assert_within(rows_of(exact(dx), axes), values[1], bounds[1])
    check_gradient(dscale, scale, values[2], bounds[2], shape, axes)
    check_gradient(dbias, bias, values[3], bounds[3], shape, axes)


X = normal((2, 6, 4, 8), "float32", 0)
SCALE, BIAS = normal((4, 1, 8), "float32", 1), normal((4, 1, 8), "float32", 2)
FUNCTIONS = {
    "layer_norm": lambda norm, x, *p, **given: norm(x, *p, **given),
    "rms_norm": lambda norm, x, s, b, **given: norm(x, s, bias=b, **given),
    "add_layer_norm": lambda norm, x, *p, **given: norm(x, 2 * x, *p, **given),
    "add_rms_norm": lambda norm, x, s, b, **given: norm(x, 2 * x, s, gate=b, **given),
    "rms_norm_add": lambda norm, x, s, b, **given: norm(x, 2 * x, s + b, **given),
    "rms_norm_add_rms_norm": lambda norm, x, s, b, **given: norm(x, x, s, b[:, :, :1], **given),
}


def summed(name, x, *parameters, scale_offset=1.0, **given):
    norm = functools.partial(getattr(jaxnorm, name), axis=(1, 3), scale_offset=scale_offset)
    results = FUNCTIONS[name](norm, x, *parameters, **given)
    weights = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    return sum(jnp.sum(weights * a) for a in jax.tree.leaves(results))


@pytest.mark.parametrize(
    ("name", "save"), [(name, ("output", "input")[i % 2]) for i, name in enumerate(FUNCTIONS)]
)
def test_whole_parameters_give_the_same(name, save):
    """Forward mode, too: whatever an operation does with a parameter, it does with these."""
    given = {} if name == "rms_norm_add" else {"save": save}

    def whole(x, *parameters):
        return summed(name, x, *(jnp.broadcast_to(p, (4, 6, 8)) for p in parameters), **given)

    function = functools.partial(summed, name, **given)
    primals, tangents = (X, SCALE, BIAS), (jnp.sin(X), BIAS, SCALE)
    ours, theirs = (jax.grad(f, (0, 1, 2)) for f in (function, whole))
    assert_computes(ours(*primals), theirs, *primals, like=ours)
    ours, theirs = (functools.partial(jax.jvp, f) for f in (function, whole))
    assert_computes(ours(primals, tangents), theirs, primals, tangents, like=ours)


def test_float64(x64):
    operands = [jnp.asarray(a, jnp.float64) for a in (X, SCALE, BIAS)]
    function = functools.partial(summed, "layer_norm")
    dx, dscale, dbias = jax.grad(function, (0, 1, 2))(*operands)
    step = 1e-6 * jnp.cos(operands[1])
    slope = function(operands[0], operands[1] + step, operands[2]) - function(
        operands[0], operands[1] - step, operands[2]
    )
    assert dx.dtype == dscale.dtype == dbias.dtype == "float64"
    # Central differences err by the step's square and by the roundings of two values, each a sum.
    sizes = step.size * np.abs(step).max() ** 2 + 2 * analyse(function, *operands).error
    assert np.abs(jnp.sum(dscale * step) * 2 - slope) <= sizes


def test_errors():
    for shape in [(4, 8), (2, 1, 8), (4, 2, 8), (4, 1, 4)]:
        with pytest.raises(
            ValueError, match=r"scale has shape .*; expected \(6, 8\).*\(or 1, where"
        ):
            jaxnorm.layer_norm(X, jnp.ones(shape), axis=(1, 3))


def test_check_params():
    report = jaxnorm.check_params({"norm": {"scale": SCALE, "bias": BIAS}}, "bfloat16")
    assert report.norms[0].columns == 32
