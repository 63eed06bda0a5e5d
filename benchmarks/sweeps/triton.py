"""Triton schedules around those of the tables."""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.triton.launch import local_gpu
from jaxnorm_kernels.triton.schedule import Line, Schedule, choose, of_line

_SHAPES = [(32768, 1024), (32768, 2048), (32768, 4096), (8192, 5120), (16384, 8192)]
_SHAPES += [(8192, 16384), (4096, 32768), (4096, 65536)]
_LOOPED = (2048, 4096, 8192)  # tiles of rows that are not held
_VALUES = (8, 16, 32)  # of a tile in a thread
_WARPS = (4, 32)
# Of a norm's backward: threads of an SM, rows under way, parameters held.
_PERSISTENT = [(1024, 1, True), (1024, 1, False), (1024, 2, True), (512, 2, True), (512, 3, True)]


def workloads() -> Iterator[KernelWorkload]:
    for op, direction in itertools.product(("softmax", "rms_norm", "layer_norm"), ("fwd", "bwd")):
        for dtype, shape in itertools.product(("bfloat16", "float32"), _SHAPES):
            yield KernelWorkload(op, direction, *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """That of the table first; then every other that may be of use, once."""
    spec = workload.spec
    persistent = workload.is_norm and workload.direction == "bwd"
    tried = [choose(spec)]
    held = 1 << (spec.cols - 1).bit_length()
    for tile, values in itertools.product((held, *_LOOPED), _VALUES):
        warps = tile // (32 * values)
        if (tile != held and tile >= spec.cols) or not _WARPS[0] <= warps <= _WARPS[1]:
            continue
        cols = spec.cols if tile == held else None
        for threads, stages, hold in _PERSISTENT if persistent else [(1024, 1, True)]:
            per_sm = max(1, threads // (32 * warps))
            line = Line(cols, tile, warps, per_sm, stages=stages, hold_params=hold)
            tried.append(of_line(line, spec, local_gpu()))
    return list(dict.fromkeys(tried))
