"""Schedules of short rows: how many of them a block has, and which threads share one.

The threads of a part of a warp may share a row, or those of a warpgroup, or of several. In forward
passes parameters may be loaded before the reductions or after; and rows may come through a queue.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from benchmarks.workloads import grid
from jaxnorm_kernels.mosaic.backward.rows import Held
from jaxnorm_kernels.mosaic.backward.schedule import softmax_schedule
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.forward.schedule import Line, Schedule, choose, of_line

_COLS, _WARP_COLS = 4096, 1024  # that a warpgroup shares in a forward pass, and a warp
_LEAST_BYTES = 8 * 2**20
_VALUES = (8, 16, 32)  # columns of a thread
_TURNS = (1, 2, 4)


def workloads() -> Iterator[KernelWorkload]:
    passes = itertools.chain(
        grid(directions=("fwd",)), grid(("softmax", "log_softmax"), directions=("bwd",))
    )
    for workload in passes:
        short = workload.cols <= (_COLS if workload.direction == "fwd" else 2 * _COLS)
        if short and workload.bytes >= _LEAST_BYTES:
            yield KernelWorkload(**vars(workload))


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others."""
    if workload.direction == "bwd":
        return list(dict.fromkeys([softmax_schedule(workload.spec), *_backward(workload)]))
    tried = [choose(workload.spec)]
    for values in _VALUES:
        if workload.cols >= WARPGROUP_THREADS:
            tried += _tiles(workload, Line("warpgroup_row", values=values))
        if workload.cols <= _WARP_COLS:
            tried += _tiles(workload, Line("row_tile", values=values))
            tried += _queued(workload, values)
    return list(dict.fromkeys(tried))


def _tiles(workload: KernelWorkload, line: Line) -> Iterator[Schedule]:
    schedule = of_line(line, workload.spec, local_gpu())
    for params_first in (False, True) if workload.is_norm else (False,):
        yield dataclasses.replace(schedule, params_first=params_first, auto_barriers=False)


def _queued(workload: KernelWorkload, values: int) -> Iterator[Schedule]:
    schedule = of_line(Line("queued_tile", values=values), workload.spec, local_gpu())
    if workload.cols * workload.spec.x_dtype.itemsize % VECTOR_BYTES == 0:
        for turns in _TURNS if workload.is_norm else (1,):
            tail = 2 * local_gpu().sms if turns > 1 else 0
            yield dataclasses.replace(schedule, turns=turns, slots=min(turns, 2), tail=tail)


def _backward(workload: KernelWorkload) -> Iterator[Held]:
    vector, cols = softmax_schedule(workload.spec).vector, workload.cols
    for threads, groups in itertools.product((8, 16, 32, WARPGROUP_THREADS), (1, 2, 4)):
        rows = groups * WARPGROUP_THREADS // threads
        if threads * vector <= cols <= 64 * threads // groups:
            yield Held(vector, threads=threads, rows=rows)
    for warpgroups in (2, 4, 8):
        if warpgroups * WARPGROUP_THREADS * vector <= cols:
            yield Held(vector, warpgroups)
