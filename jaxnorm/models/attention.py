"""Code that the attention functions of ``jaxnorm.linen`` and ``jaxnorm.nnx`` share."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations.softmax import filled_softmax
from jaxnorm_kernels.specs import FLOAT_DTYPES

# The arguments of Flax's attention functions that control dropout, in this order: dropout_rng,
# dropout_rate, broadcast_dropout, deterministic.
Dropout = tuple[jax.Array | None, float, bool, bool]


def attend(
    weights: jax.Array,
    value: jax.Array,
    dropout: Dropout,
    *,
    einsum: Callable[..., jax.Array],
    sow: Callable[[jax.Array], object] | None,
) -> jax.Array:
    """Return the matmul of attention weights and values, with Flax's dropout of the weights.

    Args:
      weights: array ``(batch..., heads, q_length, kv_length)``.
      value: array ``(batch..., kv_length, kv_heads, depth)``, in the dtype of the computation. In
        grouped-query attention, several heads of the weights share a head of the values.
      dropout: Flax's arguments for dropout. With broadcast_dropout, all batch elements and heads
        share one dropout mask.
      einsum: function with the arguments of `jnp.einsum`, which computes the matmul.
      sow: None, or a function to call with the weights before dropout.
    """
    if sow is not None:
        sow(weights)
    rng, rate, broadcast, deterministic = dropout
    if not (deterministic or rate == 0.0):
        if not 0.0 < rate < 1.0:
            raise ValueError(
                f"dot_product_attention: dropout_rate={rate!r}; expected 0 <= rate < 1"
            )
        if rng is None:
            raise ValueError(
                "dot_product_attention: dropout_rate > 0 and deterministic=False need a dropout_rng"
            )
        batch = (1,) * (weights.ndim - 2) if broadcast else weights.shape[:-2]
        keep = jax.random.bernoulli(rng, 1.0 - rate, batch + weights.shape[-2:])
        weights = weights * (keep.astype(value.dtype) / jnp.asarray(1.0 - rate, value.dtype))
    heads, groups = weights.shape[-3], value.shape[-2]
    if heads == groups:
        return einsum("...hqk,...khd->...qhd", weights, value)
    batch, lengths = weights.shape[:-3], weights.shape[-2:]
    split = weights.reshape(*batch, groups, heads // groups, *lengths)
    out = einsum("...hgqk,...khd->...qhgd", split, value)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array, *, groups: bool) -> None:
    """Raise ValueError unless the shapes of query, key and value fit together.

    If `groups` is True, key and value may have fewer heads than query.
    """
    shapes = q, k, v = query.shape, key.shape, value.shape
    fits = len(q) == len(k) == len(v) >= 3 and q[:-3] == k[:-3] == v[:-3] and k[-3] == v[-3]
    fits = fits and q[-1] == k[-1]
    fits = fits and all(q[-2] % a[-2] == 0 if groups else q[-2] == a[-2] for a in (k, v))
    if not fits:
        heads = "numbers of heads of key and value that divide query's" if groups else "equal heads"
        raise ValueError(
            "dot_product_attention: got query {}, key {}, value {}; expected ".format(*shapes)
            + "three arrays (batch..., length, heads, depth) of equal rank with equal batch axes, "
            f"key and value of equal length, query and key of equal depth, and {heads}"
        )


def masked_softmax(
    logits: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    fill: float,
    dtype: np.dtype,
) -> jax.Array:
    """Return the softmax of logits ``(batch..., heads, q_length, kv_length)`` over the last axis.

    `bias` is added to the logits, and `fill` replaces logits where `mask` is False. The result has
    the dtype `dtype`. Plain JAX processes the inputs that kernels do not support: complex or 8-bit
    logits; an integer bias; a bias or a mask that has more elements than the logits.
    """
    supported = is_supported(logits.dtype, dtype)
    if bias is not None and not (supported and fits(bias, logits.shape, FLOAT_DTYPES)):
        logits, bias = logits + bias, None
        supported = is_supported(logits.dtype, dtype)
    if mask is not None and not (supported and fits(mask, logits.shape)):
        logits, mask = jnp.where(mask, logits, fill), None
    if not supported:
        wide = jnp.promote_types(logits.dtype, dtype)
        return jax.nn.softmax(logits.astype(wide)).astype(dtype)
    where = None if mask is None else jnp.asarray(mask, bool)
    return filled_softmax(logits, where, bias, fill=fill, dtype=dtype)


def is_supported(*dtypes: jax.typing.DTypeLike) -> bool:
    """Return True if jaxnorm's functions support all of the dtypes."""
    return all(np.dtype(dtype).name in FLOAT_DTYPES for dtype in dtypes)


def fits(
    a: jax.Array | None, shape: tuple[int, ...], dtypes: Collection[str] | None = None
) -> bool:
    """Return True if `a` is None, or broadcasts to `shape` and has one of `dtypes`.

    If `dtypes` is None, any dtype is allowed.
    """
    return a is None or (
        jnp.broadcast_shapes(a.shape, shape) == shape and (dtypes is None or a.dtype.name in dtypes)
    )
