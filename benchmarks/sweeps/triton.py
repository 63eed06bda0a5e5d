"""Triton schedules of norms that hold rows: how many at once, in how many warps and programs."""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.triton.launch import local_gpu
from jaxnorm_kernels.triton.schedule import Line, Schedule, choose, of_line

_SHAPES = [(32768, 1024), (32768, 2048), (32768, 4096), (8192, 5120), (16384, 8192), (8192, 16384)]
_CALLS = [
    *itertools.product(("layer_norm", "rms_norm"), ("fwd", "bwd"), ("bfloat16",)),
    *itertools.product(("layer_norm",), ("bwd",), ("float32",)),
]
_WARPS = (4, 8, 16, 32)
_VALUES = {"fwd": (16, 32, 64), "bwd": (8, 16, 32)}  # of a tile in a thread
_THREADS = {"fwd": (1024, 512), "bwd": (768, 512, 384)}  # that an SM has registers for
_STAGES = {"fwd": (1,), "bwd": (1, 2, 4)}  # tiles under way


def workloads() -> Iterator[KernelWorkload]:
    for (op, direction, dtype), shape in itertools.product(_CALLS, _SHAPES):
        yield KernelWorkload(op, direction, *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """That of the table first; then every other that may be of use, once."""
    spec, direction = workload.spec, workload.direction
    tried = [choose(spec)]
    row = 1 << (spec.cols - 1).bit_length()
    for values, warps, threads, stages in itertools.product(
        _VALUES[direction], _WARPS, _THREADS[direction], _STAGES[direction]
    ):
        tile, per_sm = values * 32 * warps, threads // (32 * warps)
        if row <= tile <= 4 * row and per_sm:
            hold = spec.cols <= 8192
            line = Line(spec.cols, tile, warps, per_sm, stages=stages, hold_params=hold)
            tried.append(of_line(line, spec, local_gpu()))
    return list(dict.fromkeys(tried))
