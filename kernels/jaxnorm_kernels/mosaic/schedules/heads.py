"""How heads that are rotated are held and read: threads of a row, vectors, stages of a ring.

All numbers are measured (`benchmarks/sweeps/heads.py`, H200).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import RESERVED_BYTES, Gpu, kept
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARP, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.rows.heads import HeadTile, rows_of_a_tile
from jaxnorm_kernels.specs import Spec

# Columns of a thread, of which the backward holds six values: with 20, it spills.
_MOST_COLUMNS = 16
#: The longest head: that of a warp.
MOST_COLS = _MOST_COLUMNS * WARP
#: The most that a warpgroup holds at a time: two threads share a row.
LEAST_ROWS = WARPGROUP_THREADS // 2

# Bytes of x that a thread loads in the forward, at most: two loads.
_TILE_BYTES = 2 * VECTOR_BYTES
# Columns that a thread has side by side in either half of the pairs: of 16 bits, with half of the
# widest load, the forward has 0.96 to 0.97 of a copy over 64 to 256 columns, and else 0.88 to 0.91.
_MOST_OF_PAIRS = 4
# Of the backward's ring: bytes of both inputs in a stage, stages, and blocks of a multiprocessor.
# With them it has 0.86 of a copy over 128 columns of bfloat16 and 0.98 of float32, over 64 columns
# 0.82 and 0.91; with three blocks 0.80, 0.92, 0.73 and 0.87.
_STAGE_BYTES, _STAGES, _BLOCKS_PER_SM = 8 * 1024, 3, 4
# Of each column of its pairs: so many bytes of a thread leave twice as many threads to a row, and
# registers for these blocks.
_BACKWARD_BYTES = VECTOR_BYTES // 2
# What the copy engine copies is a multiple of.
_COPY_BYTES = 16
# Barriers, and Mosaic's own scratch.
_OTHER_SHARED_BYTES = 2 * 1024


@dataclasses.dataclass(frozen=True)
class Heads:
    """Parameters of the kernels.

    Attributes:
      vector: columns of each half of the pairs that a thread has side by side.
      rest: of the columns that are not rotated.
      threads: of a warp, that share a row.
      height: rows that the warpgroup holds at a time.
      rows: of a stage, a multiple of `height`; stages and blocks_per_sm: of the backward's ring.
    """

    vector: int
    rest: int
    threads: int
    height: int
    rows: int = 0
    stages: int = 0
    blocks_per_sm: int = 1

    def tile(self, spec: Spec) -> HeadTile:
        """How a block holds rows."""
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
    """None where no kernel takes the heads."""
    of_pairs = (
        VECTOR_BYTES // 2 if spec.norm.interleaved else VECTOR_BYTES
    )  # which are loaded in one
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
    """None where no kernel takes the heads."""
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
    """Vectors of the pairs and of the rest, and threads of a row; None for no such.

    The widest vectors that there are, and the most threads with them, where these leave a thread no
    more columns than its registers hold. `of_pairs`: bytes of the
    first, or of the second columns of a thread's neighbouring pairs.
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
    """The largest power of 2 up to `most` that divides so many columns of a thread."""
    vector = most
    while columns % vector:
        vector //= 2
    return vector
