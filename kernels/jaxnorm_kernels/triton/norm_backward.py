"""Backward passes of LayerNorm and RMSNorm from the output or from the input.

Row of N; G = scale + scale_offset, r = rstd, d = dy; c1 is LayerNorm's alone:

    from the output    z = y - bias,  xh = z / G,          c2 = mean(d z)
    from the input     xh = (x - mean) r,                  c2 = mean(d G xh)
    both               dx = r (d G - c1 - xh c2),          c1 = mean(d G)
                       dscale = sum_rows(d xh),            dbias = sum_rows(d)

Another cotangent of x, dh, is added to dx before it is rounded.

G is floored and the bias rounded to y's dtype as in the forward, and |xh| is clipped to sqrt(N),
its true bound, where a bias or a vanishing G may have cost y what it knew of xh; |y| is clipped to
the largest number (`Spec.y_limit`).

A program walks over its share of the rows and adds up dscale and dbias in registers; the programs'
sums are added outside, always in the same order. Rows too wide for that are cut into blocks, each
with programs of its own, and c1 and c2 come from a kernel that ran before. Where groups of rows
have parameters of their own, a program has rows of one group alone.
"""

import math
from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels import composed
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.partials import add_partials
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.launch import group_rows, launch
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import (
    columns_at,
    effective_bias,
    gain,
    start_of_group,
    tile_at,
)


def norm_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """See `Implementation.backward`; `schedule` stands in for the one of the table."""
    if spec.op == "add_norm":
        of_h = norm_bwd(residuals, cotangents, spec.last)
        return of_h._replace(x=of_h.x.astype(spec.x_dtype), residual=of_h.x)
    saved, _, stats, scale, bias, *_ = residuals
    dy, dh, _ = cotangents
    schedule = schedule or schedules.choose(spec)
    rstd, *mean = stats
    from_output = spec.saved == "output"
    common: dict[str, Any] = {
        "saved_ptr": saved,
        "dy_ptr": dy,
        "rstd_ptr": rstd,
        "mean_ptr": mean[0] if mean else None,
        "scale_ptr": scale,
        "bias_ptr": bias if from_output else None,
        "rows": spec.rows,
        "scale_rows": group_rows(scale, spec),
        "bias_rows": group_rows(bias, spec),
        "cols": spec.cols,
        "subtract_mean": spec.subtract_mean,
        "scale_offset": spec.scale_offset,
        "scale_floor": spec.scale_floor or 0.0,
        "bound": math.sqrt(spec.cols) if spec.clips_x_hat else 0.0,
        "y_limit": spec.y_limit or 0.0,
        "from_output": from_output,
        "tile_rows": schedule.tile_rows,
        "block": schedule.block,
        "warps": schedule.warps,
        "registers": schedule.registers,
    }
    row_means = _row_means(spec, schedule, common) if schedule.is_looped(spec) else (None, None)
    col_blocks, row_programs = schedule.persistent_grid(spec)
    partial = jax.ShapeDtypeStruct((row_programs * spec.groups, spec.cols), np.float32)
    dx, *partials = launch(
        _norm_bwd,
        name="jaxnorm_norm_bwd",
        outputs={
            "dx_ptr": jax.ShapeDtypeStruct(saved.shape, spec.x_dtype),
            "dscale_ptr": None if scale is None else partial,
            "dbias_ptr": None if bias is None else partial,
        },
        grid=(col_blocks * spec.groups, row_programs),
        dh_ptr=dh,
        col_blocks=col_blocks,
        c2_ptr=row_means[0],
        c1_ptr=row_means[1],
        pieces=schedule.pieces,
        hold_params=schedule.hold_params,
        stages=schedule.stages,
        **common,
    )
    dscale, dbias = _summed(partials, (scale, bias), spec)
    return Operands(dx, scale=dscale, bias=dbias)


def two_norms_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Of norm_add_norm: a kernel for each norm."""
    return composed.two_norms_bwd(norm_bwd, residuals, cotangents, spec)


def _summed(
    partials: list[jax.Array], parameters: tuple[jax.Array | None, ...], spec: Spec
) -> list[jax.Array | None]:
    """The gradients of scale and bias: sums of the programs' sums."""
    dtypes = (spec.scale_dtype, spec.bias_dtype)
    if spec.groups == 1:
        return add_partials(partials, dtypes)
    # A partial has a row for each group of each program.
    sums: list[jax.Array | None] = []
    for parameter, dtype in zip(parameters, dtypes):
        own = [] if parameter is None else [partials.pop(0).reshape(-1, *parameter.shape)]
        sums += add_partials(own, (dtype,))
    return sums


def _row_means(
    spec: Spec, schedule: Schedule, common: dict[str, Any]
) -> tuple[jax.Array, jax.Array | None]:
    """c2 and c1 of rows that are too wide for registers; c1 is LayerNorm's alone."""
    stat = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    c2, *c1 = launch(
        _norm_bwd_row_means,
        name="jaxnorm_norm_bwd_row_means",
        outputs={"c2_ptr": stat, "c1_ptr": stat if spec.subtract_mean else None},
        grid=schedule.grid(spec),
        **common,
    )
    return c2, c1[0] if c1 else None


@triton.jit
def _columns(
    scale_ptr,
    scale_start,
    bias_ptr,
    bias_start,
    y_ptr,
    col,
    cols: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
):
    """G, 1 / G and the bias of the columns of a tile. No scale is G = 1, no bias is 0."""
    g = gain(scale_ptr, scale_start, col, cols, scale_offset, scale_floor)
    if scale_ptr is None:
        inverse = 1.0
    elif scale_floor > 0.0:
        inverse = 1.0 / g
    else:  # float16: y holds nothing of xh where G is 0
        inverse = tl.where(g == 0.0, 0.0, 1.0 / tl.where(g == 0.0, 1.0, g))
    return g, inverse, effective_bias(bias_ptr, bias_start, y_ptr, col, cols, from_output)


@triton.jit
def _elements(
    saved,
    d,
    rstd,
    mean,
    g,
    inverse,
    bias,
    bound: tl.constexpr,
    y_limit: tl.constexpr,
    from_output: tl.constexpr,
):
    """d G; the terms of c2; and xh: elements of a tile. A `bound` or a `y_limit` of 0 is none."""
    dg = d * g
    if from_output:
        if y_limit > 0.0:
            saved = tl.clamp(saved, -y_limit, y_limit, propagate_nan=tl.PropagateNan.ALL)
        z = saved - bias
        terms = d * z
        xh = z * inverse
        if bound > 0.0:
            xh = tl.clamp(xh, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    else:
        xh = (saved - mean) * rstd
        terms = dg * xh
    return dg, terms, xh


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _of_rows(stat_ptr, row, rows):
    """A statistic of the rows of a tile; 0 where there is no such statistic."""
    return 0.0 if stat_ptr is None else tl.load(stat_ptr + row, row < rows, 0.0)[:, None]


@triton.jit
def _norm_bwd(
    saved_ptr,
    dy_ptr,
    dh_ptr,
    rstd_ptr,
    mean_ptr,
    scale_ptr,
    bias_ptr,
    c2_ptr,
    c1_ptr,
    dx_ptr,
    dscale_ptr,
    dbias_ptr,
    rows,
    scale_rows,
    bias_rows,
    cols: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    bound: tl.constexpr,
    y_limit: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
    col_blocks: tl.constexpr,
    hold_params: tl.constexpr,
    stages: tl.constexpr,
):
    """dx and the partial sums. c1 and c2 are None where the pieces of a tile are whole rows.

    `scale_rows` and `bias_rows` are the rows of a group, None where all rows share the parameter.
    """
    first_col = tl.program_id(0) * block
    program, programs = tl.program_id(1), tl.num_programs(1)
    scale_start, bias_start = None, None
    if scale_rows is not None or bias_rows is not None:
        first_col = tl.program_id(0) % col_blocks * block
        group = tl.program_id(0) // col_blocks
        if scale_rows is not None:
            scale_start = group.to(tl.int64) * cols
        if bias_rows is not None:
            bias_start = group.to(tl.int64) * cols
    params, dscale, dbias = (), (), ()
    for i in tl.static_range(pieces):
        if hold_params:
            params += (
                _columns(
                    scale_ptr,
                    scale_start,
                    bias_ptr,
                    bias_start,
                    saved_ptr,
                    columns_at(first_col + i * block, block, tile_rows),
                    cols,
                    scale_offset,
                    scale_floor,
                    from_output,
                ),
            )
        dscale += (tl.zeros([tile_rows, block], tl.float32),)
        dbias += (tl.zeros([tile_rows, block], tl.float32),)
    begin = program * tile_rows
    if scale_rows is not None or bias_rows is not None:
        group_rows = bias_rows if scale_rows is None else scale_rows
        begin += group * group_rows
        rows = (group + 1) * group_rows
    for first_row in tl.range(begin, rows, programs * tile_rows, num_stages=stages):
        row = first_row + tl.arange(0, tile_rows)
        rstd, mean = _of_rows(rstd_ptr, row, rows), _of_rows(mean_ptr, row, rows)
        dgs, xhs, dscales, dbiases = (), (), (), ()
        terms = tl.zeros([tile_rows, block], tl.float32)
        sums = tl.zeros([tile_rows, block], tl.float32)
        for i in tl.static_range(pieces):
            _, start, col, exists = tile_at(
                first_row, first_col + i * block, rows, cols, tile_rows, block
            )
            saved = tl.load(saved_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
            d = tl.load(dy_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
            if hold_params:
                g, inverse, bias = params[i]
            else:
                g, inverse, bias = _columns(
                    scale_ptr,
                    scale_start,
                    bias_ptr,
                    bias_start,
                    saved_ptr,
                    col,
                    cols,
                    scale_offset,
                    scale_floor,
                    from_output,
                )
            dg, dz, xh = _elements(
                saved, d, rstd, mean, g, inverse, bias, bound, y_limit, from_output
            )
            terms += dz
            sums += dg
            dgs += (dg,)
            xhs += (xh,)
            dscales += (dscale[i] + d * xh,)
            dbiases += (dbias[i] + d,)
        dscale, dbias = dscales, dbiases
        if c2_ptr is not None:
            c2, c1 = _of_rows(c2_ptr, row, rows), _of_rows(c1_ptr, row, rows)
        elif subtract_mean:  # one exchange between the warps for both
            c2, c1 = tl.reduce((terms, sums), 1, _add_pairs)
            c2, c1 = c2[:, None] / cols, c1[:, None] / cols
        else:
            c2 = tl.sum(terms, axis=1)[:, None] / cols
        for i in tl.static_range(pieces):
            dx = dgs[i] * rstd
            if subtract_mean:
                dx -= c1 * rstd
            dx -= xhs[i] * (c2 * rstd)
            _, start, col, exists = tile_at(
                first_row, first_col + i * block, rows, cols, tile_rows, block
            )
            if dh_ptr is not None:
                dx += tl.load(dh_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
            tl.store(dx_ptr + start + col, dx, mask=exists)
    partial_row = program
    if scale_rows is not None or bias_rows is not None:
        partial_row = program * (tl.num_programs(0) // col_blocks) + group
    for i in tl.static_range(pieces):
        col = columns_at(first_col + i * block, block)
        partial = partial_row.to(tl.int64) * cols + col
        if dscale_ptr is not None:
            tl.store(dscale_ptr + partial, tl.sum(dscale[i], axis=0)[None, :], mask=col < cols)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + partial, tl.sum(dbias[i], axis=0)[None, :], mask=col < cols)


@triton.jit
def _norm_bwd_row_means(
    saved_ptr,
    dy_ptr,
    rstd_ptr,
    mean_ptr,
    scale_ptr,
    bias_ptr,
    c2_ptr,
    c1_ptr,
    rows,
    scale_rows,
    bias_rows,
    cols: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    bound: tl.constexpr,
    y_limit: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """c2 and, where there is a pointer for it, c1."""
    first_row = tl.program_id(0) * tile_rows
    row = first_row + tl.arange(0, tile_rows)
    scale_start = start_of_group(row, rows, scale_rows, cols)
    bias_start = start_of_group(row, rows, bias_rows, cols)
    rstd, mean = _of_rows(rstd_ptr, row, rows), _of_rows(mean_ptr, row, rows)
    c2 = tl.zeros([tile_rows, block], tl.float32)
    c1 = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        saved = tl.load(saved_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
        d = tl.load(dy_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
        g, inverse, bias = _columns(
            scale_ptr,
            scale_start,
            bias_ptr,
            bias_start,
            saved_ptr,
            col,
            cols,
            scale_offset,
            scale_floor,
            from_output,
        )
        dg, terms, _ = _elements(
            saved, d, rstd, mean, g, inverse, bias, bound, y_limit, from_output
        )
        c2 += terms
        c1 += dg
    tl.store(c2_ptr + row, tl.sum(c2, axis=1) / cols, mask=row < rows)
    if subtract_mean:
        tl.store(c1_ptr + row, tl.sum(c1, axis=1) / cols, mask=row < rows)
