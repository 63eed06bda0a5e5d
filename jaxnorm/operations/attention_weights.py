"""Attention weights: the softmax of the matmul of queries and keys, as one function.

    weights = softmax(scale query key^T + bias, masked)

The logits of 16-bit queries and keys are float32. Their cotangent is 16 bits: the backward matmuls
would round it, so the softmax's backward kernel writes it in 16 bits, in half the memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxnorm.calls.call import Call
from jaxnorm.operations import products
from jaxnorm.operations.softmax import softmax_call
from jaxnorm.primitives import eager, row_operations


@eager.compiled("query", "key", "where", "bias")
def attention_weights(
    query: jax.Array,
    key: jax.Array,
    where: jax.Array | None,
    bias: jax.Array | None,
    *,
    scale: float,
    fill: float,
    causal: bool,
    precision: Any,
) -> jax.Array:
    """Return the softmax of scale query key^T + bias over the keys, in the dtype of the query.

    Args:
      query: ``(batch..., q_length, heads, depth)``.
      key: ``(batch..., kv_length, kv_heads, depth)`` of the same dtype, where heads is a multiple
        of kv_heads.
      where: mask that broadcasts to the logits, or None. `fill` replaces the logits where it is
        False.
      bias: float array that broadcasts to the logits, or None.
      scale: multiplies the logits, without rounding.
      fill: a finite number, or -inf to leave entries out.
      causal: leave out the keys that come after the query; only with a `fill` of -inf.
      precision: of the matmuls, as in `jax.numpy.einsum`.

    Returns:
      ``(batch..., heads, q_length, kv_length)``.
    """
    logits = jax.eval_shape(functools.partial(logits_of, precision), query, key)
    call, mask, bias = softmax_call(
        "softmax", logits, where=where, scale=scale, bias=bias, causal=causal, dtype=query.dtype,
        masked_logit=fill,
    )  # fmt: skip
    (y,) = row_operations.bind(call, logits_of(precision, query, key), mask, bias)
    return _with_narrow_derivative(call, precision, y, query, key, mask, bias)


def logits_of(
    precision: Any, query: jax.Array, key: jax.Array, dtype: np.dtype | None = None
) -> jax.Array:
    """Return query key^T in `dtype`; by default, in the arithmetic dtype."""
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        preferred_element_type=dtype or jnp.promote_types(query.dtype, jnp.float32),
    )
    size = query.shape[-2] // key.shape[-2]
    if size == 1:
        return einsum("...qhd,...khd->...hqk", query, key)
    # Grouped-query attention: `size` query heads share a head of the keys.
    split = query.reshape(*query.shape[:-2], key.shape[-2], size, query.shape[-1])
    logits = einsum("...qhgd,...khd->...hgqk", split, key)
    return logits.reshape(*logits.shape[:-4], query.shape[-2], *logits.shape[-2:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_narrow_derivative(
    call: Call,
    precision: Any,
    y: jax.Array,
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Return the weights y, with a derivative whose cotangent of the logits has 16 bits.

    The caller computes y, so that policies of rematerialisation see its name. The rule replaces
    the tangent of y. JAX drops the computation of the tangent that the rule ignores.
    """
    del call, precision, query, key, mask, bias
    return y


@functools.partial(_with_narrow_derivative.defjvp, symbolic_zeros=True)
def _(call: Call, precision: Any, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    y, query, key, mask, bias = primals
    _, dquery, dkey, _, dbias = tangents
    terms = []
    if products.nonzero(dquery) is not None:
        terms.append(logits_of(precision, dquery, key, query.dtype))
    if products.nonzero(dkey) is not None:
        terms.append(logits_of(precision, query, dkey, query.dtype))
    along = {} if bias is None else {"logits_bias": products.nonzero(dbias)}
    if terms:
        along = {"x": functools.reduce(jnp.add, terms), **along}
    narrow = call.replaced(x_dtype=np.dtype(query.dtype))
    residuals = [y] if mask is None else [y, mask]
    (dy,) = row_operations.tangents_of(narrow, residuals, along)
    return y, SymbolicZero(jax.typeof(y).to_tangent_aval()) if dy is None else dy
