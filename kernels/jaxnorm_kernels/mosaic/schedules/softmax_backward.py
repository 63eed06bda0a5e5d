"""Schedules of the backward pass of softmax. Its kernels hold rows in registers."""

import dataclasses

from jaxnorm_kernels.mosaic.device.gpu import REGISTERS, Gpu, cached
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
)
from jaxnorm_kernels.mosaic.rows.logits import (
    causal_unit,
    depends_on_index,
    run_of_rows,
    threads_of_runs,
)
from jaxnorm_kernels.mosaic.schedules.columns import OTHER_REGISTERS, full_bias_dtype, row_vector
from jaxnorm_kernels.mosaic.schedules.forward import TileKind, TileSchedule
from jaxnorm_kernels.specs import Spec

# Pairs (maximum number of columns of a row, number of warpgroups per block). The first pair that a
# row satisfies is used. A thread then has at most 48 columns in its registers. If it had more,
# fewer blocks would fit on an SM.
_HELD = ((6144, 1), (12288, 2), (12288, 4))
# The corresponding pairs for kernels that also compute the gradient of a bias. These kernels need
# more registers per column, so a thread has at most 32 columns.
_SUMMED = ((4096, 1), (8192, 2), (16384, 4))
# A row of the bias's gradient is a sum over many rows of x. If several blocks share this sum, each
# of them adds up at least this number of rows of x (or of tiles), and stores a partial sum in
# float32. With this minimum, storing takes little time compared with loading the rows of x.
_ROWS_OF_SPLIT = 8
# Maximum number of blocks per SM that compute partial sums of a bias's gradient.
_MOST_SPLIT_BLOCKS = 8
# A row with at least this many vectors is processed by a warpgroup. A shorter row is processed by a
# warp, or by some threads of a warp.
_WARPGROUP_VECTORS = 4 * WARP
# A causal row with at most this many columns is processed by one warp, or by some of its threads.
_CAUSAL_TILE = 2048
# Number of units into which a causal row is split. A unit consists of the columns that a row's
# threads load at once. An alternative would be units of a fixed size: 32 vectors of 16 bytes.
# Compared with this alternative, the backward pass takes less time (H100). With bfloat16, it takes
# 15 % less for rows of 512 columns, 8 % less for 1024 and 3 % less for 2048. With float32, it takes
# 7 % less for 512 columns and 3 % less for 1024.
_CAUSAL_PARTS = 16
# Two limits for the columns of a row that a thread has in registers. They apply to each input
# separately. `_HELD_BYTES` is the maximum number of bytes of these columns. `_HELD_VECTORS` is the
# maximum number of vectors of these columns. A thread loads each vector with one load, and starts
# all loads before it waits for the first one. So `_HELD_VECTORS` also limits the number of loads
# that a thread has in flight. `_HELD_VECTORS` is the stricter limit if vectors have fewer than 4
# bytes.
_HELD_BYTES, _HELD_VECTORS = 128, 32
# Rows that are too long for one block are distributed over a cluster of blocks.
# `_SPREAD_COLUMNS` is the maximum number of columns per thread in a cluster, and
# `_SPREAD_WARPGROUPS` has the possible numbers of warpgroups per block.
_SPREAD_COLUMNS, _SPREAD_WARPGROUPS = 32, (2, 4)


@cached
def softmax_schedule(spec: Spec, gpu: Gpu) -> TileSchedule | None:
    """Return the schedule, or None if no kernel supports these rows."""
    schedule = _placed_tile(spec) if depends_on_index(spec) else _tile(spec)
    schedule = schedule or _wide_rows(spec, gpu)
    if schedule is None or not depends_on_index(spec):
        return schedule
    return dataclasses.replace(schedule, splits=_splits(spec, schedule, gpu))


def _tile(spec: Spec) -> TileSchedule | None:
    """Return a schedule in which threads of one warp share a row, or None if this is impossible.

    This is impossible if rows are too long for a warp, or if the array has fewer rows than a tile.
    """
    vector = row_vector(spec)
    vectors = spec.cols // vector
    if vectors < _WARPGROUP_VECTORS:
        threads = next(n for n in (WARP, 16, 8, 4, 2, 1) if n <= vectors)
        rows = WARPGROUP_THREADS // threads
        if spec.rows >= rows:
            return TileSchedule("row_tile", vector, rows, threads)
    return None


def _placed_tile(spec: Spec) -> TileSchedule | None:
    """Return a schedule for short rows of a softmax that has a mask or a bias, or is causal.

    For longer rows, None is returned.

    A warp, or some of its threads, processes a row. All rows of a block must belong to one run (see
    `run_of_rows`). If this is not possible, the block processes a single row.
    """
    vector = row_vector(spec)
    most = _WARPGROUP_VECTORS * vector - 1
    if spec.softmax.causal and full_bias_dtype(spec) is None:
        most = _CAUSAL_TILE
    if spec.cols > most:
        return None
    threads = next(n for n in (WARP, 16, 8, 4, 2) if n * vector <= spec.cols)
    threads, vector = causal_unit(spec, threads, vector, _CAUSAL_PARTS)
    threads, vector = threads_of_runs(spec, threads, vector)
    rows = WARPGROUP_THREADS // threads
    if run_of_rows(spec) % rows == 0:
        return TileSchedule("row_tile", vector, rows, threads)
    if spec.cols < WARPGROUP_THREADS:
        return TileSchedule("row_tile", vector, threads=threads)
    while WARPGROUP_THREADS * vector > spec.cols:
        vector //= 2
    return TileSchedule("warpgroup_row", vector)


def _wide_rows(spec: Spec, gpu: Gpu) -> TileSchedule | None:
    """Return a schedule in which all warpgroups of a block or of a cluster share a row.

    Return None if rows are too long.
    """
    vector = row_vector(spec)
    most = min(_HELD_VECTORS * vector, _HELD_BYTES // spec.y_dtype.itemsize)
    for cols, warpgroups in _HELD if full_bias_dtype(spec) is None else _SUMMED:
        if spec.cols <= min(cols, most * warpgroups * WARPGROUP_THREADS):
            kind: TileKind = "split_row" if warpgroups > 1 else "warpgroup_row"
            return TileSchedule(kind, vector, warpgroups=warpgroups)
    for warpgroups in _SPREAD_WARPGROUPS:
        threads = warpgroups * WARPGROUP_THREADS
        cluster = max(2, _power_of_2_from(-(-spec.cols // (threads * _SPREAD_COLUMNS))))
        if cluster in gpu.clusters:
            return TileSchedule("split_row", vector, warpgroups=warpgroups, cluster=cluster)
    return None


def _splits(spec: Spec, schedule: TileSchedule, gpu: Gpu) -> int:
    """Return the number of blocks (or clusters) that share the work for a row of dbias.

    A row of dbias, the gradient of the bias, is the sum of dz (the gradient of the logits) over all
    rows of x that use the same row of the bias. The number is limited so that all blocks can run at
    the same time.
    """
    shared = spec.softmax.logits_bias_rows
    if full_bias_dtype(spec) is None or shared is None:
        return 1
    is_own = bool(shared.segments) and shared.segments[-1][1]
    rows, sharing = shared.rows, shared.sharing
    if is_own:
        rows //= schedule.rows
    else:
        sharing //= schedule.rows
    threads = schedule.warpgroups * WARPGROUP_THREADS
    # A thread needs three registers for each of its columns: y, dy and a sum.
    values = 3 * spec.cols * schedule.rows // (schedule.cluster * threads)
    by_registers = REGISTERS // ((values + OTHER_REGISTERS) * threads)
    blocks_per_sm = min(_MOST_SPLIT_BLOCKS, max(1, by_registers))
    wanted = blocks_per_sm * gpu.at_a_time(schedule.cluster)
    return max(1, min(-(-wanted // rows), sharing // _ROWS_OF_SPLIT))


def _power_of_2_from(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
