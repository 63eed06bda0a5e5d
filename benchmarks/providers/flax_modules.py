"""Norms of Flax linen. Flax uses the softmaxes of jax.nn, which the provider `jnp` measures."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from benchmarks.workloads import Operation


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    norm = nn.LayerNorm if op == "layer_norm" else nn.RMSNorm
    module = norm(epsilon=1e-6, dtype=y_dtype)

    def apply(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        y: Any = module.apply({"params": dict(zip(("scale", "bias"), parameters))}, x)
        return y

    return apply
