"""Schedules of Triton kernels.

They differ in whether a program holds whole rows, in the number of warps of a program, and in the
number of programs.
"""

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
    ("log_softmax", "fwd", "bfloat16"),
    *itertools.product(("layer_norm",), ("fwd", "bwd"), ("float32",)),
]
_WARPS = (4, 8, 16, 32)
# For each direction, values to try for the number of threads that an SM (multiprocessor) runs at
# the same time.
_THREADS = {"fwd": (1536, 1024, 768), "bwd": (1024, 768, 512)}
# Values to try for the number of tiles that a persistent program has in flight.
_STAGES = (1, 2, 3, 4, 8)
# Values to try for the number of elements of a tile that one thread holds.
_VALUES = (4, 8, 16)


def workloads() -> Iterator[KernelWorkload]:
    for op, direction, dtype in _CALLS:
        for shape in _SHAPES[op.split("_")[-1]]:
            yield KernelWorkload(op, direction, *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """Return the schedule that the table chooses, then all others that may be faster."""
    spec = workload.spec
    lines = [choose_line(spec), *_held(spec), *(_looped() if spec.cols > 8192 else ())]
    return list(dict.fromkeys(of_line(line, spec, local_gpu()) for line in lines))


def _held(spec: Spec) -> Iterator[Line]:
    # With more than 8192 columns, the parameters do not fit in the registers of a program.
    hold = spec.cols <= 8192
    # The maximum number of columns with prefetching. In longer rows, prefetching was slower.
    most = {"fwd": 2048, "bwd": 16384}[spec.direction]
    for rows, warps, threads, stages, values in itertools.product(
        (1, 2), _WARPS, _THREADS[spec.direction], _STAGES if spec.op == "norm" else (1,), _VALUES
    ):
        share, per_sm = rows * spec.cols, threads // (32 * warps)
        fits = per_sm and 8 <= share // (32 * warps) <= 64
        if fits and (rows == 1 or spec.cols <= 2048) and (stages == 1 or spec.cols <= most):
            yield Line(spec.cols, warps, per_sm, values, share, stages, hold)


def _looped() -> Iterator[Line]:
    for values, warps in itertools.product((8, 16), _WARPS):
        yield Line(None, warps, 1024 // (32 * warps), values, looped=True)
