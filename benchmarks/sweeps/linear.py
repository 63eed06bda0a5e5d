"""Schedules of a norm and the matmul after it.

They vary the width of a tile, the tiles in shared memory, and the columns of tiles that are
computed before the next rows. They are timed with the norm's scale and (as `product`) without.
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
_LEAST = 1024  # minimum of M = K = N


def workloads() -> Iterator[LinearKernelWorkload]:
    for op, asked in LINEAR.items():
        squares = [shape for shape in SQUARES if shape[0] >= _LEAST]
        for shape in dict.fromkeys((*asked.quick, *squares)):
            yield LinearKernelWorkload(op, "fwd", "x".join(map(str, shape)), "bfloat16")


def schedules(workload: LinearKernelWorkload) -> list[ProductSchedule]:
    """Return the table's schedule first, then others; the largest do not fit in shared memory."""
    chosen = choose(workload.sizes[0], workload.sizes[2])
    tried = [
        dataclasses.replace(chosen, features=features, stages=stages, group=group)
        for features, stages, group in itertools.product(_FEATURES, _STAGES, _GROUPS)
    ]
    return list(dict.fromkeys([chosen, *tried]))
