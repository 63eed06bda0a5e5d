"""Flax linen modules: drop-in LayerNorm, RMSNorm and attention function that save their outputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _attention, _flax  # first, because it says what to do where Flax is missing

# isort: split
from flax import linen as nn
from flax.linen import dtypes

from jaxnorm._norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = ["LayerNorm", "RMSNorm", "dot_product_attention"]


class LayerNorm(nn.LayerNorm):
    """:class:`flax.linen.LayerNorm` that keeps its output, not its input, for the backward pass.

    Every field, default, parameter name and the call are Flax's, so checkpoints load unchanged;
    three fields come on top. ``use_fast_variance`` is accepted, but the variance is always the
    stable two-pass one. A call with ``mask``, ``axis_name``, ``force_float32_reductions=False``,
    ``feature_axes`` other than ``reduction_axes``, or a dtype that is no float of 16 to 64 bits, is
    Flax's own, input-saving computation.

    Attributes:
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to the parameter ``scale``; 0.0 by default.
    """

    save: Save = "output"
    implementation: Name | None = None
    scale_offset: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalises x, as :meth:`flax.linen.LayerNorm.__call__` does.

        With a residual: h = x + residual, in one pass with the addition, and returns (y, h), as
        :func:`jaxnorm.add_layer_norm` does.
        """
        normalised = x if residual is None else residual
        axes = _covered_axes(self, normalised, mask)
        if axes is None:
            _flax.no_offset(self)
            flax_norm = functools.partial(super().__call__, mask=mask)
            return _flax.composed(flax_norm, x, residual)
        scale = _param(self, "scale", self.scale_init, x, axes) if self.use_scale else None
        bias = _param(self, "bias", self.bias_init, x, axes) if self.use_bias else None
        options = _flax.options(dtypes, self, axes, normalised, scale, bias)
        if residual is None:
            return layer_norm(x, scale, bias, **options)
        return add_layer_norm(x, residual, scale, bias, **options)


class RMSNorm(nn.RMSNorm):
    """:class:`flax.linen.RMSNorm` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.linen.LayerNorm` says of fields, parameters and Flax's own path holds here.

    Attributes:
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.rms_norm`.
      implementation: see :func:`jaxnorm.rms_norm`.
      scale_offset: added to the parameter ``scale``; 1.0 for Gemma's ``1 + w``, with zeros for
        ``scale_init``.
    """

    save: Save = "output"
    implementation: Name | None = None
    scale_offset: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalises x, as :meth:`flax.linen.RMSNorm.__call__` does.

        With a residual: h = x + residual, in one pass with the addition, and returns (y, h), as
        :func:`jaxnorm.add_rms_norm` does.
        """
        normalised = x if residual is None else residual
        axes = _covered_axes(self, normalised, mask)
        if axes is None:
            _flax.no_offset(self)
            flax_norm = functools.partial(super().__call__, mask=mask)
            return _flax.composed(flax_norm, x, residual)
        scale = _param(self, "scale", self.scale_init, x, axes) if self.use_scale else None
        options = _flax.options(dtypes, self, axes, normalised, scale)
        if residual is None:
            return rms_norm(x, scale, **options)
        return add_rms_norm(x, residual, scale, **options)


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
    dtype: jax.typing.DTypeLike | None = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention` with :func:`jaxnorm.softmax`.

    For ``linen.MultiHeadDotProductAttention(attention_fn=jaxnorm.linen.dot_product_attention)``.
    Arguments, masking and results are Flax's; the softmax is computed in float32 for every dtype,
    and the backward keeps the attention weights alone, where :func:`jax.nn.softmax` keeps two
    arrays of their size.

    Args:
      query, key, value: ``(batch..., length, heads, depth)``.
      bias, mask: broadcastable to ``(batch..., heads, q_length, kv_length)``; mask keeps where
        True.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: of the two matrix products.
      module: where to sow the weights, as ``attention_weights`` in ``intermediates``.
      force_fp32_for_softmax: keep the weights in float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: replacements of the
        matrix products; the last two go together and exclude ``precision`` and the first.

    Returns:
      ``(batch..., q_length, heads, v_depth)``.

    Raises:
      ValueError: shapes that do not fit together, or options that exclude each other.
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
    _attention.check_shapes(query, key, value)
    if not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        raise ValueError(
            f"dot_product_attention: query, key and value have {query.shape[-2]}, {key.shape[-2]} "
            f"and {value.shape[-2]} heads; expected equal numbers"
        )
    compute_dtype = query.dtype
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        _dot_general=einsum_dot_general or jax.lax.dot_general,
    )
    logits = (qk_attn_weights_einsum or einsum)(
        "...qhd,...khd->...hqk", _attention.scaled(query), key
    )
    out_dtype = jnp.float32 if force_fp32_for_softmax else compute_dtype
    weights = _attention.attention_weights(logits, bias, mask, compute_dtype, out_dtype)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = _attention.dropout(
            weights,
            dropout_rng,
            dropout_rate,
            broadcast=broadcast_dropout,
            compute_dtype=compute_dtype,
        )
    return (attn_weights_value_einsum or einsum)("...hqk,...khd->...qhd", weights, value)


def _covered_axes(module: Any, x: Any, mask: jax.Array | None) -> tuple[int, ...] | None:
    """The axes to normalise, or None where the call is left to Flax."""
    if mask is not None or module.axis_name is not None or not module.force_float32_reductions:
        return None
    dtypes_seen = [jnp.result_type(x), jnp.dtype(module.param_dtype)]
    if module.dtype is not None:
        dtypes_seen.append(jnp.dtype(module.dtype))
    if any(seen.name not in FLOAT_DTYPES for seen in dtypes_seen):
        return None
    name = type(module).__name__
    return _flax.shared_axes(name, module.reduction_axes, module.feature_axes, x.shape)


def _param(module: nn.Module, name: str, init: Any, x: jax.Array, axes: tuple[int, ...]) -> Any:
    shape = [x.shape[a] for a in axes]
    return module.param(name, init, shape, module.param_dtype)
