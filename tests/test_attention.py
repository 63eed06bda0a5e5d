"""The attention functions compared with Flax's, and their accuracy, masks and residuals.

`test_every_derivative` tests derivatives of higher orders, batches and rematerialisation.
"""

import inspect
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from norms import normal
from pairs import each_pair
from program_error import assert_computes, assert_same_results
from reference import SAFETY, assert_as_accurate, exact, unit_roundoff

import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

FUNCTIONS = {
    "linen": (jaxnorm.linen.dot_product_attention, nn.dot_product_attention),
    "nnx": (jaxnorm.nnx.dot_product_attention, nnx.dot_product_attention),
}
SIXTEEN = ["bfloat16", "float16"]
attend = jaxnorm.nnx.dot_product_attention
each = pytest.mark.parametrize(("ours", "theirs"), FUNCTIONS.values(), ids=list(FUNCTIONS))


def qkv(dtype="float32", kv_heads=4, depth=6):
    """Return query, key and value. nnx's fast path requires that all have the same depth."""
    return (
        normal((2, 5, 4, 6), dtype, 0),
        normal((2, 7, kv_heads, 6), dtype, 1),
        normal((2, 7, kv_heads, depth), dtype, 2),
    )


def masks():
    some = np.random.default_rng(3).random((2, 4, 5, 7)) < 0.5
    some[0, 0, 2] = False  # A fully masked query attends to all keys.
    return {"none": None, "full": some, "broadcast": some[:, :1]}


def results(f, q, k, v, ct):
    """Return the result of f and the gradients of query, key and value."""
    y, vjp = jax.vjp(f, q, k, v)
    return [y, *vjp(ct)]


@each
@each_pair("kind with_bias dtype", [*masks()], [False, True], ["float32", "bfloat16"])
def test_values_and_gradients(ours, theirs, kind, with_bias, dtype):
    mask = masks()[kind]
    mask = None if mask is None else jnp.asarray(mask)
    bias = normal((1, 4, 5, 7), dtype, 4) if with_bias else None

    def both(f):
        ct = normal((2, 5, 4, 6), dtype, 5)
        return results(lambda *a: f(*a, bias=bias, mask=mask), *qkv(dtype), ct)

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
    real, imaginary = (normal((4, 2, 5, 5, 4), "float32", i) for i in range(2))
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
    x, mask = normal((2, 6, 16), "float32", 0), nn.make_causal_mask(jnp.ones((2, 6)))

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
    for name in FUNCTIONS:
        yield name, (q[0], k, v), {}, "arrays .* of equal rank"
        yield name, (q[:1], k, v), {}, "equal batch axes"
        yield name, (q, k, v[:, :3]), {}, "key and value of equal length"
        yield name, (q[..., :3], k, v), {}, "query and key of equal depth"
        yield name, (q, k[:, :, :3], v[:, :, :3]), {}, "heads"
        yield name, (q, k, v), {"dropout_rate": 0.5}, "need a dropout_rng"
        yield name, (q, k, v), DROPOUT | {"dropout_rate": 1.5}, "0 <= rate < 1"
    one = {"qk_attn_weights_einsum": jnp.einsum}
    yield "linen", (q, k, v), one, "give both or neither"
    for options in ({"precision": "highest"}, {"einsum_dot_general": jax.lax.dot_general}):
        both = one | {"attn_weights_value_einsum": jnp.einsum}
        yield "linen", (q, k, v), both | options, "give one or the other"


@pytest.mark.parametrize(("name", "operands", "arguments", "message"), [*error_cases()])
def test_errors(name, operands, arguments, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name][0](*operands, **arguments)


# ----------------------------------------------------------------- accuracy, residuals and masks

LENGTH, HEADS, DEPTH = 48, 2, 64
# On a CPU, jax 0.11.2 accumulates the sums of some batched bfloat16 matmuls in bfloat16. This is
# not specific to jaxnorm.
adds_in_bfloat16 = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12)
accurate = [
    pytest.param("bfloat16", marks=pytest.mark.skipif(adds_in_bfloat16, reason="XLA's matmuls")),
    "float16",
]


def operands(dtype, size, kv_heads=HEADS):
    """Return query, key, value and a cotangent. Queries and keys have magnitudes around `size`."""
    q = normal((2, LENGTH, HEADS, DEPTH), dtype, 0, size)
    k = normal((2, LENGTH, kv_heads, DEPTH), dtype, 1, size)
    v = normal((2, LENGTH, kv_heads, DEPTH), dtype, 2)
    return q, k, v, normal(q.shape, dtype, 3)


def with_tangent(f, q, k, v, ct):
    """Return `results`, and a tangent of the result."""
    return *results(f, q, k, v, ct), jax.jvp(lambda q, k: f(q, k, v), (q, k), (ct, 2 * ct))[1]


def in_float64(*given, is_causal=False):
    """Return the results in float64."""

    def plain(q, k, v):
        z = jnp.einsum("bqhd,bkhd->bhqk", q, k) * DEPTH**-0.5
        z = jnp.where(CAUSAL, z, -jnp.inf) if is_causal else z
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(z), v)

    with jax.enable_x64(True):
        return (*map(exact, with_tangent(plain, *(jnp.asarray(exact(a)) for a in given))),)


CAUSAL = np.tri(LENGTH, dtype=bool)
each_causal = pytest.mark.parametrize("is_causal", [False, True])
each_size = pytest.mark.parametrize("size", [1, 3, 6, 20, 60])


@each_causal
@each_size
def test_float32(size, is_causal):
    given = operands("float32", size)

    def run(*given):
        return with_tangent(lambda *a: attend(*a, is_causal=is_causal), *given)

    expected = in_float64(*given, is_causal=is_causal)
    assert_computes(run(*given), run, *given, expected=expected)


@each_causal
@each_size
@pytest.mark.parametrize("dtype", accurate)
def test_as_accurate_as_flax(dtype, size, is_causal):
    """In nnx, our errors exceed Flax's errors by at most two ulps. In linen, they are similar.

    Linen rounds the logits. For large logits, this rounding is larger than all other errors. It is
    random, so our error may be somewhat larger or smaller than Flax's.
    """
    given, mask = operands(dtype, size), jnp.asarray(CAUSAL) if is_causal else None
    wanted = in_float64(*given, is_causal=is_causal)
    assert_as_accurate(
        *(with_tangent(lambda *a, f=f: f(*a, mask=mask), *given) for f in FUNCTIONS["linen"]),
        wanted,
    )
    two_units = 4 * unit_roundoff(dtype)
    ours, theirs = (
        with_tangent(lambda *a, f=f: f(*a, is_causal=is_causal), *given) for f in FUNCTIONS["nnx"]
    )
    for a, b, value in zip(ours, theirs, wanted):
        ours, flax = (np.linalg.norm(exact(array) - value) for array in (a, b))
        assert ours <= flax + two_units * np.linalg.norm(value)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_float16_and_bfloat16_compile(dtype, kv_heads):
    """On a CPU, 16-bit attention works under `jax.jit`; Flax's function fails in float16."""
    given = operands(dtype, 200, kv_heads)
    for result in jax.jit(lambda *a: results(attend, *a))(*given):
        assert jnp.isfinite(result).all()


def saved(f, *arrays):
    """Return the shapes and dtypes of the arrays that the derivative saves."""
    leaves = jax.eval_shape(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]), *arrays)
    return [(a.shape, a.dtype.name) for a in leaves]


@each_causal
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_no_wide_array_of_logits_in_the_backward(dtype, is_causal):
    """The saved weights and the cotangent of the logits have 16 bits."""
    q, k, v, ct = operands(dtype, 1)
    square = (2, HEADS, LENGTH, LENGTH)

    def f(q, k, v):
        return attend(q, k, v, is_causal=is_causal)

    assert [a for a in saved(f, q, k, v) if a[0] == square] == [(square, dtype)]
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(f, q, k, v)[1](*a))(ct).jaxpr
    made = [o.aval for e in jaxpr.eqns for o in e.outvars if o.aval.shape == square]
    backward = [a.dtype.name for a in made[-2:]]  # cotangents of the weights and of the logits
    assert backward == [dtype, dtype]


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", [*SIXTEEN, "float32"])
def test_is_causal_is_a_mask(dtype, with_mask, with_bias):
    """`is_causal=True` is the same as a causal mask.

    If a query's cotangent is NaN, keys to which the query may not attend are unaffected.
    """
    q, k, v, ct = operands(dtype, 1)
    ct = ct.at[:, 0].set(jnp.nan)
    causal = jnp.asarray(CAUSAL)[None, None]
    mask = jnp.asarray(np.random.default_rng(6).random((2, 1, 1, LENGTH)) < 0.8)
    mask = mask.at[..., 0].set(True) if with_mask else None
    bias = normal((1, HEADS, LENGTH, LENGTH), "float32", 7) if with_bias else None
    a = results(lambda *a: attend(*a, bias, mask, is_causal=True), q, k, v, ct)
    both = causal if mask is None else causal & mask
    b = results(lambda *a: attend(*a, bias, both), q, k, v, ct)
    _, _, dk, _ = a  # dv is NaN in `a` and `b`, because of 0 * NaN
    assert not jnp.isnan(dk[:, 1:]).any()
    for ours, by_mask in zip(a, b):
        np.testing.assert_array_equal(exact(ours), exact(by_mask))


def biases():
    """Return a dict from names to float32 biases.

    Masked logits have the lowest finite float32 value L. The smallest element of the bias is L in
    "lowest", less than L in "-inf", and greater than L in the other biases.
    """
    lowest = float(np.finfo(np.float32).min)
    first = np.arange(5) < 3
    values = {"normal": 0.5, "-1e9": -1e9, "lowest": lowest, "-inf": -math.inf}
    return {n: jnp.where(first, b, 0.0).astype("float32") for n, b in values.items()}


@each_pair(
    *("api dtype mask name", [*FUNCTIONS], [*SIXTEEN, "float32"]),
    *(["none", "causal", "nothing"], [*biases()]),
)
def test_what_a_masked_query_attends_to_is_what_it_does_in_flax(api, dtype, mask, name):
    """Weights equal Flax's, even if all keys of a query are masked or some biases are huge."""
    q, k, _, _ = (a[:1, :5, :1, :8] for a in operands(dtype, 1))
    v = jnp.eye(8, dtype=dtype)[None, :5, None]
    kept = {"none": None, "causal": np.tri(5, dtype=bool), "nothing": np.zeros((5, 5), bool)}[mask]
    kept = None if kept is None else jnp.asarray(kept)[None, None]
    bias = biases()[name][None, None, None]
    a, b = (exact(f(q, k, v, bias, kept)) for f in FUNCTIONS[api])
    # The weights are rounded in linen and in nnx. Linen also rounds the logits. They are below 4,
    # which bounds the error of this rounding.
    bound = 8 * unit_roundoff(dtype) * (np.abs(b) + (api == "linen"))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    assert np.all((np.abs(a - b) <= bound) | np.isnan(b))
