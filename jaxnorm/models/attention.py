"""The body of the attention functions of ``jaxnorm.linen`` and ``jaxnorm.nnx``.

    weights = softmax(scale query key^T + bias, masked)       out = dropout(weights) value

Each API passes a function that returns the weights, with logits in the dtype that Flax uses there.
As in Flax, a finite number replaces a masked logit, so a query whose keys are all masked attends to
all of them evenly. Only the softmax differs from Flax's: its backward pass saves only the weights.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations.softmax import filled_softmax
from jaxnorm_kernels.specs import FLOAT_DTYPES


class Dropout(NamedTuple):
    """Dropout of the weights, with one draw for all batches and heads if `broadcast`."""

    rng: jax.Array
    rate: float
    broadcast: bool

    def __call__(self, weights: jax.Array, dtype: np.dtype) -> jax.Array:
        """Multiply the weights by 0 or 1 / (1 - rate), rounded to `dtype`."""
        batch = (1,) * (weights.ndim - 2) if self.broadcast else weights.shape[:-2]
        keep = jax.random.bernoulli(self.rng, 1.0 - self.rate, batch + weights.shape[-2:])
        return weights * (keep.astype(dtype) / jnp.asarray(1.0 - self.rate, dtype=dtype))


def dropout(
    rng: jax.Array | None, rate: float, broadcast: bool, deterministic: bool
) -> Dropout | None:
    """Check Flax's four arguments of dropout; return None if there is none."""
    if deterministic or rate == 0.0:
        return None
    if not 0.0 < rate < 1.0:
        raise ValueError(f"dot_product_attention: dropout_rate={rate!r}; expected 0 <= rate < 1")
    if rng is None:
        raise ValueError(
            "dot_product_attention: dropout_rate > 0 and deterministic=False need a dropout_rng"
        )
    return Dropout(rng, rate, broadcast)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    weigh: Callable[..., jax.Array],
    einsum: Callable[..., jax.Array],
    sow: Callable[[jax.Array], object] | None,
    dropout: Dropout | None,
) -> jax.Array:
    """Return dot-product attention over ``(batch..., length, heads, depth)``.

    Args:
      query, key, value: arrays of one dtype, whose shapes `check_shapes` has accepted.
      bias, mask: broadcastable to ``(batch..., heads, q_length, kv_length)``, or None.
      weigh: returns the weights of ``(query, key, bias, mask)``.
      einsum: multiplies weights and values.
      sow: called with the weights before dropout.
      dropout: dropout of the weights.
    """
    weights = weigh(query, key, bias, mask)
    if sow is not None:
        sow(weights)
    if dropout is not None:
        weights = dropout(weights, query.dtype)
    heads, groups = query.shape[-2], value.shape[-2]
    if heads == groups:
        return einsum("...hqk,...khd->...qhd", weights, value)
    # Grouped-query attention: several query heads share a head of the values.
    batch, lengths = weights.shape[:-3], weights.shape[-2:]
    split = weights.reshape(*batch, groups, heads // groups, *lengths)
    out = einsum("...hgqk,...khd->...qhgd", split, value)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raise a ValueError unless the shapes fit together. Numbers of heads are not compared."""
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


def masked_softmax(
    logits: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    fill: float,
    dtype: np.dtype,
) -> jax.Array:
    """Return the softmax of ``(batch..., heads, q_length, kv_length)`` logits over the last axis.

    It also supports inputs that the kernels do not: complex and 8-bit logits, an integer bias, and
    a bias or a mask that enlarges the logits.
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
    """True if jaxnorm's functions support all of the dtypes."""
    return all(np.dtype(dtype).name in FLOAT_DTYPES for dtype in dtypes)


def fits(
    a: jax.Array | None, shape: tuple[int, ...], dtypes: Collection[str] | None = None
) -> bool:
    """True if `a` is None, or broadcasts to `shape` and has one of the dtypes."""
    return a is None or (
        jnp.broadcast_shapes(a.shape, shape) == shape and (dtypes is None or a.dtype.name in dtypes)
    )


def check_heads(query: jax.Array, other: jax.Array, name: str) -> None:
    """Raise a ValueError unless `other` has as many heads as the query, or a divisor of these."""
    heads, shared = query.shape[-2], other.shape[-2]
    if heads % shared:
        raise ValueError(
            f"dot_product_attention: query has {heads} heads and {name} {shared}; "
            f"expected query's heads to be a multiple of {name}'s"
        )
