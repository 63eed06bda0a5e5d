"""Plain formulas in jax.numpy and jax.nn, as people write them without a library."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.blocks import CHANNEL_GROUPS, LOGITS_SCALE
from benchmarks.losses import SOFTCAP

Array = jax.Array


def rms_norm(x: Array, scale: Array, *, dtype: str | None = None) -> Array:
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(dtype or x.dtype)


def layer_norm(
    x: Array,
    scale: Array | float = 1.0,
    bias: Array | float = 0.0,
    *,
    axis: int | tuple[int, ...] = -1,
    dtype: str | None = None,
) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=axis, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, axis=axis, keepdims=True) + 1e-6)
    return ((wide - mean) * rstd * scale + bias).astype(dtype or x.dtype)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The norms and the softmax of a library. `block` combines them with jax.numpy functions."""

    rms_norm: Callable[..., Array]
    layer_norm: Callable[..., Array]
    softmax: Callable[..., Array]

    def block(self, op: str, y_dtype: str) -> Callable[..., Any]:
        return functools.partial(getattr(self, op), dtype=y_dtype)

    def residual_rms_norm(
        self, x: Array, residual: Array, scale: Array, *, dtype: str
    ) -> tuple[Array, Array]:
        h = x + residual
        return self.rms_norm(h, scale, dtype=dtype), h

    def residual_layer_norm(
        self, x: Array, residual: Array, scale: Array, bias: Array, *, dtype: str
    ) -> tuple[Array, Array]:
        h = x + residual
        return self.layer_norm(h, scale, bias, dtype=dtype), h

    add_rms_norm, add_layer_norm = residual_rms_norm, residual_layer_norm

    def post_norm(self, x: Array, residual: Array, scale: Array, *, dtype: str) -> Array:
        return residual + self.rms_norm(x, scale, dtype=dtype)

    def sandwich(
        self, x: Array, residual: Array, scale: Array, next_scale: Array, *, dtype: str
    ) -> tuple[Array, Array]:
        h = residual + self.rms_norm(x, scale)
        return self.rms_norm(h, next_scale, dtype=dtype), h

    def ada_layer_norm(self, x: Array, scale: Array, bias: Array, *, dtype: str) -> Array:
        return (self.layer_norm(x) * (1 + scale) + bias).astype(dtype)

    def gated_add_layer_norm(
        self, x: Array, residual: Array, scale: Array, bias: Array, gate: Array, *, dtype: str
    ) -> tuple[Array, Array]:
        h = (residual + gate * x).astype(residual.dtype)
        return self.ada_layer_norm(h, scale, bias, dtype=dtype), h

    def masked_softmax(self, x: Array, where: Array, *, dtype: str) -> Array:
        return self.softmax(jnp.where(where, LOGITS_SCALE * x, -jnp.inf)).astype(dtype)

    def causal_softmax(self, x: Array, *, dtype: str) -> Array:
        rows, cols = x.shape[-2:]
        where = jnp.tri(rows, cols, dtype=bool)
        return self.masked_softmax(x, where, dtype=dtype)

    def biased_softmax(self, x: Array, bias: Array, *, dtype: str) -> Array:
        return self.softmax(LOGITS_SCALE * x + bias).astype(dtype)

    def column_softmax(self, x: Array, *, dtype: str) -> Array:
        return self.softmax(x, axis=-2).astype(dtype)

    def channel_layer_norm(self, x: Array, scale: Array, bias: Array, *, dtype: str) -> Array:
        scale, bias = (a[:, None, None] for a in (scale, bias))
        return (self.layer_norm(x, axis=1) * scale + bias).astype(dtype)

    def group_norm(self, x: Array, scale: Array, bias: Array, *, dtype: str) -> Array:
        groups = x.reshape(*x.shape[:-1], CHANNEL_GROUPS, -1)
        y = self.layer_norm(groups, axis=(1, 2, 4)).reshape(x.shape)
        return (y * scale + bias).astype(dtype)

    def group_norm_silu(self, x: Array, scale: Array, bias: Array, *, dtype: str) -> Array:
        return jax.nn.silu(self.group_norm(x, scale, bias, dtype=dtype))

    def rms_norm_rope(self, x: Array, cos: Array, sin: Array, scale: Array, *, dtype: str) -> Array:
        a, b = jnp.split(self.rms_norm(x, scale), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    def gated_rms_norm(self, x: Array, gate: Array, scale: Array, *, dtype: str) -> Array:
        return (self.rms_norm(x, scale) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)

    def gate_first_rms_norm(self, x: Array, gate: Array, scale: Array, *, dtype: str) -> Array:
        return self.rms_norm(x * jax.nn.silu(gate.astype(jnp.float32)), scale, dtype=dtype)


def cross_entropy(logits: Array, labels: Array) -> Array:
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(wide, axis=-1) - chosen


def cross_entropies(of_logits: Callable[..., Array]) -> dict[str, Callable[..., Array]]:
    """Return a dict of four losses: of logits or after a linear layer, with or without a cap."""

    def capped(logits: Array, labels: Array) -> Array:
        return of_logits(SOFTCAP * jnp.tanh(logits.astype(jnp.float32) / SOFTCAP), labels)

    def after_layer(loss: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, weight, labels: jnp.mean(loss(x @ weight, labels))

    return {
        "cross_entropy": of_logits,
        "capped_cross_entropy": capped,
        "linear_cross_entropy": after_layer(of_logits),
        "capped_linear_cross_entropy": after_layer(capped),
    }


def log_prob_and_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def linear_log_prob_and_entropy(x: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    return log_prob_and_entropy(x @ weight, labels)


def kl_divergence(logits: Array, teacher_logits: Array) -> Array:
    log_q, log_p = (jax.nn.log_softmax(z.astype(jnp.float32)) for z in (logits, teacher_logits))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl_divergence(logits: Array, teacher_logits: Array) -> Array:
    return kl_divergence(teacher_logits, logits)


def linear_kl_divergence(x: Array, weight: Array, teacher_x: Array, teacher_weight: Array) -> Array:
    return jnp.mean(kl_divergence(x @ weight, teacher_x @ teacher_weight))


_OTHERS: dict[str, Callable[..., Any]] = {
    **cross_entropies(cross_entropy),
    "log_prob_and_entropy": log_prob_and_entropy,
    "linear_log_prob_and_entropy": linear_log_prob_and_entropy,
    "kl_divergence": kl_divergence,
    "reverse_kl_divergence": reverse_kl_divergence,
    "linear_kl_divergence": linear_kl_divergence,
}
_PLAIN = Plain(rms_norm, layer_norm, jax.nn.softmax)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    if op in ("layer_norm", "rms_norm"):
        return functools.partial(getattr(_PLAIN, op), dtype=y_dtype)
    if op in _OTHERS:
        return _OTHERS[op]
    return getattr(jax.nn, op) if op in ("softmax", "log_softmax") else _PLAIN.block(op, y_dtype)
