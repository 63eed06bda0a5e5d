"""Tests of gated_linear and activation_linear.

The tests compare values and gradients with float64 NumPy, and check that wrong arguments raise
errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_linear_cases import (
    ACTIVATIONS,
    BF16,
    F32,
    MIXES,
    WIDE,
    Expected,
    operands,
    value_and_gradients,
)
from jax.experimental import checkify, io_callback
from pairs import pairwise
from program_error import analyse, assert_computes
from reference import assert_within, exact, rounding

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def check_case(shape, features, mix, activation, present):
    arrays = operands(shape, features, mix)
    arrays = {name: a for name, a in arrays.items() if name in ("gate", "weight", *present)}
    d = jnp.asarray(np.random.default_rng(1).normal(size=(*shape[:-1], features)), mix.y)
    options = {"activation": activation, "dtype": mix.dtype}
    y, gradients = value_and_gradients(arrays, d, options=tuple(options.items()))
    expected = Expected(arrays, d, mix, activation)
    assert (y.shape, y.dtype) == (d.shape, mix.y)
    assert_within(np.reshape(exact(y), expected.y.shape), expected.y, expected.y_bound)
    for name, gradient in gradients.items():
        value, error = expected.gradients[name]
        assert (gradient.shape, gradient.dtype) == (arrays[name].shape, arrays[name].dtype)
        error = error + rounding(np.abs(value) + error, gradient.dtype)
        assert_within(np.reshape(exact(gradient), value.shape), value, error)


# An entry of `MIXES` has a dtype for each operand. If the operand up is absent, the tested function
# is activation_linear. For this function, entries that differ only in up's dtype would be the same
# test. So it is tested only with entries in which up has the same dtype as gate.
@pytest.mark.parametrize(
    ("mix", "activation", "present", "shape"),
    [
        case
        for case in pairwise(
            MIXES,
            ACTIVATIONS,
            [("up", "bias"), ("up",), ("bias",), ()],
            [((70, 48), 24), ((3, 5, 33), 130), ((96,), 7)],
        )
        if "up" in case[2] or case[0].gate == case[0].up
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_values_and_gradients(mix, activation, present, shape):
    check_case(*shape, mix, activation, present)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
@pytest.mark.parametrize("mix", WIDE, ids=str)
def test_float64(mix, activation):
    check_case((9, 8), 30, mix, activation, ("up", "bias"))


def test_shapes():
    """The operands may have 0 rows, 0 or 1 features, or only one axis."""
    for shape, features in (((0, 4), 3), ((2, 0, 4), 3), ((4,), 3), ((2, 1), 1), ((2, 4), 0)):
        arrays = operands(shape, features)
        y, gradients = value_and_gradients(arrays, jnp.ones((*shape[:-1], features)))
        assert y.shape == (*shape[:-1], features)
        assert {n: g.shape for n, g in gradients.items()} == {n: a.shape for n, a in arrays.items()}
        assert all(np.isfinite(g).all() for g in gradients.values())


def test_rows_of_nan_stay_where_they_are():
    a = operands((5, 8), 6)
    a["gate"] = a["gate"].at[1].set(jnp.nan).at[2, 3].set(jnp.inf)
    y, gradients = value_and_gradients(a, jnp.ones((5, 6)))
    assert np.isnan(y).any(-1).tolist()[:2] == [False, True]
    assert np.isfinite(y[3:]).all()
    assert np.isfinite(gradients["gate"][3:]).all()


# ----------------------------------------------------------------------- functions of users


def assert_computes_with_gradients(ours, plain, *arrays):
    """Assert that results and gradients are those of `plain`, and have the same dtypes.

    The gradients are those of the arrays of floats, which come first.
    """

    def both(function):
        @jax.jit
        def run(*arrays):
            floats = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
            y, vjp = jax.vjp(lambda *a: function(*a, *arrays[len(a) :]), *floats)
            return y, *vjp(jnp.ones_like(y))

        return run

    results = both(ours)(*arrays)
    assert [a.dtype for a in results] == [a.dtype for a in jax.eval_shape(both(plain), *arrays)]
    assert_computes(results, both(plain), *arrays, like=both(ours))


@pytest.mark.parametrize("around", ["grad", "jit", "scan", "checkpoint"])
def test_an_activation_closes_over_arrays(around):
    """An activation may close over traced arrays, which have gradients."""
    a = operands((5, 8), 6)

    def loss(function, slope, gate, up, weight):
        return jnp.sum(jnp.sin(function(slope, gate, up, weight)))

    def ours(slope, gate, up, weight):
        return jaxnorm.gated_linear(
            gate, up, weight, activation=lambda x: x * jax.nn.sigmoid(slope * x)
        )

    def plain(slope, gate, up, weight):
        return (gate * jax.nn.sigmoid(slope * gate) * up) @ weight

    def wrapped(function):
        if around == "checkpoint":
            return jax.checkpoint(function)
        if around != "scan":
            return function

        def layers(slope, gate, up, weight):
            def layer(gate, slope):
                return gate + jnp.sum(function(slope, gate, up, weight)) / 64, None

            return jax.lax.scan(layer, gate, jnp.stack([slope, 2 * slope]))[0]

        return layers

    arrays = jnp.full((8,), 0.7), *(a[name] for name in ("gate", "up", "weight"))
    derived, expected = (
        jax.value_and_grad(functools.partial(loss, wrapped(function)), (0, 1, 2, 3))
        for function in (ours, plain)
    )
    results = (jax.jit(derived) if around == "jit" else derived)(*arrays)
    assert_computes(results, expected, *arrays, like=derived)
    of_slope = analyse(expected, *arrays)[1][0]
    assert np.any(np.abs(of_slope.value) > of_slope.error)


def test_experts():
    """A function passed as `product` may call `jax.lax.ragged_dot`.

    It gets both operands in the matmul's dtype.
    """
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.normal(size=(12, 8)), BF16) for _ in range(2))
    weight = jnp.asarray(rng.normal(size=(3, 8, 6)), F32)
    sizes = jnp.asarray([5, 0, 7])

    def ours(gate, up, weight):
        def product(h, weight):
            assert h.dtype == weight.dtype == BF16
            return jax.lax.ragged_dot(h, weight, sizes)

        return jaxnorm.gated_linear(gate, up, weight, product=product, dtype=BF16)

    def plain(gate, up, weight):
        h = jax.nn.silu(gate.astype(F32)) * up
        return jax.lax.ragged_dot(h.astype(BF16), weight.astype(BF16), sizes)

    assert_computes_with_gradients(ours, plain, gate, up, weight)


def test_a_product_of_a_tree():
    """The matmul that a user passes as `product` may take a tree of weights.

    It gets the tree's integers unchanged, and the tree's floats cast to the dtype of the matmul. In
    this test, it also applies dropout. The key of the dropout is a traced array from an enclosing
    function.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 8)), BF16)
    weight = {
        "bits": jnp.asarray(rng.integers(-9, 9, size=(8, 6)), jnp.int8),
        "scale": jnp.asarray(rng.uniform(size=6), F32),
    }
    bias = jnp.asarray(rng.normal(size=6), F32)

    def function(x, scale, bias, key):
        def product(h, weight):
            assert (h.dtype, weight["scale"].dtype, weight["bits"].dtype) == (BF16, BF16, "int8")
            h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
            return (h @ weight["bits"].astype(h.dtype)).astype(F32) * weight["scale"]

        tree = {"bits": weight["bits"], "scale": scale}
        return jaxnorm.activation_linear(x, tree, bias=bias, product=product, dtype=BF16)

    def plain(x, scale, bias, key):
        h = jax.nn.gelu(x.astype(F32)).astype(BF16)
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
        y = (h @ weight["bits"].astype(BF16)).astype(F32) * scale.astype(BF16)
        return (y + bias).astype(BF16)

    arrays = x, weight["scale"], bias, jax.random.key(3)
    assert_computes_with_gradients(function, plain, *arrays)


def effects_of(seen):
    """Return functions of (h, weight) that have an effect. A callback appends to the list `seen`.

    The callback returns twice the number of its calls.
    """

    def see(a):
        seen.append(a)
        return np.float32(2 * len(seen))

    def prints(h, weight, *, ordered=False):
        jax.debug.callback(see, h.sum(), ordered=ordered)
        return h @ weight

    def calls_back(h, weight):
        io_callback(see, jax.ShapeDtypeStruct((), "float32"), 0.0, ordered=True)
        return h @ weight

    def uses_a_result(h, weight):
        result = io_callback(see, jax.ShapeDtypeStruct((), "float32"), 0.0, ordered=True)
        return result * (h @ weight) / 2

    def writes(h, weight):
        jax.debug.callback(see, 0.0)
        y = jax.new_ref(h @ weight / 2)
        jax.ref.addupdate(y, ..., h @ weight / 2)
        return jax.freeze(y)

    ordered = functools.partial(prints, ordered=True)
    return {
        "print": prints,
        "ordered print": ordered,
        "print inside jit": lambda h, weight: jax.jit(ordered)(h, weight),
        "io_callback": calls_back,
        "result of io_callback": uses_a_result,
        "ref": writes,
    }


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", effects_of([]))
def test_effects_of_a_product_happen_once(name, around):
    """In a gradient, an effect of `product` happens once, as in plain JAX."""
    seen = []
    product = effects_of(seen)[name]
    a = operands((5, 8), 6)

    def ours(gate, up, weight):
        y = jaxnorm.gated_linear(gate, up, weight, product=product)
        return jnp.sum(jnp.sin(y))

    def plain(gate, up, weight):
        return jnp.sum(jnp.sin((jax.nn.silu(gate) * up) @ weight))

    arrays = [a[name] for name in ("gate", "up", "weight")]
    derived = jax.grad(ours, (0, 1, 2))
    results = around(derived)(*arrays)
    jax.effects_barrier()
    assert len(seen) == 1
    assert_computes(results, jax.grad(plain, (0, 1, 2)), *arrays)


def test_a_check_in_a_product():
    """`checkify` finds a failed check in `product`, even in a gradient."""
    arrays = [operands((5, 8), 6)[name] for name in ("gate", "weight")]

    def product(h, weight):
        checkify.check(jnp.all(h < 1), "h is large")
        return h @ weight

    def loss(x, weight):
        return jnp.sum(jaxnorm.activation_linear(x, weight, product=product))

    for function in (loss, jax.grad(loss, (0, 1))):
        for x, failed in ((arrays[0] / 100, False), (arrays[0] * 100, True)):
            error, _ = checkify.checkify(jax.jit(function))(x, arrays[1])
            assert ("h is large" in str(error.get())) == failed
