"""Schedules of the norm of attention heads with a rotation.

They differ in

* the number of threads per row. With twice the threads, a thread loads half the elements at once
* the number of rows of a tile, for forward passes
* the number of rows of a pipeline stage, for backward passes
* the number of thread blocks per multiprocessor, for backward passes
"""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.contract import HeadsKernelWorkload
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads

_SHAPES = ((4, 2048, 32, 128), (4, 2048, 32, 64), (4, 2048, 16, 256))
# Factors to try for the number of threads per row. The number that the kernel's schedule table
# chooses is multiplied by the factor. The number of elements that a thread loads at once is divided
# by the factor.
_THREADS = (1, 2)
_TILES = (1, 2, 4)
_STAGE_BYTES, _STAGES, _BLOCKS = (8192, 16384, 32768), (3,), (2, 3, 4, 6)
_SHARED_BYTES = 220 * 1024


def workloads() -> Iterator[HeadsKernelWorkload]:
    for shape, dtype in itertools.product(_SHAPES, ("bfloat16", "float32")):
        yield HeadsKernelWorkload("fwd", shape, dtype)
        yield HeadsKernelWorkload("bwd", shape, dtype)


def schedules(workload: HeadsKernelWorkload) -> list[Heads]:
    """Return a list of schedules: the schedule that the table chooses, then other valid ones."""
    spec = workload.spec
    chosen = (heads.forward if workload.direction == "fwd" else heads.backward)(spec)
    if chosen is None:
        return []
    tried = [chosen]
    for times in _THREADS:
        threads, vector = chosen.threads * times, chosen.vector // times
        if threads > 32 or vector < 1:
            continue
        height = WARPGROUP_THREADS // threads
        shape = dataclasses.replace(chosen, threads=threads, vector=vector, height=height)
        if workload.direction == "fwd":
            tried += [dataclasses.replace(shape, height=n * height) for n in _TILES]
            continue
        row_bytes = 2 * spec.cols * spec.x_dtype.itemsize
        for size, stages, blocks in itertools.product(_STAGE_BYTES, _STAGES, _BLOCKS):
            rows = max(1, size // (height * row_bytes)) * height
            if blocks * stages * rows * row_bytes <= _SHARED_BYTES:
                tried.append(
                    dataclasses.replace(shape, rows=rows, stages=stages, blocks_per_sm=blocks)
                )
    return list(dict.fromkeys(tried))
