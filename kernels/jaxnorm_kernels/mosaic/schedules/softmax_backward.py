"""Tables of schedules for the backward pass of softmaxes, which hold rows in registers."""

import dataclasses

from jaxnorm_kernels.mosaic.device.gpu import REGISTERS, Gpu, kept
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
)
from jaxnorm_kernels.mosaic.loops.in_registers import InRegisters
from jaxnorm_kernels.mosaic.rows.logits import (
    causal_unit,
    has_places,
    run_of_rows,
    threads_of_runs,
)
from jaxnorm_kernels.mosaic.schedules.columns import OTHER_REGISTERS, row_vector
from jaxnorm_kernels.specs import Spec

# Rows held in registers: the maximum number of columns, and the number of warpgroups. With more
# than 48 columns per thread, fewer blocks fit on a multiprocessor.
_HELD = ((6144, 1), (12288, 2), (12288, 4))
# The limits if column sums are computed as well: at most 32 columns per thread.
_SUMMED = ((4096, 1), (8192, 2), (16384, 4))
# The minimum number of rows, or tiles, that a row of partial sums of a bias's gradient adds up. The
# sums are float32; with this many rows, their cost is small.
_ROWS_OF_SPLIT = 8
# The maximum number of blocks per multiprocessor that compute such sums.
_MOST_SPLIT_BLOCKS = 8
# The number of vectors in a row from which a warpgroup holds it, instead of threads of a warp.
_WARPGROUP_VECTORS = 4 * WARP
# The maximum number of columns of a causal row that a warp holds. The row is split into units: one
# vector for each of the threads that share it.
_CAUSAL_TILE = 2048
# The number of units of a causal row. Over 512, 1024 and 2048 columns of bfloat16, the backward
# pass took 15, 8 and 3 % less time than with units of 32 vectors of 16 bytes; over 512 and 1024 of
# float32, 7 and 3 % less (H100).
_CAUSAL_PARTS = 16
# What a thread holds of each input at most: bytes of registers, and loads in flight.
_HELD_BYTES, _HELD_VECTORS = 128, 32
# Longer rows are spread over a cluster, whose blocks have this many warpgroups, with 32 columns per
# thread.
_SPREAD_COLUMNS, _SPREAD_WARPGROUPS = 32, (2, 4)


@kept
def softmax_schedule(spec: Spec, gpu: Gpu) -> InRegisters | None:
    """Return the schedule, or None if no kernel supports these rows."""
    schedule = _placed_tile(spec) if has_places(spec) else _tile(spec)
    schedule = schedule or _wide_rows(spec, gpu)
    if schedule is None or not has_places(spec):
        return schedule
    return dataclasses.replace(
        schedule, splits=_splits(spec, schedule, gpu), apart=spec.softmax.causal
    )


def _tile(spec: Spec) -> InRegisters | None:
    """Return a schedule in which threads of a warp share a row, or None."""
    vector = row_vector(spec)
    vectors = spec.cols // vector
    if vectors < _WARPGROUP_VECTORS:
        threads = next(n for n in (WARP, 16, 8, 4, 2, 1) if n <= vectors)
        rows = WARPGROUP_THREADS // threads
        if spec.rows >= rows:
            return InRegisters(vector, threads=threads, rows=rows)
    return None


def _placed_tile(spec: Spec) -> InRegisters | None:
    """Return a schedule for masked, biased or causal rows that a warp can hold, or None.

    The rows of a block are in one run; if they cannot be, a warpgroup holds one row. Above the
    diagonal, the units of a warp skip more columns than those of a warpgroup.
    """
    vector = row_vector(spec)
    most = _WARPGROUP_VECTORS * vector - 1
    if spec.softmax.causal and not _sums_columns(spec):
        most = _CAUSAL_TILE
    if spec.cols > most:
        return None
    threads = next(n for n in (WARP, 16, 8, 4, 2) if n * vector <= spec.cols)
    threads, vector = causal_unit(spec, threads, vector, _CAUSAL_PARTS)
    threads, vector = threads_of_runs(spec, threads, vector)
    rows = WARPGROUP_THREADS // threads
    if run_of_rows(spec) % rows == 0:
        return InRegisters(vector, threads=threads, rows=rows)
    if spec.cols < WARPGROUP_THREADS:
        return InRegisters(vector, threads=threads)
    while WARPGROUP_THREADS * vector > spec.cols:
        vector //= 2
    return InRegisters(vector)


def _wide_rows(spec: Spec, gpu: Gpu) -> InRegisters | None:
    """Return a schedule in which warpgroups of a block, or of a cluster, share a row, or None."""
    vector = row_vector(spec)
    most = min(_HELD_VECTORS * vector, _HELD_BYTES // spec.y_dtype.itemsize)
    for cols, warpgroups in _SUMMED if _sums_columns(spec) else _HELD:
        if spec.cols <= min(cols, most * warpgroups * WARPGROUP_THREADS):
            return InRegisters(vector, warpgroups)
    for warpgroups in _SPREAD_WARPGROUPS:
        threads = warpgroups * WARPGROUP_THREADS
        cluster = max(2, _power_of_2_from(-(-spec.cols // (threads * _SPREAD_COLUMNS))))
        if cluster in gpu.clusters:
            return InRegisters(vector, warpgroups, cluster=cluster)
    return None


def _sums_columns(spec: Spec) -> bool:
    """Return True if the pass computes the gradient of a bias that has columns."""
    shared = spec.softmax.logits_bias_rows
    return spec.softmax.logits_bias_dtype is not None and shared is not None and shared.has_columns


def _splits(spec: Spec, schedule: InRegisters, gpu: Gpu) -> int:
    """Return how many blocks, or clusters, share the rows of x that use one row of the bias.

    All of them can run at the same time.
    """
    shared = spec.softmax.logits_bias_rows
    if not _sums_columns(spec) or shared is None:
        return 1
    is_own = bool(shared.segments) and shared.segments[-1][1]
    rows, sharing = shared.rows, shared.sharing
    if is_own:
        rows //= schedule.rows
    else:
        sharing //= schedule.rows
    threads = schedule.warpgroups * WARPGROUP_THREADS
    # y, d and the sum of a column
    values = 3 * spec.cols * schedule.rows // (schedule.cluster * threads)
    by_registers = REGISTERS // ((values + OTHER_REGISTERS) * threads)
    blocks_per_sm = min(_MOST_SPLIT_BLOCKS, max(1, by_registers))
    wanted = blocks_per_sm * gpu.at_a_time(schedule.cluster)
    return max(1, min(-(-wanted // rows), sharing // _ROWS_OF_SPLIT))


def _power_of_2_from(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
