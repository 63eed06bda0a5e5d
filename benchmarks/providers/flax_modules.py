"""Norms of Flax linen. Flax's softmaxes are those of jax.nn, which the provider `jnp` measures."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from benchmarks.workloads import Operation


def layer_norm(y_dtype: str, *, use_fast_variance: bool = True) -> Callable[..., jax.Array]:
    module = nn.LayerNorm(epsilon=1e-6, dtype=y_dtype, use_fast_variance=use_fast_variance)
    return _applied(module)


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    if op == "layer_norm":
        return layer_norm(y_dtype)
    return _applied(nn.RMSNorm(epsilon=1e-6, dtype=y_dtype))


def _applied(module: nn.Module) -> Callable[..., jax.Array]:
    def apply(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        y: Any = module.apply({"params": dict(zip(("scale", "bias"), parameters))}, x)
        return y

    return apply
