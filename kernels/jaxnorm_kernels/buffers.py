"""Give each operand and result of a kernel a buffer that starts at an aligned address.

XLA passes a contiguous slice to a kernel as an address inside the sliced array, and lets a kernel
write its result into a part of a larger array (XLA calls both a dynamic-slice fusion). It takes
for granted that the address is a multiple of 256 bytes, as it is where the offset is a multiple of
the size of the slice. For ``x[1:]`` it is not. Mosaic's launcher then refuses the call, and a
Triton kernel, which is compiled for multiples of 16 bytes, reads at wrong addresses.

An optimization barrier next to the kernel prevents this fusion: XLA copies the slice, and writes
the result before it moves it. Around an array that is no slice a barrier costs nothing: XLA drops
it before it assigns buffers, and fuses no elementwise work into a kernel anyway.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from jax import lax

#: Addresses of a kernel's arrays are multiples of this many bytes.
ALIGNMENT = 256

_aligned: contextvars.ContextVar[Sequence[jax.Array]] = contextvars.ContextVar(
    "aligned", default=()
)


@contextlib.contextmanager
def aligned(operands: Sequence[jax.Array]) -> Iterator[None]:
    """Lets kernels that are traced inside read these operands where they are.

    They are known to be slices at aligned addresses, which need no copy.
    """
    token = _aligned.set(operands)
    try:
        yield
    finally:
        _aligned.reset(token)


def operand(array: jax.Array) -> jax.Array:
    """Return an operand of a kernel, copied if it is a slice that is not known to be aligned."""
    if any(array is other for other in _aligned.get()):
        return array
    return lax.optimization_barrier(array)


def result(array: jax.Array) -> jax.Array:
    """Return a result of a kernel in a buffer that is no part of another one."""
    return lax.optimization_barrier(array)
