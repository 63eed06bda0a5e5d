"""softmax and log_softmax of ``scale * x + bias``, with and without masks, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import refused
from logits_cases import BF16, F32, KINDS, assert_like_xla, mixed, of_width, op_of
from pairs import on_each_implementation
from program_error import analyse, assert_computes
from reference import assert_within, exact
from test_softmax import FUNCTIONS, check, data

import jaxnorm
from jaxnorm.operations.softmax import filled_softmax
from jaxnorm.tools.plan import calls_in

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SCALE = 0.37
# dtypes of x, bias and y
MIXES = [
    *((d, d, d) for d in reference.DTYPES),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float16", "float32"),
    ("float16", "bfloat16", "float32"),
]
SHAPE = (4, 3, 40, 72)
# Shapes of the bias and the mask, which broadcast to x. The axes of x are samples, heads, queries
# and keys.
BROADCAST = [(3, 40, 72), (4, 1, 1, 72), (40, 1), (), (4, 3, 40, 72), (1, 3, 1, 72)]


def mask_of(shape, seed=7):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.7)


@pytest.mark.parametrize("half", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bias(name, shape, causal, half, implementation):
    # The cases take the combinations of dtypes in turn, so each shape is tested with every
    # combination.
    turn = 2 * causal + BROADCAST.index(shape) + (name == "softmax") + half
    x_dtype, bias_dtype, y_dtype = MIXES[turn % len(MIXES)]
    x, d = data(SHAPE, x_dtype), data(SHAPE, y_dtype, seed=1, scale=1.0)
    bias = data(shape, bias_dtype, seed=2)
    options = {"causal": causal, "scale": SCALE, "bias": bias}
    check(name, x, d, **options, implementation=implementation)


def overflowing_rows(cols, dtype):
    """Return x, and an array that has the same softmax, in which no logit overflows.

    If the scale is above 1, the product of the scale and the lowest number of `dtype` is -inf. The
    rows of x have this number in half of the columns, in all of them, and in all that are not -inf.
    All logits of the last row are -inf, so its softmax is NaN.
    """
    x, lowest = data((4, cols), dtype), jnp.finfo(dtype).min
    half = jnp.arange(cols) < cols // 2
    x = x.at[0].set(jnp.where(half, lowest, x[0])).at[1].set(lowest)
    x = x.at[2].set(jnp.where(half, -jnp.inf, lowest)).at[3].set(-jnp.inf)
    same = x.at[0].set(jnp.where(half, -jnp.inf, x[0])).at[1].set(0)
    return x, same.at[2].set(jnp.where(half, -jnp.inf, 0))


def check_overflowing_rows(name, run, dtype, cols=72):
    """Compare the results for both arrays of `overflowing_rows`.

    ``run(x)`` returns the softmax or log_softmax of x with a scale of 2.
    """
    x, same = overflowing_rows(cols, dtype)
    y, expected = run(x), run(same)
    shown = exact(expected) > -np.inf if name == "log_softmax" else np.full(x.shape, True)
    shown |= np.isnan(exact(expected))
    np.testing.assert_array_equal(exact(y)[shown], exact(expected)[shown])
    assert np.all(exact(y)[~shown] < -1e4)
    assert np.isnan(exact(y)).any(-1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("scale", [2.0, np.full((), 2.0)], ids=["number", "array"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_multiples_that_overflow(x64, name, scale, dtype):
    """A row that is masked by the lowest finite number has an even softmax for any scale."""
    scale = scale if isinstance(scale, float) else jnp.asarray(scale)
    check_overflowing_rows(name, lambda x: FUNCTIONS[name](x, scale=scale), dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_traced_scale_compiles_once_and_is_a_constant(name):
    x, function, plain = data((4, 8), "float32"), getattr(jaxnorm, name), getattr(jax.nn, name)

    def derivatives(function):
        return lambda x: jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin(function(x)))), (x,), (x,))

    compiled = jax.jit(lambda x, s: derivatives(functools.partial(function, scale=s))(x))
    for scale in (0.5, 2.0):
        ours = derivatives(functools.partial(function, scale=scale))
        expected = derivatives(lambda x: plain(scale * x))  # noqa: B023
        assert_computes(compiled(x, scale), expected, x, like=ours)
    assert compiled._cache_size() == 1
    with pytest.raises(TypeError, match=r"scale is differentiated.*stop_gradient, or multiply x"):
        jax.grad(lambda scale: function(x, scale=scale).sum())(0.5)
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); expected a number or a scalar"):
        function(x, scale=jnp.ones(4))


@on_each_implementation("name shape causal", [*FUNCTIONS], BROADCAST, [False, True])
def test_where(name, shape, causal, implementation):
    x, d = data(SHAPE, "float32"), data(SHAPE, "float32", seed=1, scale=1.0)
    bias = data((1, 3, 1, 72), "float32", seed=2)
    options = {"where": mask_of(shape), "causal": causal, "bias": bias}
    check(name, x, d, **options, implementation=implementation)


@pytest.mark.parametrize(("kind", "cols", "dtypes"), [*mixed()])
def test_kernels(kind, cols, dtypes, kernels):
    assert_like_xla(kernels, of_width(kind, 128, cols), op_of(kind, cols), dtypes)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_large_arrays(kind, dtype, kernels):
    assert_like_xla(kernels, KINDS[kind], "softmax", (dtype, dtype, dtype))


@refused.expect(refused.FEW_SHORT_ROWS, refused.NARROW)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 8), (2, 3, 64, 64)], ids=str)
def test_causal_counts_from_the_top_left(shape, implementation):
    x = data(shape, "float32")
    got = jaxnorm.softmax(x, causal=True, implementation=implementation)
    kept = jnp.tril(jnp.ones(shape[-2:], bool))
    assert_computes(got, lambda x: jax.nn.softmax(x, where=kept), x)
    assert not np.any(np.asarray(got)[..., 0, 1:])


def test_a_row_without_an_entry_is_0():
    x = data((4, 6), "float32")
    where = jnp.arange(4)[:, None] != 2

    def call(x, bias):
        return jaxnorm.softmax(x, where=where, bias=bias, scale=2.0, causal=True)

    y, vjp = jax.vjp(call, x, jnp.zeros(6))
    dx, _ = vjp(jnp.full_like(y, jnp.inf).at[:2].set(1))
    np.testing.assert_array_equal(y[2], 0)
    np.testing.assert_array_equal(dx[2], 0)
    assert np.all(np.isfinite(dx[:2]))
    log = jaxnorm.log_softmax(x, where=where, causal=True)
    np.testing.assert_array_equal(log[2], -jnp.inf)


def test_minus_infinity_in_a_bias_is_as_in_x():
    x = data((3, 5), "float32")
    bias = jnp.zeros((3, 5)).at[0, 2].set(-jnp.inf).at[1].set(-jnp.inf)
    np.testing.assert_array_equal(jaxnorm.softmax(x, bias=bias), jaxnorm.softmax(x + bias))
    assert np.isnan(jaxnorm.softmax(x, bias=bias)[1]).all()


@pytest.mark.usefixtures("x64")
def test_float64():
    x, bias = data((3, 4, 50), "float32"), data((4, 50), "float64", seed=1)
    y = jaxnorm.softmax(x, bias=bias, scale=SCALE)
    assert y.dtype == "float32"  # a bias does not widen y
    expected = reference.softmax(SCALE * exact(x) + exact(bias), -1)
    assert_within(y, expected, 1.01 * reference.rounding(expected, "float32"))


def gradients(x, bias, where, **wrt):
    def loss(x, bias):
        return jnp.sum(jnp.sin(jaxnorm.softmax(x, where=where, bias=bias, scale=2.0)))

    return jax.grad(loss, **wrt)(x, bias)


def test_what_is_kept_and_computed():
    """The derivative saves y and the mask, and computes the bias's gradient only if requested."""
    x, bias, where = jnp.ones((2, 3, 5)), jnp.ones((3, 1)), mask_of((2, 1, 5))
    for argnums, expected in ((0, ["x"]), ((0, 1), ["x", "logits_bias"])):
        jaxpr = jax.make_jaxpr(functools.partial(gradients, argnums=argnums))(x, bias, where)
        (call,) = [c for c in calls_in(jaxpr.jaxpr) if c.direction == "bwd"]
        assert [*call.wrt] == expected
    _, vjp = jax.vjp(lambda x, b: jaxnorm.softmax(x, where=where, bias=b), x, bias)
    kept = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(vjp))
    assert kept == [("bool", (2, 1, 5)), ("float32", (2, 3, 5))]


@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_masked_may_take_part(with_bias):
    """`filled_softmax` replaces masked logits by a finite value, as attention code often does.

    Its results equal those of the same formula in jnp. If a row is fully masked, all its results
    are equal.
    """
    fill = float(np.finfo(np.float32).min)
    x = data((2, 3, 5, 7), "float32").at[0, 0, 1].set(fill)
    where = mask_of((2, 1, 5, 7)).at[1, 0, 2].set(False)
    bias = data((3, 5, 7), "float32", seed=2) if with_bias else jnp.zeros(())

    def ours(x, bias):
        return filled_softmax(x, where, bias if with_bias else None, fill=fill, dtype="float32")

    def theirs(x, bias):
        # The bias is lost by rounding if it is added to the huge `fill`, but it has a gradient.
        if with_bias:
            x = x + jnp.where(x == fill, bias - jax.lax.stop_gradient(bias), bias)
        return jax.nn.softmax(jnp.where(where, x, fill))

    tangents = data(x.shape, "float32", seed=3), data(bias.shape, "float32", seed=4)
    d = data(x.shape, "float32", seed=5)

    def derivatives(f):
        return lambda x, bias: (jax.jvp(f, (x, bias), tangents), jax.vjp(f, x, bias)[1](d))

    results = derivatives(ours)(x, bias)
    assert_computes(results, derivatives(theirs), x, bias)
    even = analyse(theirs, x, bias).error[1, 0, 2]
    assert_within(results[0][0][1, 0, 2], np.full(even.shape, 1 / 7), even)
