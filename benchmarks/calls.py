"""How both sides time a call: on buffers outside the cache, as a median over single calls."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

L2_BYTES = 60e6  # an H200's cache; buffers rotate over 5 times as much
MAX_BUFFERS = 64
# Maximum number of bytes that a copy moves, so that it fits beside the operands. The time of a
# larger copy is extrapolated.
COPY_BYTES = 8e9
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the timed calls, in microseconds."""

    us: float  # all kernels of a call
    main_us: float  # the longest kernel of a call
    kernels: int | None = None  # of a call; unknown on a CPU

    def times(self, factor: float) -> "Timing":
        """Return the timing multiplied by `factor`."""
        return Timing(factor * self.us, factor * self.main_us, self.kernels)

    def gbps(self, size: int) -> float:
        """Return the GB/s of a call that moves `size` bytes."""
        return size / self.us / 1e3

    def figures(self, workload: Any, roof: "Timing | None") -> dict[str, float | None]:
        """Return GB/s and the fraction of a copy's speed, or TFLOP/s if matmuls dominate."""
        return {
            "us": self.us,
            "main_us": self.main_us,
            "gbps": None if roof is None else self.gbps(workload.bytes),
            "roof": None if roof is None else roof.us / self.us,
            "tflops": workload.flops / self.us / 1e6 if workload.flops else None,
            "kernels": self.kernels,
        }


def buffers_for(size: int) -> int:
    """Return the number of sets of operands that calls use in turn; a call touches `size` bytes."""
    return min(MAX_BUFFERS, max(2, math.ceil(5 * L2_BYTES / size)))


def words_for(size: int) -> tuple[int, float]:
    """Return the number of 32-bit words to copy, and a factor for the time.

    The time of this copy times the factor is the time of a copy that moves `size` bytes.
    """
    words = max(1, min(size, int(COPY_BYTES)) // 8)
    return words, max(1.0, size / COPY_BYTES)


def calls_for(operands: Sequence[Any]) -> int:
    """Return the number of calls to time: each set of operands once, and enough for a median."""
    return max(REPEATS, len(operands))


def of_kernels(kernels_us: Sequence[float], calls: int) -> Timing:
    """Return the timing of `calls` equal calls, given the times of all their kernels in order."""
    each, rest = divmod(len(kernels_us), calls)
    if each == 0 or rest:
        raise RuntimeError(f"{len(kernels_us)} kernels in {calls} calls: the calls differ")
    by_call = [kernels_us[i * each : (i + 1) * each] for i in range(calls)]
    return Timing(
        statistics.median(map(sum, by_call)),
        statistics.median(max(call) for call in by_call),
        each,
    )


def wall_us(call: Callable[[int], None], calls: int) -> float:
    """Return the median wall-clock time of ``call(i)``, which must wait for its result."""
    times = []
    for i in range(calls):
        start = time.perf_counter()
        call(i)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
