"""memory_report's advice on softmaxes: masks, and weights that are copied before their matmul."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advice_cases import assert_true, told
from programs import through_layers

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

LAYERS, BATCH, LENGTH, HEADS, GROUP, HEAD = 3, 2, 32, 4, 2, 16
WIDTH = HEADS * HEAD
TRIL = np.tril(np.ones((LENGTH, LENGTH), bool))
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "bfloat16")
PADDING = jax.ShapeDtypeStruct((BATCH, LENGTH), "bool")


def report_of(attend, stack, argnums=(0, 1)):
    """Return the report of attention layers.

    `attend` maps logits, values and the padding mask to results.
    """
    w = {n: jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "bfloat16") for n in ("q", "k", "v", "o")}

    def layer(padding, x, w):
        q, k, v = ((x @ w[n]).reshape(BATCH, LENGTH, HEADS, HEAD) for n in "qkv")
        logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        return x + attend(logits, v, padding).reshape(x.shape) @ w["o"]

    def loss(w, x, padding):
        x = through_layers(functools.partial(layer, padding), stack, x, w)
        return jnp.sum(x.astype(jnp.float32))

    return memory_report(loss, w, X, PADDING, argnums=argnums)


def out(p, v):
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def grouped(p, v):
    """Multiply attention weights by values, where each value head serves a group of query heads.

    This is the code of Tunix's Gemma and Qwen.
    """
    p = p.astype(v.dtype).reshape(BATCH, HEADS // GROUP, GROUP, LENGTH, LENGTH)
    return jnp.einsum("bkgts,bskd->btkgd", p, v[:, :, ::GROUP])


def transposed(p, v):
    return jnp.einsum("bths,bshd->bthd", p.astype(v.dtype).transpose(0, 2, 1, 3), v)


softmax = functools.partial(jaxnorm.softmax, dtype=jnp.bfloat16)


def causal(logits, v, padding):
    where = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return out(jax.nn.softmax(jnp.where(where, logits, -jnp.inf)), v)


def given(logits, v, padding):
    return out(jax.nn.softmax(jnp.where(TRIL, logits, -1e9)), v)


def padded(logits, v, padding):
    masked = jnp.where(padding[:, None, None], logits, jnp.finfo(logits.dtype).min)
    return out(jax.nn.softmax(masked), v)


def window(logits, v, padding):
    t, s = (jax.lax.broadcasted_iota(int, (LENGTH, LENGTH), i) for i in (0, 1))
    return out(jax.nn.softmax(jnp.where((s <= t) & (t - s < 8), logits, -jnp.inf)), v)


def above(logits, v, padding):
    above = jnp.triu(jnp.ones((LENGTH, LENGTH), bool), 1)
    return out(jax.nn.softmax(jnp.where(above, -jnp.inf, logits)), v)


def with_one_more(logits, v, padding):
    """Compute attention with a mask that is not causal: it allows one key above the diagonal."""
    where = jnp.tril(jnp.ones((LENGTH, LENGTH), bool), 1)
    return out(jax.nn.softmax(jnp.where(where, logits, -jnp.inf)), v)


def of_other_axes(logits, v, padding):
    """Attend with logits in Gemma's order of axes: (batch, length, heads, length)."""
    where = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[:, None]
    p = jax.nn.softmax(jnp.where(where, logits.transpose(0, 2, 1, 3), -jnp.inf))
    return jnp.einsum("bths,bshd->bthd", p.astype(v.dtype), v)


def of_other_axes_ours(logits, v, padding):
    p = softmax(logits.transpose(0, 2, 1, 3), where=TRIL[:, None])
    return jnp.einsum("bths,bshd->bthd", p, v)


def tril_of(padding):
    """Return a mask that is causal, and in which padding is masked as well."""
    return jnp.tril(jnp.broadcast_to(padding[:, None, None], (BATCH, 1, LENGTH, LENGTH)))


def causal_and_padded(logits, v, padding):
    return out(jax.nn.softmax(jnp.where(tril_of(padding), logits, -jnp.inf)), v)


def ours_after_where(logits, v, padding):
    return out(softmax(jnp.where(padding[:, None, None], logits, -1e9)), v)


def where_of(mask):
    return lambda logits, v, padding: out(softmax(logits, where=mask(padding)), v)


FOLLOWED = {
    "plain": (lambda s, v, _: out(jax.nn.softmax(s), v), lambda s, v, _: out(softmax(s), v), ""),
    "causal": (causal, lambda s, v, _: out(softmax(s, causal=True), v), "causal=True"),
    "above": (above, lambda s, v, _: out(softmax(s, causal=True), v), "causal=True"),
    "other axes": (of_other_axes, of_other_axes_ours, "where="),
    "one more": (with_one_more, where_of(lambda padding: TRIL), "where="),
    "given": (given, where_of(lambda padding: TRIL), "where="),
    "padded": (padded, where_of(lambda padding: padding[:, None, None]), "where="),
    "causal, padded": (causal_and_padded, where_of(tril_of), "where="),
    "window": (window, where_of(lambda padding: TRIL), "where="),
    "ours": (ours_after_where, where_of(lambda padding: padding[:, None, None]), "where="),
    "grouped": (
        lambda s, v, _: grouped(jax.nn.softmax(s), v),
        lambda s, v, _: grouped(
            softmax(s.reshape(BATCH, HEADS // GROUP, GROUP, LENGTH, LENGTH)), v
        ),
        "reshape its logits",
    ),
    "transposed": (
        lambda s, v, _: transposed(jax.nn.softmax(s), v),
        lambda s, v, _: jnp.einsum("bths,bshd->bthd", softmax(s.transpose(0, 2, 1, 3)), v),
        "transpose its logits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stack", ["scan", "unrolled"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_is_true(name, stack):
    plain, ours, words = FOLLOWED[name]
    before, after = report_of(plain, stack), report_of(ours, stack)
    assert_true(before, after, "softmax")
    assert all(words in row.advice for row in told(before, "softmax"))


def used_twice(logits, v, mask):
    p = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    return out(p, v) * jnp.sum(jnp.where(mask, logits, 0).astype(v.dtype))


def of_two_logits(logits, v, mask):
    """Compute attention whose logits are halved, not masked, where `mask` is False."""
    return out(jax.nn.softmax(jnp.where(mask, logits, logits / 2)), v)


@pytest.mark.parametrize("attend", [used_twice, of_two_logits])
def test_a_mask_that_the_softmax_cannot_take(attend):
    """The advice is to use jaxnorm's softmax, but without a mask. So the mask is still saved."""

    def of_padding(logits, v, padding):
        return attend(logits, v, jnp.broadcast_to(padding[:, None, None], logits.shape))

    rows = told(report_of(of_padding, "scan"), "softmax")
    assert {row.made_by for row in rows} == {"exp"}
    assert not any("where=" in row.advice for row in rows)


def test_a_reshape_of_the_softmax_s_own_axis():
    """There is no advice if the softmax's own axis is reshaped afterwards.

    The advice would be to call jaxnorm's softmax on logits that are reshaped first. This softmax
    would normalise over other elements.
    """

    def attend(logits, v, padding):
        p = jax.nn.softmax(logits).astype(v.dtype).reshape(BATCH, HEADS, LENGTH, 4, -1)
        return jnp.einsum("bhtgs,bgshd->bthd", p, v.reshape(BATCH, 4, -1, HEADS, HEAD))

    assert not told(report_of(attend, "scan"), "softmax")


def test_a_softmax_that_is_copied_twice():
    """There is no advice if two different copies of the softmax's result are saved.

    jaxnorm's softmax would return, and save, only one of them.
    """

    def attend(logits, v, padding):
        p = jax.nn.softmax(logits).astype(v.dtype)
        return grouped(p, v).reshape(BATCH, LENGTH, HEADS, HEAD) + transposed(p, v)

    assert not told(report_of(attend, "scan"), "softmax")


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_jax(is_causal):
    """The report has advice for `jax.nn.dot_product_attention`.

    This function saves the result of exp. With `is_causal`, it also saves the mask, which is
    expanded to the shape of the logits. The report must have advice for both arrays.
    """

    def loss(q, k, v):
        y = jax.nn.dot_product_attention(jnp.sin(q), jnp.sin(k), jnp.sin(v), is_causal=is_causal)
        return jnp.sum(y)

    shape = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, HEAD), "float32")
    rows = told(memory_report(loss, shape, shape, shape, argnums=(0, 1, 2)), "softmax")
    assert {row.made_by for row in rows} == ({"exp", "broadcast_in_dim"} if is_causal else {"exp"})


def test_attention_of_flax():
    """For a module of Flax, the advice names the argument that takes jaxnorm's attention."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    x = jnp.ones((BATCH, LENGTH, WIDTH))
    rows = told(memory_report(lambda m, x: m(x).sum(), model, x), "softmax")
    assert rows
    assert all("attention_fn=jaxnorm.nnx.dot_product_attention" in row.advice for row in rows)
