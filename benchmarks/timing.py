"""Times the GPU kernels of JAX programs with CUPTI.

Without a GPU, it measures wall-clock time, which suffices to test the benchmarks.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import calls
from benchmarks.calls import Timing

Operands = Sequence[tuple[Any, ...]]

# The maximum number of bytes that a timed copy loads and stores. A larger copy might not fit into
# memory together with the operands, so its time is extrapolated.
COPY_BYTES = 8 * 10**9

# XLA's autotuning may choose a matmul whose workspace has the size of an activation. With these
# options, all programs use the matmuls that cuBLAS chooses.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}


def matmul_options() -> dict[str, Any] | None:
    """Return XLA's options for programs with matmuls; None without a GPU."""
    return GPU_OPTIONS if jax.default_backend() == "gpu" else None


def measure(function: Callable[..., Any], operands: Operands) -> Timing:
    """Return the timing of a compiled function. Successive calls use different sets of operands."""
    for operand in operands:
        jax.block_until_ready(function(*operand))
    if jax.default_backend() != "gpu":
        return Timing(wall_us(function, operands, max(calls.REPEATS, len(operands))))
    count = max(calls.REPEATS, len(operands))
    with kernels() as ran:
        for i in range(count):
            out = function(*operands[i % len(operands)])
        jax.block_until_ready(out)
    return calls.of_kernels(ran, count)


@contextlib.contextmanager
def kernels() -> Iterator[list[float]]:
    """Record the microseconds of each GPU kernel that runs within this context.

    The list is complete when the context ends.
    """
    # JAX has no public function that uses CUPTI to time single kernels.
    cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    ran: list[float] = []
    cupti._cupti_init()
    try:
        yield ran
    finally:
        ran += [1e3 * ms for _, ms in cupti._cupti_get_timings(False)]


def wall_us(function: Callable[..., Any], operands: Operands, count: int) -> float:
    """Return the median microseconds from a call to its result."""
    return calls.wall_us(
        lambda i: jax.block_until_ready(function(*operands[i % len(operands)])), count
    )


@functools.cache
def copy_programs(size: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile two functions: one makes an array, the other copies this array.

    The number of bytes that the copy loads, plus the number that it stores, is `size`, or
    COPY_BYTES if this is smaller.
    """
    words = max(1, min(size, COPY_BYTES) // 8)
    fill = jax.jit(lambda i: jnp.full(words, i, jnp.uint32)).lower(0).compile()
    copy = jax.jit(lambda x: x ^ 1).lower(jax.ShapeDtypeStruct((words,), jnp.uint32)).compile()
    return fill, copy


@functools.lru_cache(maxsize=4)
def copy_us(size: int) -> float:
    """Return the microseconds of a copy by XLA. Its loads and stores together are `size` bytes.

    It is the roofline bound for a call whose loads and stores transfer the same number of bytes.
    """
    fill, copy = copy_programs(size)
    copied = measure(copy, [(fill(i),) for i in range(calls.buffers_for(size))])
    return max(1.0, size / COPY_BYTES) * copied.us
