"""Which backward kernel runs a call, and with which parameters: one table each, with the reasons.

The numbers are those of Hopper (H100, H200): multiprocessors with 65536 registers and 228 KiB of
shared memory each, and memory that wants some 32 KiB under way on each of them.
"""

import dataclasses

import numpy as np

from jaxnorm_kernels.mosaic.direct_backward import Direct
from jaxnorm_kernels.mosaic.formulas import Columns
from jaxnorm_kernels.mosaic.ring import Ring
from jaxnorm_kernels.mosaic.rows_backward import Held, Streamed
from jaxnorm_kernels.mosaic.rows_ring import RowsRing
from jaxnorm_kernels.mosaic.tiles import WARP, WARPGROUP_THREADS, vector_width
from jaxnorm_kernels.mosaic.two_pass import TwoPass
from jaxnorm_kernels.specs import Spec

NormSchedule = Ring | RowsRing | Direct | TwoPass
SoftmaxSchedule = Held | Streamed | Ring

MULTIPROCESSORS = 132
REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
SHARED_BYTES = 228 * 1024  # of a multiprocessor
MOST_SHARED_BYTES = 227 * 1024  # of a block
RESERVED_BYTES = 1024  # of shared memory, in each block

# What a thread needs beside what it keeps of its columns: addresses, and a chunk of both inputs.
_OTHER_REGISTERS = 56
# Barriers, the sums that are being exchanged, and Mosaic's own scratch.
_OTHER_SHARED_BYTES = 3584
_MOST_STAGES = 8
COPY_BYTES = 16  # What the copy engine copies is a multiple of, and where it starts.
# Of both inputs, in a stage of narrow rows.
_STAGE_BYTES = 16 * 1024


# Clusters that run at a time: the multiprocessors come in groups of 16 and 18, and a cluster stays
# within a group.
_CLUSTERS = {1: MULTIPROCESSORS, 2: 66, 4: 32, 8: 16, 16: 8}


def persistent_blocks(spec: Spec, schedule: Ring | RowsRing | Direct) -> int:
    """Blocks (or clusters) of a persistent grid: as few as do the work in as many rounds.

    Each costs a row of partial sums, to write, to read, and to add up.
    """
    cluster = schedule.cluster if isinstance(schedule, Ring) else 1
    most = _CLUSTERS[cluster] * schedule.blocks_per_sm
    group = 1 if isinstance(schedule, Direct) else schedule.rows
    work = -(-spec.rows // group)
    rounds = -(-work // most)
    return -(-work // rounds)


@dataclasses.dataclass(frozen=True)
class _Wide:
    """A line of the table: rows of up to `cols` columns and `kib` KiB, counting both inputs.

    A thread keeps cols / (128 cluster warpgroups) columns: 32 are well, 48 can be.
    """

    cols: int
    kib: int
    warpgroups: int
    blocks_per_sm: int = 1
    lag: int = 1
    cluster: int = 1


_NORM = (
    # Two blocks hide each other's exchange, and leave 255 registers to a thread.
    _Wide(cols=5120, kib=32, warpgroups=1, blocks_per_sm=2, lag=0),
    # One block of two warpgroups: 255 registers still. It needs the lag to hide its exchange.
    _Wide(cols=12288, kib=48, warpgroups=2),
    # The shared memory of one multiprocessor would hold three rows or fewer: two share a row.
    _Wide(cols=16384, kib=96, warpgroups=2, cluster=2),
    _Wide(cols=32768, kib=128, warpgroups=4, cluster=2),
    # Four and eight: 128 of the 132 multiprocessors can work.
    _Wide(cols=65536, kib=256, warpgroups=4, cluster=4),
    _Wide(cols=131072, kib=1024, warpgroups=4, cluster=8),
)


# Columns up to, warpgroups, blocks for each multiprocessor: 16 columns of a thread, of which it
# holds seven values (two rows of both inputs, G, 1 / G, the sum), in 128 registers.
_DIRECT = ((2048, 1, 4), (4096, 2, 2), (8192, 4, 1))

# Rows of a KiB or two: a warp has 32 columns a thread, and the block needs no exchange.
_NARROW = 1024


def norm_schedule(spec: Spec) -> NormSchedule:
    saved = _saved_dtype(spec)
    vector = vector_width(spec.cols, spec.x_dtype, spec.y_dtype)
    if any(spec.cols * dtype.itemsize % COPY_BYTES for dtype in (saved, spec.y_dtype)):
        return direct(spec, vector)
    if spec.cols <= _NARROW and spec.rows >= 2 * WARP:  # the most rows of a tile
        return rows_ring(spec)
    line = next(
        (line for line in _NORM if spec.cols <= line.cols and _row_bytes(spec) <= line.kib * 1024),
        None,
    )
    ring = None if line is None else wide_ring(spec, vector, line)
    return two_pass(spec, vector) if ring is None else ring


def direct(spec: Spec, vector: int) -> Direct | TwoPass:
    """For rows that are no multiple of 16 bytes."""
    for cols, warpgroups, blocks_per_sm in _DIRECT:
        if spec.cols <= cols:
            while spec.cols < warpgroups * WARPGROUP_THREADS * vector:
                warpgroups //= 2
            return Direct(vector, warpgroups, ahead=1, blocks_per_sm=blocks_per_sm)
    return two_pass(spec, vector)


def two_pass(spec: Spec, vector: int | None = None) -> TwoPass:
    vector = vector or vector_width(spec.cols, spec.x_dtype, spec.y_dtype)
    units = 2 if vector > 2 else 4
    return TwoPass(Streamed(vector, warpgroups=4, units=units), vector, units=units)


def rows_ring(spec: Spec) -> RowsRing:
    vector = vector_width(spec.cols, spec.x_dtype, spec.y_dtype)
    threads = WARP
    # Two vectors or more for each thread: fewer shuffles for each row.
    while threads > 2 and spec.cols < 2 * threads * vector:
        threads //= 2
    ring = RowsRing(vector, threads)
    blocks_per_sm = 3 if spec.bias_dtype is None else 2
    rows = max(1, _STAGE_BYTES // (ring.height * _row_bytes(spec))) * ring.height
    while rows > ring.height and rows > spec.rows:
        rows -= ring.height
    stages = _shared_bytes(blocks_per_sm) // (rows * _row_bytes(spec))
    return dataclasses.replace(
        ring, rows=rows, stages=min(stages, _MOST_STAGES // 2), blocks_per_sm=blocks_per_sm
    )


def wide_ring(spec: Spec, vector: int, line: _Wide) -> Ring | None:
    """The rest of the parameters: what registers and shared memory allow; None for too little."""
    warpgroups = line.warpgroups
    cols = spec.cols // line.cluster  # of a block
    while warpgroups > 1 and cols < warpgroups * WARPGROUP_THREADS * vector:
        warpgroups //= 2
    threads = warpgroups * WARPGROUP_THREADS
    chunks, rest = divmod(spec.cols, line.cluster * threads * vector)
    has_tail = rest > 0
    cols = (chunks + has_tail) * threads * vector  # of a block
    row_bytes = cols * _row_bytes(spec) // spec.cols
    shared = _shared_bytes(line.blocks_per_sm)
    # What is kept of each column: its sums; G, 1 / G and the bias, as `NormFormula.columns` says.
    has_scale, has_bias = spec.scale_dtype is not None, spec.bias_dtype is not None
    kept = 2 * has_scale + has_bias if spec.saved == "output" else int(has_scale)
    bare = sum(d.itemsize for d in (spec.scale_dtype, spec.bias_dtype) if d is not None)
    own = -(-cols // threads)  # columns of a thread
    free = min(MOST_REGISTERS, REGISTERS // (threads * line.blocks_per_sm)) - _OTHER_REGISTERS

    columns: Columns = "registers"
    held = 0
    if own * (has_scale + has_bias + kept) > free:
        columns, held = "shared", 4 * kept * cols
        if shared - held < 3 * row_bytes:
            columns, held = "recomputed", bare * cols
    stages = min((shared - held) // row_bytes, _MOST_STAGES, WARP // warpgroups)
    if stages < 2:
        return None
    return Ring(
        vector,
        warpgroups,
        stages,
        lag=line.lag if stages > 2 else 0,
        blocks_per_sm=line.blocks_per_sm,
        columns=columns,
        cluster=line.cluster,
    )


def _saved_dtype(spec: Spec) -> np.dtype:
    return spec.y_dtype if spec.saved == "output" else spec.x_dtype


def _row_bytes(spec: Spec) -> int:
    """Of both inputs."""
    return spec.cols * (_saved_dtype(spec).itemsize + spec.y_dtype.itemsize)


def _shared_bytes(blocks_per_sm: int) -> int:
    """For the ring of a block."""
    most = min(MOST_SHARED_BYTES, SHARED_BYTES // blocks_per_sm - RESERVED_BYTES)
    return most - _OTHER_SHARED_BYTES


def softmax_schedule(spec: Spec) -> SoftmaxSchedule:
    vector = vector_width(spec.cols, spec.x_dtype, spec.y_dtype)
    vectors = spec.cols // vector
    if vectors <= 4 * WARP:
        threads = WARP
        while threads > vectors or (threads > 8 and vectors <= threads):
            threads //= 2
        rows = WARPGROUP_THREADS // threads
        if spec.rows >= rows:
            return Held(vector, threads=threads, rows=rows)
    if vectors <= 8 * WARPGROUP_THREADS:
        return Held(vector)
    if vectors <= 16 * WARPGROUP_THREADS:
        return Held(vector, warpgroups=2)
    if vectors <= 32 * WARPGROUP_THREADS:
        return Held(vector, warpgroups=4)
    return Streamed(vector)
