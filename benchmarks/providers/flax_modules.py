"""Flax linen's norms. (Its softmaxes are jax.nn's own: those of the provider jnp.)"""

from collections.abc import Callable

import flax.linen as nn
import jax

from benchmarks.workloads import Operation


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    module = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}[op](epsilon=1e-6, dtype=y_dtype)

    def apply(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        return module.apply({"params": dict(zip(("scale", "bias"), parameters))}, x)

    return apply
