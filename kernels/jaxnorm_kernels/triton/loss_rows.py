"""Rows of logits in the kernels of losses and divergences: their blocks, scales and caps.

The forward pass reads a row once, block after block. The threads exchange nothing while they read.
Each thread holds the maximum of what it has read so far, and its sums are relative to this maximum
(Milakov, Gimelshein 2018). The sums of the threads are merged at the end.

The backward pass gets the sums of the row from the forward pass. Given these sums, an element of
the gradient depends only on the same element of x. A program loads its whole block of x before it
stores the gradient. So the gradient may overwrite x.

If the length of rows is not a multiple of 16 bytes, most rows begin at an unaligned address. The
first block of a row then begins at the last multiple of 16 bytes before the row's first column. All
blocks but the first and the last can thus be loaded and stored 16 bytes at a time.

With a scale or a cap, the logits are z = f * g(x)::

    g = tanh(a x / c)    f = c    dz / dx = a (1 - g^2)    with a cap
    g = x                f = a    dz / dx = a              without a cap

a is ``logits_scale``, and c is ``logit_softcap``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels import launching
from jaxnorm_kernels.implementation import Operands
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.schedule import Schedule, loss_blocks, loss_vector

# Lower bound of v in products such as exp(v) * v * sum. exp(v) is 0 at this bound and below it.
# Without the bound, v could be -inf or the lowest float32 (which some users write into masked
# logits). v or v * sum could then be infinite, and the product 0 * inf would be NaN.
FAR = tl.constexpr(-1e20)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the rows of a call are split into blocks.

    Attributes:
      classes: the number of columns that are classes; these are the first columns.
      blocks: the number of blocks in a row.
      vector: the number of adjacent elements that a thread loads at once.
    """

    classes: int
    blocks: int
    vector: int

    @classmethod
    def of(cls, spec: Spec, schedule: Schedule) -> "Layout":
        """Return the layout for the call `spec`."""
        return cls(spec.classes, loss_blocks(spec, schedule), loss_vector(spec, schedule))


@dataclasses.dataclass(frozen=True)
class Cap:
    """How the logits z = f * g(x) are computed from x; see the module docstring.

    Attributes:
      scale: the number ``logits_scale``, called a in the module docstring.
      softcap: the cap c; 0 for no cap.
      factor: the number f. It is equal to the cap if there is one, and otherwise to the scale.
    """

    scale: float
    softcap: float
    factor: float

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> "Cap":
        """Return the `Cap` of logits with this scale and this cap (None for no cap)."""
        return cls(scale, softcap or 0.0, scale if softcap is None else softcap)


# ------------------------------------------------------------------------------------- launches


def launch_forward(
    kernel: Any,
    spec: Spec,
    schedule: Schedule,
    results: Mapping[str, bool],
    **arguments: Any,
) -> list[jax.Array]:
    """Launch a forward kernel, and return its results in the order of the kernel's parameters.

    `results` is a dict. A key is the name of an output parameter of the kernel. The value is True
    if the kernel computes this output, and False if the output is omitted. Each result is an array
    with one float32 number per row.
    """
    layout = Layout.of(spec, schedule)
    of_rows = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    return schedule.launch(
        kernel,
        spec,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs={name: of_rows if is_returned else None for name, is_returned in results.items()},
        layout=layout,
        lanes=min(32 * schedule.warps, schedule.block // layout.vector),
        stages=schedule.stages,
        **arguments,
    )


def launch_backward(
    kernel: Any, x: jax.Array, spec: Spec, schedule: Schedule, **arguments: Any
) -> Operands:
    """Launch a backward kernel, and return the gradient of x.

    Each program computes the gradient in one block (a range of columns) of the rows of one tile.
    """
    layout = Layout.of(spec, schedule)
    (tiles,) = schedule.grid(spec)
    place = launching.overwritable(x) if spec.overwrites_x else None
    dx = None if spec.overwrites_x else jax.ShapeDtypeStruct(x.shape, spec.dx_dtype)
    results = schedule.launch(
        kernel,
        spec,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={"dx_ptr": dx},
        grid=(tiles * layout.blocks,),
        x_ptr=x if place is None else place,
        layout=layout,
        **arguments,
    )
    return Operands(results[0] if place is None else launching.overwritten(place))


# --------------------------------------------------------------------------------------- blocks


@triton.jit
def rows_at(tile, rows, tiling: tl.constexpr):
    """Return the row indices of tile number `tile`, and a mask of the rows that exist."""
    row = tile * tiling.tile_rows + tl.arange(0, tiling.tile_rows)
    return row, row < rows


@triton.jit
def that_count(positions_ptr, row, exists):
    """Return a mask of the rows that exist and that ``positions`` does not exclude."""
    counts = exists
    if positions_ptr is not None:
        counts = exists & tl.load(positions_ptr + row, exists, 0)
    return counts


@triton.jit
def start(row, cols: tl.constexpr, vector: tl.constexpr):
    """Return, for each row, the start of its first block, and the row's start within this block.

    The first number is an offset from the start of the array, a multiple of `vector`. The second
    number is the offset of the row's first column from the start of this block.
    """
    first_col = row.to(tl.int64)[:, None] * cols
    begin = first_col // vector * vector
    return begin, (first_col - begin).to(tl.int32)


@triton.jit
def over_blocks(
    add: tl.constexpr,
    sums,
    of_rows,
    counts,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
    stages: tl.constexpr,
):
    """Add all blocks of a tile's rows to the sums of each thread, and return the sums.

    A loop adds the blocks that lie entirely inside the rows. The blocks at the ends of the rows are
    added outside of the loop. `counts` is a mask of the rows whose results are computed. If it is
    False for all rows of the tile, the sums are not needed, and the loop is skipped.

    ``add(sums, of_rows, first, layout, options, tiling, is_whole)`` adds one block to the sums.
    `first` is the number of elements from the start of the first block to the start of this block.
    `is_whole` is True if the block lies entirely inside the row.
    """
    block: tl.constexpr = tiling.block
    first_whole: tl.constexpr = 0 if tiling.cols % layout.vector == 0 else 1
    whole: tl.constexpr = layout.classes // block
    blocks: tl.constexpr = layout.blocks
    if first_whole > 0:
        sums = add(sums, of_rows, 0, layout, options, tiling, False)
    # If `counts` is False for all rows of the tile, `end` is 0, and the loop loads nothing.
    end = tl.where(tl.max(counts.to(tl.int32), axis=0) > 0, whole * block, 0)
    for first in tl.range(first_whole * block, end, block, num_stages=stages):
        sums = add(sums, of_rows, first, layout, options, tiling, True)
    for i in tl.static_range(max(whole, first_whole), blocks):
        sums = add(sums, of_rows, i * block, layout, options, tiling, False)
    return sums


@triton.jit
def store_block(
    store: tl.constexpr,
    pointers,
    rows,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
):
    """Compute and store this program's part of the gradient, in the backward pass.

    The part is one block (a range of columns) of the rows of one tile. ``store(pointers, row,
    exists, nth, layout, options, tiling, is_whole)`` computes and stores the gradient in block
    number `nth` of the rows. `is_whole` is True if the block lies entirely inside the row.
    """
    row, exists = rows_at(tl.program_id(0) // layout.blocks, rows, tiling)
    nth = tl.program_id(0) % layout.blocks
    if tiling.cols % layout.vector == 0:
        fits: tl.constexpr = tiling.cols % tiling.block == 0
        store(pointers, row, exists, nth, layout, options, tiling, fits)
    elif (nth > 0) & (nth < tiling.cols // tiling.block):
        store(pointers, row, exists, nth, layout, options, tiling, True)
    else:
        store(pointers, row, exists, nth, layout, options, tiling, False)


@triton.jit
def block_at(row, exists, nth, layout: tl.constexpr, tiling: tl.constexpr, is_whole: tl.constexpr):
    """Return four arrays that describe block number `nth` of the rows in the backward pass.

    1. The offsets of the block's elements from the start of the array.
    2. A mask of the elements that exist.
    3. The indices of the elements in the block, which start at 0.
    4. For each row, the index of the row's first column, counted from the start of the block. It is
       negative if this column is in an earlier block.
    """
    begin, lead = start(row, tiling.cols, layout.vector)
    lane, first = tl.arange(0, tiling.block)[None, :], nth * tiling.block
    read = exists[:, None]
    if not is_whole:
        read = read & is_column(lane, first, lead, tiling.cols, tiling.cols, layout.vector)
    return begin + first + lane, read, lane, lead - first


@triton.jit
def is_column(lane, first, lead, end: tl.constexpr, cols: tl.constexpr, vector: tl.constexpr):
    """Return a mask of a block's elements that is True in the columns before `end`.

    If `vector` divides `cols` and `end`, the mask is constant in each aligned group of `vector`
    elements. Such a group can be loaded at once.
    """
    if cols % vector == 0:
        is_inside = lane + first < end
    else:
        is_inside = (lane >= lead - first) & (lane < end + lead - first)
    return is_inside


@triton.jit
def by_lanes(x, m, vector: tl.constexpr):
    """Reshape a block to `(tile_rows, n, lanes, vector)`.

    The axis of size `lanes` is distributed over threads. Each thread holds all elements along the
    axes of size n and `vector`.
    """
    tile_rows: tl.constexpr = m.shape[0]
    lanes: tl.constexpr = m.shape[1]
    return tl.reshape(x, [tile_rows, x.shape[1] // (lanes * vector), lanes, vector])


@triton.jit
def lane_max(x):
    """Return the maximum over the elements of each thread, an array `(tile_rows, lanes)`.

    `x` is a block that `by_lanes` has reshaped.
    """
    return tl.max(tl.max(x, axis=3), axis=1)


@triton.jit
def lane_sum(x):
    """Return the sum over the elements of each thread, an array `(tile_rows, lanes)`.

    `x` is a block that `by_lanes` has reshaped.
    """
    return tl.sum(tl.sum(x, axis=3), axis=1)


# --------------------------------------------------------------------------------------- logits


@triton.jit
def load_classes(ptr, read, cap: tl.constexpr):
    """Load x, and return g(x) in float32. g(x) is -inf where the mask `read` is False."""
    x = of_logits(tl.load(ptr, read, float("-inf")), cap)
    if cap.softcap > 0.0:  # The tanh of -inf is -1, not -inf.
        x = tl.where(read, x, float("-inf"))
    return x


@triton.jit
def of_logits(x, cap: tl.constexpr):
    """Return g(x) in float32; see the module docstring."""
    x = x.to(tl.float32)
    if cap.softcap > 0.0:
        x = tanh(x * (cap.scale / cap.softcap))
    return x


@triton.jit
def times_slope(dz, g, cap: tl.constexpr):
    """Return the gradient of x, given the gradient `dz` of the logits z.

    `g` is g(x); see the module docstring.
    """
    if cap.softcap > 0.0:
        dz *= (1.0 - g) * (1.0 + g)
    if cap.scale != 1.0:
        dz *= cap.scale
    return dz


@triton.jit
def log1p(x):
    """Return log(1 + x) for x > -1, accurate to a few units in the last place even for small x.

    Let u be 1 + x, rounded to float32. u - 1 may differ from x. Still, log(u) / (u - 1) is close to
    log(1 + x) / x. So the result is computed as x * log(u) / (u - 1).
    """
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def tanh(x):
    """Return the tanh of `x`, accurate to a few units in the last place even for small x.

    For small x, the formula with 1 - exp(-2 |x|) would lose digits, so a series is used instead.
    """
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -size, size))
