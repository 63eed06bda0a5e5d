"""Triton schedules around those of the tables, and rows held where the tables loop over them."""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.triton.launch import local_gpu
from jaxnorm_kernels.triton.schedule import Line, Schedule, choose, of_line

_ROWS = {256: 32768, 1024: 32768, 2048: 32768, 4096: 32768, 5120: 4096, 8192: 16384}
_ROWS |= {16384: 8192, 32768: 4096, 65536: 4096}
_WARPS = (4, 8, 16, 32)
_VALUES = (4, 8, 16, 32)  # of a tile in a thread
# Of a norm's backward: threads of an SM, rows under way, parameters held.
_PERSISTENT = [(1024, 1, True), (1024, 1, False), (1024, 2, True), (512, 2, True), (512, 3, True)]


def workloads() -> Iterator[KernelWorkload]:
    for op, direction in itertools.product(("softmax", "rms_norm", "layer_norm"), ("fwd", "bwd")):
        for dtype, cols in itertools.product(("bfloat16", "float32"), _ROWS):
            yield KernelWorkload(op, direction, _ROWS[cols], cols, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """That of the table first; then every other that may be of use, once."""
    spec = workload.spec
    persistent = workload.is_norm and workload.direction == "bwd"
    tried = [choose(spec)]
    for warps, values in itertools.product(_WARPS, _VALUES):
        tile = 32 * warps * values
        if tile > max(4096, 2 * spec.cols):
            continue
        # A tile of less than a row is a block that the row is looped over.
        cols = None if tile < spec.cols else spec.cols
        for threads, stages, hold in _PERSISTENT if persistent else [(1024, 1, True)]:
            per_sm = max(1, threads // (32 * warps))
            line = Line(cols, tile, warps, per_sm, stages=stages, hold_params=hold)
            tried.append(of_line(line, spec, local_gpu()))
    return list(dict.fromkeys(tried))
