"""Give a kernel's operands and results buffers of their own, which start at aligned addresses.

XLA passes a contiguous slice to a kernel as an address inside the sliced array, and lets a kernel
write its result into a part of a larger array (XLA calls both a dynamic-slice fusion). It does so
if the size of the slice is a multiple of 256 bytes, and never looks at the offset. The address of
``x[1:]`` is then not aligned: Mosaic's launcher refuses it, and a Triton kernel, which is compiled
for multiples of 16 bytes, reads at a wrong address.

An optimization barrier next to the kernel prevents this fusion: XLA copies the slice, and moves the
result after the kernel has written it. Around an array that is no slice a barrier costs nothing:
XLA drops it before it assigns buffers, and fuses no elementwise work into a kernel anyway.

Reading slices in place where the program shows that they are aligned was tried, too. It gained at
most 0.4 % of a training step (GPT-2 small and Llama 1B under scan, with and without
rematerialisation, on an H100), and took 1 to 2 seconds of compilation.
"""

import contextlib
from collections.abc import Iterator

import jax
from jax import lax

#: Addresses of a kernel's arrays are multiples of this many bytes.
ALIGNMENT = 256


def own_buffer(array: jax.Array) -> jax.Array:
    """Return an operand or a result of a kernel, in a buffer that is no part of another one."""
    return lax.optimization_barrier(array)


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Set what JAX needs while a kernel is traced, whatever the caller has set.

    Kernels count in 32 bits: with 64-bit types on, Python's integers would not meet theirs in one
    operation. And Pallas keeps tracers of every kernel, of one that copies a vector, too (jax
    0.11.2 and 0.12.0), for which ``jax_check_tracer_leaks`` would raise.
    """
    with jax.enable_x64(False), jax.check_tracer_leaks(False):
        yield
