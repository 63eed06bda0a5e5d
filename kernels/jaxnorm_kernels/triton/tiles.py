"""Pieces that every kernel is made of: how rows are cut into tiles; reading and writing a tile.

A tile is (tile_rows, block) elements of an array (rows, cols). Sizes of tiles are powers of two, so
that a tile may reach over the last row and the last column: what is outside is neither read nor
written. An array may have more than 2^31 elements, so a row's offset has 64 bits.
"""

import dataclasses

import triton
import triton.language as tl

# A block may hold nothing but -inf. Against this maximum its exponentials are 0; against its own,
# -inf, they would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How rows are cut; every kernel is compiled for one.

    Attributes:
      cols: of a row.
      tile_rows: rows of a tile, a power of two.
      block: columns of a tile, a power of two.
      pieces: tiles, side by side, that a program holds at once.
    """

    cols: int
    tile_rows: int
    block: int
    pieces: int


@triton.jit
def zeros(tiling: tl.constexpr):
    """A tile of zeros."""
    return tl.full([tiling.tile_rows, tiling.block], 0.0, tl.float32)


@triton.jit
def columns_at(first_col, block: tl.constexpr, tile_rows: tl.constexpr = 1):
    """The columns of a tile: of a row that goes for all, or of each row.

    What is kept for many tiles is better loaded for each row: then it lies in the threads that
    have those rows, and is not sent there anew for every tile.
    """
    col = (first_col + tl.arange(0, block))[None, :]
    if tile_rows > 1:
        col += tl.zeros([tile_rows, 1], tl.int32)
    return col


@triton.jit
def tile_at(first_row, first_col, rows, tiling: tl.constexpr):
    """A tile's rows, the offsets of their starts, its columns, and which of its elements exist.

    The element of each row and column has the offset `start + col`.
    """
    row = first_row + tl.arange(0, tiling.tile_rows)
    start = row.to(tl.int64)[:, None] * tiling.cols
    col = columns_at(first_col, tiling.block)
    exists = (row < rows)[:, None]
    if tiling.cols % tiling.block != 0:
        exists = exists & (col < tiling.cols)
    return row, start, col, exists


@triton.jit
def load_tile(ptr, tile, eviction: tl.constexpr = ""):
    """In float32; 0 beyond the rows."""
    _, start, col, exists = tile
    return tl.load(ptr + start + col, exists, 0.0, eviction_policy=eviction).to(tl.float32)


@triton.jit
def store_tile(ptr, x, tile):
    """Writes those elements that exist."""
    _, start, col, exists = tile
    tl.store(ptr + start + col, x, mask=exists)


@triton.jit
def load_rows(ptr, first_row, rows, tiling: tl.constexpr):
    """Whole rows in float32: a tuple of tiles, side by side; 0 beyond the rows."""
    pieces: tl.constexpr = tiling.pieces
    tiles = ()
    for i in tl.static_range(pieces):
        tiles += (load_tile(ptr, tile_at(first_row, i * tiling.block, rows, tiling)),)
    return tiles


@triton.jit
def zero_beyond(x, first_col, tiling: tl.constexpr):
    """`x`, and 0 in the columns of a tile that do not exist."""
    if tiling.cols % tiling.block != 0:
        x = tl.where(columns_at(first_col, tiling.block) < tiling.cols, x, 0.0)
    return x


@triton.jit
def of_rows(stat_ptr, row, rows):
    """A statistic of the rows of a tile; 0 where there is no such statistic."""
    return 0.0 if stat_ptr is None else tl.load(stat_ptr + row, row < rows, 0.0)[:, None]


@triton.jit
def clipped(x, limit: tl.constexpr):
    """`x`, of which what is greater in magnitude is `limit`; 0 is none."""
    if limit > 0.0:
        x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def rounded_like(x, ptr):
    """`x` rounded to the dtype behind a pointer, in float32 again."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)
