"""Schedules of softmaxes over unaligned rows, which are no multiple of 16 bytes.

How many columns a thread reads at once, and how many warpgroups and blocks share a row; among them
the schedules of rows in no periods, which are read element by element.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.loops.in_registers import InRegisters
from jaxnorm_kernels.mosaic.rows.partitions import alignment_view
from jaxnorm_kernels.mosaic.schedules import forward
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule

_ROWS = 8192
_COLS = (1001, 4095, 50257)
_BARE: dict[str, Any] = {"params_first": True}


def workloads() -> Iterator[KernelWorkload]:
    for direction, op, cols in itertools.product(("fwd", "bwd"), ("softmax", "log_softmax"), _COLS):
        # Both functions have the same schedules; bfloat16 has the most classes.
        if op == "softmax" or cols == 50257:
            yield KernelWorkload(op, direction, _ROWS, cols, "bfloat16", "bfloat16")  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Any]:
    """The table's first; then others that hold windows, and the one that holds none."""
    spec = workload.spec
    without = dataclasses.replace(spec, rows=spec.rows - 1)
    tried: list[Any]
    if workload.direction == "fwd":
        row = forward.choose(spec)
        tried = [row, *_held(workload, row), forward.choose(without)]
    else:
        tried = [softmax_schedule(s) for s in (spec, without)]
        tried[1:1] = _in_registers(workload)
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _held(workload: KernelWorkload, chosen: ForwardSchedule | None) -> Iterator[ForwardSchedule]:
    window = alignment_view(workload.rows, workload.cols, [workload.spec.x_dtype])
    if workload.cols == 1001:
        yield ForwardSchedule("warpgroup_row", 4, window=window, **_BARE)
    elif workload.cols == 4095:
        if chosen is not None:
            yield dataclasses.replace(chosen, vector=4)
        yield ForwardSchedule("split_row", 8, warpgroups=1, window=window, **_BARE)
        yield ForwardSchedule("split_row", 8, warpgroups=2, window=window, **_BARE)
    else:
        for cluster, warpgroups in ((4, 2), (8, 2), (4, 4)):
            yield ForwardSchedule(
                "split_row", 8, warpgroups=warpgroups, cluster=cluster, window=window, **_BARE
            )


def _in_registers(workload: KernelWorkload) -> Iterator[InRegisters]:
    window = alignment_view(workload.rows, workload.cols, [workload.spec.x_dtype])
    if workload.cols == 1001:
        yield InRegisters(4, window=window)
    elif workload.cols == 4095:
        yield InRegisters(4, window=window)
        yield InRegisters(8, 2, window=window)
    else:
        for cluster, warpgroups in ((4, 4), (8, 4)):
            yield InRegisters(8, warpgroups, cluster=cluster, window=window)
