"""Values and gradients of softmax and log_softmax against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import refused
from pairs import on_each_implementation
from program_error import analyse, assert_computes
from reference import assert_within, exact

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FUNCTIONS = {
    "softmax": (jaxnorm.softmax, reference.softmax, reference.softmax_bound),
    "log_softmax": (jaxnorm.log_softmax, reference.log_softmax, reference.log_softmax_bound),
}
GRADIENTS = {
    "softmax": (reference.softmax_gradient, reference.softmax_gradient_bound),
    "log_softmax": (reference.log_softmax_gradient, reference.log_softmax_gradient_bound),
}
AXES = [-1, 0, 1, (0, 2), (-1, -2), None]
MIXES = [*((d, d) for d in reference.DTYPES), ("bfloat16", "float32"), ("float32", "bfloat16")]


def data(shape, dtype, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def check(name, x, d, *, axis=-1, implementation):
    """Assert that values and gradient at x are within their bounds; d is the cotangent."""
    function, expected, bound = FUNCTIONS[name]
    gradient, gradient_bound = GRADIENTS[name]
    y_dtype = d.dtype.name
    y, vjp = jax.vjp(lambda x: function(x, axis, dtype=y_dtype, implementation=implementation), x)
    (dx,) = vjp(d)

    u = reference.arithmetic(x.dtype.name, y_dtype)
    y_ref = expected(exact(x), axis)
    y_bound = bound(exact(x), y_ref, axis, y_dtype, u)
    assert (y.dtype, dx.dtype) == (d.dtype, x.dtype)
    assert_within(y, y_ref, y_bound)
    assert_within(
        dx,
        gradient(y_ref, exact(d), axis),
        gradient_bound(y_ref, exact(d), axis, y_bound, x.dtype.name, y_dtype, u),
    )


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@on_each_implementation("name mix axis", [*FUNCTIONS], MIXES, AXES)
def test_values_and_gradients(name, mix, axis, implementation):
    x_dtype, y_dtype = mix
    x, d = data((64, 8, 37), x_dtype), data((64, 8, 37), y_dtype, seed=1, scale=1.0)
    check(name, x, d, axis=axis, implementation=implementation)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@on_each_implementation("dtype cols axis", ["bfloat16", "float16"], [37, 64, 3000], [-1, 0, (0, 2)])
def test_common_part_of_cotangents(dtype, cols, axis, implementation):
    """A large constant that is added to all cotangents of a row does not change the gradient.

    In exact arithmetic, the constant cancels because each row of y sums to 1. If y is rounded to 16
    bits, a row no longer sums to exactly 1. The constant must cancel in this case, too.
    """
    x, d = data((64, 8, cols), dtype), data((64, 8, cols), dtype, seed=1, scale=1.0)
    check("softmax", x, d + 100, axis=axis, implementation=implementation)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@on_each_implementation("name cols", [*FUNCTIONS], [1, 2, 31, 50257])
def test_widths(name, cols, implementation):
    x, d = data((3, cols), "float32"), data((3, cols), "float32", seed=1, scale=1.0)
    check(name, x, d, implementation=implementation)


def where_masks():
    rng = np.random.default_rng(3)
    some = rng.random((4, 5, 6)) < 0.5
    some[1, 2] = False  # a fully masked row
    return {"full": some, "broadcast": some[:1, :, :], "lower rank": some[0, 0]}


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS, refused.SOME_COLUMNS)
@on_each_implementation("name axis kind", [*FUNCTIONS], [-1, 0, (0, 2)], [*where_masks()])
def test_where(name, axis, kind, implementation):
    function, expected, _ = FUNCTIONS[name]
    where = where_masks()[kind]
    x, d = data((4, 5, 6), "float32"), data((4, 5, 6), "float32", seed=1)
    kept = np.broadcast_to(where, x.shape)
    # Masked elements of x and of the cotangent must have no effect.
    x = jnp.where(kept, x, jnp.nan)
    d = jnp.where(kept, d, jnp.inf)

    def both(x, d, **options):
        y, vjp = jax.vjp(lambda x: function(x, axis, where, **options), x)
        return y, *vjp(d)

    y, dx = both(x, d, implementation=implementation)
    y_ref = expected(exact(x), axis, where)
    d_kept = np.where(kept, exact(d), 0)
    dx_ref = np.where(kept, GRADIENTS[name][0](y_ref, d_kept, axis), 0)
    # The error bounds come from an analysis of the same function for arrays whose masked elements
    # are 0.
    y_like, dx_like = analyse(both, jnp.where(kept, x, 0), jnp.where(kept, d, 0))
    assert_within(y, y_ref, y_like.error)
    assert_within(dx, dx_ref, dx_like.error)
    np.testing.assert_array_equal(np.asarray(dx)[~kept], 0)
    np.testing.assert_array_equal(np.asarray(y)[~kept], 0 if name == "softmax" else -np.inf)


def test_log_softmax_mask_is_not_guessed_from_the_output():
    """The gradient of log_softmax is nonzero for a logit of -inf, and 0 for a masked logit."""
    x = jnp.asarray([0.0, -jnp.inf, 1.0])
    for where, expected in [(None, 1.0), (jnp.asarray([True, False, True]), 0.0)]:
        _, vjp = jax.vjp(lambda x, where=where: jaxnorm.log_softmax(x, where=where), x)
        assert vjp(jnp.ones(3))[0][1] == expected


def test_row_of_minus_infinity():
    x = jnp.full((2, 3), -jnp.inf)
    assert jnp.isnan(jaxnorm.softmax(x)).all()
    assert jnp.isnan(jaxnorm.log_softmax(x)).all()
    nothing = jnp.zeros((2, 3), bool)
    np.testing.assert_array_equal(jaxnorm.softmax(x, where=nothing), 0)
    np.testing.assert_array_equal(jaxnorm.log_softmax(x, where=nothing), -jnp.inf)
    np.testing.assert_array_equal(jax.grad(lambda x: jaxnorm.softmax(x, where=nothing).sum())(x), 0)


def test_large_logits_do_not_overflow():
    x = jnp.asarray([[3e38, 3e38, -3e38]])
    np.testing.assert_array_equal(jaxnorm.softmax(x), [[0.5, 0.5, 0.0]])
    expected = np.array([[np.log(0.5), np.log(0.5), -np.inf]])
    assert_computes(jaxnorm.log_softmax(x), jaxnorm.log_softmax, x, expected=expected)


@refused.expect(refused.EMPTY)
@on_each_implementation("name shape", [*FUNCTIONS], [(0, 5), (5, 0), (3, 0, 4), (0,)])
def test_empty(name, shape, implementation):
    function = FUNCTIONS[name][0]
    x = jnp.zeros(shape, jnp.bfloat16)
    y, vjp = jax.vjp(lambda x: function(x, implementation=implementation), x)
    assert y.shape == vjp(y)[0].shape == shape


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_and_scalar_axes(name):
    function = FUNCTIONS[name][0]
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(function(x, np.int64(1)), function(jnp.asarray(x), -1))
    np.testing.assert_array_equal(function(x[0]), function(x)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_beats_jax_nn_in_low_precision(dtype):
    """In low precision, the gradient is at least as accurate as jax.nn's."""
    x, d = data((64, 1000), dtype), data((64, 1000), dtype, seed=1)
    dx_ref = reference.softmax_gradient(reference.softmax(exact(x), -1), exact(d), -1)
    errors = [
        reference.relative_error(jax.vjp(f, x)[1](d)[0], dx_ref)
        for f in (jaxnorm.softmax, jax.nn.softmax)
    ]
    assert errors[0] <= errors[1]
