"""The tiles of all kernels: how rows are split into tiles, and loads and stores of a tile.

A tile is (tile_rows, block) elements of an array (rows, cols). Tile sizes are powers of two, so a
tile may extend beyond the last row and the last column. Elements outside are neither loaded nor
stored. An array may have more than 2^31 elements, so a row's offset has 64 bits.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared

# A block may contain only -inf, so its maximum is raised to this lower limit. Relative to this
# limit, the exponentials of such a block are 0. Relative to -inf, they would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tile sizes that a kernel is compiled for.

    Attributes:
      cols: the number of columns of a row.
      tile_rows: the number of rows of a tile, a power of two.
      block: the number of columns of a tile, a power of two.
      pieces: the number of adjacent tiles that a program holds at once.
    """

    cols: int
    tile_rows: int
    block: int
    pieces: int


@triton.jit
def zeros(tiling: tl.constexpr):
    """Return a tile of zeros."""
    return tl.full([tiling.tile_rows, tiling.block], 0.0, tl.float32)


@triton.jit
def columns_at(first_col, block: tl.constexpr, tile_rows: tl.constexpr = 1):
    """Return a tile's column indices: one row for all of its rows, or `tile_rows` rows.

    If loaded values are held for many tiles, use `tile_rows`. The values are then in the threads
    that hold those rows, and need not be exchanged for every tile.
    """
    col = (first_col + tl.arange(0, block))[None, :]
    if tile_rows > 1:
        col += tl.zeros([tile_rows, 1], tl.int32)
    return col


@triton.jit
def tile_at(first_row, first_col, rows, tiling: tl.constexpr):
    """Return a tile's rows, the offsets at which they start, its columns, and which elements exist.

    The element at `row` and `col` has the offset `start + col`.
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
    """Load a tile in float32, with 0 for elements that do not exist."""
    _, start, col, exists = tile
    return tl.load(ptr + start + col, exists, 0.0, eviction_policy=eviction).to(tl.float32)


@triton.jit
def store_tile(ptr, x, tile):
    """Store the elements of a tile that exist."""
    _, start, col, exists = tile
    tl.store(ptr + start + col, x, mask=exists)


@triton.jit
def load_rows(ptr, first_row, rows, tiling: tl.constexpr):
    """Load whole rows in float32, as a tuple of adjacent tiles, with 0 beyond the rows."""
    pieces: tl.constexpr = tiling.pieces
    tiles = ()
    for i in tl.static_range(pieces):
        tiles += (load_tile(ptr, tile_at(first_row, i * tiling.block, rows, tiling)),)
    return tiles


@triton.jit
def zero_beyond(x, first_col, tiling: tl.constexpr):
    """Return `x` with 0 in those columns of a tile that are beyond the end of the rows."""
    if tiling.cols % tiling.block != 0:
        x = tl.where(columns_at(first_col, tiling.block) < tiling.cols, x, 0.0)
    return x


@triton.jit
def of_rows(stat_ptr, row, rows):
    """Load a statistic for each row of a tile. If the pointer is None, return 0."""
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


#: How to convert an index by its digits. For each axis, three numbers: the divisor that extracts
#: its digit from the index, the size of the axis, and the factor of the digit in the result.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How to find the row of a broadcast operand that belongs to a row of x.

    Attributes:
      has_columns: True if the operand is ``(n, cols)``, False if it is ``(n, 1)``.
      row: converts a row of x to the operand's row.
      of_row, of_nth: the inverse, for the n-th row of x that uses a row of the operand. The row of
        x is the sum of the operand's row, converted by `of_row`, and n, converted by `of_nth`.
    """

    has_columns: bool
    row: Digits
    of_row: Digits
    of_nth: Digits


def operand_of(shared: Shared | None) -> Operand:
    """Return how the operand of a call is broadcast."""
    assert shared is not None  # `why_unsupported` refuses other calls.
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
    """Convert an index by its `digits`; see `Digits`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result
