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
        us = wall_us(function, operands, calls.calls_for(operands))
        return Timing(us, us)
    count = calls.calls_for(operands)
    with kernels() as ran:
        for i in range(count):
            out = function(*operands[i % len(operands)])
        jax.block_until_ready(out)
    return calls.of_kernels([us for _, us in ran], count)


@contextlib.contextmanager
def kernels() -> Iterator[list[tuple[str, float]]]:
    """Record the GPU kernels that run within this context: a list of (name, microseconds).

    The list is complete when the context ends.
    """
    # JAX has no public function that uses CUPTI to time single kernels.
    cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    ran: list[tuple[str, float]] = []
    cupti._cupti_init()
    try:
        yield ran
    finally:
        ran += [(name, 1e3 * ms) for name, ms in cupti._cupti_get_timings(False)]


def wall_us(function: Callable[..., Any], operands: Operands, count: int) -> float:
    """Return the median microseconds from a call to its result."""
    return calls.wall_us(
        lambda i: jax.block_until_ready(function(*operands[i % len(operands)])), count
    )


@functools.cache
def copy_programs(size: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile two functions: one makes an array, the other copies this array.

    The number of bytes that the copy loads, plus the number that it stores, is `size`.
    """
    words, _ = calls.words_for(size)
    fill = jax.jit(lambda i: jnp.full(words, i, jnp.uint32)).lower(0).compile()
    copy = jax.jit(lambda x: x ^ 1).lower(jax.ShapeDtypeStruct((words,), jnp.uint32)).compile()
    return fill, copy


@functools.lru_cache(maxsize=4)
def copy_roof(size: int) -> Timing:
    """Return the timing of a copy by XLA. Its loads and stores together transfer `size` bytes.

    It is the roofline bound for a call whose loads and stores transfer the same number of bytes.
    """
    fill, copy = copy_programs(size)
    copied = measure(copy, [(fill(i),) for i in range(calls.buffers_for(size))])
    return copied.times(calls.words_for(size)[1])
