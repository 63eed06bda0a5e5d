"""Accuracy of the attention functions: float64 bounds, comparison with Flax, masks and NaNs.

`test_every_derivative` tests derivatives of higher orders, batches and rematerialisation.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from pairs import each_pair
from program_error import assert_computes
from reference import exact

import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

LENGTH, HEADS, DEPTH = 48, 2, 64
SIXTEEN = ["bfloat16", "float16"]
attend = jaxnorm.nnx.dot_product_attention


# On a CPU, jax 0.11.2 accumulates the sums of some batched bfloat16 matmuls in bfloat16. This is
# not specific to jaxnorm.
adds_in_bfloat16 = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12)
accurate = [
    pytest.param("bfloat16", marks=pytest.mark.skipif(adds_in_bfloat16, reason="XLA's matmuls")),
    "float16",
]


def normal(shape, dtype, seed, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def operands(dtype, size, kv_heads=HEADS):
    """Return query, key, value and a cotangent. Queries and keys have magnitudes around `size`."""
    q = normal((2, LENGTH, HEADS, DEPTH), dtype, 0, size)
    k = normal((2, LENGTH, kv_heads, DEPTH), dtype, 1, size)
    v = normal((2, LENGTH, kv_heads, DEPTH), dtype, 2)
    return q, k, v, normal(q.shape, dtype, 3)


def results(f, q, k, v, ct):
    """Return the result of f and the gradients of query, key and value."""
    y, vjp = jax.vjp(f, q, k, v)
    return [y, *vjp(ct)]


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
    reference.assert_as_accurate(
        *(
            with_tangent(lambda *a, m=m: m.dot_product_attention(*a, mask=mask), *given)
            for m in (jaxnorm.linen, nn)
        ),
        wanted,
    )
    two_units = 4 * reference.unit_roundoff(dtype)
    ours, theirs = (
        with_tangent(lambda *a, f=f: f(*a, is_causal=is_causal), *given)
        for f in (attend, nnx.dot_product_attention)
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


@each_causal
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_float32_bias_below_the_range_of_float16(dtype, is_causal):
    """Masked keys have weight 0, even if all unmasked keys have a bias of -1e9."""
    q, k, _, _ = (a[:1, :4, :1, :8] for a in operands(dtype, 1))
    v = jnp.eye(8, dtype=dtype)[None, :4, None]  # the identity, so that y consists of the weights
    padding = jnp.where(jnp.arange(4) < 2, -1e9, 0.0)[None, None, None]
    mask = None if is_causal else jnp.tri(4, dtype=bool)[None, None]
    weights = exact(attend(q, k, v, padding, mask, is_causal=is_causal))[0, :, 0, :4]
    np.testing.assert_array_equal(weights[~np.tri(4, dtype=bool)], 0)


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
    *("api dtype mask name", ["linen", "nnx"], [*SIXTEEN, "float32"]),
    *(["none", "causal", "nothing"], [*biases()]),
)
def test_what_a_masked_query_attends_to_is_what_it_does_in_flax(api, dtype, mask, name):
    """Weights equal Flax's, even if all keys of a query are masked or some biases are huge."""
    ours, theirs = {"linen": (jaxnorm.linen, nn), "nnx": (jaxnorm.nnx, nnx)}[api]
    q, k, _, _ = (a[:1, :5, :1, :8] for a in operands(dtype, 1))
    v = jnp.eye(8, dtype=dtype)[None, :5, None]
    kept = {"none": None, "causal": jnp.tri(5, dtype=bool), "nothing": jnp.zeros((5, 5), bool)}[
        mask
    ]
    kept = None if kept is None else kept[None, None]
    bias = biases()[name][None, None, None]
    a, b = (exact(m.dot_product_attention(q, k, v, bias, kept)) for m in (ours, theirs))
    # The weights are rounded in linen and in nnx. Linen also rounds the logits. They are below 4,
    # which bounds the error of this rounding.
    bound = 8 * reference.unit_roundoff(dtype) * (np.abs(b) + (api == "linen"))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    assert np.all((np.abs(a - b) <= bound) | np.isnan(b))
