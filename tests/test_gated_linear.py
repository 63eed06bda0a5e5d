"""Values and gradients of gated_linear and activation_linear, and functions of users as arguments.

`test_every_derivative` tests activations that close over arrays.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from pairs import pairwise
from program_error import analyse, assert_computes, values_of
from programs import equations
from reference import ACTIVATIONS, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

BF16, F32 = "bfloat16", "float32"
DTYPES = {"b": BF16, "h": "float16", "f": F32, "d": "float64"}
# The dtypes of gate, up, weight, bias and y. The option `dtype=`, if it is given, is that of y.
MIXES = [
    *(("bbbbb", False), ("fffff", False), ("bbfff", False), ("bbffb", True), ("ffffb", True)),
    *(("hhhff", True), ("bfbbf", False), ("hbbhf", False), ("bbbfh", True)),
]
WIDE = [("dfffd", False), ("ffddd", False), ("dddff", True), ("fffdd", True)]


def operands(shape, features, mix="ffff"):
    """Return a dict of the arrays gate, up, weight and bias."""
    rng = np.random.default_rng(0)
    shapes = {"gate": shape, "up": shape, "weight": (shape[-1], features), "bias": (features,)}
    scales = {"weight": 1 / math.sqrt(shape[-1])}
    return {
        name: jnp.asarray(rng.normal(size=size) * scales.get(name, 1), DTYPES[letter])
        for (name, size), letter in zip(shapes.items(), mix)
    }


def call(arrays, **options):
    """Call gated_linear, or activation_linear if the dict `arrays` has no key "up"."""
    arrays = dict(arrays)
    gate, up, weight = (arrays.pop(name, None) for name in ("gate", "up", "weight"))
    if up is None:
        return jaxnorm.activation_linear(gate, weight, **arrays, **options)
    return jaxnorm.gated_linear(gate, up, weight, **arrays, **options)


def plain(arrays, activation="gelu"):
    function = getattr(jax.nn, activation) if isinstance(activation, str) else activation
    h = function(arrays["gate"]) * arrays.get("up", 1.0)
    return h @ arrays["weight"] + arrays.get("bias", 0.0)


def derived(function):
    """Return a function of operands and a cotangent: the result of `function`, and gradients."""

    def run(arrays, d):
        y, vjp = jax.vjp(function, arrays)
        return y, vjp(d)[0]

    return run


def check_case(shape, features, mix, activation, present):
    dtypes, is_given = mix
    arrays = operands(shape, features, dtypes)
    arrays = {name: a for name, a in arrays.items() if name in ("gate", "weight", *present)}
    y_dtype = DTYPES[dtypes[4]]
    d = jnp.asarray(np.random.default_rng(1).normal(size=(*shape[:-1], features)), y_dtype)
    options = {"activation": activation, "dtype": y_dtype if is_given else None}
    ours = derived(functools.partial(call, **options))
    y, gradients = jax.jit(ours)(arrays, d)
    assert y.dtype == y_dtype
    types = {name: (a.shape, a.dtype) for name, a in arrays.items()}
    assert {name: (a.shape, a.dtype) for name, a in gradients.items()} == types
    with jax.enable_x64(True):
        wide = jax.tree.map(exact, (arrays, d))
        expected = values_of(
            analyse(derived(functools.partial(plain, activation=activation)), *wide)
        )
    assert_computes((y, gradients), ours, arrays, d, expected=expected)


# Without the operand up, the tested function is activation_linear. For this function, entries of
# `MIXES` that differ only in up's dtype would be the same test. So it is tested only with entries
# in which up has the same dtype as gate.
@pytest.mark.parametrize(
    ("mix", "activation", "present", "shape"),
    [
        case
        for case in pairwise(
            MIXES,
            [*ACTIVATIONS, jnp.tanh],
            [("up", "bias"), ("up",), ("bias",), ()],
            [((70, 48), 24), ((3, 5, 33), 130), ((96,), 7), ((2, 1), 1), ((2, 4), 0)],
        )
        if "up" in case[2] or case[0][0][0] == case[0][0][1]
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


def test_matmul_precision():
    arrays = operands((3, 4), 5)
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = jax.make_jaxpr(call)(arrays)
    (product,) = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert product.params["precision"] == (jax.lax.Precision.DEFAULT,) * 2


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


class Parameter:
    """A leaf of a tree that JAX converts to an array, like the parameters of some frameworks."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


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

        tree = {"bits": weight["bits"], "scale": Parameter(scale)}
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
