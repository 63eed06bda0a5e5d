"""The attention function of ``jaxnorm.linen``, for ``MultiHeadDotProductAttention``."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes

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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention` with :func:`jaxnorm.softmax`.

    For ``linen.MultiHeadDotProductAttention(attention_fn=jaxnorm.linen.dot_product_attention)``.
    Arguments and masking are Flax's. As there, the logits have the dtype of the computation. The
    softmax is computed in float32 for every dtype. The backward pass saves only the attention
    weights, where :func:`jax.nn.softmax` saves two arrays of their size (unless
    ``jax_softmax_custom_jvp`` is set).

    Args:
      query, key, value: ``(batch..., length, heads, depth)``.
      bias, mask: broadcastable to ``(batch..., heads, q_length, kv_length)``; entries where mask is
        False are masked.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: precision of the two matmuls.
      module: where to sow the weights, as ``attention_weights`` in ``intermediates``.
      force_fp32_for_softmax: keep the weights in float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: replacements of the
        matmuls; the last two go together and exclude ``precision`` and the first.

    Returns:
      ``(batch..., q_length, heads, v_depth)``.

    Raises:
      ValueError: shapes that do not fit together, or options that exclude each other.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> attention = nn.MultiHeadDotProductAttention(
      ...     8, attention_fn=jaxnorm.linen.dot_product_attention
      ... )
      >>> x, mask = jnp.ones((2, 16, 64)), nn.make_causal_mask(jnp.ones((2, 16)))
      >>> attention.init_with_output(jax.random.key(0), x, mask=mask)[0].shape
      (2, 16, 64)
    """
    if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
        raise ValueError(
            "dot_product_attention: got one of qk_attn_weights_einsum and "
            "attn_weights_value_einsum; give both or neither"
        )
    if qk_attn_weights_einsum is not None and (precision or einsum_dot_general):
        raise ValueError(
            "dot_product_attention: qk_attn_weights_einsum replaces what precision and "
            "einsum_dot_general configure; give one or the other"
        )
    query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
    attention.check_shapes(query, key, value)
    if not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        raise ValueError(
            f"dot_product_attention: query, key and value have {query.shape[-2]}, {key.shape[-2]} "
            f"and {value.shape[-2]} heads; expected equal numbers"
        )
    dtype = query.dtype
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        _dot_general=einsum_dot_general or jax.lax.dot_general,
    )

    def weigh(
        query: jax.Array, key: jax.Array, bias: jax.Array | None, mask: jax.Array | None
    ) -> jax.Array:
        query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
        logits = (qk_attn_weights_einsum or einsum)("...qhd,...khd->...hqk", query, key)
        return attention.masked_softmax(
            logits,
            bias,
            mask,
            fill=float(jnp.finfo(dtype).min),
            dtype=np.dtype(jnp.float32) if force_fp32_for_softmax else dtype,
        )

    return attention.attend(
        query,
        key,
        value,
        bias,
        mask,
        weigh=weigh,
        einsum=attn_weights_value_einsum or einsum,
        sow=module and functools.partial(module.sow, "intermediates", "attention_weights"),
        dropout=attention.dropout(dropout_rng, dropout_rate, broadcast_dropout, deterministic),
    )
