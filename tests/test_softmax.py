"""Values and gradients of softmax and log_softmax against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import refused
from pairs import on_each_implementation
from program_error import assert_computes
from reference import assert_within, exact

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FUNCTIONS = {"softmax": jaxnorm.softmax, "log_softmax": jaxnorm.log_softmax}
AXES = [-1, 0, 1, (0, 2), (-1, -2), None]
MIXES = [*((d, d) for d in reference.DTYPES), ("bfloat16", "float32"), ("float32", "bfloat16")]


def data(shape, dtype, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def check(
    name, x, d, *, axis=-1, bias=None, where=None, causal=False, scale=1.0, implementation=None
):
    """Assert that values and gradients are those in float64. `d` is the cotangent.

    Masked elements of x and of the cotangent are NaN and infinite: they must have no effect. The
    error bounds come from an analysis of XLA's code in which these elements are 0.
    """
    log = name == "log_softmax"
    options = {"where": where, "scale": scale, "causal": causal, "dtype": d.dtype}

    def both(function, implementation, x, bias, d):
        call = functools.partial(function, axis=axis, implementation=implementation, **options)
        y, vjp = jax.vjp(lambda x, bias: call(x, bias=bias), x, bias)
        return y, *vjp(d)

    kept = np.broadcast_to(True if where is None else where, x.shape)
    kept = kept & np.tri(*x.shape[-2:], dtype=bool) if causal else kept
    masked = jnp.where(kept, x, jnp.nan), bias, jnp.where(kept, d, jnp.inf)
    results = both(FUNCTIONS[name], implementation, *masked)
    x, d = jnp.where(kept, x, 0), jnp.where(kept, d, 0)
    for a, like in zip(results, (d, x, bias)):
        assert like is None or (a.shape, a.dtype) == (like.shape, like.dtype)
    z = float(scale) * exact(x) + (0 if bias is None else exact(bias))
    y = reference.softmax(z, axis, kept, log=log)
    dz = np.where(kept, reference.softmax_gradient(y, exact(d), axis, log=log), 0)
    dbias = None
    if bias is not None:
        sizes = (1,) * (x.ndim - bias.ndim) + bias.shape
        summed = tuple(i for i, size in enumerate(sizes) if size == 1)
        dbias = dz.sum(summed, keepdims=True).reshape(bias.shape)
    of_xla = functools.partial(both, getattr(jaxnorm, name), "xla")
    assert_computes(results, of_xla, x, bias, d, expected=(y, float(scale) * dz, dbias))


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
    x, d = data((64, 8, cols), dtype), data((64, 8, cols), dtype, seed=1, scale=1.0) + 100
    _, vjp = jax.vjp(lambda x: jaxnorm.softmax(x, axis, implementation=implementation), x)
    y, terms = reference.softmax(exact(x), axis), x.size / exact(x).max(axis).size
    dx = reference.softmax_gradient(y, exact(d), axis)
    # The errors of y multiply differences of cotangents of the row, but never a cotangent itself.
    # The gradient has three such products. The float32 sum over the row has cotangents near 100.
    differences = np.ptp(exact(d), axis=axis, keepdims=True)
    in_float32 = reference.SAFETY * np.sqrt(terms) * reference.rounding(exact(d), "float32")
    bound = 3 * reference.rounding(y, dtype) * differences + y * in_float32
    assert_within(vjp(d)[0], dx, bound + reference.rounding(dx, dtype))


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
    x, d = data((4, 5, 6), "float32"), data((4, 5, 6), "float32", seed=1)
    check(name, x, d, axis=axis, where=where_masks()[kind], implementation=implementation)


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
    function = FUNCTIONS[name]
    x = jnp.zeros(shape, jnp.bfloat16)
    y, vjp = jax.vjp(lambda x: function(x, implementation=implementation), x)
    assert y.shape == vjp(y)[0].shape == shape


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_and_scalar_axes(name):
    function = FUNCTIONS[name]
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
