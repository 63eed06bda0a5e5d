"""The attention functions compared with Flax's, directly and inside Flax's attention modules."""

import inspect
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import each_pair
from program_error import assert_computes, assert_same_results
from reference import SAFETY, unit_roundoff

import jaxnorm.linen
import jaxnorm.nnx

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FUNCTIONS = {
    "linen": (jaxnorm.linen.dot_product_attention, nn.dot_product_attention),
    "nnx": (jaxnorm.nnx.dot_product_attention, nnx.dot_product_attention),
}
each = pytest.mark.parametrize(("ours", "theirs"), FUNCTIONS.values(), ids=list(FUNCTIONS))


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(dtype="float32", kv_heads=4, depth=6):
    """Return query, key and value. nnx's fast path requires that all have the same depth."""
    return (
        normal(2, 5, 4, 6, dtype=dtype),
        normal(2, 7, kv_heads, 6, seed=1, dtype=dtype),
        normal(2, 7, kv_heads, depth, seed=2, dtype=dtype),
    )


def masks():
    some = np.random.default_rng(3).random((2, 4, 5, 7)) < 0.5
    some[0, 0, 2] = False  # A fully masked query attends to all keys.
    return {"none": None, "full": some, "broadcast": some[:, :1]}


@each
@each_pair("kind with_bias dtype", [*masks()], [False, True], ["float32", "bfloat16"])
def test_values_and_gradients(ours, theirs, kind, with_bias, dtype):
    mask = masks()[kind]
    mask = None if mask is None else jnp.asarray(mask)
    bias = normal(1, 4, 5, 7, seed=4, dtype=dtype) if with_bias else None

    def both(f):
        y, vjp = jax.vjp(lambda *a: f(*a, bias=bias, mask=mask), *qkv(dtype))
        return [y, *vjp(jnp.cos(jnp.arange(y.size, dtype=dtype)).reshape(y.shape))]

    # Our function and Flax's round logits and weights at different points. In bfloat16, `analyse`
    # gives no finite bound for our function: its gradient divides by the sum of the weights of a
    # row, and `analyse` cannot know that this sum is near 1. So the bound of Flax's is used.
    assert_same_results(lambda: both(ours), lambda: both(theirs), as_accurate=True)


DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(7)}
EVALUATED = {"dropout_rate": 0.5, "deterministic": True}
WHOLE = np.broadcast_to(masks()["broadcast"], (2, 4, 5, 7))
# Each case: a library, the operands, and further arguments. A mask may have more batch elements
# than the operands. Flax's nnx function supports such masks if there is a dropout rate.
CASES = {
    **{
        f"{name} {case}": (name, operands, options)
        for name in FUNCTIONS
        for case, (operands, options) in {
            "dtype": (qkv("bfloat16"), {"dtype": jnp.float32}),
            "dropout": (qkv(depth=5), {**DROPOUT, "broadcast_dropout": False}),
            "broadcast dropout": (qkv(depth=5), {**DROPOUT, "broadcast_dropout": True}),
            "integer bias": (qkv(), {**EVALUATED, "bias": jnp.arange(7) % 3}),
            "larger mask": ([a[:1] for a in qkv()], {**EVALUATED, "mask": masks()["full"]}),
            "no batch axis": ([a[0] for a in qkv()], {}),
            "two batch axes": ([a[None] for a in qkv()], EVALUATED),
        }.items()
    },
    "linen float32 softmax": ("linen", qkv("bfloat16"), {"force_fp32_for_softmax": True}),
    **{
        f"nnx {heads} heads": ("nnx", qkv(kv_heads=heads), {"is_causal": True, **mask})
        for heads, mask in ((1, {}), (2, {"mask": WHOLE}), (4, {}))
    },
}


@pytest.mark.parametrize("case", CASES)
def test_options(case):
    name, operands, options = CASES[case]
    options = {n: jnp.asarray(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    ours, theirs = FUNCTIONS[name]
    # `analyse` gives no bound for our result of a fully masked query.
    assert_same_results(
        lambda: ours(*operands, **options),
        lambda: theirs(*operands, **options),
        as_accurate="mask" in options,
    )


@each
def test_signature_is_flax_s(ours, theirs):
    def parameters(f):
        return [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]

    assert parameters(ours) == parameters(theirs)


@each
@pytest.mark.parametrize("kind", [None, "mask", "bias"])
def test_complex_operands(ours, theirs, kind):
    """Complex operands work as in Flax, which computes their softmax with jax.nn.softmax.

    Flax's nnx function does so if there is a dropout rate. Otherwise, it calls
    jax.nn.dot_product_attention, which drops the imaginary parts of the logits.
    """
    real, imaginary = (normal(4, 2, 5, 5, 4, seed=seed) for seed in range(2))
    *operands, bias = real + 1j * imaginary
    options = {"mask": jnp.tril(jnp.ones((5, 5), bool)), "bias": bias[0, :, :, 0]}
    options = {kind: options[kind]} if kind else {}
    y, expected = (f(*operands, **options, **EVALUATED) for f in (ours, theirs))
    assert y.dtype == expected.dtype == "complex64"
    # The logits are sums of 4 complex products, which are 8 real products. After a softmax over 5
    # keys, the results are sums of 5 complex products, which are 10 real products.
    size = float(max(jnp.abs(a).max() for a in operands)) ** 2
    bound = SAFETY * unit_roundoff("float32") * (math.sqrt(8) + 2 + math.sqrt(10)) * 8 * size
    assert np.abs(y - expected).max() <= bound


def test_replaced_einsums_in_linen():
    calls = []

    def einsum(subscripts, *operands):
        calls.append(subscripts)
        return jnp.einsum(subscripts, *operands)

    ours, theirs = FUNCTIONS["linen"]
    y = ours(*qkv(), qk_attn_weights_einsum=einsum, attn_weights_value_einsum=einsum)
    assert_computes(y, theirs, *qkv(), like=ours)
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("sow", [False, True])
def test_in_modules(sow):
    """In Flax's modules, the functions give the results and the weights of Flax's functions."""
    x, mask = normal(2, 6, 16), nn.make_causal_mask(jnp.ones((2, 6)))

    variables = nn.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), x)

    def linen(f):
        module = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=f)
        return module.apply(variables, x, mask=mask, sow_weights=sow, mutable=["intermediates"])

    modules = {
        f: nnx.MultiHeadAttention(4, 16, attention_fn=f, decode=False, rngs=nnx.Rngs(0))
        for f in FUNCTIONS["nnx"]
    }

    def of_nnx(f):
        module = nnx.clone(modules[f])
        y = module(x, mask=mask, sow_weights=sow)
        return y, jax.tree.leaves(nnx.state(module, nnx.Intermediate))

    assert len(of_nnx(FUNCTIONS["nnx"][0])[1]) == int(sow)
    for run, (ours, theirs) in zip((linen, of_nnx), FUNCTIONS.values()):
        assert_same_results(lambda: run(ours), lambda: run(theirs))  # noqa: B023


def error_cases():
    q, k, v = qkv()
    return [
        ((q[0], k, v), {}, "arrays .* of equal rank"),
        ((q[:1], k, v), {}, "equal batch axes"),
        ((q, k, v[:, :3]), {}, "key and value of equal length"),
        ((q[..., :3], k, v), {}, "query and key of equal depth"),
        ((q, k[:, :, :3], v[:, :, :3]), {}, "heads"),
        ((q, k, v), {"dropout_rate": 0.5}, "need a dropout_rng"),
        ((q, k, v), {"dropout_rate": 1.5, "dropout_rng": jax.random.key(0)}, "0 <= rate < 1"),
    ]


@each
@pytest.mark.parametrize(("operands", "arguments", "message"), error_cases())
def test_errors(ours, theirs, operands, arguments, message):
    with pytest.raises(ValueError, match=message):
        ours(*operands, **arguments)


@pytest.mark.parametrize(
    "options", [{"precision": "highest"}, {"einsum_dot_general": jax.lax.dot_general}]
)
def test_exclusive_einsums(options):
    einsums = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    attend = jaxnorm.linen.dot_product_attention
    with pytest.raises(ValueError, match="give both or neither"):
        attend(*qkv(), qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(ValueError, match="give one or the other"):
        attend(*qkv(), **options, **einsums)
