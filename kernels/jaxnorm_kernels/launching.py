"""Helpers for launching kernels: separate buffers for arrays, JAX settings, and the local GPU.

If an operand of a kernel is a contiguous slice of a larger array, XLA passes an address inside this
array to the kernel. If the kernel's result becomes a part of a larger array, XLA lets the kernel
write it there. (XLA calls both cases "dynamic-slice fusion".) XLA checks that the size of
the slice is a multiple of 256 bytes, but does not check its offset. So the address of ``x[1:]`` may
not be aligned. Mosaic's launcher refuses such an address. A Triton kernel, which is compiled for
addresses that are multiples of 16 bytes, would read at a wrong address.

An optimization barrier next to the kernel prevents this fusion: XLA copies the slice before the
kernel, or copies the result after it. If an array is not a slice, the barrier costs nothing: XLA
drops the barrier before it assigns buffers, and makes no copy. The barrier prevents no other fusion
either, because XLA never fuses elementwise work into a kernel.

As an experiment, slices that are provably aligned were passed without a copy. This saved at most
0.4 % of a training step, and added 1 to 2 seconds of compilation (GPT-2 small and Llama 1B under
scan, with and without rematerialisation, on an H100). So slices are copied. There is one exception:
a scan stacks the residuals of its layers in arrays. The slices of these arrays are aligned, and
kernels load and store them in place.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

#: The versions of JAX with which the kernels were tested. The kernels use JAX's private API, which
#: any release may change.
TESTED = ("0.11.2", "0.12.0.1")

#: The address of every operand and result of a kernel is a multiple of this many bytes.
ALIGNMENT = 256


#: A function that puts an operand or a result of a kernel into a separate buffer; see the module
#: docstring.
own_buffer = lax.optimization_barrier


def overwritable(operand: jax.Array) -> Any:
    """Return a ref of an operand that a kernel overwrites. `overwritten` reads it afterwards.

    A kernel that overwrites its operand needs one buffer that holds the operand before the kernel
    and the result after it. XLA provides such a buffer only if the operand is an entire array. If
    the operand is a slice, XLA allocates a buffer for the result but does not copy the slice there,
    so the kernel reads arbitrary contents. An operand that is an entire array in JAX's program may
    still be a slice in the compiled program: XLA merges matmuls that have a common operand, and
    slices the merged result. So this function always applies `own_buffer`.
    """
    return jax.new_ref(own_buffer(operand))


def overwritten(ref: Any) -> jax.Array:
    """Return the contents of a ref made by `overwritable`, after the kernel.

    `own_buffer` also puts the kernel's result into a separate buffer. Otherwise, XLA could let the
    kernel write the result into a part of another array, without copying the operand there.
    """
    return own_buffer(jax.freeze(ref))


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Override the caller's JAX settings while a kernel is traced.

    Kernels use 32-bit indices. If 64-bit types were enabled, Python integers would become int64,
    which cannot be mixed with 32-bit indices. If ``jax_check_tracer_leaks`` were set, JAX would
    raise an error, because Pallas holds references to the tracers of every kernel (jax 0.11.2 and
    0.12.0).
    """
    with jax.enable_x64(False), jax.check_tracer_leaks(False):
        yield


@functools.cache
def local_capability() -> int | None:
    """Return ten times the compute capability of the local GPU (90 for 9.0).

    If there are several local GPUs, return the minimum over them, because a program may run on any
    of them. Return None if there is no local NVIDIA GPU.
    """
    found = [
        getattr(d, "compute_capability", "") for d in jax.local_devices() if d.platform == "gpu"
    ]
    # For an AMD GPU, the attribute is not a number but a name, such as "gfx942".
    if not found or not all(capability.replace(".", "").isdigit() for capability in found):
        return None
    return min(round(10 * float(capability)) for capability in found)
