"""The plain formulas in jax.numpy: what one writes without a library."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.workloads import Operation

Array = jax.Array


def rms_norm(x: Array, scale: Array, *, dtype: str | None = None) -> Array:
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(dtype or x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array, *, dtype: str | None = None) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, axis=-1, keepdims=True) + 1e-6)
    return ((wide - mean) * rstd * scale + bias).astype(dtype or x.dtype)


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., Array]:
    norms: dict[str, Callable[..., Array]] = {"layer_norm": layer_norm, "rms_norm": rms_norm}
    if op in norms:
        return functools.partial(norms[op], dtype=y_dtype)
    return getattr(jax.nn, op)
