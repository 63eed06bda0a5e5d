"""Tiles of two-dimensional arrays: their indices, and loads and stores.

A tile is a part of an array (rows, cols) with tile_rows rows and block columns. Both numbers are
powers of two, so a tile may extend beyond the last row and the last column. Elements outside the
array are neither loaded nor stored. An array may have more than 2^31 elements, so the offset of a
row in its array has 64 bits.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared

# If the maximum m of a block is smaller than this number, m is set to this number. If a block
# contains only -inf, exp(x - m) is then 0. With m = -inf, it would be NaN, because -inf - -inf is
# NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tile sizes that a kernel is compiled for.

    Attributes:
      cols: the number of columns of a row.
      tile_rows: the number of rows of a tile, a power of two.
      block: the number of columns of a tile, a power of two.
      pieces: the number of adjacent tiles of a row that a program holds at once.
    """

    cols: int
    tile_rows: int
    block: int
    pieces: int


@triton.jit
def zeros(tiling: tl.constexpr):
    """Return a float32 tile of zeros."""
    return tl.full([tiling.tile_rows, tiling.block], 0.0, tl.float32)


@triton.jit
def columns_at(first_col, block: tl.constexpr, tile_rows: tl.constexpr = 1):
    """Return a tile's column indices, as an array with one row or with `tile_rows` equal rows.

    Use `tile_rows` for a parameter that is loaded once for many tiles. The loaded array then has
    the shape and layout of a tile, so each thread already holds the values for its rows. With one
    row, threads would exchange the values again for each tile.
    """
    col = (first_col + tl.arange(0, block))[None, :]
    if tile_rows > 1:
        col += tl.zeros([tile_rows, 1], tl.int32)
    return col


@triton.jit
def tile_at(first_row, first_col, rows, tiling: tl.constexpr):
    """Return a tile's row indices, the offsets of its rows, its column indices, and a mask.

    The element in column `col` of a row with the offset `start` has the offset `start + col` in its
    array. The mask is True for elements that are inside the array.
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
    """Load a tile in float32, with 0 for elements outside the array."""
    _, start, col, exists = tile
    return tl.load(ptr + start + col, exists, 0.0, eviction_policy=eviction).to(tl.float32)


@triton.jit
def store_tile(ptr, x, tile):
    """Store a tile, except for elements outside the array."""
    _, start, col, exists = tile
    tl.store(ptr + start + col, x, mask=exists)


@triton.jit
def load_rows(ptr, first_row, rows, tiling: tl.constexpr):
    """Load whole rows as a tuple of adjacent float32 tiles, with 0 outside the array."""
    pieces: tl.constexpr = tiling.pieces
    tiles = ()
    for i in tl.static_range(pieces):
        tiles += (load_tile(ptr, tile_at(first_row, i * tiling.block, rows, tiling)),)
    return tiles


@triton.jit
def zero_beyond(x, first_col, tiling: tl.constexpr):
    """Return the tile `x` with 0 in columns beyond the last column of the array."""
    if tiling.cols % tiling.block != 0:
        x = tl.where(columns_at(first_col, tiling.block) < tiling.cols, x, 0.0)
    return x


@triton.jit
def of_rows(stat_ptr, row, rows):
    """Load a statistic, one number for each row of a tile. If the pointer is None, return 0."""
    return 0.0 if stat_ptr is None else tl.load(stat_ptr + row, row < rows, 0.0)[:, None]


@triton.jit
def clipped(x, limit: tl.constexpr):
    """Clip `x` to a magnitude of at most `limit`, if `limit` is not 0."""
    if limit > 0.0:
        x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def rounded_like(x, ptr):
    """Round `x` to the dtype that `ptr` points to, and return it in float32."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


# ------------------------------------------------------------- operands that are broadcast to rows


#: A rule that converts an index over some axes to an index over other axes. It has three numbers
#: for each axis: (stride, size, new stride). The position on the axis is index // stride % size,
#: and the result is the sum of position * new stride over all axes.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How rows of x map to rows of an operand that is broadcast to x.

    Attributes:
      has_columns: True if the operand is ``(n, cols)``, False if it is ``(n, 1)``.
      row: the rule that converts a row index of x to the row index of the operand.
      of_row, of_nth: two rules for the opposite direction. Several rows of x use row r of the
        operand; the n-th of them is row of_row(r) + of_nth(n) of x.
    """

    has_columns: bool
    row: Digits
    of_row: Digits
    of_nth: Digits


def operand_of(shared: Shared | None) -> Operand:
    """Convert a `Shared` to an `Operand`, which a kernel takes as a compile-time constant."""
    assert shared is not None  # `why_unsupported` refuses calls without this mapping of rows
    row: Digits = ()
    parts: dict[bool, Digits] = {True: (), False: ()}
    of_x, inside = 1, {True: 1, False: 1}
    for size, has_axis in reversed(shared.segments):
        row += (of_x, size, inside[True]) if has_axis else ()
        parts[has_axis] += (inside[has_axis], size, of_x)
        of_x, inside[has_axis] = of_x * size, inside[has_axis] * size
    return Operand(shared.has_columns, row, of_row=parts[True], of_nth=parts[False])


@triton.jit
def renumbered(number, digits: tl.constexpr):
    """Convert an index by the rule `digits`; see `Digits`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result
