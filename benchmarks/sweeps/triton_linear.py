"""Schedules of Triton's norm and the product after it: tiles, steps and groups.

Without a scale: with one, the kernel is the same.
"""

import dataclasses
from collections.abc import Iterator

from benchmarks.contract import LinearKernelWorkload
from benchmarks.linear import LINEAR
from benchmarks.workloads import Shape
from jaxnorm_kernels.triton.launch import local_gpu
from jaxnorm_kernels.triton.linear_schedule import Line, LinearSchedule, choose, of_line

# Of a tile: rows and features, columns of x at a time, warps, and programs that a multiprocessor
# has registers for.
_TILES = (
    *((128, 256, 64, 8, 1), (256, 128, 64, 8, 1), (128, 256, 64, 4, 1)),
    *((128, 128, 64, 4, 2), (128, 128, 64, 8, 1), (128, 128, 128, 8, 1)),
    *((64, 256, 64, 4, 2), (64, 128, 64, 4, 2), (64, 128, 128, 4, 2), (64, 64, 64, 4, 3)),
    *((32, 64, 128, 4, 2), (16, 64, 128, 4, 2), (16, 32, 128, 4, 2)),
)
_FEW: Shape = (64, 4096, 4096)
_SHAPES = (*LINEAR["product"].quick[:2], *((n, n, n) for n in (1024, 2048)), _FEW)


def workloads() -> Iterator[LinearKernelWorkload]:
    for shape in _SHAPES:
        yield LinearKernelWorkload("product", "fwd", "x".join(map(str, shape)), "bfloat16")


def schedules(workload: LinearKernelWorkload) -> list[LinearSchedule]:
    """That of the table first, and with other steps; then other tiles, of which some may spill."""
    spec, gpu = workload.spec, local_gpu()
    first = choose(spec)
    tried = [first]
    tried += [dataclasses.replace(first, stages=first.stages + more) for more in (-1, 1)]
    tried += [dataclasses.replace(first, group=group) for group in (8, 32)]
    for rows, features, block, warps, per_sm in _TILES:
        line = Line(rows, features, block, warps, per_sm, stages=4)
        tried.append(of_line(line, spec, gpu))
    return list(dict.fromkeys(tried))
