"""Pieces that every kernel is made of: addresses of a tile, and what belongs to its columns.

A tile is (tile_rows, block) elements of an array (rows, cols). Sizes of tiles are powers of two, so
that a tile may reach over the last row and the last column: what is outside is neither read nor
written. An array may have more than 2^31 elements, so a row's offset has 64 bits.
"""

import triton
import triton.language as tl


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
def tile_at(
    first_row, first_col, rows, cols: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr
):
    """A tile's rows, the offsets of their starts, its columns, and which of its elements exist.

    The element of each row and column has the offset `start + col`.
    """
    row = first_row + tl.arange(0, tile_rows)
    start = row.to(tl.int64)[:, None] * cols
    col = columns_at(first_col, block)
    exists = (row < rows)[:, None]
    if cols % block != 0:
        exists = exists & (col < cols)
    return row, start, col, exists


@triton.jit
def load_rows(
    ptr,
    first_row,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
    other: tl.constexpr,
):
    """Whole rows in float32: a tuple of `pieces` tiles, side by side; `other` beyond the rows."""
    tiles = ()
    for i in tl.static_range(pieces):
        tiles += (load_piece(ptr, i, first_row, rows, cols, tile_rows, block, other),)
    return tiles


@triton.jit
def load_piece(
    ptr,
    piece: tl.constexpr,
    first_row,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    other: tl.constexpr = 0.0,
):
    """The tile of that number in float32; `other` beyond the rows."""
    _, start, col, exists = tile_at(first_row, piece * block, rows, cols, tile_rows, block)
    return tl.load(ptr + start + col, mask=exists, other=other).to(tl.float32)


@triton.jit
def store_piece(
    ptr,
    tile,
    piece: tl.constexpr,
    first_row,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Writes the tile of that number."""
    _, start, col, exists = tile_at(first_row, piece * block, rows, cols, tile_rows, block)
    tl.store(ptr + start + col, tile, mask=exists)


@triton.jit
def zero_beyond(x, col, cols: tl.constexpr, block: tl.constexpr):
    """`x`, and 0 in the columns of a tile that do not exist."""
    if cols % block != 0:
        x = tl.where(col < cols, x, 0.0)
    return x


@triton.jit
def start_of_group(row, rows, group_rows, cols: tl.constexpr):
    """Offsets of the parameters (n, cols) of rows, of which `group_rows` share each of the n.

    None where `group_rows` is None: for parameters (cols,). Rows beyond the last have its.
    """
    if group_rows is None:
        start = None
    else:
        start = (tl.minimum(row, rows - 1) // group_rows).to(tl.int64)[:, None] * cols
    return start


@triton.jit
def load_parameter(ptr, start, col, cols: tl.constexpr, other: tl.constexpr):
    """A parameter in float32 for the columns of a tile; `start` is that of a group, or None."""
    if start is not None:
        ptr += start
    value = tl.load(ptr + col, mask=col < cols, other=other, eviction_policy="evict_last")
    return value.to(tl.float32)


@triton.jit
def gain(scale_ptr, start, col, cols: tl.constexpr, offset: tl.constexpr, floor: tl.constexpr):
    """G = scale + offset for the columns of a tile, raised to `floor` (0 for none) in magnitude."""
    if scale_ptr is None:
        g = 1.0
    else:
        g = load_parameter(scale_ptr, start, col, cols, 1.0) + offset
        if floor > 0.0:
            g = tl.where(tl.abs(g) < floor, tl.where(g < 0.0, -floor, floor), g)
    return g


@triton.jit
def effective_bias(bias_ptr, start, y_ptr, col, cols: tl.constexpr, from_output: tl.constexpr):
    """The bias for the columns of a tile, rounded to y's dtype where the output is saved."""
    if bias_ptr is None:
        bias = 0.0
    else:
        bias = load_parameter(bias_ptr, start, col, cols, 0.0)
        if from_output:
            bias = rounded_like(bias, y_ptr)
    return bias


@triton.jit
def rounded_like(x, ptr):
    """`x` rounded to the dtype behind a pointer, in float32 again."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)
