"""softmax and log_softmax of z = scale x + bias.

With m = max(z), d = dy, all sums over a row:

    softmax      y = exp(z - m) / sum(exp(z - m))          dz = y (d - sum(d y))
    log_softmax  y = z - m - log(sum(exp(z - m)))          dz = d - exp(y) sum(d)
    both         dx = scale dz,  dbias = sum(dz) over what shares a value of the bias

What takes no part has z = -inf, y = 0 or -inf, and its d counts as 0, infinite though it may be.
The backward of softmax with a mask looks at y alone: the cotangent of what has rounded to 0 is
dropped, too.

Rows that fit are held in registers. Wider ones are read twice, block after block (the second time
mostly from the L2 cache), and the sums of the blocks read so far are kept for the greatest element
so far (Milakov, Gimelshein 2018):

    m' = max(m, max(z))                     s' = s exp(m - m') + exp(z - m')
"""

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Shared, Spec
from jaxnorm_kernels.triton import logits as logits_of
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.launch import launch
from jaxnorm_kernels.triton.logits import (
    columns_of,
    drop_zeros,
    load_cotangent,
    load_logits,
    load_output,
    load_rows_of_logits,
    looped_total,
    only_kept,
    scaled,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.softmax_bias import softmax_bwd_bias
from jaxnorm_kernels.triton.tiles import store_piece, tile_at

# A block may hold nothing but -inf. Against this maximum its exponentials are 0; against its own,
# -inf, they would be NaN. A whole row of -inf still ends as 0 / 0.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def softmax_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """Of softmax or log_softmax; `schedule` stands in for the one of the table."""
    x = operands.x
    schedule = schedule or schedules.choose(spec)
    (y,) = launch(
        _softmax_fwd_looped if schedule.is_looped(spec) else _softmax_fwd_in_registers,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs={"y_ptr": jax.ShapeDtypeStruct(x.shape, spec.y_dtype)},
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        mask_ptr=operands.mask,
        bias_ptr=operands.logits_bias,
        rows=spec.rows,
        cols=spec.cols,
        log=spec.op == "log_softmax",
        logits=logits_of.of(spec),
        **schedule.tiles(spec),
    )
    return Results(y)


def softmax_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """The gradients of x and of the bias; `schedule` stands in for the one of the table."""
    y, dy = residuals.saved, cotangents.y
    schedule = schedule or schedules.choose(spec)
    mask = residuals.mask if spec.reads_mask else None
    if logits_of.sums_columns(spec):
        dx, gradient = softmax_bwd_bias(y, mask, dy, spec, schedule)
        return Operands(dx, logits_bias=gradient)
    dbias = None if spec.logits_bias_dtype is None else spec.logits_bias_rows
    row_sums = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    dx, *sums = launch(
        _softmax_bwd_looped if schedule.is_looped(spec) else _softmax_bwd_in_registers,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={
            "dx_ptr": jax.ShapeDtypeStruct(y.shape, spec.x_dtype),
            "sum_ptr": None if dbias is None else row_sums,
        },
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        y_ptr=y,
        dy_ptr=dy,
        mask_ptr=mask,
        rows=spec.rows,
        cols=spec.cols,
        log=spec.op == "log_softmax",
        logits=logits_of.of(spec),
        **schedule.tiles(spec),
    )
    if dbias is None:
        return Operands(dx)
    gradient = _of_rows(dbias, *sums).astype(spec.logits_bias_dtype)
    return Operands(dx, logits_bias=gradient)


def _of_rows(shared: Shared, sums: jax.Array) -> jax.Array:
    """`(n, 1)`: those of the rows that share a value of the bias."""
    broadcast = [axis for axis, (_, own) in enumerate(shared.segments) if not own]
    return sums.reshape([size for size, _ in shared.segments]).sum(broadcast).reshape(-1, 1)


@triton.jit
def _softmax_fwd_in_registers(
    x_ptr,
    mask_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    logits: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    z, kept = load_rows_of_logits(
        x_ptr, mask_ptr, bias_ptr, first_row, rows, cols, tile_rows, block, pieces, logits
    )
    top = z[0]
    for i in tl.static_range(1, pieces):
        top = tl.maximum(top, z[i])
    m = tl.maximum(tl.max(top, axis=1), _LOWEST)[:, None]
    e = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        e += tl.exp(z[i] - m)
    s = tl.sum(e, axis=1)[:, None]
    for i in tl.static_range(pieces):
        y = z[i] - m - tl.log(s) if log else tl.exp(z[i] - m) * (1.0 / s)
        y = only_kept(y, kept[i], log, logits)
        store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)


@triton.jit
def _softmax_fwd_looped(
    x_ptr,
    mask_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    logits: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    m = tl.full([tile_rows, 1], _LOWEST, tl.float32)
    s = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, columns_of(first_row, rows, cols, tile_rows, logits), block):
        z, _ = load_logits(
            x_ptr,
            mask_ptr,
            bias_ptr,
            first_row,
            first_col,
            rows,
            cols,
            tile_rows,
            block,
            logits,
            "evict_last",
        )
        higher = tl.maximum(m, tl.max(z, axis=1)[:, None])
        s = s * tl.exp(m - higher) + tl.exp(z - higher)
        m = higher
    total = tl.sum(s, axis=1)[:, None]
    for first_col in tl.range(0, cols, block):
        z, kept = load_logits(
            x_ptr,
            mask_ptr,
            bias_ptr,
            first_row,
            first_col,
            rows,
            cols,
            tile_rows,
            block,
            logits,
            "evict_first",
        )
        y = z - m - tl.log(total) if log else tl.exp(z - m) * (1.0 / total)
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        tl.store(y_ptr + start + col, only_kept(y, kept, log, logits), mask=exists)


@triton.jit
def _softmax_bwd_in_registers(
    y_ptr,
    dy_ptr,
    mask_ptr,
    dx_ptr,
    sum_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    logits: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    """dx, and sum(dz) of each row where there is a pointer for it."""
    first_row = tl.program_id(0) * tile_rows
    y, d = (), ()
    for i in tl.static_range(pieces):
        row, start, col, exists = tile_at(first_row, i * block, rows, cols, tile_rows, block)
        y += (load_output(y_ptr, row, start, col, exists, log, logits, ""),)
    for i in tl.static_range(pieces):
        row, start, col, exists = tile_at(first_row, i * block, rows, cols, tile_rows, block)
        dy = load_cotangent(dy_ptr, mask_ptr, row, start, col, exists, cols, logits, "")
        d += (drop_zeros(dy, y[i], logits),)
    terms = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        terms += d[i] if log else d[i] * y[i]
    total = tl.sum(terms, axis=1)[:, None]
    sums = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        dz = d[i] - tl.exp(y[i]) * total if log else y[i] * (d[i] - total)
        sums += dz
        store_piece(dx_ptr, scaled(dz, logits), i, first_row, rows, cols, tile_rows, block)
    if sum_ptr is not None:
        row = first_row + tl.arange(0, tile_rows)
        tl.store(sum_ptr + row, tl.sum(sums, axis=1), mask=row < rows)


@triton.jit
def _softmax_bwd_looped(
    y_ptr,
    dy_ptr,
    mask_ptr,
    dx_ptr,
    sum_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    logits: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """dx, and sum(dz) of each row where there is a pointer for it."""
    first_row = tl.program_id(0) * tile_rows
    total = looped_total(
        y_ptr, dy_ptr, mask_ptr, first_row, rows, cols, log, logits, tile_rows, block
    )
    sums = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, cols, block):
        row, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        y = load_output(y_ptr, row, start, col, exists, log, logits, "evict_first")
        d = load_cotangent(dy_ptr, mask_ptr, row, start, col, exists, cols, logits, "evict_first")
        d = drop_zeros(d, y, logits)
        dz = d - tl.exp(y) * total if log else y * (d - total)
        if sum_ptr is not None:
            sums += dz
        tl.store(dx_ptr + start + col, scaled(dz, logits), mask=exists)
    if sum_ptr is not None:
        row = first_row + tl.arange(0, tile_rows)
        tl.store(sum_ptr + row, tl.sum(sums, axis=1), mask=row < rows)
