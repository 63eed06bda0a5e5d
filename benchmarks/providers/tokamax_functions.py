"""tokamax's normalization, by its Triton kernels. Its output has x's dtype."""

from collections.abc import Callable

import jax
import triton.backends.nvidia.driver as triton_driver

from benchmarks.workloads import Operation

# jax-triton 0.4.1 imports two names of Triton 3.7. Triton 3.6, which torch 2.11 pins, lacks them,
# and jax-triton would then take no NVIDIA GPU for granted, without a word.
if not hasattr(triton_driver, "TMA_TF32"):
    triton_driver.TMA_TF32 = 11
if not hasattr(triton_driver, "TMA_DTYPE_DEVICE_TO_HOST"):
    triton_driver.TMA_DTYPE_DEVICE_TO_HOST = {i: i for i in range(16)}

import tokamax


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return tokamax.layer_norm(
            x, scale, bias, subtract_mean=op == "layer_norm", implementation="triton"
        )

    return norm
