"""Schedules of the kernel for a norm and the matmul after it.

They differ in the width of an output tile, in the number of pipeline stages in shared memory, and
in the order of the tiles. The columns of output tiles are divided into groups of neighbouring
columns. The kernel computes the tiles of one group in all rows, then the tiles of the next group. A
schedule sets the width of a group. The kernel is timed twice: with the norm, and without the norm
(the operation `product`).
"""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.contract import LinearKernelWorkload
from benchmarks.linear import LINEAR, SQUARES
from jaxnorm_kernels.mosaic.linear import ProductSchedule, choose

_FEATURES = (128, 192, 256)
_STAGES = (3, 4, 5, 6)
_GROUPS = (4, 8, 16, 32)
_LEAST = 1024  # minimum size M = K = N of a square matmul


def workloads() -> Iterator[LinearKernelWorkload]:
    for op, asked in LINEAR.items():
        squares = [shape for shape in SQUARES if shape[0] >= _LEAST]
        for shape in dict.fromkeys((*asked.quick, *squares)):
            yield LinearKernelWorkload(op, "fwd", "x".join(map(str, shape)), "bfloat16")


def schedules(workload: LinearKernelWorkload) -> list[ProductSchedule]:
    """Return the schedule that is chosen by default, then others.

    The largest schedules do not fit in shared memory, and are reported as failed.
    """
    chosen = choose(workload.sizes[0], workload.sizes[2])
    tried = [
        dataclasses.replace(chosen, features=features, stages=stages, group=group)
        for features, stages, group in itertools.product(_FEATURES, _STAGES, _GROUPS)
    ]
    return list(dict.fromkeys([chosen, *tried]))
