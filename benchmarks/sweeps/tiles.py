"""Schedules of short rows: how many of them a block has, and which threads share one.

The threads of a part of a warp may share a row, or those of a warpgroup, or of several. In forward
passes parameters may be loaded before the reductions or after; and rows may come through a queue.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from benchmarks.workloads import Operation, grid
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARP, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.loops.in_registers import InRegisters
from jaxnorm_kernels.mosaic.schedules.forward import ForwardRule, ForwardSchedule, choose, of_line
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule

_COLS = {"fwd": 4096, "bwd": 12288}
_WARP_COLS = 1536  # that a warp shares
_LEAST_BYTES = 8 * 2**20
_GROUPS = (1, 2, 4)  # rows of a warp, or of a part of one
_VALUES = 64  # columns of a thread, at most
_TILES = (1, 2, 4)
# Beside those of the benchmarks: rows that no power of two divides, and those that start anywhere.
_BETWEEN = [(32768, 640), (32768, 1152), (32768, 1280), (32768, 1536)]
_ODD = [(8192, 2047), (8192, 8191), (8192, 12287)]


def workloads() -> Iterator[KernelWorkload]:
    softmaxes: tuple[Operation, ...] = ("softmax", "log_softmax")
    passes = itertools.chain(
        grid(directions=("fwd",)),
        grid(directions=("fwd",), shapes=_BETWEEN),
        grid(softmaxes, directions=("bwd",)),
        grid(softmaxes, directions=("bwd",), shapes=_ODD),
    )
    for workload in passes:
        if workload.cols <= _COLS[workload.direction] and workload.bytes >= _LEAST_BYTES:
            yield KernelWorkload(**vars(workload))


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others, once."""
    if workload.direction == "bwd":
        tried: list[Any] = [softmax_schedule(workload.spec), *_backward(workload)]
    else:
        tried = [choose(workload.spec), *_forward(workload)]
    return list(dict.fromkeys(tried))


def _forward(workload: KernelWorkload) -> Iterator[ForwardSchedule]:
    loads = (False, True) if workload.is_norm else (True,)
    if workload.cols >= WARPGROUP_THREADS:
        row = of_line(ForwardRule("warpgroup_row"), workload.spec, local_gpu())
        yield from (dataclasses.replace(row, params_first=first) for first in loads)
    if workload.cols > _WARP_COLS:
        return
    one = of_line(ForwardRule("row_tile"), workload.spec, local_gpu())
    for groups in _GROUPS:
        rows = groups * WARPGROUP_THREADS // one.threads
        if groups * workload.cols <= _VALUES * one.threads:
            tile = dataclasses.replace(one, rows=rows)
            yield from (dataclasses.replace(tile, params_first=first) for first in loads)
            if workload.cols * workload.spec.x_dtype.itemsize % VECTOR_BYTES == 0:
                yield from _queued(tile)


def _queued(tile: ForwardSchedule) -> Iterator[ForwardSchedule]:
    for tiles in _TILES:
        tail = 2 * local_gpu().sms if tiles > 1 else 0
        yield dataclasses.replace(
            tile, kind="pipelined_tile", tiles=tiles, slots=min(tiles, 2), tail=tail
        )


def _backward(workload: KernelWorkload) -> Iterator[InRegisters]:
    chosen, cols = softmax_schedule(workload.spec), workload.cols
    if chosen is None:
        return
    vector = chosen.vector
    for threads, groups in itertools.product((8, 16, WARP), _GROUPS):
        if threads * vector <= cols and groups * cols <= _VALUES * threads:
            yield InRegisters(vector, threads=threads, rows=groups * WARPGROUP_THREADS // threads)
    for warpgroups in (1, 2, 4, 8):
        if warpgroups * WARPGROUP_THREADS * vector <= cols:
            yield InRegisters(vector, warpgroups)
