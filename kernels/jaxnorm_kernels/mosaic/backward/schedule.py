"""Which backward kernel runs a call, and with which parameters: one table each, with the reasons.

The numbers are those of Hopper (H100, H200): multiprocessors with 65536 registers and 228 KiB of
shared memory each, and memory that wants some 32 KiB under way on each of them.
"""

import dataclasses

import numpy as np

from jaxnorm_kernels.mosaic.backward.direct import Direct
from jaxnorm_kernels.mosaic.backward.formulas import Columns
from jaxnorm_kernels.mosaic.backward.ring import Ring
from jaxnorm_kernels.mosaic.backward.rows import Held, Streamed
from jaxnorm_kernels.mosaic.backward.rows_ring import RowsRing
from jaxnorm_kernels.mosaic.backward.two_pass import TwoPass
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPGROUP_THREADS, vector_width
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
_OTHER_REGISTERS = 40
# Barriers, the sums that are being exchanged, and Mosaic's own scratch.
_OTHER_SHARED_BYTES = 6 * 1024
COPY_BYTES = 16  # What the copy engine copies is a multiple of, and where it starts.
# Of both inputs, in a stage of narrow rows: of up to a KiB, and of more.
_SHORT_STAGE_BYTES, _STAGE_BYTES = 8 * 1024, 16 * 1024


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
class Line:
    """A line of a table: for up to `cols` columns, `kib` KiB of both inputs, `sums` column sums.

    The other attributes are those of `Ring`; of `stages`, the most.
    """

    cols: int
    kib: int
    warpgroups: int
    stages: int
    sums: int = 2
    rows: int = 1
    pieces: int = 1
    lag: int = 1
    blocks_per_sm: int = 1
    cluster: int = 1


# A thread keeps cols / (128 cluster warpgroups) columns: 16 are well in 128 registers, 32 in 255.
# Stages: two or three rows ahead keep memory busy; more of them slow the writing of dx down.
_NORM = (
    # A step of two rows, or two blocks and more on a multiprocessor, hide each other's exchange.
    Line(cols=1024, kib=4, warpgroups=1, stages=4, rows=2, blocks_per_sm=3),
    Line(cols=1024, kib=8, warpgroups=1, stages=2, rows=2, blocks_per_sm=3),
    Line(cols=2048, kib=8, warpgroups=1, stages=3, lag=0, blocks_per_sm=3),
    Line(cols=2048, kib=16, warpgroups=1, stages=2, blocks_per_sm=3),
    Line(cols=3072, kib=12, warpgroups=1, stages=4, blocks_per_sm=2),
    Line(cols=3072, kib=24, warpgroups=1, stages=2, rows=2, blocks_per_sm=2),
    Line(cols=4096, kib=16, warpgroups=1, stages=3, blocks_per_sm=2),
    Line(cols=4096, kib=32, warpgroups=1, stages=2, blocks_per_sm=2),
    # One warpgroup has no registers for more columns: two share a row, of a block or a cluster.
    Line(cols=5120, kib=20, warpgroups=1, stages=4, blocks_per_sm=2, cluster=2),
    Line(cols=5120, kib=40, warpgroups=2, stages=2, rows=2),
    Line(cols=8192, kib=32, warpgroups=2, stages=3, rows=2, cluster=2),
    Line(cols=8192, kib=64, warpgroups=2, stages=2, rows=2, cluster=2),
    Line(cols=12288, kib=96, warpgroups=3, stages=4, cluster=2),
    Line(cols=16384, kib=64, warpgroups=4, stages=6, cluster=2),
    Line(cols=16384, kib=128, warpgroups=4, stages=2, cluster=2),
    # With one column sum, 32 columns are still well: G is read again from shared memory instead.
    Line(cols=32768, kib=128, sums=1, warpgroups=4, stages=4, pieces=2, lag=0, cluster=2),
    Line(cols=32768, kib=128, warpgroups=2, stages=4, blocks_per_sm=2, cluster=8),
    Line(cols=32768, kib=256, warpgroups=2, stages=3, cluster=4),
    # 128 of the 132 multiprocessors can work.
    Line(cols=65536, kib=512, warpgroups=2, stages=3, blocks_per_sm=2, cluster=16),
    Line(cols=131072, kib=1024, warpgroups=2, stages=3, cluster=16),
)

# Nothing is kept of the columns, so that rows are spread only for want of shared memory.
_SOFTMAX = (
    Line(cols=16384, kib=64, warpgroups=4, stages=3, lag=0),
    # Two clusters on the same multiprocessors hide each other's exchange.
    Line(cols=65536, kib=256, warpgroups=2, stages=2, blocks_per_sm=2, cluster=8),
    Line(cols=65536, kib=512, warpgroups=2, stages=3, lag=0, cluster=8),
    Line(cols=131072, kib=1024, warpgroups=2, stages=3, cluster=16),
)


# Columns up to, warpgroups, blocks for each multiprocessor: 16 columns of a thread, of which it
# holds seven values (two rows of both inputs, G, 1 / G, the sum), in 128 registers.
_DIRECT = ((2048, 1, 4), (4096, 2, 2), (8192, 4, 1))

# Shorter rows: a warp has fewer than 32 columns a thread, and the block needs no exchange.
_NARROW = 1024

# Warpgroups of softmax rows in registers, 8 vectors of each input a thread at most, and columns up
# to: beyond 48 of a thread only one block of two warpgroups fits a multiprocessor.
_HELD = {1: 8192, 2: 12288, 4: 32768}


def norm_schedule(spec: Spec) -> NormSchedule:
    if not _copied(spec):
        return direct(spec)
    if spec.cols < _NARROW and spec.rows >= 2 * WARP:  # the most rows of a tile
        return rows_ring(spec)
    return _from_table(_NORM, spec) or two_pass(spec)


def direct(spec: Spec) -> Direct | TwoPass:
    """For rows that are no multiple of 16 bytes."""
    vector = _vector(spec)
    for cols, warpgroups, blocks_per_sm in _DIRECT:
        if spec.cols <= cols:
            while spec.cols < warpgroups * WARPGROUP_THREADS * vector:
                warpgroups //= 2
            return Direct(vector, warpgroups, ahead=1, blocks_per_sm=blocks_per_sm)
    return two_pass(spec)


def two_pass(spec: Spec) -> TwoPass:
    vector = _vector(spec)
    units = 2 if vector > 2 else 4
    return TwoPass(Streamed(vector, warpgroups=4, units=units), vector, units=units)


def rows_ring(spec: Spec) -> RowsRing:
    vector = _vector(spec)
    threads = WARP
    while threads > 2 and spec.cols < threads * vector:
        threads //= 2
    ring = RowsRing(vector, threads)
    # 8 columns of a thread leave registers for three blocks.
    blocks_per_sm = 3 if spec.cols <= 8 * threads else 2
    stage_bytes = _SHORT_STAGE_BYTES if _row_bytes(spec) <= 1024 else _STAGE_BYTES
    rows = max(1, stage_bytes // (ring.height * _row_bytes(spec))) * ring.height
    while rows > ring.height and rows > spec.rows:
        rows -= ring.height
    stages = min(3, _shared_bytes(blocks_per_sm) // (rows * _row_bytes(spec)))
    return dataclasses.replace(ring, rows=rows, stages=stages, blocks_per_sm=blocks_per_sm)


def _from_table(table: tuple[Line, ...], spec: Spec) -> Ring | None:
    """The ring of the first line that takes the spec, and fits; None for no line."""
    sums = sum(dtype is not None for dtype in (spec.scale_dtype, spec.bias_dtype))
    for line in table:
        fits = spec.cols <= line.cols and _row_bytes(spec) <= line.kib * 1024
        if fits and sums <= line.sums and (ring := wide_ring(spec, line)):
            return ring
    return None


def wide_ring(spec: Spec, line: Line) -> Ring | None:
    """The line for this spec: what registers and shared memory allow; None for too little."""
    vector, warpgroups = _vector(spec), line.warpgroups
    threads = line.cluster * line.pieces * WARPGROUP_THREADS
    while warpgroups > 1 and spec.cols < warpgroups * threads * vector:
        warpgroups //= 2
    if spec.cols < warpgroups * threads * vector:
        return None
    # Half a vector at once, where that leaves no tail.
    if spec.cols % (warpgroups * threads * vector) and vector == 8:
        vector = 8 if spec.cols % (warpgroups * threads * 4) else 4
    ring = Ring(
        vector,
        warpgroups,
        line.stages,
        rows=line.rows if spec.rows >= line.rows else 1,
        pieces=line.pieces,
        lag=line.lag,
        blocks_per_sm=line.blocks_per_sm,
        cluster=line.cluster,
    )
    cols = warpgroups * ring.pieces * ring.cut(spec.cols)[0].width  # of a block
    columns, held = _columns(spec, ring, cols)
    stage_bytes = ring.rows * cols // ring.pieces * _row_bytes(spec) // spec.cols
    stages = min(ring.stages, (_shared_bytes(ring.blocks_per_sm) - held) // stage_bytes)
    lag = min(ring.lag, stages // ring.pieces - 1)
    return None if lag < 0 else dataclasses.replace(ring, stages=stages, lag=lag, columns=columns)


def _columns(spec: Spec, ring: Ring, cols: int) -> tuple[Columns, int]:
    """Where to keep what belongs to `cols` columns of a block, and its bytes of shared memory."""
    params = [dtype for dtype in (spec.scale_dtype, spec.bias_dtype) if dtype is not None]
    # The sums; G, 1 / G and the bias, as `NormFormula.columns` says.
    has_scale, has_bias = spec.scale_dtype is not None, spec.bias_dtype is not None
    kept = 2 * has_scale + has_bias if spec.saved == "output" else int(has_scale)
    threads = ring.warpgroups * WARPGROUP_THREADS
    free = min(MOST_REGISTERS, REGISTERS // (threads * ring.blocks_per_sm)) - _OTHER_REGISTERS
    if cols // threads * (len(params) + kept) <= free:
        return "registers", 0
    return "recomputed", sum(dtype.itemsize for dtype in params) * cols


def _copied(spec: Spec) -> bool:
    """Whether the copy engine takes the rows of both inputs."""
    return not any(
        spec.cols * dtype.itemsize % COPY_BYTES for dtype in (_saved_dtype(spec), spec.y_dtype)
    )


def _vector(spec: Spec) -> int:
    return vector_width(spec.cols, spec.x_dtype, spec.y_dtype)


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
    vector = _vector(spec)
    vectors = spec.cols // vector
    if vectors <= 4 * WARP:
        threads = WARP
        while threads > vectors or (threads > 8 and vectors <= threads):
            threads //= 2
        rows = WARPGROUP_THREADS // threads
        if spec.rows >= rows:
            return Held(vector, threads=threads, rows=rows)
    warpgroups = next((w for w in _HELD if vectors <= 8 * w * WARPGROUP_THREADS), None)
    if warpgroups is not None and spec.cols <= _HELD[warpgroups]:
        return Held(vector, warpgroups)
    ring = _from_table(_SOFTMAX, spec) if _copied(spec) else None
    return ring or Streamed(vector)
