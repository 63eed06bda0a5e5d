"""The gradient of a softmax's bias that has columns: the sum of dz over the rows that share it.

A program loops over the rows of x that share a row of the bias, or over some of them, and sums dz
in registers. If many rows of x share few rows of the bias, several programs share the work. Their
sums are added outside the kernel in a fixed order. If rows are too wide for this, they are split
into blocks with separate programs, and an earlier kernel computes the rows' totals.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared, Spec
from jaxnorm_kernels.triton import logits as logits_of
from jaxnorm_kernels.triton.logits import (
    cotangent_of_logits,
    drop_zeros,
    load_cotangent,
    load_output,
    looped_total,
    scaled,
    term_of_total,
    total_of,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import columns_at, renumbered, zeros


@dataclasses.dataclass(frozen=True)
class Programs:
    """How programs share the rows of x.

    Attributes:
      col_blocks: parts of a row, with separate programs.
      bias_tiles: parts of the bias's rows, with separate programs.
      splits: parts of the rows of x that share a row of the bias, with separate programs.
      each: rows in such a part.
      tile_shares: True if the rows of a tile share one row of the bias, False if each has its own.
    """

    col_blocks: int
    bias_tiles: int
    splits: int
    each: int
    tile_shares: bool

    @classmethod
    def of(cls, shared: Shared, schedule: Schedule, spec: Spec) -> "Programs":
        """Return the division among the programs of `schedule`, or fewer if rows are too few."""
        size = schedule.tile_rows
        # The rows of a tile are neighbours in x.
        has_axis = bool(shared.segments) and shared.segments[-1][1]
        tile_shares = size > 1 and not (has_axis and shared.rows >= size)
        bias_tiles = shared.rows if tile_shares else math.ceil(shared.rows / size)
        steps = math.ceil(shared.sharing / size) if tile_shares else shared.sharing
        col_blocks = math.ceil(spec.cols / (schedule.pieces * schedule.block))
        wanted = min(max(1, schedule.programs // (col_blocks * bias_tiles)), steps)
        each = math.ceil(steps / wanted)
        return cls(
            col_blocks,
            bias_tiles,
            splits=math.ceil(steps / each),
            each=each * size if tile_shares else each,
            tile_shares=tile_shares,
        )


def softmax_bwd_bias(
    y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec, schedule: Schedule
) -> tuple[jax.Array, jax.Array]:
    """Return dx, and dbias `(n, cols)`.

    Args:
      y, dy: `(rows, cols)`.
      mask: `(n, cols)` or `(n, 1)`; None if the mask is not read.
    """
    shared = spec.softmax.logits_bias_rows
    assert shared is not None  # or `why_unsupported` refuses it
    operands: dict[str, Any] = {
        "y_ptr": y,
        "dy_ptr": dy,
        "mask_ptr": mask,
        "logits": logits_of.of(spec),
    }
    total = None
    if schedule.is_looped(spec):
        (total,) = schedule.launch(
            _softmax_bwd_totals,
            spec,
            name=f"jaxnorm_{spec.op}_bwd_totals",
            outputs={"total_ptr": jax.ShapeDtypeStruct((spec.rows,), np.float32)},
            **operands,
        )
    programs = Programs.of(shared, schedule, spec)
    is_whole = programs.splits == 1
    partial = jax.ShapeDtypeStruct(
        (programs.splits * shared.rows, spec.cols),
        spec.softmax.logits_bias_dtype if is_whole else np.float32,
    )
    dx, dbias = schedule.launch(
        _softmax_bwd_bias,
        spec,
        name=f"jaxnorm_{spec.op}_bwd_bias",
        outputs={"dx_ptr": jax.ShapeDtypeStruct(y.shape, spec.x_dtype), "dbias_ptr": partial},
        grid=(programs.col_blocks * programs.bias_tiles, programs.splits),
        total_ptr=total,
        bias_rows=shared.rows,
        sharing=shared.sharing,
        each=programs.each,
        col_blocks=programs.col_blocks,
        tile_shares=programs.tile_shares,
        stages=schedule.stages,
        **operands,
    )
    if not is_whole:
        dbias = dbias.reshape(programs.splits, shared.rows, spec.cols).sum(0)
    return dx, dbias.astype(spec.softmax.logits_bias_dtype)


@triton.jit
def _softmax_bwd_totals(
    y_ptr, dy_ptr, mask_ptr, total_ptr, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Compute the total of each row."""
    first_row = tl.program_id(0) * tiling.tile_rows
    total = looped_total(y_ptr, dy_ptr, mask_ptr, first_row, rows, logits, tiling)
    row = (first_row + tl.arange(0, tiling.tile_rows))[:, None]
    tl.store(total_ptr + row, total, mask=row < rows)


@triton.jit
def _softmax_bwd_bias(
    y_ptr,
    dy_ptr,
    mask_ptr,
    total_ptr,
    dx_ptr,
    dbias_ptr,
    rows,
    bias_rows,
    sharing,
    each,
    logits: tl.constexpr,
    tiling: tl.constexpr,
    col_blocks: tl.constexpr,
    tile_shares: tl.constexpr,
    stages: tl.constexpr,
):
    """Store dx = scale dz, and a program's sums of dz over the rows that share a row of the bias.

    If the pieces of a tile are whole rows, the pointer to the totals is None. A program processes
    `each` of the `sharing` rows of x that share a row of the bias.
    """
    cols: tl.constexpr = tiling.cols
    block: tl.constexpr = tiling.block
    pieces: tl.constexpr = tiling.pieces
    first_col = tl.program_id(0) % col_blocks * (pieces * block)
    lane = tl.arange(0, tiling.tile_rows)
    if tile_shares:
        bias_row, offset, step = tl.program_id(0) // col_blocks + lane * 0, lane, tiling.tile_rows
    else:
        bias_row = tl.program_id(0) // col_blocks * tiling.tile_rows + lane
        offset, step = lane * 0, 1
    dbias = ()
    for _ in tl.static_range(pieces):
        dbias += (zeros(tiling),)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, sharing)
    for first in tl.range(begin, end, step, num_stages=stages):
        nth = first + offset
        row = renumbered(bias_row, logits.bias.of_row) + renumbered(nth, logits.bias.of_nth)
        exists = ((bias_row < bias_rows) & (nth < end))[:, None]
        start = row.to(tl.int64)[:, None] * cols
        ys, ds = (), ()
        terms, weights = zeros(tiling), zeros(tiling)
        for i in tl.static_range(pieces):
            col = columns_at(first_col + i * block, block)
            tile = (row, start, col, exists & (col < cols))
            y = load_output(y_ptr, tile, logits)
            d = drop_zeros(load_cotangent(dy_ptr, mask_ptr, tile, logits, cols), y, logits)
            terms += term_of_total(y, d, logits)
            if logits.renormalises:
                weights += y
            ys += (y,)
            ds += (d,)
        if total_ptr is None:
            total = total_of(terms, weights, logits)
        else:
            total = tl.load(total_ptr + row, row < rows, 0.0)[:, None]
        sums = ()
        for i in tl.static_range(pieces):
            dz = cotangent_of_logits(ys[i], ds[i], total, logits)
            sums += (dbias[i] + dz,)
            col = columns_at(first_col + i * block, block)
            tl.store(dx_ptr + start + col, scaled(dz, logits), mask=exists & (col < cols))
        dbias = sums
    for i in tl.static_range(pieces):
        col = columns_at(first_col + i * block, block)
        if tile_shares:
            partial_row = tl.program_id(1) * bias_rows + tl.program_id(0) // col_blocks
            partial = partial_row.to(tl.int64) * cols + col
            tl.store(dbias_ptr + partial, tl.sum(dbias[i], axis=0)[None, :], mask=col < cols)
        else:
            partial = (tl.program_id(1) * bias_rows + bias_row).to(tl.int64)[:, None] * cols + col
            is_row = (bias_row < bias_rows)[:, None]
            tl.store(dbias_ptr + partial, dbias[i], mask=is_row & (col < cols))
