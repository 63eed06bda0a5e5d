"""The attention functions compared with Flax's, directly and inside Flax's attention modules."""

import functools
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


def qkv(dtype="float32", kv_heads=4):
    return (
        normal(2, 5, 4, 8, dtype=dtype),
        normal(2, 7, kv_heads, 8, seed=1, dtype=dtype),
        normal(2, 7, kv_heads, 6, seed=2, dtype=dtype),
    )


def masks():
    some = np.random.default_rng(3).random((2, 4, 5, 7)) < 0.5
    some[0, 0, 2] = False  # A fully masked query attends to all keys.
    return {"none": None, "full": some, "broadcast": some[:, :1]}


@each
@each_pair("kind with_bias dtype", [*masks()], [False, True], ["float32", "bfloat16"])
def test_values_and_gradients(ours, theirs, kind, with_bias, dtype):
    operands = tuple(a[..., :6] for a in qkv(dtype))  # nnx's fast path requires equal depths
    mask = masks()[kind]
    mask = None if mask is None else jnp.asarray(mask)
    bias = normal(1, 4, 5, 7, seed=4, dtype=dtype) if with_bias else None

    def both(f):
        y, vjp = jax.vjp(lambda *a: f(*a, bias=bias, mask=mask), *operands)
        return [y, *vjp(jnp.cos(jnp.arange(y.size, dtype=dtype)).reshape(y.shape))]

    # Our function and Flax's round logits and weights at different points. In bfloat16, `analyse`
    # gives no finite bound for our function: its gradient divides by the sum of the weights of a
    # row, and `analyse` cannot know that this sum is near 1. So the bound of Flax's is used.
    assert_same_results(lambda: both(ours), lambda: both(theirs), as_accurate=True)


@each
def test_dtype_argument(ours, theirs):
    operands = tuple(a[..., :6] for a in qkv("bfloat16"))
    assert_same_results(
        lambda: ours(*operands, dtype=jnp.float32), lambda: theirs(*operands, dtype=jnp.float32)
    )


@each
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(ours, theirs, broadcast):
    arguments = {
        "dropout_rng": jax.random.key(7),
        "dropout_rate": 0.5,
        "broadcast_dropout": broadcast,
    }
    assert_same_results(lambda: ours(*qkv(), **arguments), lambda: theirs(*qkv(), **arguments))
    whole = ours(*qkv(), **arguments, deterministic=True)
    np.testing.assert_array_equal(whole, ours(*qkv()))


@each
def test_signature_is_flax_s(ours, theirs):
    def parameters(f):
        return [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]

    assert parameters(ours) == parameters(theirs)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries_and_causal_mask_in_nnx(heads):
    q, k, v = (a[..., :6] for a in qkv(kv_heads=heads))
    for arguments in ({}, {"is_causal": True}, {"is_causal": True, "mask": masks()["broadcast"]}):
        arguments = {
            n: jnp.asarray(np.broadcast_to(a, (2, 4, 5, 7))) if n == "mask" else a
            for n, a in arguments.items()
        }
        assert_same_results(
            lambda: jaxnorm.nnx.dot_product_attention(q, k, v, **arguments),  # noqa: B023
            lambda: nnx.dot_product_attention(q, k, v, **arguments),  # noqa: B023
        )


@each
@pytest.mark.parametrize("kind", [None, "mask", "bias"])
def test_complex_operands(ours, theirs, kind):
    """Complex operands work as in Flax, which computes their softmax with jax.nn.softmax.

    Flax's nnx function does so if there is a dropout rate. Otherwise, it calls
    jax.nn.dot_product_attention, which drops the imaginary parts of the logits.
    """
    shape = (2, 5, 3, 4)
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), "complex64")
        for _ in range(3)
    ]
    options = {
        None: {},
        "mask": {"mask": jnp.tril(jnp.ones((5, 5), bool))},
        "bias": {"bias": jnp.asarray(rng.normal(size=(5, 5)), "complex64")},
    }[kind]
    options |= {"dropout_rate": 0.5, "deterministic": True}
    y, expected = (f(*operands, **options) for f in (ours, theirs))
    assert y.dtype == expected.dtype == "complex64"
    # The logits are sums of 4 complex products, which are 8 real products. After a softmax over 5
    # keys, the results are sums of 5 complex products, which are 10 real products.
    size = float(max(jnp.abs(a).max() for a in operands)) ** 2
    bound = SAFETY * unit_roundoff("float32") * (math.sqrt(8) + 2 + math.sqrt(10)) * 8 * size
    assert np.abs(y - expected).max() <= bound


def test_complex_operands_in_the_linen_module():
    module = nn.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=jaxnorm.linen.dot_product_attention
    )
    x = jnp.ones((4, 6, 6), "complex64")
    assert module.init_with_output(jax.random.key(0), x)[0].dtype == "complex64"


@each
@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_integer_biases_and_more_masks_than_operands(ours, theirs, kind):
    """A bias may have integers, and a mask may have more batch elements than the operands.

    Flax's nnx function supports such masks if there is a dropout rate. `analyse` gives no bound for
    our result of a fully masked query, so the bound of Flax's is used.
    """
    q, k, v = (a[:1, ..., :6] for a in qkv())
    options = {
        "bias": {"bias": jnp.arange(7) % 3},
        "mask": {"mask": jnp.asarray(masks()["full"])},
    }[kind]
    options |= {"dropout_rate": 0.5, "deterministic": True}
    assert_same_results(
        lambda: ours(q, k, v, **options), lambda: theirs(q, k, v, **options), as_accurate=True
    )


def test_softmax_precision_in_linen():
    operands = qkv("bfloat16")
    ours, theirs = (functools.partial(f, force_fp32_for_softmax=True) for f in FUNCTIONS["linen"])
    assert_same_results(lambda: ours(*operands), lambda: theirs(*operands))


def test_replaced_einsums_in_linen():
    calls = []

    def einsum(subscripts, *operands):
        calls.append(subscripts)
        return jnp.einsum(subscripts, *operands)

    y = jaxnorm.linen.dot_product_attention(
        *qkv(), qk_attn_weights_einsum=einsum, attn_weights_value_einsum=einsum
    )
    plain = nn.dot_product_attention
    assert_computes(y, plain, *qkv(), like=jaxnorm.linen.dot_product_attention)
    assert len(calls) == 2


def test_batch_axes():
    q, k, v = qkv()
    for ours, _ in FUNCTIONS.values():
        one = ours(q[0], k[0], v[0])
        assert_computes(one, lambda *a, f=ours: f(*a)[0], q, k, v)
        assert_computes(ours(q[None], k[None], v[None])[0], ours, q, k, v)


@pytest.mark.parametrize("sow", [False, True])
def test_in_the_linen_module(sow):
    x, mask = normal(2, 6, 16), nn.make_causal_mask(jnp.ones((2, 6)))

    def module(f):
        return nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=f)

    ours, theirs = (module(f) for f in FUNCTIONS["linen"])
    variables = theirs.init(jax.random.key(0), x)

    def applied(module):
        return module.apply(variables, x, mask=mask, sow_weights=sow, mutable=["intermediates"])

    assert_same_results(lambda: applied(ours), lambda: applied(theirs))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("sow", [False, True])
def test_in_the_nnx_module(sow):
    x, mask = normal(2, 6, 16), nnx.make_causal_mask(jnp.ones((2, 6)))

    modules = {
        f: nnx.MultiHeadAttention(4, 16, attention_fn=f, decode=False, rngs=nnx.Rngs(0))
        for f in FUNCTIONS["nnx"]
    }

    def run(f):
        module = nnx.clone(modules[f])
        y = module(x, mask=mask, sow_weights=sow)
        return y, jax.tree.leaves(nnx.state(module, nnx.Intermediate))

    ours, theirs = FUNCTIONS["nnx"]
    assert len(run(ours)[1]) == int(sow)
    assert_same_results(lambda: run(ours), lambda: run(theirs))


def test_keeps_only_the_weights_of_the_softmax():
    """The softmax saves one array of the logits' size; jax.nn.softmax saves two."""
    q = k = v = normal(1, 64, 1, 4)

    def square_residuals(f):
        jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]))(q, k, v).jaxpr
        return len({id(o) for o in jaxpr.outvars if o.aval.shape[-2:] == (64, 64)})

    ours, theirs = (square_residuals(f) for f in FUNCTIONS["linen"])
    assert ours == 1
    assert theirs > 1


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
    with pytest.raises(ValueError, match="give both or neither"):
        jaxnorm.linen.dot_product_attention(*qkv(), qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(ValueError, match="give one or the other"):
        jaxnorm.linen.dot_product_attention(
            *qkv(),
            **options,
            qk_attn_weights_einsum=jnp.einsum,
            attn_weights_value_einsum=jnp.einsum,
        )
