"""Schedules of a norm and a gate, of heads and of whole layers, in both orders.

Whose elements cost more instructions than a norm's: forward, how many rows or warpgroups a block
has; backward, how many warpgroups and blocks share a row, how many rows a stage has, and how many
blocks a multiprocessor.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.device.gpu import REGISTERS, local_gpu
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.schedules.forward import ForwardRule, ForwardSchedule, choose, of_line
from jaxnorm_kernels.mosaic.schedules.norm_backward import (
    NormSchedule,
    norm_schedule,
    rows_ring,
    wide_ring,
)
from jaxnorm_kernels.specs import Spec

_SHAPES = [(524288, 64), (262144, 128), (131072, 256), (32768, 1024), (16384, 2048), (8192, 4096)]
_SHAPES += [(8192, 5120), (8192, 8192)]
_GROUPS = (1, 2, 4)  # rows of a warp, or of a part of one
_VALUES = (8, 64)  # columns of a thread, forward
_RING_COLUMNS = (4, 32)  # backward
_STAGES, _BLOCKS = (3, 4, 6), (2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class GateFirst(KernelWorkload):
    """The norm of x times the gate's activation."""

    @property
    def spec(self) -> Spec:
        return super().spec.replaced(norm_before_gate=False)


def workloads() -> Iterator[KernelWorkload]:
    kinds = (KernelWorkload, GateFirst)
    for kind, direction, dtype, (rows, cols) in itertools.product(
        kinds, ("fwd", "bwd"), ("bfloat16", "float32"), _SHAPES
    ):
        yield kind("rms_norm_gated", direction, rows, cols, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others, once."""
    spec = workload.spec
    tried: list[Any] = [choose(spec), *_forward(spec)]
    if workload.direction == "bwd":
        tried = [norm_schedule(spec), *_rows_rings(spec), *rings(spec)]
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _forward(spec: Spec) -> Iterator[ForwardSchedule]:
    one = of_line(ForwardRule("row_tile"), spec, local_gpu())
    for groups, threads in itertools.product(_GROUPS, (one.threads, 2 * one.threads)):
        # With more threads for a row, narrower loads.
        vector = one.vector * one.threads // threads
        if threads <= WARP and vector > 1 and groups * spec.cols <= _VALUES[1] * threads:
            rows = groups * WARPGROUP_THREADS // threads
            yield dataclasses.replace(one, vector=vector, threads=threads, rows=rows)
    if spec.cols < WARPGROUP_THREADS * _VALUES[0] // 2:
        return
    row = of_line(ForwardRule("warpgroup_row"), spec, local_gpu())
    yield from (dataclasses.replace(row, params_first=first) for first in (True, False))
    for warpgroups, cluster in itertools.product((1, 2, 4), (1, 2, 4)):
        columns = spec.cols / (WARPGROUP_THREADS * warpgroups * cluster)
        if warpgroups * cluster > 1 and _VALUES[0] <= columns <= _VALUES[1]:
            split = dataclasses.replace(row, kind="split_row")
            yield dataclasses.replace(split, warpgroups=warpgroups, cluster=cluster)


def _rows_rings(spec: Spec) -> Iterator[NormSchedule]:
    if spec.cols > 1024:
        return
    ring = rows_ring(spec)
    row_bytes = 3 * spec.cols * spec.x_dtype.itemsize
    for groups, stages, blocks_per_sm in itertools.product(_GROUPS, _STAGES, _BLOCKS):
        rows = groups * ring.height
        if blocks_per_sm * stages * rows * row_bytes <= local_gpu().smem:
            yield dataclasses.replace(ring, rows=rows, stages=stages, blocks_per_sm=blocks_per_sm)


def rings(spec: Spec) -> Iterator[NormSchedule | None]:
    shares = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3, 4), (1, 2))
    for warpgroups, cluster, blocks_per_sm, rows in shares:
        threads = WARPGROUP_THREADS * warpgroups
        columns = spec.cols / (threads * cluster)
        fits = threads * blocks_per_sm * 64 <= REGISTERS
        if fits and _RING_COLUMNS[0] <= columns <= _RING_COLUMNS[1]:
            yield wide_ring(spec, warpgroups, cluster, blocks_per_sm, rows)
