"""Rings of the backward, around those that the tables have and where they miss their bars."""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.backward.ring import Ring
from jaxnorm_kernels.mosaic.backward.schedule import Line, wide_ring
from jaxnorm_kernels.specs import Spec

_ROWS = {1024: 32768, 2048: 32768, 4096: 32768, 3000: 8192, 5120: 8192, 8192: 16384, 12288: 8192}
_ROWS |= {16384: 8192, 32768: 4096, 65536: 4096, 131072: 1024}

# For each width some grids of a line's attributes; one block, a row a step and one row of lag where
# none is said.
_NORM: dict[int, list[dict[str, list[int]]]] = {
    1024: [{"warpgroups": [1], "blocks_per_sm": [3, 4], "rows": [1, 2], "lag": [0, 1]}],
    2048: [{"warpgroups": [1], "blocks_per_sm": [2, 3], "rows": [1, 2], "lag": [0, 1]}],
    3000: [{"warpgroups": [1, 2], "blocks_per_sm": [1, 2], "rows": [1, 2]}],
    4096: [{"warpgroups": [1], "blocks_per_sm": [2], "lag": [0, 1]}, {"warpgroups": [2]}],
    5120: [
        {"warpgroups": [1], "blocks_per_sm": [2], "cluster": [1, 2], "rows": [1, 2]},
        {"warpgroups": [2], "rows": [1, 2]},
        {"warpgroups": [5], "cluster": [2]},
    ],
    8192: [
        {"warpgroups": [2, 4]},
        {"warpgroups": [2], "cluster": [2], "rows": [1, 2]},
        {"warpgroups": [2], "pieces": [2]},
    ],
    12288: [{"warpgroups": [2, 3], "cluster": [2]}],
    16384: [{"warpgroups": [2, 4], "cluster": [2], "pieces": [1, 2]}],
    32768: [
        {"warpgroups": [4], "cluster": [2], "pieces": [2, 4], "lag": [0, 1]},
        {"warpgroups": [2, 4], "cluster": [4], "pieces": [1, 2]},
        {"warpgroups": [2], "cluster": [8]},
    ],
    65536: [
        {"warpgroups": [4], "cluster": [4, 8], "pieces": [2, 4], "lag": [0, 1]},
        {"warpgroups": [2], "cluster": [8], "pieces": [1, 2]},
        {"warpgroups": [2], "cluster": [16], "blocks_per_sm": [1, 2]},
    ],
    131072: [
        {"warpgroups": [2, 4], "cluster": [16], "pieces": [1, 2]},
        {"warpgroups": [4], "cluster": [8], "pieces": [2, 4]},
    ],
}
_SOFTMAX: dict[int, list[dict[str, list[int]]]] = {
    16384: [{"warpgroups": [2, 4], "cluster": [1, 2], "pieces": [1, 2], "lag": [0, 1]}],
    32768: [{"warpgroups": [2, 4], "cluster": [2, 4, 8], "pieces": [1, 2], "lag": [0, 1]}],
    65536: [
        {"warpgroups": [2, 4], "cluster": [4, 8], "pieces": [1, 2], "lag": [0, 1]},
        {"warpgroups": [2], "cluster": [8, 16], "blocks_per_sm": [2]},
    ],
    131072: [{"warpgroups": [2, 4], "cluster": [8, 16], "pieces": [1, 2, 4], "lag": [0, 1]}],
}
_STAGES = (2, 3, 4, 6)


def workloads() -> Iterator[KernelWorkload]:
    for op in ("rms_norm", "layer_norm", "softmax"):
        for dtype, cols in itertools.product(("bfloat16", "float32"), _ROWS):
            yield KernelWorkload(op, "bwd", _ROWS[cols], cols, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Ring]:
    """Every combination that fits, once."""
    grids = (_NORM if workload.is_norm else _SOFTMAX).get(workload.cols, [])
    combined = itertools.chain.from_iterable(map(_combinations, grids))
    rings = [_ring(workload.spec, attributes) for attributes in combined]
    return list(dict.fromkeys(ring for ring in rings if ring is not None))


def _combinations(grid: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*grid.values(), _STAGES):
        yield dict(zip((*grid, "stages"), values))


def _ring(spec: Spec, attributes: dict[str, Any]) -> Ring | None:
    return wide_ring(spec, Line(cols=spec.cols, kib=1024, **attributes))
