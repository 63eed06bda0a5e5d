"""tokamax's norms, and its function that computes a linear layer and the cross-entropy after it.

The norms are Triton kernels.
"""

from collections.abc import Callable

import jax
import triton.backends.nvidia.driver as triton_driver

# Define two names that jax-triton 0.4.1 imports from Triton 3.7. torch 2.11 requires Triton 3.6,
# which lacks them, and jax-triton would then silently assume that there is no NVIDIA GPU.
if not hasattr(triton_driver, "TMA_TF32"):
    triton_driver.TMA_TF32 = 11
if not hasattr(triton_driver, "TMA_DTYPE_DEVICE_TO_HOST"):
    triton_driver.TMA_DTYPE_DEVICE_TO_HOST = {i: i for i in range(16)}

import tokamax
from tokamax._src.ops.normalization.triton import TritonNormalization

# Call an internal operation, as tokamax's own benchmark does. The public function
# `tokamax.layer_norm` has a disadvantage here: if only the forward pass runs, its kernel overwrites
# x with y, so XLA copies x first. The copy is not a kernel and would not be timed, but it would
# leave a part of a small x in the cache. The public function has no argument that prevents this.
_NORM = TritonNormalization(input_output_alias=False)


def linear_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return tokamax.linear_softmax_cross_entropy_loss(x, labels, weight, reduction="mean")


def function(name: str, op: str, y_dtype: str) -> Callable[..., jax.Array]:
    if op == "linear_cross_entropy":
        return linear_cross_entropy

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return _NORM(x, scale, bias, subtract_mean=op == "layer_norm")

    return norm
