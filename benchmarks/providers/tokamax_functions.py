"""tokamax's normalization with its Triton kernels (y has x's dtype), and its linear loss."""

from collections.abc import Callable

import jax
import triton.backends.nvidia.driver as triton_driver

# jax-triton 0.4.1 imports two names of Triton 3.7. Triton 3.6, which torch 2.11 requires, lacks
# them, and jax-triton would then silently assume that there is no NVIDIA GPU.
if not hasattr(triton_driver, "TMA_TF32"):
    triton_driver.TMA_TF32 = 11
if not hasattr(triton_driver, "TMA_DTYPE_DEVICE_TO_HOST"):
    triton_driver.TMA_DTYPE_DEVICE_TO_HOST = {i: i for i in range(16)}

import tokamax
from tokamax._src.ops.normalization.triton import TritonNormalization

# As in tokamax's own benchmark; no public argument sets it. `tokamax.layer_norm` differs only in a
# forward pass without a backward pass, which overwrites x with y. XLA then copies x first, but not
# by a kernel, and the copy of a small array leaves a part of it in the cache.
_NORM = TritonNormalization(input_output_alias=False)


def linear_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return tokamax.linear_softmax_cross_entropy_loss(x, labels, weight, reduction="mean")


def function(name: str, op: str, y_dtype: str) -> Callable[..., jax.Array]:
    if op == "linear_cross_entropy":
        return linear_cross_entropy

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return _NORM(x, scale, bias, subtract_mean=op == "layer_norm")

    return norm
