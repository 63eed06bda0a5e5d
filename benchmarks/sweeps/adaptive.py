"""Schedules of adaLN and of adaLN-zero's step: norms whose parameters are those of each sample.

Few rows share them, and of a step there are three: forward, how many rows a block takes of a
sample, in which threads, and whether they come through a queue; backward, how many warpgroups and
blocks share a row, how many rows a step has, and how many blocks a multiprocessor. The shapes are
those of the blocks `ada_layer_norm` and `gated_add_layer_norm`.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from benchmarks.sweeps.gated import rings
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.schedules.forward import ForwardRule, ForwardSchedule, choose, of_line
from jaxnorm_kernels.mosaic.schedules.norm_backward import norm_schedule
from jaxnorm_kernels.specs import Spec

# Rows, columns, samples.
_SHAPES = [(32 * 1024, 1152, 32), (8 * 4096, 1536, 8), (16 * 1024, 2048, 16)]
_MOST_VALUES = 48  # columns of a thread, forward
_TILES, _SLOTS = (1, 2, 4, 8), (1, 2, 3)  # rows of a block that come through a queue, and room


def workloads() -> Iterator[KernelWorkload]:
    for gated, dtype, direction, (rows, cols, groups) in itertools.product(
        (False, True), ("bfloat16", "float32"), ("fwd", "bwd"), _SHAPES
    ):
        op = "add_layer_norm" if gated else "layer_norm"
        yield KernelWorkload(op, direction, rows, cols, dtype, dtype, groups, gated)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others, once."""
    spec = workload.spec
    is_forward = workload.direction == "fwd"
    tried = [choose(spec), *_forward(spec)] if is_forward else [norm_schedule(spec), *rings(spec)]
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _forward(spec: Spec) -> Iterator[ForwardSchedule]:
    tile = of_line(ForwardRule("row_tile"), spec, local_gpu())
    if spec.cols <= _MOST_VALUES * tile.threads:
        yield tile
        yield from _queued(dataclasses.replace(tile, kind="pipelined_tile"))
    row = of_line(ForwardRule("warpgroup_row"), spec, local_gpu())
    yield row
    for warpgroups, cluster in itertools.product((1, 2), (1, 2)):
        if spec.cols < warpgroups * cluster * WARPGROUP_THREADS * row.vector:
            continue
        split = dataclasses.replace(row, warpgroups=warpgroups, cluster=cluster)
        if warpgroups * cluster > 1:
            yield dataclasses.replace(split, kind="split_row")
        yield from _queued(dataclasses.replace(split, kind="pipelined_row"))


def _queued(schedule: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """With the rows that are taken one by one at the end, where a block has several."""
    for tiles, slots in itertools.product(_TILES, _SLOTS):
        if slots <= tiles:
            tail = 2 * local_gpu().at_a_time(schedule.cluster) if tiles > 1 else 0
            yield dataclasses.replace(schedule, tiles=tiles, slots=slots, tail=tail)
