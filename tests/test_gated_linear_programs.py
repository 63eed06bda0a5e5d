"""Programs of gated_linear and activation_linear: saved arrays, memory, and matmuls."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from pairs import each_pair
from programs import equations

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

POLICIES = jax.checkpoint_policies
AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
    "dots": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "names": functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("gate", "up")),
}
WIDTH, INNER = 16, 40


def gated(options, gate, up, weight, bias):
    return jaxnorm.gated_linear(gate, up, weight, bias=bias, **options)


def ungated(options, gate, up, weight, bias):
    return jaxnorm.activation_linear(gate, weight, bias=bias, **options)


def arrays_of(dtype="float32"):
    shapes = {"gate": (4, INNER), "up": (4, INNER), "weight": (INNER, WIDTH), "bias": (WIDTH,)}
    return [jnp.ones(shape, dtype) for shape in shapes.values()]


def made(function, *arrays):
    """Return the shapes of the arrays that a derivative saves.

    Arguments of the function and scalars are left out.
    """
    kept = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(function, *a)[1]))(*arrays).jaxpr
    inputs = {*kept.invars, *kept.constvars}
    found = [v for v in kept.outvars if isinstance(v, jax.extend.core.Var) and v not in inputs]
    assert len({*found}) == len(found)
    return sorted(v.aval.shape for v in found if v.aval.ndim)


OPTIONS = {
    "none": {},
    "dtype": {"activation": "gelu", "dtype": jnp.bfloat16},
    "function": {"activation": jnp.tanh},
    "product": {
        "activation": "sigmoid",
        "product": lambda h, weight: jnp.einsum("ij,jk->ik", h, weight),
    },
}


@pytest.mark.remat
@each_pair("function around options", [gated, ungated], [*AROUND], [*OPTIONS])
def test_blocks(function, around, options):
    """A block saves the operands of its matmuls, and the arrays that a policy selects.

    It saves no elementwise result. This also holds inside `jax.jit`.
    """
    call = functools.partial(function, OPTIONS[options])

    def block(x, w_gate, w_up, weight, bias):
        gate, up = checkpoint_name(x @ w_gate, "gate"), checkpoint_name(x @ w_up, "up")
        return x + call(gate, up, weight, bias)

    x = jnp.ones((4, WIDTH))
    weights = [jnp.ones((WIDTH, INNER))] * 2 + [jnp.ones((INNER, WIDTH)), jnp.ones(WIDTH)]
    number = 2 if function is gated else 1
    expected = {"nothing": number, "jit": number, "dots": number, "names": number}.get(around, 0)
    kept = made(AROUND[around](block), x, *weights)
    assert kept.count((4, INNER)) == expected
    assert not [shape for shape in kept if shape not in ((4, INNER), (4, WIDTH))]
    # The policy "dots" saves the results of matmuls. It also finds the matmul inside `function`.
    assert kept.count((4, WIDTH)) <= (around == "dots")
    assert made(call, *arrays_of()) == []


def scan(block, x, parameters):
    return jax.lax.scan(lambda x, p: (block(x, *p), None), x, parameters)[0]


def unrolled(block, x, parameters):
    for layer in range(len(parameters[0])):
        x = block(x, *[p[layer] for p in parameters])
    return x


@each_pair(
    *("stack dtype activation has_gate", [scan, unrolled], ["float32", "bfloat16"]),
    *(["silu", "gelu"], [True, False]),
)
def test_compiled_memory(stack, dtype, activation, has_gate):
    """In compiled programs, a layer saves gate, up and x, and nothing else of their size."""
    tokens, width, inner = 512, 64, 256

    def block(x, w_gate, w_up, weight):
        if not has_gate:
            return x + jaxnorm.activation_linear(x @ w_gate, weight, activation=activation)
        return x + jaxnorm.gated_linear(x @ w_gate, x @ w_up, weight, activation=activation)

    def temp_bytes(layers):
        def loss(x, parameters):
            return jnp.sum(stack(block, x, parameters).astype(jnp.float32) ** 2)

        shapes = [(width, inner), (width, inner), (inner, width)]
        parameters = [jax.ShapeDtypeStruct((layers, *shape), dtype) for shape in shapes]
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=1)).lower(x, parameters).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    of_a_layer = (temp_bytes(5) - temp_bytes(3)) / 2
    activation_bytes = tokens * inner * jnp.dtype(dtype).itemsize
    # The saved activations are gate and up. In addition, a layer may store x, and XLA may store one
    # copy of each weight. x is a quarter as large as one of these activations. There are at most
    # three weights, and each of them is an eighth as large as one of these activations.
    assert of_a_layer <= (1 + has_gate + 1 / 4 + 3 / 8) * activation_bytes


def products_of(function, *arrays):
    """Return the dtypes of both operands and of the result of each matmul that is needed."""
    jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    return [tuple(v.aval.dtype.name for v in (*e.invars, *e.outvars)) for e in products]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("function", [gated, ungated])
def test_products_behind_a_product_of_16_bits(function, has_bias):
    """With dtype=bfloat16, the backward's matmuls are bfloat16, too, even for float32 operands."""
    arrays = arrays_of("float32")

    def loss(gate, up, weight, bias):
        bias = bias if has_bias else None
        return jnp.sum(jnp.sin(function({"dtype": jnp.bfloat16}, gate, up, weight, bias)))

    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    forward, *backward = products_of(step, *arrays)
    half = "bfloat16"
    assert forward == (half, half, "float32" if has_bias else half)
    assert backward == [(half,) * 3] * 2
    # The matmuls of tangents are bfloat16 as well.
    tangents = products_of(lambda *a: jax.jvp(loss, a, a), *arrays)
    assert [types[:2] for types in tangents] == [(half, half)] * 3


def test_no_product_runs_twice():
    """A call without a backward pass has one matmul and no optimization barrier.

    In forward mode, the call has two more matmuls, for the tangents of the two operands.
    """
    arrays = arrays_of()

    def loss(*arrays):
        return jnp.sum(jnp.sin(gated({}, *arrays)))

    assert len(products_of(jax.value_and_grad(loss, range(4)), *arrays)) == 3
    assert len(products_of(jax.grad(loss), *arrays)) == 2  # only the first operand's gradient
    for function, count in ((loss, 1), (lambda *a: jax.jvp(loss, a, a), 3)):
        assert len(products_of(function, *arrays)) == count
        assert "optimization_barrier" not in jax.jit(function).lower(*arrays).as_text()
