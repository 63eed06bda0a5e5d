"""The plain formulas in jax.numpy: what one writes without a library."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def rms_norm(x: Array, scale: Array, *, dtype: str | None = None) -> Array:
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(dtype or x.dtype)


def layer_norm(
    x: Array, scale: Array | float = 1.0, bias: Array | float = 0.0, *, dtype: str | None = None
) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, axis=-1, keepdims=True) + 1e-6)
    return ((wide - mean) * rstd * scale + bias).astype(dtype or x.dtype)


@dataclasses.dataclass(frozen=True)
class Norms:
    """A library's plain norms, and the blocks that a model makes of them."""

    rms_norm: Callable[..., Array]
    layer_norm: Callable[..., Array]

    def block(self, op: str, y_dtype: str) -> Callable[..., Any]:
        blocks: dict[str, Callable[..., Any]] = {
            "add_rms_norm": functools.partial(self.add_norm, self.rms_norm),
            "add_layer_norm": functools.partial(self.add_norm, self.layer_norm),
            "residual_rms_norm": functools.partial(self.add_norm, self.rms_norm),
            "residual_layer_norm": functools.partial(self.add_norm, self.layer_norm),
            "post_norm": self.post_norm,
            "sandwich": self.sandwich,
            "ada_layer_norm": self.ada_layer_norm,
        }
        return functools.partial(blocks[op], dtype=y_dtype)

    def add_norm(
        self, norm: Callable[..., Array], x: Array, residual: Array, *parameters: Array, dtype: str
    ) -> tuple[Array, Array]:
        h = x + residual
        return norm(h, *parameters, dtype=dtype), h

    def post_norm(self, x: Array, residual: Array, scale: Array, *, dtype: str) -> Array:
        return residual + self.rms_norm(x, scale, dtype=dtype)

    def sandwich(
        self, x: Array, residual: Array, scale: Array, next_scale: Array, *, dtype: str
    ) -> tuple[Array, Array]:
        h = residual + self.rms_norm(x, scale)
        return self.rms_norm(h, next_scale, dtype=dtype), h

    def ada_layer_norm(self, x: Array, scale: Array, bias: Array, *, dtype: str) -> Array:
        return (self.layer_norm(x) * (1 + scale) + bias).astype(dtype)


_NORMS = Norms(rms_norm, layer_norm)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    if op in ("layer_norm", "rms_norm"):
        return functools.partial(getattr(_NORMS, op), dtype=y_dtype)
    return getattr(jax.nn, op) if op in ("softmax", "log_softmax") else _NORMS.block(op, y_dtype)
