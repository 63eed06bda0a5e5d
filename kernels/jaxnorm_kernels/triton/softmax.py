"""Kernels of softmax and log_softmax of z = scale * x + bias.

Let m = max(z) and d = dy. All sums are over a row, except for the sum in dbias:

    softmax      y = exp(z - m) / sum(exp(z - m))          dz = y (d - sum(d y) / sum(y))
    log_softmax  y = z - m - log(sum(exp(z - m)))          dz = d - exp(y) sum(d)
    both         dx = scale * dz,  dbias = sum(dz) over the elements that share a value of the bias

sum(y) is computed only if y is rounded to 16 bits (`Spec.renormalises`). Otherwise, it is taken to
be 1. Excluded elements have z = -inf and y = 0 (-inf for log_softmax). Their cotangent d is taken
to be 0, even if it is infinite. The backward pass of softmax with a mask does not read the mask,
but treats elements with y = 0 as excluded. So it also ignores cotangents of elements whose y was
rounded to 0.

If registers have room for whole rows, rows are held there. Wider rows are loaded twice, one block
of columns after another. The second load is mostly served from the L2 cache. During the first load,
m is the maximum of the blocks so far, and s is their sum of exp(z - m). With a new block z, they
become (Milakov, Gimelshein 2018):

    m' = max(m, max(z))                     s' = s exp(m - m') + sum(exp(z - m'))
"""

import dataclasses
import math

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.gradients import add_rows
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import logits as logits_of
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton import support
from jaxnorm_kernels.triton.logits import (
    columns_of,
    cotangent_of_logits,
    drop_zeros,
    load_cotangent,
    load_logits,
    load_output,
    looped_total,
    masked,
    scaled,
    term_of_total,
    total_of,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import LOWEST, columns_at, renumbered, store_tile, tile_at, zeros


def softmax_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """Run a forward pass; see `Implementation.forward`. `schedule` replaces the default."""
    x = operands.x
    schedule = schedule or schedules.choose(spec)
    (y,) = schedule.launch(
        _softmax_fwd_looped if schedule.is_looped(spec) else _softmax_fwd_in_registers,
        spec,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs={"y_ptr": jax.ShapeDtypeStruct(x.shape, spec.y_dtype)},
        x_ptr=x,
        mask_ptr=operands.mask,
        bias_ptr=operands.logits_bias,
        logits=logits_of.of(spec),
    )
    return Results(y)


def softmax_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Run a backward pass; see `Implementation.backward`. `schedule` replaces the default."""
    y, dy = residuals.saved, cotangents.y
    schedule = schedule or schedules.choose(spec)
    mask = residuals.mask if spec.reads_mask else None
    if support.sums_columns(spec):
        dx, gradient = softmax_bwd_bias(y, mask, dy, spec, schedule)
        return Operands(dx, logits_bias=gradient)
    dbias = None if spec.softmax.logits_bias_dtype is None else spec.softmax.logits_bias_rows
    row_sums = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    dx, *sums = schedule.launch(
        _softmax_bwd_looped if schedule.is_looped(spec) else _softmax_bwd_in_registers,
        spec,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={
            "dx_ptr": jax.ShapeDtypeStruct(y.shape, spec.x_dtype),
            "sum_ptr": None if dbias is None else row_sums,
        },
        y_ptr=y,
        dy_ptr=dy,
        mask_ptr=mask,
        logits=logits_of.of(spec),
    )
    if dbias is None:
        return Operands(dx)
    gradient = add_rows(dbias, *sums).astype(spec.softmax.logits_bias_dtype)
    return Operands(dx, logits_bias=gradient)


@triton.jit
def _softmax_fwd_in_registers(
    x_ptr, mask_ptr, bias_ptr, y_ptr, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Store y = exp(z - m) / s, or log(y) for log_softmax. Registers hold whole rows.

    m is the maximum of a row of z, and s is the sum of exp(z - m) over the row.
    """
    first_row = tl.program_id(0) * tiling.tile_rows
    z, takes_part = _load_rows(x_ptr, mask_ptr, bias_ptr, first_row, rows, logits, tiling)
    top = z[0]
    for i in tl.static_range(1, len(z)):
        top = tl.maximum(top, z[i])
    m = tl.maximum(tl.max(top, axis=1), LOWEST)[:, None]
    e = zeros(tiling)
    for i in tl.static_range(len(z)):
        e += tl.exp(z[i] - m)
    s = tl.sum(e, axis=1)[:, None]
    for i in tl.static_range(len(z)):
        y = masked(_output(z[i], m, s, logits), takes_part[i], logits)
        store_tile(y_ptr, y, tile_at(first_row, i * tiling.block, rows, tiling))


@triton.jit
def _load_rows(
    x_ptr, mask_ptr, bias_ptr, first_row, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Load whole rows of x, and return two tuples of tiles.

    The tiles of the first tuple are the logits z. The tiles of the second are masks of the elements
    that are not excluded.
    """
    pieces: tl.constexpr = tiling.pieces
    zs, take_part = (), ()
    for i in tl.static_range(pieces):
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        z, takes_part = load_logits(x_ptr, mask_ptr, bias_ptr, tile, logits, tiling.cols)
        zs += (z,)
        take_part += (takes_part,)
    return zs, take_part


@triton.jit
def _softmax_fwd_looped(
    x_ptr, mask_ptr, bias_ptr, y_ptr, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Store the softmax y. Load each row block by block, once for m and s, and once more for y.

    m is the maximum of the elements in the blocks that have been loaded so far. s is the sum of
    exp(v - m) over these elements v. With a new block z, m and s become m' and s':

    m' = max(m, max(z))     s' = s exp(m - m') + sum(exp(z - m'))
    """
    cols: tl.constexpr = tiling.cols
    first_row = tl.program_id(0) * tiling.tile_rows
    m = tl.full([tiling.tile_rows, 1], LOWEST, tl.float32)
    s = zeros(tiling)
    for first_col in tl.range(0, columns_of(first_row, rows, logits, tiling), tiling.block):
        tile = tile_at(first_row, first_col, rows, tiling)
        z, _ = load_logits(x_ptr, mask_ptr, bias_ptr, tile, logits, cols, "evict_last")
        higher = tl.maximum(m, tl.max(z, axis=1)[:, None])
        s = s * tl.exp(m - higher) + tl.exp(z - higher)
        m = higher
    s = tl.sum(s, axis=1)[:, None]
    for first_col in tl.range(0, cols, tiling.block):
        tile = tile_at(first_row, first_col, rows, tiling)
        z, takes_part = load_logits(x_ptr, mask_ptr, bias_ptr, tile, logits, cols, "evict_first")
        _, start, col, exists = tile
        y = _output(z, m, s, logits)
        tl.store(y_ptr + start + col, masked(y, takes_part, logits), mask=exists)


@triton.jit
def _output(z, m, s, logits: tl.constexpr):
    """Return y = exp(z - m) / s, or log(y) for log_softmax."""
    return z - m - tl.log(s) if logits.log else tl.exp(z - m) * (1.0 / s)


@triton.jit
def _softmax_bwd_in_registers(
    y_ptr, dy_ptr, mask_ptr, dx_ptr, sum_ptr, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Store dx = scale * dz. A program holds whole rows in registers.

    If `sum_ptr` is not None, also store sum(dz) of each row.
    """
    pieces: tl.constexpr = tiling.pieces
    first_row = tl.program_id(0) * tiling.tile_rows
    y, d = (), ()
    for i in tl.static_range(pieces):
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        y += (load_output(y_ptr, tile, logits),)
    for i in tl.static_range(pieces):
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        piece = load_cotangent(dy_ptr, mask_ptr, tile, logits, tiling.cols)
        d += (drop_zeros(piece, y[i], logits),)
    terms, weights, sums = zeros(tiling), zeros(tiling), zeros(tiling)
    for i in tl.static_range(pieces):
        terms += term_of_total(y[i], d[i], logits)
        if logits.renormalises:
            weights += y[i]
    total = total_of(terms, weights, logits)
    for i in tl.static_range(pieces):
        dz = cotangent_of_logits(y[i], d[i], total, logits)
        sums += dz
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        store_tile(dx_ptr, scaled(dz, logits), tile)
    if sum_ptr is not None:
        row = first_row + tl.arange(0, tiling.tile_rows)
        tl.store(sum_ptr + row, tl.sum(sums, axis=1), mask=row < rows)


@triton.jit
def _softmax_bwd_looped(
    y_ptr, dy_ptr, mask_ptr, dx_ptr, sum_ptr, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Store dx = scale * dz. Rows are loaded twice, one block of columns after another.

    If `sum_ptr` is not None, also store sum(dz) of each row.
    """
    cols: tl.constexpr = tiling.cols
    first_row = tl.program_id(0) * tiling.tile_rows
    total = looped_total(y_ptr, dy_ptr, mask_ptr, first_row, rows, logits, tiling)
    sums = zeros(tiling)
    for first_col in tl.range(0, cols, tiling.block):
        tile = tile_at(first_row, first_col, rows, tiling)
        y = load_output(y_ptr, tile, logits, "evict_first")
        d = load_cotangent(dy_ptr, mask_ptr, tile, logits, cols, "evict_first")
        dz = cotangent_of_logits(y, drop_zeros(d, y, logits), total, logits)
        if sum_ptr is not None:
            sums += dz
        _, start, col, exists = tile
        tl.store(dx_ptr + start + col, scaled(dz, logits), mask=exists)
    if sum_ptr is not None:
        row = first_row + tl.arange(0, tiling.tile_rows)
        tl.store(sum_ptr + row, tl.sum(sums, axis=1), mask=row < rows)


# -------------------------------------------------------------------------------------------------
# The gradient of a bias that has columns. It is the sum of dz over the rows of x that share a row
# of the bias.
#
# A program loops over rows of x that share a row of the bias, and adds up dz in registers. If many
# rows of x share a row of the bias, these rows of x are divided among several programs. The sums of
# these programs are added outside the kernel in a fixed order. A program holds whole rows, so rows
# have at most `support.MOST_SUMMED` columns.


@dataclasses.dataclass(frozen=True)
class Programs:
    """How the work on the gradient of a bias is divided among programs.

    A program loops over tiles of consecutive rows of x. All tiles of a program use the same rows of
    the bias. Either all rows of a tile use a single row of the bias, or each row of a tile uses a
    different row of the bias.

    Attributes:
      bias_tiles: the number of parts into which the rows of the bias are divided. A program
        processes only rows of x that use the rows of one part.
      splits: the number of programs that share the work for a row of the bias. The rows of x that
        use this row are divided among them.
      each: the number of rows of x that one program processes for each of its rows of the bias.
      tile_shares: True if all rows of a tile of x use the same row of the bias, False if each row
        of the tile uses a different row of the bias.
    """

    bias_tiles: int
    splits: int
    each: int
    tile_shares: bool

    @classmethod
    def of(cls, shared: Shared, schedule: Schedule) -> "Programs":
        """Divide the work among the number of programs that `schedule` requests.

        If there are few rows, use fewer programs.
        """
        size = schedule.tile_rows
        # A tile has consecutive rows of x. Either all of them share a row of the bias, or each of
        # them uses a different row.
        has_axis = bool(shared.segments) and shared.segments[-1][1]
        tile_shares = size > 1 and not (has_axis and shared.rows >= size)
        bias_tiles = shared.rows if tile_shares else math.ceil(shared.rows / size)
        steps = math.ceil(shared.sharing / size) if tile_shares else shared.sharing
        wanted = min(max(1, schedule.programs // bias_tiles), steps)
        each = math.ceil(steps / wanted)
        return cls(
            bias_tiles,
            splits=math.ceil(steps / each),
            each=each * size if tile_shares else each,
            tile_shares=tile_shares,
        )


def softmax_bwd_bias(
    y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec, schedule: Schedule
) -> tuple[jax.Array, jax.Array]:
    """Return dx, and the gradient of a bias of shape `(n, cols)`.

    n is the number of rows of the bias. Several rows of x may share a row of the bias.

    Args:
      y, dy: arrays `(rows, cols)`.
      mask: an array `(m, cols)` or `(m, 1)`, each of whose m rows may be shared by several rows of
        x; None if the kernel does not read the mask.
    """
    shared = spec.softmax.logits_bias_rows
    assert shared is not None  # `why_unsupported` refuses calls for which this mapping is None
    programs = Programs.of(shared, schedule)
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
        grid=(programs.bias_tiles, programs.splits),
        y_ptr=y,
        dy_ptr=dy,
        mask_ptr=mask,
        bias_rows=shared.rows,
        sharing=shared.sharing,
        each=programs.each,
        logits=logits_of.of(spec),
        tile_shares=programs.tile_shares,
        stages=schedule.stages,
    )
    if not is_whole:
        dbias = dbias.reshape(programs.splits, shared.rows, spec.cols).sum(0)
    return dx, dbias.astype(spec.softmax.logits_bias_dtype)


@triton.jit
def _softmax_bwd_bias(
    y_ptr,
    dy_ptr,
    mask_ptr,
    dx_ptr,
    dbias_ptr,
    rows,
    bias_rows,
    sharing,
    each,
    logits: tl.constexpr,
    tiling: tl.constexpr,
    tile_shares: tl.constexpr,
    stages: tl.constexpr,
):
    """Store dx = scale * dz, and sums of dz for the gradient of the bias.

    The gradient of a row of the bias is the sum of dz over all rows of x that use this row of the
    bias. `sharing` is the number of these rows of x, and `each` is the number of them that one
    program processes. The program stores the sum of dz over its rows.
    """
    cols: tl.constexpr = tiling.cols
    block: tl.constexpr = tiling.block
    pieces: tl.constexpr = tiling.pieces
    lane = tl.arange(0, tiling.tile_rows)
    if tile_shares:
        bias_row, offset, step = tl.program_id(0) + lane * 0, lane, tiling.tile_rows
    else:
        bias_row = tl.program_id(0) * tiling.tile_rows + lane
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
            col = columns_at(i * block, block)
            tile = (row, start, col, exists & (col < cols))
            y = load_output(y_ptr, tile, logits)
            d = drop_zeros(load_cotangent(dy_ptr, mask_ptr, tile, logits, cols), y, logits)
            terms += term_of_total(y, d, logits)
            if logits.renormalises:
                weights += y
            ys += (y,)
            ds += (d,)
        total = total_of(terms, weights, logits)
        sums = ()
        for i in tl.static_range(pieces):
            dz = cotangent_of_logits(ys[i], ds[i], total, logits)
            sums += (dbias[i] + dz,)
            col = columns_at(i * block, block)
            tl.store(dx_ptr + start + col, scaled(dz, logits), mask=exists & (col < cols))
        dbias = sums
    for i in tl.static_range(pieces):
        col = columns_at(i * block, block)
        if tile_shares:
            partial_row = tl.program_id(1) * bias_rows + tl.program_id(0)
            partial = partial_row.to(tl.int64) * cols + col
            tl.store(dbias_ptr + partial, tl.sum(dbias[i], axis=0)[None, :], mask=col < cols)
        else:
            partial = (tl.program_id(1) * bias_rows + bias_row).to(tl.int64)[:, None] * cols + col
            is_row = (bias_row < bias_rows)[:, None]
            tl.store(dbias_ptr + partial, dbias[i], mask=is_row & (col < cols))
