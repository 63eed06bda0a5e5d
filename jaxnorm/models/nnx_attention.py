"""The attention function of ``jaxnorm.nnx``, for ``nnx.MultiHeadAttention``."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxnorm.models import flax_modules
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.operations.softmax import attention_weights, logits_of
from jaxnorm_kernels.specs import FLOAT_DTYPES

# The fill value of masked logits in jax.nn.dot_product_attention, also for float64 logits.
_FILL = 0.7 * float(jnp.finfo(jnp.float32).min)


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

    Pass it to ``nnx.MultiHeadAttention`` as ``attention_fn``. Arguments and masking are Flax's. The
    logits of 16-bit operands are float32, also with dropout or ``module``, where Flax rounds them.
    The softmax is computed in float32 (float64 for float64). The backward pass saves only the
    attention weights, in the dtype of the computation. Key and value may have fewer heads than
    query (grouped-query attention).

    Args:
      query: ``(batch..., q_length, heads, depth)``.
      key, value: ``(batch..., kv_length, kv_heads, depth)``.
      bias, mask: broadcastable to ``(batch..., heads, q_length, kv_length)``; entries where mask is
        False are masked.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: precision of the two matmuls.
      module: where to sow the weights, as ``attention_weights`` of type ``nnx.Intermediate``.
      promote_dtype: function that casts the inputs to one dtype.
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
    flax_modules.check_shapes(query, key, value)
    flax_modules.check_heads(query, key, "key")
    flax_modules.check_heads(query, value, "value")
    return flax_modules.attend(
        query,
        key,
        value,
        bias,
        mask,
        weigh=functools.partial(_weigh, precision, is_causal),
        einsum=functools.partial(jnp.einsum, precision=precision),
        sow=module and functools.partial(module.sow, nnx.Intermediate, "attention_weights"),
        dropout=flax_modules.dropout(dropout_rng, dropout_rate, broadcast_dropout, deterministic),
    )


def _weigh(
    precision: Any,
    is_causal: bool,
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
) -> jax.Array:
    scale, fill, dtype = query.shape[-1] ** -0.5, _FILL, query.dtype
    lengths = query.shape[-3], key.shape[-3]
    # With a causal mask alone, each query has an unmasked key, so a fill of -inf gives the same
    # weights, and the kernels can skip masked entries.
    only_causal = is_causal and bias is None and mask is None
    if is_causal and not (only_causal and flax_modules.is_supported(dtype)):
        causal = jnp.tril(jnp.ones(lengths, bool))
        mask, only_causal = causal if mask is None else jnp.logical_and(mask, causal), False
    shape = (*query.shape[:-3], query.shape[-2], *lengths)
    if (
        flax_modules.is_supported(dtype)
        and flax_modules.fits(bias, shape, FLOAT_DTYPES)
        and flax_modules.fits(mask, shape)
    ):
        return attention_weights(
            query,
            key,
            None if mask is None else jnp.asarray(mask, bool),
            bias,
            scale=scale,
            fill=-math.inf if only_causal else fill,
            causal=only_causal,
            precision=precision,
        )
    logits = logits_of(precision, query, key) * scale
    return flax_modules.masked_softmax(logits, bias, mask, fill=fill, dtype=dtype)
