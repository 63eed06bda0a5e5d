"""gated_linear and activation_linear: values and gradients against float64 numpy; errors."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import pairwise
from reference import SAFETY, arithmetic, assert_within, exact, rounding, unit_roundoff
from test_configurations import CONFIGURATIONS
from test_forward_mode import DERIVATIVES, check, transformed

import jaxnorm
from jaxnorm.operations import products

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

BF16, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Dtypes: of operands, then what becomes of them."""

    gate: str
    up: str
    weight: str
    bias: str
    h: str
    product: str
    y: str
    dtype: str | None = None


MIXES = [
    Mix(BF16, BF16, BF16, BF16, BF16, BF16, BF16),
    Mix(F32, F32, F32, F32, F32, F32, F32),
    Mix(BF16, BF16, F32, F32, BF16, F32, F32),
    Mix(BF16, BF16, F32, F32, BF16, BF16, BF16, dtype=BF16),
    Mix(F32, F32, F32, F32, F32, BF16, BF16, dtype=BF16),
    Mix(F16, F16, F16, F32, F16, F16, F32, dtype=F32),
    Mix(BF16, F32, BF16, BF16, F32, F32, F32),
    Mix(F16, BF16, BF16, F16, F32, F32, F32),
    Mix(BF16, BF16, BF16, F32, BF16, BF16, F16, dtype=F16),
]
WIDE = [
    Mix(F64, F32, F32, F32, F64, F64, F64),
    Mix(F32, F32, F64, F64, F32, F64, F64),
    Mix(F64, F64, F64, F32, F64, F32, F32, dtype=F32),
    Mix(F32, F32, F32, F64, F32, F32, F64, dtype=F64),
]
ACTIVATIONS = ["silu", "gelu", "relu", "leaky_relu", "sigmoid", jnp.tanh]


def operands(shape, features, mix=MIXES[1], seed=0):
    """gate, up, weight and bias."""
    rng = np.random.default_rng(seed)
    return {
        "gate": jnp.asarray(rng.normal(size=shape), mix.gate),
        "up": jnp.asarray(rng.normal(size=shape), mix.up),
        "weight": jnp.asarray(
            rng.normal(size=(shape[-1], features)) / math.sqrt(shape[-1]), mix.weight
        ),
        "bias": jnp.asarray(rng.normal(size=features), mix.bias),
    }


def call(arrays, **options):
    """Either function, of the operands that there are."""
    arrays = dict(arrays)
    gate, up, weight = (arrays.pop(name, None) for name in ("gate", "up", "weight"))
    if up is None:
        return jaxnorm.activation_linear(gate, weight, **arrays, **options)
    return jaxnorm.gated_linear(gate, up, weight, **arrays, **options)


class Expected:
    """y and its gradients, and the bounds of both: name -> value, bound but for its own rounding.

    What rounds: the elementwise result to its dtype, then both factors to the product's; the sums,
    like random walks; the product's cotangent and results to the product's dtype.
    """

    def __init__(self, arrays, d, mix, activation):
        gate, weight = (exact(arrays[name]) for name in ("gate", "weight"))
        rows_have_axes = gate.ndim > 2
        gate = gate.reshape(-1, gate.shape[-1])
        up = exact(arrays["up"]).reshape(gate.shape) if "up" in arrays else np.ones(gate.shape)
        bias = exact(arrays["bias"]) if "bias" in arrays else np.zeros(weight.shape[1])
        d = exact(d).reshape(-1, weight.shape[1])
        function = getattr(jax.nn, activation) if isinstance(activation, str) else activation
        with jax.enable_x64(True):
            x = jnp.asarray(gate, jnp.float64)
            of_gate, slope = map(exact, jax.jvp(function, (x,), (jnp.ones_like(x),)))
        elementwise = arithmetic(mix.gate, mix.up)
        self.u = arithmetic(mix.product, mix.y)

        # Of gelu, 1 + tanh(...) is rounded where it is small, and then multiplied by x.
        of_gate_error = 8 * elementwise * (np.abs(gate) + np.abs(of_gate))
        slope_error = 16 * elementwise * (1 + np.abs(gate))
        h = of_gate * up
        h_error = of_gate_error * np.abs(up) + 2 * elementwise * np.abs(h) + rounding(h, mix.h)
        h_error = h_error + rounding(np.abs(h) + h_error, mix.product) * (mix.h != mix.product)
        w_error = rounding(weight, mix.product) * (mix.weight != mix.product)
        self.y = h @ weight + bias
        size = np.abs(h) @ np.abs(weight)
        error = h_error @ (np.abs(weight) + w_error) + np.abs(h) @ w_error
        error = error + self.walk(h.shape[1]) * size + 4 * self.u * (size + np.abs(bias))
        self.y_bound = error + rounding(np.abs(self.y) + error, mix.y)

        d_error = rounding(d, mix.product) * (mix.y != mix.product)
        dh = d @ weight.T
        error = d_error @ (np.abs(weight) + w_error).T + np.abs(d) @ w_error.T
        error = error + self.walk(d.shape[1]) * (np.abs(d) @ np.abs(weight).T)
        error = error + rounding(np.abs(dh) + error, mix.product)
        dh_error = error + rounding(np.abs(dh) + error, mix.h) * (mix.h != mix.product)
        along = np.abs(up) * (np.abs(slope) + slope_error)
        dgate, dup, dweight = dh * up * slope, dh * of_gate, h.T @ d
        error = h_error.T @ (np.abs(d) + d_error) + np.abs(h).T @ d_error
        error = error + self.walk(len(d)) * (np.abs(h).T @ np.abs(d))
        # On a CPU XLA adds up in 16 bits where the result has those and rows have several axes.
        if rows_have_axes and mix.product in (BF16, F16) and jax.default_backend() == "cpu":
            in_16_bits = self.walk(len(d)) * unit_roundoff(mix.product) / self.u
            error = error + in_16_bits * (np.abs(h).T @ np.abs(d))
        few = 4 * elementwise
        self.gradients = {
            "gate": (
                dgate,
                dh_error * along + np.abs(dh * up) * slope_error + few * np.abs(dgate),
            ),
            "up": (
                dup,
                dh_error * (np.abs(of_gate) + of_gate_error)
                + np.abs(dh) * of_gate_error
                + few * np.abs(dup),
            ),
            "weight": (dweight, error + rounding(np.abs(dweight) + error, mix.product)),
            "bias": (d.sum(0), self.walk(len(d)) * np.abs(d).sum(0)),
        }

    def walk(self, terms):
        """Of a sum's roundings, by the sum of magnitudes."""
        return SAFETY * self.u * (math.sqrt(terms) + 2)


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_gradients(arrays, d, options=()):
    y, vjp = jax.vjp(lambda arrays: call(arrays, **dict(options)), arrays)
    return y, vjp(d)[0]


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


# The mixes of activation_linear are those whose gate and up are alike.
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
    """No rows, no features of either kind, one of each."""
    for shape, features in (((0, 4), 3), ((2, 0, 4), 3), ((4,), 3), ((2, 1), 1), ((2, 4), 0)):
        arrays = operands(shape, features)
        y, gradients = value_and_gradients(arrays, jnp.ones((*shape[:-1], features)))
        assert y.shape == (*shape[:-1], features)
        assert {n: g.shape for n, g in gradients.items()} == {n: a.shape for n, a in arrays.items()}
        assert all(np.isfinite(g).all() for g in gradients.values())


def test_defaults():
    a = operands((5, 8), 6)
    gate, up, weight, bias = a.values()
    np.testing.assert_allclose(
        jaxnorm.gated_linear(gate, up, weight), (jax.nn.silu(gate) * up) @ weight, rtol=1e-5
    )
    np.testing.assert_allclose(
        jaxnorm.activation_linear(gate, weight, bias=bias),
        jax.nn.gelu(gate) @ weight + bias,
        rtol=1e-5,
        atol=1e-6,
    )


def test_rows_of_nan_stay_where_they_are():
    a = operands((5, 8), 6)
    a["gate"] = a["gate"].at[1].set(jnp.nan).at[2, 3].set(jnp.inf)
    y, gradients = value_and_gradients(a, jnp.ones((5, 6)))
    assert np.isnan(y).any(-1).tolist()[:2] == [False, True]
    assert np.isfinite(y[3:]).all()
    assert np.isfinite(gradients["gate"][3:]).all()


ERRORS = [
    ({"gate": [1.0]}, TypeError, r"gate is a list; expected an array"),
    ({"gate": jnp.ones((2, 3), int)}, TypeError, r"gate has dtype int32.*astype"),
    ({"up": jnp.ones((2, 3), int)}, TypeError, r"up has dtype int32.*astype"),
    ({"up": None}, TypeError, r"up is a NoneType; expected an array"),
    ({"up": jnp.ones(3)}, ValueError, r"up has shape \(3,\); expected \(2, 3\), the shape of gate"),
    ({"gate": jnp.ones(())}, ValueError, r"gate has shape \(\); expected \(..., f\).*gate\[None\]"),
    ({"weight": jnp.ones((4, 5))}, ValueError, r"\(4, 5\); expected \(3, n\).*weight.T"),
    ({"weight": jnp.ones(3)}, ValueError, r"weight has shape \(3,\); expected \(3, n\)"),
    ({"weight": jnp.ones((3, 5), int)}, TypeError, r"weight has dtype int32"),
    ({"bias": jnp.ones(3)}, ValueError, r"bias has shape \(3,\); expected \(5,\), a number for"),
    ({"bias": jnp.ones(5, int)}, TypeError, r"bias has dtype int32"),
    ({"activation": "tanh"}, ValueError, r"'tanh'; expected one of 'relu', .* or an elementwise"),
    ({"activation": None}, ValueError, r"activation=None; expected .* for none, lambda x: x"),
    ({"activation": jnp.sum}, ValueError, r"activation returned shape \(\) .* expected its shape"),
    ({"dtype": "int8"}, TypeError, r"dtype=int8; expected one of bfloat16"),
    ({"product": "ragged"}, TypeError, r"product is a str; expected a function of \(h, weight\)"),
    ({"product": lambda h, w: None}, TypeError, r"product returned a NoneType; expected an array"),
    ({"product": lambda h, w: h > 0}, TypeError, r"product returned dtype bool; expected"),
    (
        {"product": jnp.matmul, "bias": jnp.ones(3)},
        ValueError,
        r"bias has shape \(3,\); expected \(5,\)",
    ),
    ({"product": jnp.matmul, "weight": "w"}, TypeError, r"weight has a str; expected an array"),
    ({"out_sharding": "data"}, TypeError, r"out_sharding is a str; expected a NamedSharding"),
    (
        {"out_sharding": jax.sharding.PartitionSpec("data")},
        ValueError,
        r"lie on no mesh with Explicit axes; expected None; leave it out",
    ),
    (
        {"out_sharding": jax.sharding.PartitionSpec("data"), "product": jnp.matmul},
        ValueError,
        r"and product=; expected one of them; give it to the product",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS, ids=lambda v: str(v)[:30])
def test_errors(arguments, error, message):
    given = {"gate": jnp.ones((2, 3)), "up": jnp.ones((2, 3)), "weight": jnp.ones((3, 5))}
    with pytest.raises(error, match=f"^gated_linear: .*{message}"):
        jaxnorm.gated_linear(**{**given, **arguments})
    if "up" not in arguments:
        given["x"] = arguments.get("gate", given["gate"])
        arguments = {n: a for n, a in arguments.items() if n != "gate"}
        del given["gate"], given["up"]
        with pytest.raises(error, match=f"^activation_linear: .*{message.replace('gate', 'x')}"):
            jaxnorm.activation_linear(**{**given, **arguments})


@pytest.mark.parametrize("function", [jaxnorm.gated_linear, jaxnorm.activation_linear])
def test_options_are_named(function):
    arrays = [jnp.ones((2, 3))] * (2 if function is jaxnorm.gated_linear else 1)
    with pytest.raises(TypeError, match="positional argument"):
        function(*arrays, jnp.ones((3, 5)), jnp.ones(5))


# ------------------------------------------------------------------------ functions of users


@pytest.mark.parametrize("around", ["grad", "jit", "scan", "checkpoint"])
def test_an_activation_closes_over_arrays(around):
    """Traced ones, which have gradients."""
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
    both = []
    for function in (ours, plain):
        gradients = jax.value_and_grad(functools.partial(loss, wrapped(function)), (0, 1, 2, 3))
        both.append((jax.jit(gradients) if around == "jit" else gradients)(*arrays))
    for p, q in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5)
    assert np.abs(both[0][1][0]).max() > 1e-3


def test_experts():
    """`jax.lax.ragged_dot` in place of the product, which gets both factors in its dtype."""
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

    def both(function):
        y, vjp = jax.vjp(function, gate, up, weight)
        return y, *vjp(jnp.ones_like(y))

    for p, q in zip(both(ours), both(plain), strict=True):
        assert p.dtype == q.dtype
        # Two draws of the same roundings to 8 bits.
        np.testing.assert_allclose(exact(p), exact(q), rtol=0, atol=2**-6 * np.abs(exact(q)).max())


def test_a_product_of_a_tree():
    """Integers as they are, floats in the product's dtype; with dropout of h, by a traced key."""
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

    def both(function):
        @jax.jit
        def run(*arrays):
            y, vjp = jax.vjp(lambda *a: function(*a, arrays[-1]), *arrays[:-1])
            return y, *vjp(jnp.ones_like(y))

        return run(x, weight["scale"], bias, jax.random.key(3))

    for p, q in zip(both(function), both(plain), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_allclose(exact(p), exact(q), rtol=0, atol=2**-6 * np.abs(exact(q)).max())


# -------------------------------------------------------------------------------- derivatives


def matrix(s, b):
    """A weight that depends on both."""
    return jnp.outer(jnp.sin(s), jnp.cos(b)) / s.size


def plain(x, s, b):
    return (jax.nn.gelu(x) * jnp.sin(x)) @ matrix(s, b) + b


def ours(x, s, b, implementation=None):
    return jaxnorm.gated_linear(x, jnp.sin(x), matrix(s, b), bias=b, activation="gelu")


def plain_closed(x, s, b):
    return jnp.tanh(s * x) @ matrix(s, b) + b


def ours_closed(x, s, b, implementation=None):
    return jaxnorm.activation_linear(
        x, matrix(s, b), bias=b, activation=lambda x: jnp.tanh(s * x), product=lambda h, w: h @ w
    )


PAIRS = {"gated": (plain, ours), "closed": (plain_closed, ours_closed)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("pair", PAIRS)
def test_derivatives(derivative, pair):
    check(DERIVATIVES[derivative], *PAIRS[pair], "xla")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("transformation", ["scan", "checkpoint", "save_policy", "jit", "vmap"])
@pytest.mark.parametrize("pair", PAIRS)
def test_under_transformations(transformation, pair):
    check(transformed("forward over reverse", transformation), *PAIRS[pair], "xla")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("function", [ours, ours_closed])
def test_outside_jit(function):
    arrays = [exact(operands((3, 4), 4)[name]) for name in ("gate", "bias", "bias")]
    gradients = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2))
    compiled = jax.jit(gradients)(*arrays)
    with jax.disable_jit():
        one_by_one = gradients(*arrays)
    for a, b, c in zip(*map(jax.tree.leaves, (gradients(*arrays), one_by_one, compiled))):
        np.testing.assert_allclose(a, c, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(b, c, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("in_axes", [(1, 1, None, None), (0, None, 1, None), (None, None, 0, 1)])
def test_vmap(in_axes):
    """Of rows, of weights, of biases."""
    arrays = [
        v if axis is None else jnp.stack([v, jnp.roll(v, 1, 0), jnp.flip(v)], axis)
        for v, axis in zip(operands((5, 8), 6).values(), in_axes)
    ]

    def gradients(*arrays):
        def summed(gate, up, weight, bias):
            return jnp.sum(jnp.sin(jaxnorm.gated_linear(gate, up, weight, bias=bias)))

        return jax.value_and_grad(summed, range(4))(*arrays)

    batched = jax.jit(jax.vmap(gradients, in_axes))(*arrays)
    for i in range(3):
        one = [v if axis is None else jnp.take(v, i, axis) for v, axis in zip(arrays, in_axes)]
        for p, q in zip(*map(jax.tree.leaves, (batched, gradients(*one))), strict=True):
            np.testing.assert_allclose(p[i], q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "configuration", ["x64", "strict dtype promotion", "rank promotion raises", "leaks raise"]
)
def test_configurations(configuration):
    """Of JAX, that change how code is traced."""
    mix = MIXES[3]
    arrays, d = operands((6, 16), 8, mix), jnp.ones((6, 8), mix.y)

    def run():
        return jax.tree.leaves(value_and_gradients(arrays, d, options=(("dtype", BF16),)))

    expected = run()
    with CONFIGURATIONS[configuration]():
        got = run()
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_within(ours, exact(theirs), 2.0**-6 * np.abs(exact(theirs)).max())


# ------------------------------------------------------------------------------- outside jit


def test_a_call_is_compiled_once(monkeypatch):
    """But one with a function, which may be another each time, is traced each time."""
    traced = []
    plain = products.Dot.__call__

    def counted(self, *arguments):
        traced.append(self)
        return plain(self, *arguments)

    monkeypatch.setattr(products.Dot, "__call__", counted)
    arrays = operands((3, 11), 13)
    named = [call(arrays, activation="silu") for _ in range(3)]
    assert len(traced) == 1
    of_functions = [call(arrays, activation=lambda x: jax.nn.silu(x)) for _ in range(3)]
    assert len(traced) == 4
    for y in named + of_functions:
        np.testing.assert_allclose(y, named[0], rtol=1e-6, atol=1e-6)


def test_a_traced_argument_meets_no_jit():
    arrays = operands((3, 4), 5)
    for name in arrays:
        jaxpr = jax.make_jaxpr(
            lambda a, name=name: call({**arrays, name: a}, activation=lambda x: x)
        )
        assert "jit" not in str(jaxpr(arrays[name]))


def test_matmul_precision():
    arrays = operands((3, 4), 5)
    with jax.default_matmul_precision("bfloat16"):
        lowered = str(jax.make_jaxpr(call)(arrays))
    assert "DEFAULT" in lowered or "bfloat16" in lowered.lower()
