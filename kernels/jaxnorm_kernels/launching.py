"""The local GPU, and what every kernel's launch needs: separate buffers, and JAX's settings.

XLA passes a contiguous slice to a kernel as an address inside the sliced array, and lets a kernel
write its result into a part of a larger array (XLA calls both a dynamic-slice fusion). It does so
if the size of the slice is a multiple of 256 bytes, and ignores the offset. The address of
``x[1:]`` is then not aligned: Mosaic's launcher refuses it, and a Triton kernel, which is compiled
for multiples of 16 bytes, reads at a wrong address.

An optimization barrier next to the kernel prevents this fusion: XLA copies the slice, or copies the
result once the kernel has written it. If an array is not a slice, the barrier costs nothing: XLA
drops it before buffer assignment, and would not fuse elementwise work into a kernel anyway.

An alternative was tried that passes slices without a copy if they are provably aligned. It saved at
most 0.4 % of a training step (GPT-2 small and Llama 1B under scan, with and without
rematerialisation, on an H100), and added 1 to 2 seconds of compilation.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax import lax

#: Addresses of a kernel's arrays are multiples of this many bytes.
ALIGNMENT = 256


#: Return an operand or a result of a kernel in a separate buffer.
own_buffer = lax.optimization_barrier


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Override the caller's JAX settings while a kernel is traced.

    Kernels use 32-bit indices: with 64-bit types enabled, Python's integers would become int64,
    which does not match. Pallas keeps references to the tracers of every kernel (jax 0.11.2 and
    0.12.0), for which ``jax_check_tracer_leaks`` would raise.
    """
    with jax.enable_x64(False), jax.check_tracer_leaks(False):
        yield


@functools.cache
def local_capability() -> int | None:
    """Return ten times the compute capability of the local NVIDIA GPU, or None without one."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "")  # for AMD GPUs, a name: "gfx942"
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return None
    return round(10 * float(capability))
