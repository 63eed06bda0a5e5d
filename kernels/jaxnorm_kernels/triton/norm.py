"""LayerNorm and RMSNorm. LayerNorm subtracts the mean, RMSNorm has mean = 0:

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias

Rows that fit are held in registers, as pieces side by side, and reduced twice; where they are
short, programs may take turns over them and read the next ones meanwhile. Wider rows are read
twice, block after block. A block of n columns has its own mean m and sum of squares about it, M; it
is merged with those of the k columns before it (Chan, Golub, LeVeque 1979):

    mean' = mean + (m - mean) n / (k + n)       M' += M + (m - mean)^2 k n / (k + n)

E[x^2] - E[x]^2 would cancel.
"""

import jax
import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec, Stats
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.launch import launch
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import (
    columns_at,
    effective_bias,
    gain,
    load_rows,
    store_piece,
    tile_at,
    zero_beyond,
)


def norm_fwd(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, Stats]:
    schedule = schedule or schedules.choose(spec)
    kernel, grid, options = _norm_fwd_held, schedule.grid(spec), {}
    if schedule.is_looped(spec):
        kernel = _norm_fwd_looped
    elif schedule.stages > 1:
        kernel, grid = _norm_fwd_in_turns, schedule.persistent_grid(spec)[1:]
        options = {"stages": schedule.stages}
    stat = jax.ShapeDtypeStruct((spec.rows,), spec.compute_dtype)
    y, *stats = launch(
        kernel,
        name=f"jaxnorm_{'layer' if spec.subtract_mean else 'rms'}_norm_fwd",
        outputs={
            "y_ptr": jax.ShapeDtypeStruct(x.shape, spec.y_dtype),
            "rstd_ptr": stat if spec.want_stats else None,
            "mean_ptr": stat if spec.want_stats and spec.returns_mean else None,
        },
        grid=grid,
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        scale_ptr=scale,
        bias_ptr=bias,
        rows=spec.rows,
        cols=spec.cols,
        epsilon=spec.epsilon,
        subtract_mean=spec.subtract_mean,
        scale_offset=spec.scale_offset,
        scale_floor=spec.scale_floor or 0.0,
        from_output=spec.saved == "output",
        **schedule.tiles(spec),
        **options,
    )
    return y, tuple(stats)


@triton.jit
def _params(
    scale_ptr,
    bias_ptr,
    y_ptr,
    piece: tl.constexpr,
    cols: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    block: tl.constexpr,
    tile_rows: tl.constexpr = 1,
):
    """G and the bias of the columns of a piece."""
    col = columns_at(piece * block, block, tile_rows)
    g = gain(scale_ptr, col, cols, scale_offset, scale_floor)
    return g, effective_bias(bias_ptr, y_ptr, col, cols, from_output)


@triton.jit
def _norm_fwd_held(
    x_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    mean_ptr,
    rows,
    cols: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    x = load_rows(x_ptr, first_row, rows, cols, tile_rows, block, pieces, 0.0)
    centred, rstd, mean = _normalized(x, cols, epsilon, subtract_mean, tile_rows, block, pieces)
    for i in tl.static_range(pieces):
        g, bias = _params(
            scale_ptr, bias_ptr, y_ptr, i, cols, scale_offset, scale_floor, from_output, block
        )
        y = centred[i] * rstd[:, None] * g + bias
        store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)
    _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def _norm_fwd_in_turns(
    x_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    mean_ptr,
    rows,
    cols: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
    stages: tl.constexpr,
):
    """Programs take turns over the rows, keep the parameters, and read the next rows meanwhile."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    params = ()
    for i in tl.static_range(pieces):
        params += (
            _params(
                scale_ptr,
                bias_ptr,
                y_ptr,
                i,
                cols,
                scale_offset,
                scale_floor,
                from_output,
                block,
                tile_rows,
            ),
        )
    for first_row in tl.range(program * tile_rows, rows, programs * tile_rows, num_stages=stages):
        x = load_rows(x_ptr, first_row, rows, cols, tile_rows, block, pieces, 0.0)
        centred, rstd, mean = _normalized(x, cols, epsilon, subtract_mean, tile_rows, block, pieces)
        for i in tl.static_range(pieces):
            g, bias = params[i]
            y = centred[i] * rstd[:, None] * g + bias
            store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)
        _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def _normalized(
    x,
    cols: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    """x - mean, by pieces; r; and the mean."""
    mean = tl.zeros([tile_rows], tl.float32)
    if subtract_mean:
        total = tl.zeros([tile_rows, block], tl.float32)
        for i in tl.static_range(pieces):
            total += x[i]
        mean = tl.sum(total, axis=1) / cols
    centred = ()
    square = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        c = x[i]
        if subtract_mean:
            c = zero_beyond(c - mean[:, None], columns_at(i * block, block), cols, block)
        square += c * c
        centred += (c,)
    return centred, tl.rsqrt(tl.sum(square, axis=1) / cols + epsilon), mean


@triton.jit
def _norm_fwd_looped(
    x_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    mean_ptr,
    rows,
    cols: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    mean = tl.zeros([tile_rows], tl.float32)
    square = tl.zeros([tile_rows], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, 0.0, eviction_policy="evict_last").to(tl.float32)
        if subtract_mean:
            before = tl.cast(first_col, tl.float32)
            size = tl.cast(tl.minimum(cols - first_col, block), tl.float32)
            weight = size / (before + size)
            block_mean = tl.sum(x, axis=1) / size
            x = zero_beyond(x - block_mean[:, None], col, cols, block)
            shift = block_mean - mean
            square += shift * shift * before * weight
            mean += shift * weight
        square += tl.sum(x * x, axis=1)
    rstd = tl.rsqrt(square / cols + epsilon)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, 0.0, eviction_policy="evict_first").to(tl.float32)
        g = gain(scale_ptr, col, cols, scale_offset, scale_floor)
        bias = effective_bias(bias_ptr, y_ptr, col, cols, from_output)
        y = (x - mean[:, None]) * rstd[:, None] * g + bias
        tl.store(y_ptr + start + col, y, mask=exists)
    _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows: tl.constexpr):
    row = first_row + tl.arange(0, tile_rows)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row < rows)
