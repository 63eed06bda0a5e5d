"""The rules by which calls are timed, both in JAX and in PyTorch.

A time is the median over several calls. Each call uses operands that are not in the GPU's cache.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

# The size of an H200's L2 cache in bytes. Timed calls cycle through several sets of operands. All
# sets together have about 5 times this size. There are at least 2 and at most MAX_BUFFERS sets.
L2_BYTES = 60e6
MAX_BUFFERS = 64
# The number of timed calls, unless there are more sets of operands.
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a call takes on the device: medians over all timed calls.

    Attributes:
      us: the sum of the times of all kernels of a call, in microseconds.
      kernels: the number of kernels of a call; None on a CPU.
    """

    us: float
    kernels: int | None = None


def buffers_for(size: int) -> int:
    """Return the number of sets of operands for calls that load and store `size` bytes.

    Successive calls use different sets, so that no operand of a call is in the L2 cache.
    """
    return min(MAX_BUFFERS, max(2, math.ceil(5 * L2_BYTES / size)))


def of_kernels(kernels_us: Sequence[float], calls: int) -> Timing:
    """Return the timing of one call, given the times of all kernels of several equal calls.

    `kernels_us` has the times in microseconds, in the order in which the kernels ran. `calls` is
    the number of calls.
    """
    each, rest = divmod(len(kernels_us), calls)
    if each == 0 or rest:
        raise RuntimeError(f"{len(kernels_us)} kernels in {calls} calls: the calls differ")
    by_call = (sum(kernels_us[i * each : (i + 1) * each]) for i in range(calls))
    return Timing(statistics.median(by_call), each)


def wall_us(call: Callable[[int], None], calls: int) -> float:
    """Return the median time of ``call(i)`` in microseconds. The call must wait for its result."""
    times = []
    for i in range(calls):
        start = time.perf_counter()
        call(i)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
