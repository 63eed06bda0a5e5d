"""Triton schedules: rows at once, or parts of a row; in how many warps, in how many programs."""

import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.launch import local_gpu
from jaxnorm_kernels.triton.schedule import Line, Schedule, choose_line, of_line

_NARROW = [(32768, 1024), (32768, 2048), (8192, 3000), (32768, 4096)]
_WIDE = [(8192, 5120), (16384, 8192), (8192, 12288), (8192, 16384), (4096, 32768)]
_SHAPES = {"softmax": [*_NARROW[2:3], *_WIDE], "norm": [*_NARROW, *_WIDE]}
_CALLS = [
    *itertools.product(("softmax", "layer_norm", "rms_norm"), ("fwd", "bwd"), ("bfloat16",)),
    *itertools.product(("layer_norm",), ("fwd", "bwd"), ("float32",)),
]
_WARPS = (4, 8, 16, 32)
_VALUES = {"fwd": (8, 16, 32), "bwd": (8, 16)}  # of a tile in a thread
_THREADS = (1024, 768, 512)  # that an SM has registers for
_STAGES = (1, 2, 4, 8)  # rows under way


def workloads() -> Iterator[KernelWorkload]:
    for op, direction, dtype in _CALLS:
        for shape in _SHAPES["softmax" if op == "softmax" else "norm"]:
            yield KernelWorkload(op, direction, *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """That of the table first; then every other that may be of use, once."""
    spec, direction = workload.spec, workload.direction
    row = 1 << (spec.cols - 1).bit_length()
    lines = [choose_line(spec)]
    turns = direction == "fwd" or spec.op == "norm"  # of a program over several rows
    for values, warps, threads, stages in itertools.product(
        _VALUES[direction], _WARPS, _THREADS, _STAGES if turns else (1,)
    ):
        tile, per_sm = values * 32 * warps, threads // (32 * warps)
        if not per_sm:
            continue
        if row <= tile <= 2 * row:
            hold = _holds_params(spec, stages)
            lines.append(Line(spec.cols, tile, warps, per_sm, stages=stages, hold_params=hold))
        if spec.cols > 8192 and values <= 16 and threads == 1024 and stages == 1:
            lines.append(Line(None, tile, warps, per_sm))  # the row is looped over
    return list(dict.fromkeys(of_line(line, spec, local_gpu()) for line in lines))


def _holds_params(spec: Spec, stages: int) -> bool:
    """Where a thread has registers for them, and several rows to use them for."""
    return spec.cols <= 8192 and (spec.direction == "bwd" or stages > 1)
