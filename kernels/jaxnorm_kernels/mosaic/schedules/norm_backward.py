"""Schedules of the backward pass of norms: which kernel runs, and with which sizes.

The numbers are for Hopper (H100, H200): an SM has 65536 registers and 228 KiB of shared memory, and
needs about 32 KiB of loads in flight. On a GPU with less shared memory, pipelines have fewer
stages, or SMs have fewer blocks.
"""

import dataclasses

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import (
    MOST_REGISTERS,
    REGISTERS,
    RESERVED_BYTES,
    Gpu,
    cached,
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
from jaxnorm_kernels.mosaic.schedules.columns import OTHER_REGISTERS, param_sizes, row_vector
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Spec

NormSchedule = PipelinedRows | PipelinedNarrowRows

# Shared memory of a block for barriers, for the sums that warps exchange, and for Mosaic itself.
_OTHER_SHARED_BYTES = 6 * 1024
# Sizes for the narrow-rows kernel, from a sweep over schedules (commit e274726a). A pipeline stage
# has at most `_STAGE_BYTES`. If a row has at most `_SHORT_ROW_BYTES`, summed over all inputs, a
# stage has at most `_SHORT_STAGE_BYTES`. `_MOST_ROW_STAGES` is the maximum number of stages.
_SHORT_ROW_BYTES, _SHORT_STAGE_BYTES, _STAGE_BYTES, _MOST_ROW_STAGES = 1024, 8 * 1024, 16 * 1024, 3
# If a thread has at most this many columns, three blocks fit in an SM's registers. If it has more,
# only two blocks fit.
_THREE_BLOCKS_COLUMNS = 8


def persistent_blocks(spec: Spec, schedule: NormSchedule | Heads, gpu: Gpu | None = None) -> int:
    """Return how many blocks (or clusters) to launch for each group of rows.

    The blocks are persistent: each processes many rows. The result is the number with the least
    estimated time. If several numbers have the same estimated time, the result is the smallest of
    them. Fewer blocks are better, because each block stores a row of partial sums, which must be
    loaded and added later.
    """
    gpu = gpu or local_gpu()
    cluster = schedule.cluster if isinstance(schedule, PipelinedRows) else 1
    most = gpu.at_a_time(cluster) * schedule.blocks_per_sm
    steps, groups = -(-_rows(spec) // schedule.rows), spec.groups

    # For each number of blocks that could be launched, estimate the time of the kernel, counted in
    # steps of the pipeline. If more blocks are launched than can run at the same time, they run in
    # rounds. A round takes as long as one block. The time of a block is one step for each stage, to
    # fill the pipeline, plus the block's own steps.
    times = [
        -(-groups * blocks // most) * (-(-steps // blocks) + schedule.stages)
        for blocks in range(1, min(steps, most) + 1)
    ]
    return 1 + times.index(min(times))


# Preferred and maximum number of columns per thread in the pipelined kernel. If possible, a block
# has only one warpgroup, and a row is split among so many blocks that a thread has at most the
# preferred number of columns. Fewer blocks with several warpgroups each would be slower, because
# large blocks wait longer for each other's sums. If the GPU's clusters are too small for this many
# blocks per row, a thread may have up to the maximum number of columns. They still fit in the
# thread's 255 registers.
_RING_COLUMNS, _MOST_RING_COLUMNS = 12, 32
# Each SM should have 48 to 96 KiB of loads in flight, in four pipeline steps. With less, the memory
# is idle at times. With more, the stores of dx become slow. The following limits serve this goal. A
# block processes a part of each row (or entire rows, without clusters). In the limits, the bytes of
# this part are counted over all inputs together.
#
# - Rows per step: if the part has at most `_TWO_ROWS_BYTES`, a step has two rows, and their sums
#   are exchanged together. Otherwise, and in all calls with two norms, a step has one row.
# - Warpgroups per block: usually one. A block has several warpgroups if the part has at least
#   `_ONE_BLOCK_BYTES`, and one warpgroup would have too many columns (more than the preferred
#   number per thread).
# - Blocks per SM: if a block has several warpgroups, an SM runs only this block. Otherwise, an SM
#   runs two blocks, or three if a step has at most `_THREE_BLOCKS_BYTES`, including dx and other
#   results.
_RING_STAGES = 4
_TWO_ROWS_BYTES, _THREE_BLOCKS_BYTES, _ONE_BLOCK_BYTES = 5 * 1024, 10 * 1024, 12 * 1024

# Number of additional registers that a thread needs if the kernel has a third input, such as a
# gate. They contain one vector of this input and one vector of its gradient.
_THIRD_INPUT_REGISTERS = 32

# A row with at least this many columns is processed by an entire warpgroup, and a shorter row by
# one warp. If a warpgroup processes a row, its warps must exchange the row's sums, which takes
# time. LayerNorm reaches these bandwidths, relative to a copy (H100):
#
#                                warpgroup per row    warp per row
#     768 columns of float32           0.97               0.92
#     512 columns of bfloat16          0.83               0.87
_WARPGROUP_ROWS = 768
# Minimum number of rows for the narrow-rows kernel. The largest tile, in which two threads share
# each row, has this number of rows. So a call that uses this kernel always has enough rows for one
# tile.
_LEAST_NARROW_ROWS = WARPGROUP_THREADS // 2


@cached
def norm_schedule(spec: Spec, gpu: Gpu) -> NormSchedule | None:
    """Return the schedule of a norm's backward pass, or None if no kernel supports the rows."""
    if not is_copied(spec):
        return None
    if spec.cols < _WARPGROUP_ROWS and _rows(spec) >= _LEAST_NARROW_ROWS:
        return narrow_rows(spec, gpu)
    return pipelined_rows(spec, gpu)


def narrow_rows(spec: Spec, gpu: Gpu | None = None) -> PipelinedNarrowRows:
    """Return the schedule for narrow rows: each warp processes entire rows.

    A stage contains as many rows as the limits allow.
    """
    gpu = gpu or local_gpu()
    vector = row_vector(spec)
    threads = WARP
    while threads > 2 and spec.cols < threads * vector:
        threads //= 2
    ring = PipelinedNarrowRows(vector, threads)
    blocks_per_sm = 3 if spec.cols <= _THREE_BLOCKS_COLUMNS * threads else 2
    # A call with a third row input (a gate, or x in a scaled sum) also has a second result per
    # element. These arrays take many registers, so a stage should contain only one tile of rows.
    is_small = _row_bytes(spec) <= _SHORT_ROW_BYTES or bool(spec.also_saved_dtypes)
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
    """Return a schedule in which a block, or a cluster of blocks, shares each row.

    Clusters of many blocks with one warpgroup each are preferred to few blocks with several
    warpgroups. If no such schedule supports the rows, None is returned.
    """
    most = WARPGROUP_THREADS * _RING_COLUMNS
    sizes = [1, *sorted(gpu.clusters)]
    cluster = next((size for size in sizes if spec.cols <= size * most), sizes[-1])
    part = spec.cols // cluster
    part_bytes = part * _column_bytes(spec)
    rows = 2 if len(spec.norms) < 2 and part_bytes <= _TWO_ROWS_BYTES else 1
    written = sum(dtype.itemsize for dtype in (spec.x_dtype, *spec.also_saved_dtypes))
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
    """Return a schedule with these sizes, or None if rows are too long or too short for them."""
    block = cluster * WARPGROUP_THREADS  # threads per row, if a block has one warpgroup
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
    width = ring.partition(spec.cols).width  # number of columns per warpgroup
    stage_bytes = ring.rows * warpgroups * width * _row_bytes(spec) // spec.cols
    shared_bytes = _shared_bytes(gpu or local_gpu(), ring.blocks_per_sm)
    stages = min(ring.stages, shared_bytes // stage_bytes)
    fits = width <= _MOST_RING_COLUMNS * WARPGROUP_THREADS
    fits = fits and _registers(spec, width) <= _most_registers(ring)
    # With a single pipeline stage, no row would be loaded ahead of its use.
    if not fits or stages < 2:
        return None
    return dataclasses.replace(ring, stages=stages)


def _registers(spec: Spec, width: int) -> int:
    """Return the number of registers that a thread needs if its warpgroup has `width` columns."""
    # Each column needs registers for its sums and for the results of `Formula.columns`: G, 1 / G
    # and the bias.
    held = 0
    for norm in spec.norms:
        columns_of_scale = 2 if norm.norm.saved == "output" else 1
        held += columns_of_scale * (norm.norm.scale_dtype is not None) + norm.reads_bias
    held += spec.norm.branch_scale_dtype is not None
    # Two norms need about twice as many registers per column as one norm.
    of_column = (len(param_sizes(spec)) + held) * len(spec.norms)
    others = OTHER_REGISTERS + _THIRD_INPUT_REGISTERS * len(spec.also_saved_dtypes)
    return of_column * (width // WARPGROUP_THREADS) + others


def _most_registers(ring: PipelinedRows) -> int:
    threads = ring.warpgroups * WARPGROUP_THREADS
    return min(MOST_REGISTERS, REGISTERS // (threads * ring.blocks_per_sm))


def is_copied(spec: Spec) -> bool:
    """Return True if asynchronous copies can load the rows of all inputs."""
    return not any(spec.cols * dtype.itemsize % COPY_BYTES for dtype in row_dtypes(spec))


def row_dtypes(spec: Spec) -> list[np.dtype]:
    """Return the dtypes of the arrays that a norm's backward pass loads row by row.

    The list has an entry for each of these arrays, in this order: x, if the call has two norms; the
    saved output or input of the last norm; other saved arrays, such as a gate; dy; dh, if h is a
    result.
    """
    last = spec.last
    saved = last.y_dtype if last.norm.saved == "output" else last.x_dtype
    x = [spec.x_dtype] * (len(spec.norms) > 1)
    return [
        *x,
        saved,
        *spec.also_saved_dtypes,
        spec.y_dtype,
        *[last.x_dtype] * ("h" in spec.outputs),
    ]


def _rows(spec: Spec) -> int:
    """Return the number of rows per group; the rows of a group have the same parameters."""
    return spec.rows // spec.groups


def _row_bytes(spec: Spec) -> int:
    """Return the bytes of a row, summed over all inputs."""
    return spec.cols * _column_bytes(spec)


def _column_bytes(spec: Spec) -> int:
    return sum(dtype.itemsize for dtype in row_dtypes(spec))


def _shared_bytes(gpu: Gpu, blocks_per_sm: int) -> int:
    """Return the shared memory that is available for the stages of a block, in bytes."""
    return gpu.shared_bytes // blocks_per_sm - RESERVED_BYTES - _OTHER_SHARED_BYTES
