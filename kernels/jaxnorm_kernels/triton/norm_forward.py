"""Forward passes of LayerNorm and RMSNorm, alone or with a residual addition or a gate.

LayerNorm subtracts the mean. For RMSNorm, the mean in these formulas is 0:

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias       or the activation of this sum

With a residual, there are three forms: y = norm(x + residual), y = residual + norm(x), and y =
norm(residual + norm(x)). In the first and the third form, the sum that is normalised is called h.
It is rounded to its stored dtype before it is normalised. In the first form, x may be scaled before
the addition. With a gate, either x or the norm's result is multiplied by the gate's activation. The
product is not rounded before y is stored.

A program holds whole rows in registers, as adjacent tiles. They are reduced twice: first for the
mean, then for the variance. The formula E[x^2] - E[x]^2 would need less arithmetic, but its terms
may cancel. For short rows, persistent programs may loop over the rows and prefetch the next ones.
Rows of more than `support.MOST_NORMALISED` columns do not fit into registers, and are left to XLA.
"""

from typing import Any

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import norm_parameters
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.norm_parameters import (
    activated,
    gain,
    gain_and_bias,
    gated,
    group_rows,
    of_groups,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import (
    columns_at,
    load_rows,
    load_tile,
    rounded_like,
    store_tile,
    tile_at,
    zero_beyond,
    zeros,
)


def norm_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """Run a forward pass; see `Implementation.forward`. `schedule` replaces the default."""
    x, scale, bias, next_scale = operands.x, operands.scale, operands.bias, operands.next_scale
    residual, branch_scale = operands.residual, operands.branch_scale
    schedule = schedule or schedules.choose(spec)
    kernel = norm_fwd_in_registers
    options: dict[str, Any] = {
        "op": "add_norm" if branch_scale is not None else spec.op,
        "gate_ptr": operands.gate,
        "gate": norm_parameters.gate_of(spec),
    }
    if schedule.stages > 1 and spec.op == "norm" and spec.groups == 1:
        kernel = norm_fwd_persistent
        options = {"grid": schedule.persistent_grid(spec)[1:], "stages": schedule.stages}
    stat = jax.ShapeDtypeStruct((spec.rows,), np.float32) if spec.has_stats else None
    # `norm` has the options of the call's last norm, such as epsilon. An earlier norm of the call
    # uses the same options, with three exceptions. It has no mean and no bias. It also has no lower
    # limit of |G|: it saves its input, so no backward pass divides by G.
    norm = spec.norms[-1]
    y_dtype = spec.norm.residual_dtype if spec.operation.y_is_sum else spec.y_dtype
    h = jax.ShapeDtypeStruct(x.shape, spec.norm.residual_dtype) if spec.normalises_h else None
    kind = "layer_norm" if spec.norm.subtract_mean else "rms_norm"
    y, *results = schedule.launch(
        kernel,
        spec,
        name=f"jaxnorm_{spec.op.replace('norm', kind)}_fwd",
        outputs={
            "y_ptr": jax.ShapeDtypeStruct(x.shape, y_dtype),
            "h_ptr": h,
            "rstd_ptr": stat,
            "mean_ptr": stat if norm.returns_mean else None,
            "next_rstd_ptr": stat if len(spec.norms) > 1 else None,
        },
        x_ptr=x,
        residual_ptr=residual,
        scale_ptr=scale,
        bias_ptr=bias,
        next_scale_ptr=next_scale,
        branch_scale_ptr=branch_scale,
        scale_rows=group_rows(scale, spec),
        bias_rows=group_rows(bias, spec),
        next_scale_rows=group_rows(next_scale, spec),
        branch_scale_rows=group_rows(branch_scale, spec),
        norm=norm_parameters.of(norm),
        **options,
    )
    if h is None:
        return Results(y, stats=tuple(results))
    # The kernels always store h. Return it only if the call requests it.
    return Results(y, results[0] if "h" in spec.outputs else None, tuple(results[1:]))


@triton.jit
def norm_fwd_in_registers(
    x_ptr,
    residual_ptr,
    gate_ptr,
    scale_ptr,
    bias_ptr,
    next_scale_ptr,
    branch_scale_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
    next_rstd_ptr,
    rows,
    scale_rows,
    bias_rows,
    next_scale_rows,
    branch_scale_rows,
    op: tl.constexpr,
    norm: tl.constexpr,
    tiling: tl.constexpr,
    gate: tl.constexpr,
):
    """Normalise whole rows in registers.

    `scale_rows` is the number of consecutive rows of x that share a row of the scale, or None if
    all rows share the scale. `bias_rows`, `next_scale_rows` and `branch_scale_rows` are the same
    for the other parameters.
    """
    first_row = tl.program_id(0) * tiling.tile_rows
    row = first_row + tl.arange(0, tiling.tile_rows)
    scale = of_groups(scale_ptr, row, rows, scale_rows, tiling.cols)
    bias = of_groups(bias_ptr, row, rows, bias_rows, tiling.cols)
    x = load_rows(x_ptr, first_row, rows, tiling)
    if op == "add_norm":
        branch_scale = of_groups(branch_scale_ptr, row, rows, branch_scale_rows, tiling.cols)
        scaled = ()
        for i in tl.static_range(len(x)):
            col = columns_at(i * tiling.block, tiling.block)
            scaled += (x[i] * gain(branch_scale, col, tiling.cols, 0.0, 0.0),)
        x = _sums(scaled, residual_ptr, h_ptr, first_row, rows, tiling)
    if op == "norm_gated":
        loaded, x = x, ()
        for i in tl.static_range(len(loaded)):
            tile = tile_at(first_row, i * tiling.block, rows, tiling)
            x += (gated(loaded[i], gate_ptr, tile, gate, True),)
    centred, rstd, mean = _normalized(x, norm.epsilon, norm.subtract_mean, tiling)
    if op == "norm_add_norm":
        _store_stats(rstd_ptr, None, first_row, rows, rstd, mean, tiling)
        normed = ()
        for i in tl.static_range(len(x)):
            col = columns_at(i * tiling.block, tiling.block)
            g = gain(scale, col, tiling.cols, norm.scale_offset, 0.0)
            normed += (centred[i] * rstd[:, None] * g,)
        h = _sums(normed, residual_ptr, h_ptr, first_row, rows, tiling)
        centred, rstd, mean = _normalized(h, norm.epsilon, False, tiling)
        rstd_ptr = next_rstd_ptr
        scale = of_groups(next_scale_ptr, row, rows, next_scale_rows, tiling.cols)
    for i in tl.static_range(len(x)):
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        g, b = gain_and_bias(scale, bias, y_ptr, tile[2], tiling.cols, norm)
        y = _after_norm(centred[i] * rstd[:, None] * g + b, norm)
        y = gated(y, gate_ptr, tile, gate, False)
        if op == "norm_add":
            y += load_tile(residual_ptr, tile)
        store_tile(y_ptr, y, tile)
    _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tiling)


@triton.jit
def norm_fwd_persistent(
    x_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    mean_ptr,
    rows,
    norm: tl.constexpr,
    tiling: tl.constexpr,
    stages: tl.constexpr,
):
    """Normalise rows with persistent programs that prefetch the next rows.

    This kernel supports a single norm of x, without a residual or a gate. All rows must share the
    parameters, because each program loads them only once.
    """
    pieces: tl.constexpr = tiling.pieces
    tile_rows: tl.constexpr = tiling.tile_rows
    program, programs = tl.program_id(0), tl.num_programs(0)
    scale, bias, params = (scale_ptr, None), (bias_ptr, None), ()
    for i in tl.static_range(pieces):
        col = columns_at(i * tiling.block, tiling.block, tile_rows)
        params += (gain_and_bias(scale, bias, y_ptr, col, tiling.cols, norm),)
    for first_row in tl.range(program * tile_rows, rows, programs * tile_rows, num_stages=stages):
        x = load_rows(x_ptr, first_row, rows, tiling)
        centred, rstd, mean = _normalized(x, norm.epsilon, norm.subtract_mean, tiling)
        for i in tl.static_range(pieces):
            g, b = params[i]
            y = _after_norm(centred[i] * rstd[:, None] * g + b, norm)
            store_tile(y_ptr, y, tile_at(first_row, i * tiling.block, rows, tiling))
        _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tiling)


@triton.jit
def _normalized(x, epsilon: tl.constexpr, subtract_mean: tl.constexpr, tiling: tl.constexpr):
    """Return (x - mean, r, mean). x - mean is a tuple with one array for each tile of the rows.

    The mean is computed with a correctly rounded division, because Triton's `/` has an error of up
    to 2 ulps. With `/`, the mean of a row of equal numbers may differ slightly from these numbers.
    x - mean is then a small error instead of 0. As r is large in such a row, (x - mean) * r may be
    as large as 1.
    """
    mean = tl.full([tiling.tile_rows], 0.0, tl.float32)
    if subtract_mean:
        total = zeros(tiling)
        for i in tl.static_range(len(x)):
            total += x[i]
        mean = tl.div_rn(tl.sum(total, axis=1), mean + tiling.cols)
    centred, square = (), zeros(tiling)
    for i in tl.static_range(len(x)):
        c = x[i]
        if subtract_mean:
            c = zero_beyond(c - mean[:, None], i * tiling.block, tiling)
        square += c * c
        centred += (c,)
    return centred, tl.rsqrt(tl.sum(square, axis=1) / tiling.cols + epsilon), mean


@triton.jit
def _after_norm(n, norm: tl.constexpr):
    """Return the activation of `n`, the norm's result, or `n` itself if there is no activation."""
    if norm.activation is not None:
        n, _ = activated(n, norm.activation)
    return n


@triton.jit
def _sums(x, residual_ptr, h_ptr, first_row, rows, tiling: tl.constexpr):
    """Store h = residual + x for whole rows, and return h as a tuple of float32 tiles."""
    sums = ()
    for i in tl.static_range(len(x)):
        tile = tile_at(first_row, i * tiling.block, rows, tiling)
        h = rounded_like(load_tile(residual_ptr, tile) + x[i], h_ptr)
        store_tile(h_ptr, h, tile)
        sums += (h,)
    return sums


@triton.jit
def _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tiling: tl.constexpr):
    row = first_row + tl.arange(0, tiling.tile_rows)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row < rows)
