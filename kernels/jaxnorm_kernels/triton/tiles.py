"""Tiles of two-dimensional arrays: their indices, and loads and stores.

A tile is a part of an array ``(rows, cols)``. It has `tile_rows` rows and `block` columns. Both
numbers are powers of two, so a tile may extend beyond the last row and the last column of the
array. Elements outside the array are neither loaded nor stored. An array may have more than 2^31
elements, so the offset of a row from the start of the array is a 64-bit integer.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.broadcasts import Shared

# The maximum m of a block is raised to this number if it is smaller. So if a block contains only
# -inf, exp(x - m) is 0. With m = -inf, x - m = -inf + inf and its exponential would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tile sizes that a kernel is compiled for.

    Attributes:
      cols: the number of columns of a row.
      tile_rows: the number of rows of a tile, a power of two.
      block: the number of columns of a tile, a power of two.
      pieces: the number of tiles that a program holds at once. They are adjacent parts of the same
        rows.
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

    Pass `tile_rows` for a parameter that is loaded once for many tiles. The loaded array then has
    the shape and the register layout of a tile, so each thread already holds the values for its
    elements. With one row, threads would exchange the values again for each tile.
    """
    col = (first_col + tl.arange(0, block))[None, :]
    if tile_rows > 1:
        col += tl.zeros([tile_rows, 1], tl.int32)
    return col


@triton.jit
def tile_at(first_row, first_col, rows, tiling: tl.constexpr):
    """Return four arrays that describe a tile.

    1. The indices of its rows.
    2. The offsets of its rows from the start of the array. If a row starts at offset `start`, its
       element in column `col` is at offset `start + col`.
    3. The indices of its columns.
    4. A mask of the tile's elements that are inside the array.
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
    """Load a tile, and return it in float32. Elements outside the array are 0."""
    _, start, col, exists = tile
    return tl.load(ptr + start + col, exists, 0.0, eviction_policy=eviction).to(tl.float32)


@triton.jit
def store_tile(ptr, x, tile):
    """Store the tile `x`. Elements outside the array are not stored."""
    _, start, col, exists = tile
    tl.store(ptr + start + col, x, mask=exists)


@triton.jit
def load_rows(ptr, first_row, rows, tiling: tl.constexpr):
    """Load whole rows, and return a tuple of float32 tiles. Elements outside the array are 0."""
    pieces: tl.constexpr = tiling.pieces
    tiles = ()
    for i in tl.static_range(pieces):
        tiles += (load_tile(ptr, tile_at(first_row, i * tiling.block, rows, tiling)),)
    return tiles


@triton.jit
def zero_beyond(x, first_col, tiling: tl.constexpr):
    """Return the tile `x` with zeros in columns beyond the last column of the array."""
    if tiling.cols % tiling.block != 0:
        x = tl.where(columns_at(first_col, tiling.block) < tiling.cols, x, 0.0)
    return x


@triton.jit
def of_rows(stat_ptr, row, rows):
    """Load one number for each row of a tile, such as a statistic.

    If the pointer is None, return 0.
    """
    return 0.0 if stat_ptr is None else tl.load(stat_ptr + row, row < rows, 0.0)[:, None]


@triton.jit
def clipped(x, limit: tl.constexpr):
    """Clip `x` to the range from -`limit` to `limit`. A limit of 0 means no limit."""
    if limit > 0.0:
        x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def rounded_like(x, ptr):
    """Round `x` to the dtype that `ptr` points to, and return it in float32."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


# ------------------------------------------------------------- operands that are broadcast to rows


#: A rule that converts a flat index of one array to a flat index of another. It has three
#: consecutive numbers for each axis: stride, size and new stride. The position on this axis is
#: index // stride % size. The new index is the sum of position * new stride over all axes.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How rows of x map to rows of an operand that is broadcast to x.

    Attributes:
      has_columns: True if the operand has the shape ``(n, cols)``, False if it has the shape ``(n,
        1)``.
      row: the rule that converts the index of a row of x to the index of the row of the operand
        that this row of x uses.
      of_row, of_nth: two rules for the opposite direction. Several rows of x use row r of the
        operand. The n-th of them is the row of x with index of_row(r) + of_nth(n). For example, if
        each of 3 rows of the operand is used by 4 consecutive rows of x, of_row(r) is 4 r and
        of_nth(n) is n.
    """

    has_columns: bool
    row: Digits
    of_row: Digits
    of_nth: Digits


def operand_of(shared: Shared | None) -> Operand:
    """Convert a `Shared` to an `Operand`, which is a compile-time constant of a kernel."""
    assert shared is not None  # `why_unsupported` refuses calls for which this mapping is None
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
    """Convert the index `number` by the rule `digits`; see `Digits`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result
