"""The steps of dot-product attention that linen's and nnx's attention functions share.

    weights = softmax(query key^T / sqrt(depth) + bias, masked)       out = dropout(weights) value

with Flax's semantics: a masked logit becomes the dtype's most negative finite number, so a query
that may attend to nothing attends to everything evenly. Only the softmax differs: it keeps its
output, and nothing else, for the backward.
"""

import jax
import jax.numpy as jnp

from jaxnorm.operations.softmax import filled_softmax, softmax
from jaxnorm_kernels.specs import FLOAT_DTYPES


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """ValueError unless the three fit together (but for their numbers of heads)."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    expected = "(batch..., length, heads, depth)"
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
        raise ValueError(
            f"dot_product_attention: got {shapes}; expected three arrays {expected} of equal rank"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"dot_product_attention: got {shapes}; expected equal batch axes")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"dot_product_attention: got {shapes}; expected key and value of equal length (axis -3)"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"dot_product_attention: got {shapes}; expected query and key of equal depth (axis -1)"
        )


def group_size(query: jax.Array, other: jax.Array, name: str) -> int:
    """How many query heads share one head of `other` (grouped-query attention)."""
    heads, shared = query.shape[-2], other.shape[-2]
    if heads % shared:
        raise ValueError(
            f"dot_product_attention: query has {heads} heads and {name} {shared}; "
            f"expected query's heads to be a multiple of {name}'s"
        )
    return heads // shared


def scaled(query: jax.Array) -> jax.Array:
    """query / sqrt(depth), in query's dtype."""
    return query / jnp.sqrt(query.shape[-1]).astype(query.dtype)


def attention_weights(
    logits: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    compute_dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
    *,
    is_causal: bool = False,
) -> jax.Array:
    """softmax over the last axis of ``(batch..., heads, q_length, kv_length)`` logits."""
    fill = float(jnp.finfo(compute_dtype).min)
    is_real = logits.dtype.name in FLOAT_DTYPES  # or complex, say, which Flax takes
    if is_causal and is_real and bias is None and mask is None:
        # No row is without an entry, so that a finite fill and -inf are the same.
        return softmax(logits, causal=True, dtype=out_dtype)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], dtype=bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    if bias is not None and not (is_real and _fits(bias, logits)):
        logits, bias = logits + bias, None
    if mask is not None and not (is_real and _broadcasts(mask, logits)):
        logits, mask = jnp.where(mask, logits, fill), None
    if not is_real:
        return jax.nn.softmax(logits.astype(out_dtype))
    where = None if mask is None else jnp.asarray(mask, bool)
    return filled_softmax(logits, where, bias, fill=fill, dtype=out_dtype)


def _fits(bias: jax.Array, logits: jax.Array) -> bool:
    return _broadcasts(bias, logits) and bias.dtype.name in FLOAT_DTYPES


def _broadcasts(a: jax.Array, logits: jax.Array) -> bool:
    """Whether `a` leaves the logits' shape as it is."""
    return jnp.broadcast_shapes(jnp.shape(a), logits.shape) == logits.shape


def dropout(
    weights: jax.Array,
    rng: jax.Array | None,
    rate: float,
    *,
    broadcast: bool,
    compute_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Zeroes weights with probability `rate`; one draw for all batches and heads if `broadcast`."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dot_product_attention: dropout_rate={rate!r}; expected 0 <= rate < 1")
    if rng is None:
        raise ValueError(
            "dot_product_attention: dropout_rate > 0 and deterministic=False need a dropout_rng"
        )
    shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    multiplier = keep.astype(compute_dtype) / jnp.asarray(1.0 - rate, dtype=compute_dtype)
    return weights * multiplier
