"""The attention function of ``jaxnorm.nnx``, for ``nnx.MultiHeadAttention``."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxnorm.models import attention
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.operations.softmax import attention_weights, logits_of
from jaxnorm_kernels.specs import FLOAT_DTYPES

# The value that replaces masked logits. jax.nn.dot_product_attention uses the same value, even for
# float64 logits.
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
    """Compute :func:`flax.nnx.dot_product_attention` with :func:`jaxnorm.softmax`.

    Pass it to ``nnx.MultiHeadAttention`` as ``attention_fn``. The arguments and the rule for masked
    logits are the same as in Flax. The logits of 16-bit operands are float32. (Flax rounds them to
    16 bits if there is dropout or a ``module``.) The softmax is computed in float32 (float64 for
    float64 logits). For the backward pass of the softmax, only the attention weights are saved, in
    the dtype of the computation. Key and value may have fewer heads than query (grouped-query
    attention).

    Args:
      query: array ``(batch..., q_length, heads, depth)``.
      key, value: arrays ``(batch..., kv_length, kv_heads, depth)``.
      bias, mask: arrays that broadcast to ``(batch..., heads, q_length, kv_length)``, or None.
        Logits are masked where ``mask`` is False.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: options of the dropout of
        attention weights, as in Flax.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: precision of the two matmuls.
      module: module in which the weights are sown, as ``attention_weights`` of type
        ``nnx.Intermediate``, or None.
      promote_dtype: function that casts the inputs to one dtype.
      is_causal: if True, keys at positions after the query's position are masked as well.

    Returns:
      Array ``(batch..., q_length, heads, v_depth)``.

    Raises:
      ValueError: the shapes or the numbers of heads do not fit together.

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
    attention.check_shapes(query, key, value, groups=True)
    scale, dtype = query.shape[-1] ** -0.5, query.dtype
    lengths = query.shape[-3], key.shape[-3]
    # If the causal mask is the only mask, each query has an unmasked key. Then a fill of -inf gives
    # the same weights as a fill of `_FILL`, and kernels can skip masked entries.
    is_supported = attention.is_supported(dtype)
    only_causal = is_causal and bias is None and mask is None and is_supported
    if is_causal and not only_causal:
        causal = jnp.tril(jnp.ones(lengths, bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    shape = (*query.shape[:-3], query.shape[-2], *lengths)
    if is_supported and attention.fits(bias, shape, FLOAT_DTYPES) and attention.fits(mask, shape):
        weights = attention_weights(
            query,
            key,
            None if mask is None else jnp.asarray(mask, bool),
            bias,
            scale=scale,
            fill=-math.inf if only_causal else _FILL,
            causal=only_causal,
            precision=precision,
        )
    else:
        logits = logits_of(precision, query, key) * scale
        weights = attention.masked_softmax(logits, bias, mask, fill=_FILL, dtype=dtype)
    return attention.attend(
        weights,
        value,
        (dropout_rng, dropout_rate, broadcast_dropout, deterministic),
        einsum=functools.partial(jnp.einsum, precision=precision),
        sow=module and functools.partial(module.sow, nnx.Intermediate, "attention_weights"),
    )
