"""Schedules of unaligned rows, which are no multiple of 16 bytes.

How many columns a thread reads at once, how many warpgroups and blocks share a row, and how many
rows a block takes; among them the schedules of rows in no periods, which are read element by
element.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from benchmarks.workloads import OPERATIONS
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.rows.windows import window_of
from jaxnorm_kernels.mosaic.schedules import forward, norm_backward
from jaxnorm_kernels.mosaic.schedules.forward_lines import Schedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.mosaic.walks.in_registers import InRegisters
from jaxnorm_kernels.mosaic.walks.ring import Ring

_ROWS = 8192
_COLS = (1001, 4095, 50257)
_BARE: dict[str, Any] = {"params_first": True, "auto_barriers": False}


def workloads() -> Iterator[KernelWorkload]:
    for direction, op, cols in itertools.product(("fwd", "bwd"), OPERATIONS, _COLS):
        # Of functions that have the same schedules, one; bfloat16 has the most classes.
        if op in ("softmax", "layer_norm") or cols == 50257:
            yield KernelWorkload(op, direction, _ROWS, cols, "bfloat16", "bfloat16")  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others that hold windows, and the one that holds none."""
    spec = workload.spec
    without = dataclasses.replace(spec, rows=spec.rows - 1)
    tried: list[Any]
    if workload.direction == "fwd":
        row = forward.choose(spec)
        tried = [row, *_queued(workload, row), *_held(workload, row), forward.choose(without)]
    elif workload.is_norm:
        ring = norm_backward.norm_schedule(spec)
        tried = [ring, *_rings(workload, ring), norm_backward.norm_schedule(without)]
    else:
        tried = [softmax_schedule(s) for s in (spec, without)]
        tried[1:1] = _in_registers(workload)
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _queued(workload: KernelWorkload, chosen: Schedule | None) -> Iterator[Schedule]:
    if chosen is None or chosen.kind != "queued_row" or not workload.is_norm:
        return
    for tiles, slots in ((2, 2), (4, 3), (8, 2), (16, 2)):
        yield dataclasses.replace(chosen, tiles=tiles, slots=slots)
    yield dataclasses.replace(chosen, rereads=not chosen.rereads)
    if workload.cols > 2**14:
        for cluster, warpgroups in ((4, 2), (8, 2)):
            tail = 2 * local_gpu().at_a_time(cluster)
            yield dataclasses.replace(chosen, cluster=cluster, warpgroups=warpgroups, tail=tail)


def _held(workload: KernelWorkload, chosen: Schedule | None) -> Iterator[Schedule]:
    window = window_of(workload.rows, workload.cols, [workload.spec.x_dtype])
    if workload.is_norm and workload.cols > 1024:
        return
    if workload.cols == 1001:
        yield Schedule("warpgroup_row", 4, window=window, **_BARE)
    elif workload.cols == 4095:
        if chosen is not None:
            yield dataclasses.replace(chosen, vector=4)
        yield Schedule("split_row", 8, warpgroups=1, window=window, **_BARE)
        yield Schedule("split_row", 8, warpgroups=2, window=window, **_BARE)
    else:
        for cluster, warpgroups in ((4, 2), (8, 2), (4, 4)):
            yield Schedule(
                "split_row", 8, warpgroups=warpgroups, cluster=cluster, window=window, **_BARE
            )


def _in_registers(workload: KernelWorkload) -> Iterator[InRegisters]:
    window = window_of(workload.rows, workload.cols, [workload.spec.x_dtype])
    if workload.cols == 1001:
        yield InRegisters(4, window=window)
    elif workload.cols == 4095:
        yield InRegisters(4, window=window)
        yield InRegisters(8, 2, window=window)
    else:
        for cluster, warpgroups in ((4, 4), (8, 4)):
            yield InRegisters(8, warpgroups, cluster=cluster, window=window)


def _rings(workload: KernelWorkload, chosen: Any) -> Iterator[Ring | None]:
    if not isinstance(chosen, Ring) or chosen.window is None:
        return
    window = chosen.window
    of_class = dataclasses.replace(
        workload.spec, rows=workload.rows // window.period, cols=window.width
    )
    shapes = {
        1001: [(1, 1, 3, 2), (1, 1, 2, 2), (1, 1, 3, 1)],
        4095: [(2, 1, 2, 1), (4, 1, 1, 1), (1, 2, 2, 1), (1, 2, 2, 2), (1, 4, 3, 2), (2, 2, 1, 1)],
        50257: [(2, 8, 1, 1), (4, 4, 1, 1), (4, 8, 1, 1), (1, 16, 1, 1), (1, 16, 2, 1)],
    }
    for warpgroups, cluster, blocks_per_sm, rows in shapes[workload.cols]:
        yield norm_backward.wide_ring(of_class, warpgroups, cluster, blocks_per_sm, rows, window)
