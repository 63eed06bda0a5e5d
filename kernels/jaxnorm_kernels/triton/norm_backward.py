"""Backward passes of LayerNorm and RMSNorm, computed from the saved output or the saved input.

For a row of N elements, let G = scale + scale_offset, r = rstd and d = dy:

    from the output    z = y - bias,  xh = z / G,          c2 = mean(d z)
    from the input     xh = (x - mean) r,                  c2 = mean(d G xh)
    both               dx = r (d G - c1 - xh c2),          c1 = mean(d G)
                       dscale = sum_rows(d xh),            dbias = sum_rows(d)

For RMSNorm, mean and c1 are 0 in these formulas.

With an activation after the norm, the backward pass starts from the saved input. It recomputes the
norm's result n = xh * G + bias, and sets d = dy * activation'(n).

The input of the norm may have an extra cotangent dh. Then dh is added to dx before dx is rounded.
If the input of the norm is h = residual + branch_scale * x, let t be the gradient of h:

    dresidual = t       dx = branch_scale * t       dbranch_scale = sum_rows(t x)

With a gate, let A = activation(gate) and A' = activation'(gate). There are two forms. If the gate
comes after the norm, the formulas above are used with d = A * dy. If the gate comes before the
norm, x * A takes the place of x in these formulas, and they give dt, the gradient of x * A:

    y = norm(x) A     dgate = dy xh G A'
    y = norm(x A)     dgate = dt x A'           dx = dt A

As in the forward pass, the bias is rounded to y's dtype, and |G| has a lower limit: if it is
smaller than `Spec.scale_floor`, it is replaced by `Spec.scale_floor`. If y may have lost
information about xh, because of a bias or a very small G, |xh| is clipped to its true bound
sqrt(N). |y| is clipped to the largest finite number (`Spec.y_limit`).

Each program loops over some of the rows and adds up their dscale and dbias in registers. The sums
of the programs are added outside the kernel in a fixed order. If rows are too wide for these sums
to fit into registers, a program processes only a block of the columns of its rows. Such a program
cannot compute c1 and c2, which are means over whole rows. So an earlier kernel computes them. If
groups of rows have separate parameters, a program processes only rows of one group.
"""

from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels import gradients
from jaxnorm_kernels.gradients import add_partials
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import norm_parameters
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.norm_parameters import (
    activated,
    effective_bias,
    gain,
    gain_and_inverse,
    gated,
    group_rows,
    of_groups,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import (
    clipped,
    columns_at,
    load_tile,
    of_rows,
    store_tile,
    tile_at,
    zero_beyond,
    zeros,
)


def norm_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Run a backward pass; see `Implementation.backward`. `schedule` replaces the default."""
    if spec.op == "add_norm":
        of_h = norm_bwd(residuals, cotangents, spec.last)
        return of_h._replace(x=of_h.x.astype(spec.x_dtype), residual=of_h.x)
    saved, x, scale, bias = residuals.saved, residuals.x, residuals.scale, residuals.bias
    gate, branch_scale, dh = residuals.gate, residuals.branch_scale, cotangents.h
    schedule = schedule or schedules.choose(spec)
    rstd, *mean = residuals.stats
    operands: dict[str, Any] = {
        "saved_ptr": saved,
        "dy_ptr": cotangents.y,
        "rstd_ptr": rstd,
        "mean_ptr": mean[0] if mean else None,
        "scale_ptr": scale,
        "bias_ptr": bias if spec.reads_bias else None,
        "scale_rows": group_rows(scale, spec),
        "bias_rows": group_rows(bias, spec),
        "norm": norm_parameters.of(spec.last),
        "gate_ptr": gate,
        "gate": norm_parameters.gate_of(spec),
    }
    c2, c1 = None, None
    if schedule.is_looped(spec):
        stat = jax.ShapeDtypeStruct((spec.rows,), np.float32)
        c2, *of_mean = schedule.launch(
            _norm_bwd_row_means,
            spec,
            name="jaxnorm_norm_bwd_row_means",
            outputs={"c2_ptr": stat, "c1_ptr": stat if spec.norm.subtract_mean else None},
            **operands,
        )
        c1 = of_mean[0] if of_mean else None
    col_blocks, row_programs = schedule.persistent_grid(spec)
    partial = jax.ShapeDtypeStruct((row_programs * spec.groups, spec.cols), np.float32)
    like_h = jax.ShapeDtypeStruct(saved.shape, spec.last.x_dtype)  # dh is None if h is not used
    dx, *partials = schedule.launch(
        _norm_bwd,
        spec,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={
            "dx_ptr": jax.ShapeDtypeStruct(saved.shape, spec.x_dtype),
            "dgate_ptr": None if gate is None else jax.ShapeDtypeStruct.like(gate),
            "dresidual_ptr": None if branch_scale is None else like_h,
            "dscale_ptr": None if scale is None else partial,
            "dbias_ptr": None if bias is None else partial,
            "dbranch_scale_ptr": None if branch_scale is None else partial,
        },
        grid=(col_blocks * spec.groups, row_programs),
        x_ptr=x,
        dh_ptr=dh,
        branch_scale_ptr=branch_scale,
        branch_scale_rows=group_rows(branch_scale, spec),
        c2_ptr=c2,
        c1_ptr=c1,
        col_blocks=col_blocks,
        hold_params=schedule.hold_params,
        stages=schedule.stages,
        **operands,
    )
    dgate = None if gate is None else partials.pop(0)
    dresidual = None if branch_scale is None else partials.pop(0)
    parameters = (scale, bias, branch_scale)
    dbranch_scale: Any
    dscale, dbias, dbranch_scale = parameter_gradients(partials, parameters, spec)
    return Operands(dx, dresidual, dscale, dbias, gate=dgate, branch_scale=dbranch_scale)


def two_norms_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Run the backward pass of norm_add_norm with one kernel for each of its norms."""
    return gradients.two_norms_bwd(norm_bwd, residuals, cotangents, spec)


def parameter_gradients(
    partials: list[jax.Array], parameters: tuple[jax.Array | None, ...], spec: Spec
) -> list[jax.Array | None]:
    """Return the gradients of `parameters`, in the same order.

    `partials` has an array of partial gradients for each parameter that is present. The programs
    have stored these arrays. A gradient is the sum of the partial gradients in its array.
    """
    dtypes = [None if p is None else p.dtype for p in parameters]
    if spec.groups == 1:
        return add_partials(partials, dtypes)
    # Each array of partial gradients has one row for each pair (program, group of rows).
    sums: list[jax.Array | None] = []
    for parameter, dtype in zip(parameters, dtypes):
        of_programs = [] if parameter is None else [partials.pop(0).reshape(-1, *parameter.shape)]
        sums += add_partials(of_programs, (dtype,))
    return sums


@triton.jit
def _columns(scale, bias, y_ptr, col, cols: tl.constexpr, norm: tl.constexpr):
    """Return (G, 1 / G, bias) for the columns of a tile, where G = scale + scale_offset."""
    g, inverse = gain_and_inverse(scale, col, cols, norm)
    return g, inverse, effective_bias(bias, y_ptr, col, cols, norm.from_output)


@triton.jit
def _elements(saved, d, rstd, mean, params, first_col, norm: tl.constexpr, tiling: tl.constexpr):
    """Return (d, d * G, terms of c2, xh) for the elements of a tile; see the module docstring.

    The mean of the terms of c2 over a row is c2. The argument `d` is dy, or dy * A if a gate comes
    after the norm. The returned d is `d`, multiplied by the activation's derivative if there is an
    activation after the norm.
    """
    g, inverse, b = params
    if norm.activation is not None:
        _, slope = activated((saved - mean) * rstd * g + b, norm.activation)
        # Beyond the last column, the activation's derivative `slope` may be any number. So set d to
        # 0 there.
        d = zero_beyond(d * slope, first_col, tiling)
    dg = d * g
    if norm.from_output:
        z = clipped(saved, norm.y_limit) - b
        terms = d * z
        xh = clipped(z * inverse, norm.x_hat_limit)
    else:
        xh = (saved - mean) * rstd
        terms = dg * xh
    return d, dg, terms, xh


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_bwd(
    saved_ptr,
    gate_ptr,
    x_ptr,
    dy_ptr,
    dh_ptr,
    rstd_ptr,
    mean_ptr,
    scale_ptr,
    bias_ptr,
    branch_scale_ptr,
    c2_ptr,
    c1_ptr,
    dx_ptr,
    dgate_ptr,
    dresidual_ptr,
    dscale_ptr,
    dbias_ptr,
    dbranch_scale_ptr,
    rows,
    scale_rows,
    bias_rows,
    branch_scale_rows,
    norm: tl.constexpr,
    gate: tl.constexpr,
    tiling: tl.constexpr,
    col_blocks: tl.constexpr,
    hold_params: tl.constexpr,
    stages: tl.constexpr,
):
    """Store dx, and partial sums of the parameters' gradients; see the module docstring.

    With a gate or branch_scale, also store dgate or dresidual.

    If a program holds whole rows, it computes c1 and c2 itself, and `c1_ptr` and `c2_ptr` are None.
    Otherwise, it loads c1 and c2.

    `scale_rows` is the number of consecutive rows of x that share a row of the scale, or None if
    all rows share the scale. `bias_rows` and `branch_scale_rows` are the same for the other
    parameters.
    """
    cols: tl.constexpr = tiling.cols
    block: tl.constexpr = tiling.block
    pieces: tl.constexpr = tiling.pieces
    of_norm: tl.constexpr = scale_rows is not None or bias_rows is not None
    has_groups: tl.constexpr = of_norm or branch_scale_rows is not None
    first_col, group, group_rows = tl.program_id(0) * block, 0, rows
    program, programs = tl.program_id(1), tl.num_programs(1)
    scale, bias, branch_scale = (scale_ptr, None), (bias_ptr, None), (branch_scale_ptr, None)
    if has_groups:
        first_col, group = tl.program_id(0) % col_blocks * block, tl.program_id(0) // col_blocks
        if scale_rows is not None:
            group_rows = scale_rows
        elif bias_rows is not None:
            group_rows = bias_rows
        else:
            group_rows = branch_scale_rows
        start = group.to(tl.int64) * cols
        if scale_rows is not None:
            scale = (scale_ptr, start)
        if bias_rows is not None:
            bias = (bias_ptr, start)
        if branch_scale_rows is not None:
            branch_scale = (branch_scale_ptr, start)
    params, branch_scales, dscale, dbias, dbranch_scale = (), (), (), (), ()
    for i in tl.static_range(pieces):
        if hold_params:
            col = columns_at(first_col + i * block, block, tiling.tile_rows)
            params += (_columns(scale, bias, saved_ptr, col, cols, norm),)
            branch_scales += (gain(branch_scale, col, cols, 0.0, 0.0),)
        dscale += (zeros(tiling),)
        dbias += (zeros(tiling),)
        dbranch_scale += (zeros(tiling),)
    begin, rows = program * tiling.tile_rows + group * group_rows, (group + 1) * group_rows
    for first_row in tl.range(begin, rows, programs * tiling.tile_rows, num_stages=stages):
        row = first_row + tl.arange(0, tiling.tile_rows)
        rstd, mean = of_rows(rstd_ptr, row, rows), of_rows(mean_ptr, row, rows)
        dgs, xhs, dscales, dbiases, factors = (), (), (), (), ()
        terms, sums = zeros(tiling), zeros(tiling)
        for i in tl.static_range(pieces):
            tile = tile_at(first_row, first_col + i * block, rows, tiling)
            saved, d = load_tile(saved_ptr, tile), load_tile(dy_ptr, tile)
            if hold_params:
                columns = params[i]
            else:
                columns = _columns(scale, bias, saved_ptr, tile[2], cols, norm)
            if gate is not None:
                a, slope = activated(load_tile(gate_ptr, tile), gate.activation)
                if gate.comes_first:
                    factors += ((a, saved * slope),)
                    saved *= a
                else:
                    store_tile(dgate_ptr, d * columns[0] * (saved * rstd) * slope, tile)
                    d *= a
            d, dg, dz, xh = _elements(
                saved, d, rstd, mean, columns, first_col + i * block, norm, tiling
            )
            terms += dz
            sums += dg
            dgs += (dg,)
            xhs += (xh,)
            dscales += (dscale[i] + d * xh,)
            dbiases += (dbias[i] + d,)
        dscale, dbias = dscales, dbiases
        if c2_ptr is not None:
            c2, c1 = of_rows(c2_ptr, row, rows), of_rows(c1_ptr, row, rows)
        elif norm.subtract_mean:  # Reduce both sums at once, so that warps exchange data only once.
            c2, c1 = tl.reduce((terms, sums), 1, _add_pairs)
            c2, c1 = c2[:, None] / cols, c1[:, None] / cols
        else:
            c2 = tl.sum(terms, axis=1)[:, None] / cols
        dbranch_scales = ()
        for i in tl.static_range(pieces):
            dx = dgs[i] * rstd
            if norm.subtract_mean:
                dx -= c1 * rstd
            dx -= xhs[i] * (c2 * rstd)
            tile = tile_at(first_row, first_col + i * block, rows, tiling)
            if dh_ptr is not None:
                dx += load_tile(dh_ptr, tile)
            if gate is not None and gate.comes_first:
                a, of_gate = factors[i]
                store_tile(dgate_ptr, dx * of_gate, tile)
                dx *= a
            if branch_scale_ptr is not None:
                store_tile(dresidual_ptr, dx, tile)
                dbranch_scales += (dbranch_scale[i] + dx * load_tile(x_ptr, tile),)
                if hold_params:
                    dx *= branch_scales[i]
                else:
                    dx *= gain(branch_scale, tile[2], cols, 0.0, 0.0)
            store_tile(dx_ptr, dx, tile)
        if branch_scale_ptr is not None:
            dbranch_scale = dbranch_scales
    groups = tl.num_programs(0) // col_blocks if has_groups else 1
    partial_row = program * groups + group
    for i in tl.static_range(pieces):
        col = columns_at(first_col + i * block, block)
        partial = partial_row.to(tl.int64) * cols + col
        if dscale_ptr is not None:
            tl.store(dscale_ptr + partial, tl.sum(dscale[i], axis=0)[None, :], mask=col < cols)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + partial, tl.sum(dbias[i], axis=0)[None, :], mask=col < cols)
        if dbranch_scale_ptr is not None:
            total = tl.sum(dbranch_scale[i], axis=0)[None, :]
            tl.store(dbranch_scale_ptr + partial, total, mask=col < cols)


@triton.jit
def _norm_bwd_row_means(
    saved_ptr,
    gate_ptr,
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
    norm: tl.constexpr,
    gate: tl.constexpr,
    tiling: tl.constexpr,
):
    """Store the row means c2 and, for LayerNorm, c1; see the module docstring.

    The rows are too wide for registers, so they are loaded one block of columns after another.
    """
    cols: tl.constexpr = tiling.cols
    first_row = tl.program_id(0) * tiling.tile_rows
    row = first_row + tl.arange(0, tiling.tile_rows)
    scale = of_groups(scale_ptr, row, rows, scale_rows, cols)
    bias = of_groups(bias_ptr, row, rows, bias_rows, cols)
    rstd, mean = of_rows(rstd_ptr, row, rows), of_rows(mean_ptr, row, rows)
    c2, c1 = zeros(tiling), zeros(tiling)
    for first_col in tl.range(0, cols, tiling.block):
        tile = tile_at(first_row, first_col, rows, tiling)
        saved = gated(load_tile(saved_ptr, tile), gate_ptr, tile, gate, True)
        d = gated(load_tile(dy_ptr, tile), gate_ptr, tile, gate, False)
        columns = _columns(scale, bias, saved_ptr, tile[2], cols, norm)
        _, dg, terms, _ = _elements(saved, d, rstd, mean, columns, first_col, norm, tiling)
        c2 += terms
        c1 += dg
    tl.store(c2_ptr + row, tl.sum(c2, axis=1) / cols, mask=row < rows)
    if norm.subtract_mean:
        tl.store(c1_ptr + row, tl.sum(c1, axis=1) / cols, mask=row < rows)
