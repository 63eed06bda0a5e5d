"""The choice of a norm's backward kernel, and its parameters: tables with their reasons.

The numbers are those of Hopper (H100, H200): multiprocessors with 65536 registers and 228 KiB of
shared memory each, and memory that needs about 32 KiB in flight on each of them. On a GPU with less
shared memory, rings have fewer stages, or multiprocessors have fewer blocks.
"""

import dataclasses

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import (
    MOST_REGISTERS,
    REGISTERS,
    RESERVED_BYTES,
    Gpu,
    kept,
    local_gpu,
)
from jaxnorm_kernels.mosaic.device.layouts import (
    COPY_BYTES,
    LEAST_VECTOR,
    WARP,
    WARPGROUP_THREADS,
    fitting_vector,
)
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules.columns import OTHER_REGISTERS, row_vector
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Spec

NormSchedule = PipelinedRows | PipelinedNarrowRows

# The shared memory that barriers, the sums being exchanged and Mosaic itself take.
_OTHER_SHARED_BYTES = 6 * 1024
# Narrow rows, from the sweep `benchmarks/sweeps/backward.py`. The first three numbers are limits in
# bytes of all inputs: for a short row, for a stage of short rows, and for a stage of other rows.
# The last one is the maximum number of stages.
_SHORT_ROW_BYTES, _SHORT_STAGE_BYTES, _STAGE_BYTES, _MOST_ROW_STAGES = 1024, 8 * 1024, 16 * 1024, 3
# With at most this many columns per thread, registers suffice for three blocks; otherwise for two.
_THREE_BLOCKS_COLUMNS = 8


def persistent_blocks(spec: Spec, schedule: NormSchedule | Heads, gpu: Gpu | None = None) -> int:
    """Return the number of blocks (or clusters) per group of rows that is estimated to be fastest.

    If several numbers are equally fast, this is the smallest. Each block costs a row of partial
    sums, which must be stored, loaded and added.
    """
    gpu = gpu or local_gpu()
    cluster = schedule.cluster if isinstance(schedule, PipelinedRows) else 1
    most = gpu.at_a_time(cluster) * schedule.blocks_per_sm
    steps, groups = -(-_rows(spec) // schedule.rows), spec.groups

    # Estimate the time for each number of blocks, in units of a step. Blocks run in rounds. A
    # round takes as long as the steps of one block, plus the steps that fill its stages.
    times = [
        -(-groups * blocks // most) * (-(-steps // blocks) + schedule.stages)
        for blocks in range(1, min(steps, most) + 1)
    ]
    return 1 + times.index(min(times))


# The preferred and the maximum number of columns per thread in a ring. It is at most 12 if the GPU
# has large enough clusters, because many small blocks wait less for each other's sums than a few
# large ones. 255 registers hold at most 32 columns.
_RING_COLUMNS, _MOST_RING_COLUMNS = 12, 32
# Four steps should keep 48 to 96 KiB in flight on a multiprocessor: less leaves the memory idle,
# more slows down the stores of dx. From this follow, in bytes,
#
# - the bytes of all inputs for a block's part of a row, up to which a step has two rows that share
#   an exchange of sums (except with two norms: each of their rows has two exchanges);
# - the bytes of a step, including dx and other results, up to which three blocks share a
#   multiprocessor instead of two;
# - the bytes of a block's part of a row from which one block per multiprocessor is enough, if it
#   needs several warpgroups.
_RING_STAGES = 4
_TWO_ROWS_BYTES, _THREE_BLOCKS_BYTES, _ONE_BLOCK_BYTES = 5 * 1024, 10 * 1024, 12 * 1024

# The registers that a third input takes for a unit, and that its result takes.
_KEPT_REGISTERS = 32

# The minimum number of columns for which a warpgroup, and not a warp, holds a row. Two rows at a
# time, or three blocks, hide the exchange that this needs. LayerNorm over 768 columns of float32
# reaches 0.97 of copy bandwidth instead of 0.92; over 512 of bfloat16 it would be 0.83 instead of
# 0.87 (H100).
_WARPGROUP_ROWS = 768
# The minimum number of rows for the narrow-rows kernel: the rows of its largest tile, in which two
# threads share a row.
_LEAST_NARROW_ROWS = WARPGROUP_THREADS // 2


@kept
def norm_schedule(spec: Spec, gpu: Gpu) -> NormSchedule | None:
    """Return the schedule of a backward pass, or None if no kernel supports the call's rows."""
    if not is_copied(spec):
        return None
    if spec.cols < _WARPGROUP_ROWS and _rows(spec) >= _LEAST_NARROW_ROWS:
        return narrow_rows(spec, gpu)
    return pipelined_rows(spec, gpu)


def narrow_rows(spec: Spec, gpu: Gpu | None = None) -> PipelinedNarrowRows:
    """Return the schedule for narrow rows. A stage holds as many rows as fit."""
    gpu = gpu or local_gpu()
    vector = row_vector(spec)
    threads = WARP
    while threads > 2 and spec.cols < threads * vector:
        threads //= 2
    ring = PipelinedNarrowRows(vector, threads)
    blocks_per_sm = 3 if spec.cols <= _THREE_BLOCKS_COLUMNS * threads else 2
    # The result that belongs to a third input leaves registers for only one tile at a time.
    is_small = _row_bytes(spec) <= _SHORT_ROW_BYTES or bool(spec.kept_dtypes)
    stage_bytes = _SHORT_STAGE_BYTES if is_small else _STAGE_BYTES
    rows = max(1, stage_bytes // (ring.height * _row_bytes(spec))) * ring.height
    while rows > ring.height and rows > _rows(spec):
        rows -= ring.height
    step_bytes = rows * _row_bytes(spec)
    while blocks_per_sm > 1 and _shared_bytes(gpu, blocks_per_sm) < 2 * step_bytes:
        blocks_per_sm -= 1
    stages = min(_MOST_ROW_STAGES, _shared_bytes(gpu, blocks_per_sm) // step_bytes)
    return dataclasses.replace(ring, rows=rows, stages=stages, blocks_per_sm=blocks_per_sm)


def pipelined_rows(spec: Spec, gpu: Gpu) -> PipelinedRows | None:
    """Return a ring for rows that a block or a cluster shares, or None if the row is too long.

    A cluster of blocks with one warpgroup each is preferred to blocks with several warpgroups.
    """
    most = WARPGROUP_THREADS * _RING_COLUMNS
    sizes = [1, *sorted(gpu.clusters)]
    cluster = next((size for size in sizes if spec.cols <= size * most), sizes[-1])
    part = spec.cols // cluster
    part_bytes = part * _column_bytes(spec)
    rows = 2 if len(spec.norms) < 2 and part_bytes <= _TWO_ROWS_BYTES else 1
    written = sum(dtype.itemsize for dtype in (spec.x_dtype, *spec.kept_dtypes))
    step_bytes = rows * (part_bytes + part * written)
    shapes = [(2, 1), (4, 1)]
    if spec.cols <= cluster * most or part_bytes < _ONE_BLOCK_BYTES:
        shapes.insert(0, (1, 3 if step_bytes <= _THREE_BLOCKS_BYTES else 2))
    rings = (
        wide_rows(spec, warpgroups, cluster, blocks_per_sm, rows, gpu)
        for warpgroups, blocks_per_sm in shapes
    )
    return next((ring for ring in rings if ring), None)


def wide_rows(
    spec: Spec,
    warpgroups: int,
    cluster: int,
    blocks_per_sm: int,
    rows: int = 1,
    gpu: Gpu | None = None,
) -> PipelinedRows | None:
    """Return a ring with these numbers, or None if registers or shared memory do not suffice."""
    block = cluster * WARPGROUP_THREADS  # threads that share a row, with one warpgroup
    while warpgroups > 1 and spec.cols < warpgroups * block * LEAST_VECTOR:
        warpgroups //= 2
    vector = fitting_vector(spec.cols, row_vector(spec), warpgroups * block)
    if spec.cols < warpgroups * block * vector:
        return None
    ring = PipelinedRows(
        vector,
        warpgroups,
        _RING_STAGES,
        rows=min(rows, _rows(spec)),
        blocks_per_sm=blocks_per_sm,
        cluster=cluster,
    )
    width = ring.partition(spec.cols).width  # columns of a warpgroup
    stage_bytes = ring.rows * warpgroups * width * _row_bytes(spec) // spec.cols
    shared_bytes = _shared_bytes(gpu or local_gpu(), ring.blocks_per_sm)
    stages = min(ring.stages, shared_bytes // stage_bytes)
    fits = width <= _MOST_RING_COLUMNS * WARPGROUP_THREADS
    fits = fits and _registers(spec, width) <= _most_registers(ring)
    # With one stage, no row would be loaded ahead.
    if not fits or stages < 2:
        return None
    return dataclasses.replace(ring, stages=stages)


def _registers(spec: Spec, width: int) -> int:
    """Return the number of registers that a thread needs if its warpgroup holds `width` columns."""
    # A column has its sums, and what `Formula.columns` returns: G, 1 / G and the bias.
    held = 0
    for norm in spec.norms:
        of_scale = 2 if norm.norm.saved == "output" else 1
        held += of_scale * (norm.norm.scale_dtype is not None) + norm.reads_bias
    held += spec.norm.branch_scale_dtype is not None
    of_column = (_column_sums(spec) + held) * len(spec.norms)  # including values in flight
    others = OTHER_REGISTERS + _KEPT_REGISTERS * len(spec.kept_dtypes)
    return of_column * (width // WARPGROUP_THREADS) + others


def _column_sums(spec: Spec) -> int:
    norms = (spec.norm.scale_dtype, spec.norm.bias_dtype, spec.norm.next_scale_dtype)
    return sum(dtype is not None for dtype in (*norms, spec.norm.branch_scale_dtype))


def _most_registers(ring: PipelinedRows) -> int:
    threads = ring.warpgroups * WARPGROUP_THREADS
    return min(MOST_REGISTERS, REGISTERS // (threads * ring.blocks_per_sm))


def is_copied(spec: Spec) -> bool:
    """Return True if asynchronous copies can load the rows of all inputs."""
    return not any(spec.cols * dtype.itemsize % COPY_BYTES for dtype in row_dtypes(spec))


def row_dtypes(spec: Spec) -> list[np.dtype]:
    """Return the dtypes of the rows that a norm's backward pass loads.

    They are, in order: x (only for two norms), the saved array, arrays saved beside it, dy and dh.
    """
    last = spec.last
    saved = last.y_dtype if last.norm.saved == "output" else last.x_dtype
    x = [spec.x_dtype] * (len(spec.norms) > 1)
    return [*x, saved, *spec.kept_dtypes, spec.y_dtype, *[last.x_dtype] * ("h" in spec.outputs)]


def _rows(spec: Spec) -> int:
    """Return the number of rows that share their parameters."""
    return spec.rows // spec.groups


def _row_bytes(spec: Spec) -> int:
    """Return the bytes that a row takes in all inputs together."""
    return spec.cols * _column_bytes(spec)


def _column_bytes(spec: Spec) -> int:
    return sum(dtype.itemsize for dtype in row_dtypes(spec))


def _shared_bytes(gpu: Gpu, blocks_per_sm: int) -> int:
    """Return the shared memory that is available for a block's ring."""
    return gpu.shared_bytes // blocks_per_sm - RESERVED_BYTES - _OTHER_SHARED_BYTES
