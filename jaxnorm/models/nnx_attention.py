"""The attention function of ``jaxnorm.nnx``, for ``nnx.MultiHeadAttention``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxnorm.models import attention
from jaxnorm.operations.checks import DTypeLike


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """:func:`flax.nnx.dot_product_attention` with :func:`jaxnorm.softmax`.

    For ``nnx.MultiHeadAttention(attention_fn=jaxnorm.nnx.dot_product_attention)``. Arguments,
    masking and results are Flax's; the softmax is computed in float32 for every dtype, and the
    backward keeps the attention weights alone. Key and value may have fewer heads than query
    (grouped-query attention).

    Args:
      query: ``(batch..., q_length, heads, depth)``.
      key, value: ``(batch..., kv_length, kv_heads, depth)``.
      bias, mask: broadcastable to ``(batch..., heads, q_length, kv_length)``; mask keeps where
        True.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: of the two matrix products.
      module: where to sow the weights, as ``attention_weights`` of type ``nnx.Intermediate``.
      promote_dtype: how the inputs get one dtype.
      is_causal: also mask keys that come after the query.

    Returns:
      ``(batch..., q_length, heads, v_depth)``.

    Raises:
      ValueError: shapes or numbers of heads that do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> attention = nnx.MultiHeadAttention(
      ...     8,
      ...     64,
      ...     attention_fn=jaxnorm.nnx.dot_product_attention,
      ...     decode=False,
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> attention(jnp.ones((2, 16, 64))).shape
      (2, 16, 64)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    attention.check_shapes(query, key, value)
    compute_dtype = query.dtype
    logits = jnp.einsum(
        "...qhgd,...khd->...hgqk",
        _grouped(attention.scaled(query), -2, attention.group_size(query, key, "key")),
        key,
        precision=precision,
    )
    logits = _merged(logits, -4)
    weights = attention.attention_weights(
        logits, bias, mask, compute_dtype, compute_dtype, is_causal=is_causal
    )
    if module is not None:
        module.sow(nnx.Intermediate, "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = attention.dropout(
            weights,
            dropout_rng,
            dropout_rate,
            broadcast=broadcast_dropout,
            compute_dtype=compute_dtype,
        )
    out = jnp.einsum(
        "...hgqk,...khd->...qhgd",
        _grouped(weights, -3, attention.group_size(query, value, "value")),
        value,
        precision=precision,
    )
    return _merged(out, -3)


def _grouped(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits `axis` into (groups, size)."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Merges `axis` with the one after it."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
