"""Helpers for launching kernels: separate buffers for arrays, JAX settings, and the local GPU.

XLA passes a contiguous slice to a kernel as an address inside the sliced array, and lets a kernel
write its result into a part of a larger array (XLA calls both a dynamic-slice fusion). XLA checks
that the size of the slice is a multiple of 256 bytes, but not that its offset is. The address of
``x[1:]`` is then not aligned: Mosaic's launcher refuses it, and a Triton kernel, which is compiled
for multiples of 16 bytes, reads at a wrong address.

An optimization barrier next to the kernel prevents this fusion: XLA copies the slice, or copies the
result once the kernel has written it. If an array is not a slice, the barrier costs nothing: XLA
drops the barrier before buffer assignment, and would not fuse elementwise work into a kernel
anyway.

As an alternative, provably aligned slices were passed without a copy. This saved at most 0.4 % of a
training step (GPT-2 small and Llama 1B under scan, with and without rematerialisation, on an H100),
and added 1 to 2 seconds of compilation.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax import lax

#: The address of every array that a kernel takes or returns is a multiple of this many bytes.
ALIGNMENT = 256


#: Put an operand or a result of a kernel into a separate buffer; see the module docstring.
own_buffer = lax.optimization_barrier


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Override the caller's JAX settings while a kernel is traced.

    Kernels use 32-bit indices. With 64-bit types enabled, Python integers would become int64, and
    int64 cannot be mixed with 32-bit indices. The option ``jax_check_tracer_leaks`` would raise an
    error, because Pallas holds references to the tracers of every kernel (jax 0.11.2 and 0.12.0).
    """
    with jax.enable_x64(False), jax.check_tracer_leaks(False):
        yield


@functools.cache
def local_capability() -> int | None:
    """Return ten times the compute capability of the local NVIDIA GPU (90 for 9.0), or None."""
    device = jax.local_devices()[0]
    # For an AMD GPU, the attribute is not a number but a name, such as "gfx942".
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return None
    return round(10 * float(capability))
