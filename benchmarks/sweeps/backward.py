"""Schedules of the backward passes of norms and softmaxes, over many widths.

The kernels of norms load rows through a pipeline. Their schedules differ in

* the number of warpgroups and of thread blocks that share a row
* the number of thread blocks per multiprocessor
* the number of rows per step of the pipeline

The kernels of softmaxes hold rows in registers. Their schedules differ only in the number of
warpgroups and of thread blocks that share a row.
"""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.loops.in_registers import InRegisters
from jaxnorm_kernels.mosaic.schedules.norm_backward import (
    NormSchedule,
    narrow_rows,
    norm_schedule,
    wide_rows,
)
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule

_OPS = ("layer_norm", "rms_norm", "add_layer_norm", "rms_norm_add_rms_norm", "softmax")
_ELEMENTS = 2**26
_COLS = [512, 640, 768, 896, 1024, 1152, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168]
_COLS += [8192, 10240, 12288, 14336, 16384, 20480, 24576, 32768, 49152, 65536, 131072]
_WARPGROUPS, _CLUSTERS, _BLOCKS_PER_SM = (1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 3)
# For norms, the minimum and maximum number of columns per thread. The key is True if a cluster of
# several thread blocks shares a row. In a cluster, the minimum is 8: with fewer columns, the blocks
# spend their time waiting for each other.
_RING_COLUMNS = {False: (4, 32), True: (8, 32)}
# For softmaxes, the minimum and maximum number of columns per thread.
_HELD_COLUMNS = (16, 64)


def workloads() -> Iterator[KernelWorkload]:
    for op, cols, dtype in itertools.product(_OPS, _COLS, ("bfloat16", "float32")):
        rows = _ELEMENTS // cols // 8 * 8
        workload = KernelWorkload(op, "bwd", rows, cols, dtype, dtype)  # type: ignore[arg-type]
        if len(schedules(workload)) > 1:
            yield workload


def schedules(workload: KernelWorkload) -> list[NormSchedule | InRegisters]:
    """Return the schedule that the tables choose, then all other combinations that fit."""
    tried = _rings(workload) if workload.is_norm else _held(workload)
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _rings(workload: KernelWorkload) -> Iterator[NormSchedule | None]:
    spec, cols = workload.spec, workload.cols
    yield norm_schedule(spec)
    if cols <= 1024:
        yield narrow_rows(spec)
    shares = itertools.product(_WARPGROUPS, _CLUSTERS, _BLOCKS_PER_SM, (1, 2))
    for warpgroups, cluster, blocks_per_sm, rows in shares:
        columns = cols / (128 * warpgroups * cluster)
        if 2 <= warpgroups * blocks_per_sm <= 4 and _in(_RING_COLUMNS[cluster > 1], columns):
            yield wide_rows(spec, warpgroups, cluster, blocks_per_sm, rows)


def _held(workload: KernelWorkload) -> Iterator[InRegisters | None]:
    yield softmax_schedule(workload.spec)
    vector = 16 // workload.spec.y_dtype.itemsize
    for warpgroups, cluster in itertools.product(_WARPGROUPS, _CLUSTERS):
        if _in(_HELD_COLUMNS, workload.cols / (128 * warpgroups * cluster)):
            yield InRegisters(vector, warpgroups, cluster=cluster)


def _in(limits: tuple[int, int], columns: float) -> bool:
    least, most = limits
    return least <= columns <= most
