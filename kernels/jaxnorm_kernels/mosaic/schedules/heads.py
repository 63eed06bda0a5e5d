"""Schedules of norms with a rotation: threads per head, vectors, and stages of the pipeline.

All numbers are measured (`benchmarks/sweeps/heads.py`, H200).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import RESERVED_BYTES, Gpu, kept
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARP, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.rows.heads import HeadTile, rows_of_a_tile
from jaxnorm_kernels.specs import Spec

# The maximum number of columns per thread. The backward pass holds six values of each column, and
# spills registers with 20 columns.
_MOST_COLUMNS = 16
#: The maximum number of columns of a head: a warp must hold it.
MOST_COLS = _MOST_COLUMNS * WARP
#: The maximum number of rows that a warpgroup holds at a time. Two threads then share a row.
LEAST_ROWS = WARPGROUP_THREADS // 2

# The maximum bytes of x that a thread loads in the forward pass: two loads.
_TILE_BYTES = 2 * VECTOR_BYTES
# The maximum number of neighbouring columns that a thread loads at once from each half of the
# pairs. With half of the widest load, the forward pass reaches 0.96 to 0.97 of a copy's bandwidth
# over 64 to 256 columns of 16 bits, otherwise 0.88 to 0.91.
_MOST_OF_PAIRS = 4
# The pipeline of the backward pass: bytes of both inputs per stage, stages, and blocks per
# multiprocessor. It reaches 0.86 of a copy's bandwidth over 128 columns of bfloat16, 0.98 over 128
# of float32, and 0.82 and 0.91 over 64 columns. With three blocks, the four numbers are 0.80, 0.92,
# 0.73 and 0.87.
_STAGE_BYTES, _STAGES, _BLOCKS_PER_SM = 8 * 1024, 3, 4
# The bytes of the widest load of pairs in the backward pass. Half of the widest possible load
# doubles the threads per row. Each thread then has fewer columns, and registers suffice for these
# blocks.
_BACKWARD_BYTES = VECTOR_BYTES // 2
# The size of an asynchronous copy must be a multiple of this.
_COPY_BYTES = 16
# The shared memory that barriers and Mosaic itself take.
_OTHER_SHARED_BYTES = 2 * 1024


@dataclasses.dataclass(frozen=True)
class Heads:
    """Parameters of the kernels.

    Attributes:
      vector: the number of neighbouring columns that a thread holds in each half of the pairs.
      rest: the number of neighbouring columns that a thread holds among those not rotated.
      threads: the number of threads of a warp that share a row.
      height: the number of rows that the warpgroup holds at a time.
      rows: the number of rows in a stage of the backward pass, a multiple of `height`.
      stages, blocks_per_sm: the number of stages, and of blocks per multiprocessor, in the backward
        pass.
    """

    vector: int
    rest: int
    threads: int
    height: int
    rows: int = 0
    stages: int = 0
    blocks_per_sm: int = 1

    def tile(self, spec: Spec) -> HeadTile:
        """Return how a block holds rows of heads."""
        return HeadTile(
            spec.cols,
            spec.norm.rotated,
            spec.norm.interleaved,
            self.vector,
            self.rest,
            self.threads,
            self.height,
        )


def forward(spec: Spec) -> Heads | None:
    """Return the schedule of the forward pass, or None if no kernel supports these heads."""
    of_pairs = VECTOR_BYTES // 2 if spec.norm.interleaved else VECTOR_BYTES  # loaded at once
    held = _held(spec, (spec.x_dtype, spec.y_dtype), of_pairs)
    if held is None:
        return None
    vector, rest, threads = held
    step = rows_of_a_tile(threads)
    of_thread = spec.cols // threads * spec.x_dtype.itemsize
    height = max(1, _TILE_BYTES // of_thread) * step
    height = min(height, spec.rows // step * step)
    return Heads(vector, rest, threads, height)


@kept
def backward(spec: Spec, gpu: Gpu) -> Heads | None:
    """Return the schedule of the backward pass, or None if no kernel supports these heads."""
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.x_dtype
    read = (saved, spec.y_dtype)
    held = _held(spec, (*read, spec.x_dtype), _BACKWARD_BYTES)
    if held is None or any(spec.cols * dtype.itemsize % _COPY_BYTES for dtype in read):
        return None
    vector, rest, threads = held
    height = rows_of_a_tile(threads)
    row_bytes = spec.cols * sum(dtype.itemsize for dtype in read)
    rows = max(1, _STAGE_BYTES // (height * row_bytes)) * height
    rows = min(rows, spec.rows // height * height)
    sums = height * spec.cols * 4
    room = gpu.shared_bytes - RESERVED_BYTES - _OTHER_SHARED_BYTES
    if _STAGES * rows * row_bytes + sums > room:
        return None
    return Heads(vector, rest, threads, height, rows, _STAGES, _BLOCKS_PER_SM)


def _held(spec: Spec, dtypes: Sequence[np.dtype], of_pairs: int) -> tuple[int, int, int] | None:
    """Return (vector of the pairs, vector of the rest, threads per row), or None.

    This chooses the widest possible vectors and then the most threads, if a thread's registers can
    hold its columns. `of_pairs` is the maximum number of bytes that a thread loads at once from the
    first columns of its pairs, and from the second.
    """
    if spec.cols > MOST_COLS or spec.rows < LEAST_ROWS:
        return None
    itemsize = max(dtype.itemsize for dtype in dtypes)
    most, most_of_pairs = VECTOR_BYTES // itemsize, min(of_pairs // itemsize, _MOST_OF_PAIRS)
    pairs, rest = spec.norm.rotated // 2, spec.cols - spec.norm.rotated

    def vectors(threads: int) -> tuple[int, int] | None:
        if pairs % threads or rest % threads:
            return None
        return _widest(pairs // threads, most_of_pairs), _widest(rest // threads or most, most)

    shapes = [(v, n) for n in (32, 16, 8, 4, 2) if n <= WARP and (v := vectors(n)) is not None]
    if not shapes:
        return None

    def by_preference(shape: tuple[tuple[int, int], int]) -> tuple[bool, int, int]:
        vectors, threads = shape
        return spec.cols <= _MOST_COLUMNS * threads, min(vectors), threads

    (vector, of_rest), threads = max(shapes, key=by_preference)
    return vector, of_rest, threads


def _widest(columns: int, most: int) -> int:
    """Return the largest power of 2, at most `most`, that divides a thread's number of columns."""
    vector = most
    while columns % vector:
        vector //= 2
    return vector
