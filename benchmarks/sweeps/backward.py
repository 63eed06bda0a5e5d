"""Rings of the backward, around those that the tables have and where they miss their bars."""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.backward.in_registers import InRegisters
from jaxnorm_kernels.mosaic.backward.schedule import (
    Line,
    NormSchedule,
    norm_schedule,
    softmax_schedule,
    wide_ring,
)

# Rows and columns: a GiB or so at most, and a few rows.
_SHAPES = [(32768, 1024), (32768, 2048), (32768, 4096), (2048, 4096), (8192, 3000), (8192, 5120)]
_SHAPES += [(16384, 8192), (8192, 12288), (8192, 16384), (4096, 32768), (4096, 65536)]
_SHAPES += [(1024, 131072)]

# For each width some grids of a line's attributes; one block, a row a step and one row of lag where
# none is said.
_NORM: dict[int, list[dict[str, list[int]]]] = {
    1024: [{"warpgroups": [1], "blocks_per_sm": [3, 4], "rows": [1, 2], "stages": [2, 4]}],
    2048: [{"warpgroups": [1], "blocks_per_sm": [3], "lag": [0, 1], "stages": [2, 3]}],
    3000: [
        {"warpgroups": [1], "blocks_per_sm": [1, 2], "rows": [1, 2], "stages": [2, 4]},
        {"warpgroups": [2, 3], "rows": [1, 2], "stages": [4]},
        {"warpgroups": [1], "cluster": [2], "blocks_per_sm": [2, 3], "stages": [4]},
    ],
    4096: [
        {"warpgroups": [1], "blocks_per_sm": [2], "lag": [0, 1], "stages": [2, 3]},
        {"warpgroups": [2], "rows": [1, 2], "lag": [1, 2], "stages": [3, 5]},
        {"warpgroups": [1, 2], "cluster": [2], "blocks_per_sm": [1, 2], "stages": [4]},
    ],
    5120: [
        {"warpgroups": [1], "blocks_per_sm": [2], "cluster": [2], "lag": [1, 2], "stages": [4]},
        {"warpgroups": [5], "cluster": [1, 2], "rows": [1, 2], "stages": [4]},
    ],
    8192: [
        {"warpgroups": [2, 4], "cluster": [2], "rows": [1, 2], "lag": [1, 2], "stages": [2, 3, 5]},
        {"warpgroups": [2, 4], "cluster": [4], "rows": [1, 2], "stages": [4]},
    ],
    12288: [{"warpgroups": [2, 3, 4], "cluster": [2], "lag": [1, 2], "stages": [4]}],
    16384: [
        {"warpgroups": [2, 4], "cluster": [2], "lag": [1, 2], "stages": [2, 3, 4]},
        {"warpgroups": [2, 4], "cluster": [4], "rows": [1, 2], "stages": [4]},
    ],
    32768: [
        {"warpgroups": [2, 4], "cluster": [4], "lag": [1, 2], "stages": [3, 4]},
        {"warpgroups": [2, 4], "cluster": [8], "rows": [1, 2], "lag": [1, 2], "stages": [3, 4]},
    ],
    65536: [
        {"warpgroups": [2, 4], "cluster": [8], "lag": [1, 2], "stages": [3, 4]},
        {"warpgroups": [2, 4], "cluster": [16], "rows": [1, 2], "stages": [3, 4]},
    ],
    131072: [{"warpgroups": [2, 4], "cluster": [16], "stages": [2, 3, 4]}],
}
# Softmax rows in registers: warpgroups and clusters that leave a thread so many columns.
_HELD = list(itertools.product((1, 2, 4), (1, 2, 4, 8, 16)))
_HELD_COLUMNS = (16, 64)


def workloads() -> Iterator[KernelWorkload]:
    for op in ("rms_norm", "layer_norm", "softmax"):
        for dtype, shape in itertools.product(("bfloat16", "float32"), _SHAPES):
            yield KernelWorkload(op, "bwd", *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[NormSchedule | InRegisters]:
    """The table's first; then every combination that fits, once."""
    tried = _rings(workload) if workload.is_norm else _held(workload)
    return list(dict.fromkeys(schedule for schedule in tried if schedule is not None))


def _rings(workload: KernelWorkload) -> Iterator[NormSchedule | None]:
    yield norm_schedule(workload.spec)
    for grid in _NORM.get(workload.cols, []):
        for values in itertools.product(*grid.values()):
            line = Line(cols=workload.cols, kib=1024, **dict(zip(grid, values)))
            if (ring := wide_ring(workload.spec, line)) is not None:
                yield ring


def _held(workload: KernelWorkload) -> Iterator[InRegisters | None]:
    yield softmax_schedule(workload.spec)
    vector = 16 // workload.spec.y_dtype.itemsize
    least, most = _HELD_COLUMNS
    for warpgroups, cluster in _HELD:
        if least <= workload.cols / (128 * warpgroups * cluster) <= most:
            yield InRegisters(vector, warpgroups, cluster=cluster)
