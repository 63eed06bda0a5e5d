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

from tokamax._src.ops.normalization.triton import TritonNormalization

# As tokamax's own benchmark has it; no public argument says so. What `tokamax.layer_norm` takes is
# the same but for a forward without a backward, which writes y over x: XLA copies x before, by no
# kernel, and the copy of a small array leaves a part of it in the cache.
_NORM = TritonNormalization(input_output_alias=False)


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return _NORM(x, scale, bias, subtract_mean=op == "layer_norm")

    return norm
