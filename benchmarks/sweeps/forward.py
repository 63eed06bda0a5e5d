"""Schedules of forward passes whose rows are loaded through a pipeline.

A block is a thread block. Schedules differ in the number of rows per block, and in how many
warpgroups and blocks share a row. They also differ in the number of small blocks. A small block
processes only a single tile of rows. Small blocks process the last rows of the array, so that all
multiprocessors finish at about the same time.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from benchmarks.workloads import DTYPES, GRID, PARAMETERS, Operation
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule, choose

_TILES = (1, 2, 3, 4, 6, 8)
# Values to try for the ratio a / b. There are `a` small thread blocks for the last rows (see the
# module docstring), and the GPU runs b blocks at the same time.
_TAILS = (0, 1, 2, 4)
# The minimum and maximum number of columns per thread.
_VALUES = (16, 64)
_LEAST_BYTES = 32 * 2**20


def workloads() -> Iterator[KernelWorkload]:
    ops: tuple[Operation, ...] = ("layer_norm", "rms_norm", "log_softmax")
    shapes = itertools.chain(*GRID.values())
    for op, (x, y), (rows, cols) in itertools.product(ops, DTYPES, shapes):
        workload = KernelWorkload(op, "fwd", rows, cols, x, y)
        if workload.bytes >= _LEAST_BYTES and (x == y or PARAMETERS[op]):
            yield workload


def schedules(workload: KernelWorkload) -> list[ForwardSchedule]:
    """Return the schedule that the table chooses, then others of the same kind."""
    chosen = choose(workload.spec)
    if chosen is None or chosen.kind not in ("pipelined_tile", "pipelined_row"):
        return []
    tried = [chosen, *_shares(workload, chosen)]
    if workload.is_norm:
        tried += _ends(workload, chosen)
    return list(dict.fromkeys(tried))


def _ends(workload: KernelWorkload, chosen: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """Yield schedules with other numbers of rows per block."""
    blocks = local_gpu().at_a_time(chosen.cluster)
    for tiles, tail in itertools.product(_TILES, _TAILS):
        if 2 * tail * blocks * chosen.rows < workload.rows:
            # Use a pipeline slot for each tile of the block, but not more slots than the table's
            # schedule has.
            slots = min(tiles, max(chosen.slots, 2))
            tail_rows = tail * blocks if tiles > 1 else 0
            yield dataclasses.replace(chosen, tiles=tiles, tail=tail_rows, slots=slots)


def _shares(workload: KernelWorkload, chosen: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """Yield variants of `chosen` that differ in the numbers of warpgroups and blocks per row."""
    if chosen.kind == "pipelined_tile" or workload.x_dtype != workload.y_dtype:
        return
    for cluster, warpgroups in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        if not _VALUES[0] <= workload.cols / (128 * cluster * warpgroups) <= _VALUES[1]:
            continue
        spread = dataclasses.replace(chosen, cluster=cluster, warpgroups=warpgroups)
        if not workload.is_norm:
            yield spread
        elif workload.op == "layer_norm" and workload.y_dtype == "bfloat16":
            tiles, tail = 4, 2 * local_gpu().at_a_time(cluster)
            ends = dataclasses.replace(spread, tiles=tiles, tail=tail, slots=3)
            yield from (dataclasses.replace(ends, rereads=r) for r in (False, True))
