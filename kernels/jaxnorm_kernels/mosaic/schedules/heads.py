"""Schedules of norms with a rotation: threads per head, vector sizes, and stages of the pipeline.

A rotation acts on pairs of columns of a head. A thread loads the first columns of its pairs with
one load, and the second columns with another. But if the columns of a pair are neighbours
(interleaved), one load loads both columns of its pairs. All numbers were measured on an H200.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import RESERVED_BYTES, Gpu, cached
from jaxnorm_kernels.mosaic.device.layouts import COPY_BYTES, VECTOR_BYTES, WARP, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.rows.heads import HeadTile
from jaxnorm_kernels.specs import Spec

# Maximum number of columns per thread. The backward pass needs six values for each column, so
# registers would spill to memory if a thread had 20 columns.
_MOST_COLUMNS = 16
#: Maximum number of columns of a head, so that it fits in the registers of one warp.
MOST_COLS = _MOST_COLUMNS * WARP
#: Minimum number of rows of a call. The largest tile, in which two threads share each row, has this
#: number of rows. So every supported call has enough rows for one tile.
LEAST_ROWS = WARPGROUP_THREADS // 2

# Maximum number of bytes of x per thread in the forward pass: two loads of 16 bytes.
_TILE_BYTES = 2 * VECTOR_BYTES
# Maximum number of neighbouring pairs that a thread loads at once: their first columns with one
# load, and their second columns with another. With 16-bit elements, a load then has 8 bytes, half
# of the maximum. With this limit, the forward pass over 64 to 256 columns of 16 bits reaches 0.96
# to 0.97 of a copy's bandwidth. With loads of 16 bytes, it reaches 0.88 to 0.91.
_MOST_OF_PAIRS = 4
# Pipeline of the backward pass: number of bytes of both inputs per stage, number of stages, and
# number of blocks per SM. Bandwidths, relative to a copy:
#
#                                four blocks per SM    three blocks per SM
#     128 columns of bfloat16           0.86                  0.80
#     128 columns of float32            0.98                  0.92
#     64 columns of bfloat16            0.82                  0.73
#     64 columns of float32             0.91                  0.87
_STAGE_BYTES, _STAGES, _BLOCKS_PER_SM = 8 * 1024, 3, 4
# A thread of the backward pass loads the first columns of its pairs with one load, and their second
# columns with another. This is the maximum number of bytes of each of these loads. It is half of
# the largest possible load, 16 bytes. With loads of 16 bytes, half as many threads would share a
# row, and each thread would have twice as many columns. Then four blocks would not fit in an SM's
# registers.
_BACKWARD_BYTES = VECTOR_BYTES // 2
# Shared memory of a block for barriers and for Mosaic itself.
_OTHER_SHARED_BYTES = 2 * 1024


@dataclasses.dataclass(frozen=True)
class Heads:
    """Schedule of the kernels of norms with a rotation.

    Attributes:
      vector: number of neighbouring pairs per thread. A thread loads their first columns with one
        load, and their second columns with another.
      rest: number of neighbouring columns that a thread loads at once from the columns that are not
        rotated.
      threads: number of threads of a warp that share a row.
      height: number of rows that a warpgroup processes at the same time.
      rows: number of rows per stage of the backward pass, a multiple of `height`.
      stages: number of stages of the backward pass.
      blocks_per_sm: number of blocks per SM in the backward pass.
    """

    vector: int
    rest: int
    threads: int
    height: int
    rows: int = 0
    stages: int = 0
    blocks_per_sm: int = 1

    def tile(self, spec: Spec) -> HeadTile:
        """Return the tile: how a block distributes rows (heads) over its threads."""
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
    """Return the schedule of the forward pass, or None if the heads are not supported."""
    of_pairs = VECTOR_BYTES // 2 if spec.norm.interleaved else VECTOR_BYTES  # bytes per load
    held = _held(spec, (spec.x_dtype, spec.y_dtype), of_pairs)
    if held is None:
        return None
    vector, rest, threads = held
    step = WARPGROUP_THREADS // threads
    of_thread = spec.cols // threads * spec.x_dtype.itemsize
    height = max(1, _TILE_BYTES // of_thread) * step
    height = min(height, spec.rows // step * step)
    return Heads(vector, rest, threads, height)


@cached
def backward(spec: Spec, gpu: Gpu) -> Heads | None:
    """Return the schedule of the backward pass, or None if the heads are not supported."""
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.x_dtype
    read = (saved, spec.y_dtype)
    held = _held(spec, (*read, spec.x_dtype), _BACKWARD_BYTES)
    if held is None or any(spec.cols * dtype.itemsize % COPY_BYTES for dtype in read):
        return None
    vector, rest, threads = held
    height = WARPGROUP_THREADS // threads
    row_bytes = spec.cols * sum(dtype.itemsize for dtype in read)
    rows = max(1, _STAGE_BYTES // (height * row_bytes)) * height
    rows = min(rows, spec.rows // height * height)
    sums = height * spec.cols * 4
    room = gpu.shared_bytes - RESERVED_BYTES - _OTHER_SHARED_BYTES
    if _STAGES * rows * row_bytes + sums > room:
        return None
    return Heads(vector, rest, threads, height, rows, _STAGES, _BLOCKS_PER_SM)


def _held(spec: Spec, dtypes: Sequence[np.dtype], of_pairs: int) -> tuple[int, int, int] | None:
    """Return ``(vector, rest, threads)``, or None if the heads are not supported.

    The result has three attributes of `Heads`:

    * `vector`, the number of pairs that a thread loads at once;
    * `rest`, the number of unrotated columns that a thread loads at once;
    * `threads`, the number of threads per row.

    If several triples are possible, a triple is preferred if a thread's columns fit in the thread's
    registers. Among such triples, the widest loads are preferred, and then the largest number of
    threads.

    A thread loads the first columns of its pairs with one load, and the second columns with
    another. `of_pairs` is the maximum number of bytes of each of these loads.
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
    """Return the largest power of 2 that is at most `most` and divides `columns`."""
    vector = most
    while columns % vector:
        vector //= 2
    return vector
