"""Kernel time on a GPU, by CUPTI, on buffers that are not in its cache."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

L2_BYTES = 60e6  # of an H200; what a call touches is used again only after 5 times as much
MAX_BUFFERS = 64
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the calls."""

    us: float  # all kernels of a call
    main_us: float  # its longest kernel

    def gbps(self, size: int) -> float:
        return size / self.us / 1e3


def buffers_for(size: int) -> int:
    """How many sets of operands to rotate, for calls that touch `size` bytes."""
    return min(MAX_BUFFERS, max(2, math.ceil(5 * L2_BYTES / size)))


def measure(function: Callable[..., Any], operands: Sequence[tuple[Any, ...]]) -> Timing:
    """Times a compiled function on each of `operands` in turn."""
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext  # the only CUPTI hook that counts single kernels
    for operand in operands:
        jax.block_until_ready(function(*operand))
    calls = max(REPEATS, len(operands))
    cupti._cupti_init()
    try:
        for i in range(calls):
            out = function(*operands[i % len(operands)])
        jax.block_until_ready(out)
    finally:
        kernels = [1e3 * ms for _, ms in cupti._cupti_get_timings(False)]
    each, rest = divmod(len(kernels), calls)
    if each == 0 or rest:
        raise RuntimeError(f"{len(kernels)} kernels in {calls} calls: the calls differ")
    by_call = [kernels[i * each : (i + 1) * each] for i in range(calls)]
    return Timing(
        statistics.median(map(sum, by_call)), statistics.median(max(call) for call in by_call)
    )


def copy_roof(size: int) -> Timing:
    """A kernel that reads and writes `size` bytes in all, as fast as XLA can."""
    copy = jax.jit(lambda x: x ^ 1)
    words = max(1, size // 8)
    arrays = [(jnp.full(words, i, jnp.uint32),) for i in range(buffers_for(size))]
    return measure(copy, arrays)
