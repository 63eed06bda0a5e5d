"""Kernels of LayerNorm and RMSNorm.

LayerNorm subtracts the mean, RMSNorm has mean = 0:

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias

Where a residual is added to x, or to the normalised x before another norm, what is normalised is
the sum h as it is stored: rounded.

Rows that fit are held in registers, as pieces side by side, and reduced twice; where they are
short, persistent programs may take turns over them and read the next ones meanwhile. Wider rows
are read twice, block after block; of h, what is read is what the program has written. A block of n
columns has its own mean m and sum of squares about it, M; it is merged with those of the k columns
before it (Chan, Golub, LeVeque 1979):

    mean' = mean + (m - mean) n / (k + n)       M' += M + (m - mean)^2 k n / (k + n)

E[x^2] - E[x]^2 would cancel.
"""

import triton
import triton.language as tl

from jaxnorm_kernels.triton.tiles import (
    columns_at,
    effective_bias,
    gain,
    load_piece,
    load_rows,
    rounded_like,
    start_of_group,
    store_piece,
    tile_at,
    zero_beyond,
)


@triton.jit
def _params(
    scale_ptr,
    scale_start,
    bias_ptr,
    bias_start,
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
    g = gain(scale_ptr, scale_start, col, cols, scale_offset, scale_floor)
    return g, effective_bias(bias_ptr, bias_start, y_ptr, col, cols, from_output)


@triton.jit
def norm_fwd_in_registers(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    next_scale_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
    next_rstd_ptr,
    rows,
    scale_rows,
    bias_rows,
    next_scale_rows,
    cols: tl.constexpr,
    op: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    """Whole rows in registers. `scale_rows` and its like: rows of a group; None for all rows."""
    first_row = tl.program_id(0) * tile_rows
    row = first_row + tl.arange(0, tile_rows)
    scale_start = start_of_group(row, rows, scale_rows, cols)
    bias_start = start_of_group(row, rows, bias_rows, cols)
    x = load_rows(x_ptr, first_row, rows, cols, tile_rows, block, pieces, 0.0)
    if op == "add_norm":
        x = _sums(x, residual_ptr, h_ptr, first_row, rows, cols, tile_rows, block, pieces)
    centred, rstd, mean = _normalized(x, cols, epsilon, subtract_mean, tile_rows, block, pieces)
    if op == "norm_add_norm":
        _store_stats(rstd_ptr, None, first_row, rows, rstd, mean, tile_rows)
        normed = ()
        for i in tl.static_range(pieces):
            g = gain(scale_ptr, scale_start, columns_at(i * block, block), cols, scale_offset, 0.0)
            normed += (centred[i] * rstd[:, None] * g,)
        h = _sums(normed, residual_ptr, h_ptr, first_row, rows, cols, tile_rows, block, pieces)
        centred, rstd, mean = _normalized(h, cols, epsilon, False, tile_rows, block, pieces)
        rstd_ptr = next_rstd_ptr
        scale_ptr = next_scale_ptr
        scale_start = start_of_group(row, rows, next_scale_rows, cols)
    for i in tl.static_range(pieces):
        g, bias = _params(
            scale_ptr,
            scale_start,
            bias_ptr,
            bias_start,
            y_ptr,
            i,
            cols,
            scale_offset,
            scale_floor,
            from_output,
            block,
        )
        y = centred[i] * rstd[:, None] * g + bias
        if op == "norm_add":
            y += load_piece(residual_ptr, i, first_row, rows, cols, tile_rows, block)
        store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)
    _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def norm_fwd_persistent(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    next_scale_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
    next_rstd_ptr,
    rows,
    scale_rows,
    bias_rows,
    next_scale_rows,
    cols: tl.constexpr,
    op: tl.constexpr,
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
    """Persistent programs take turns over the rows, and read the next ones meanwhile.

    Of one norm, whose parameters all rows share: a program keeps them.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    params = ()
    for i in tl.static_range(pieces):
        params += (
            _params(
                scale_ptr,
                None,
                bias_ptr,
                None,
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
        if op == "add_norm":
            x = _sums(x, residual_ptr, h_ptr, first_row, rows, cols, tile_rows, block, pieces)
        centred, rstd, mean = _normalized(x, cols, epsilon, subtract_mean, tile_rows, block, pieces)
        for i in tl.static_range(pieces):
            g, bias = params[i]
            y = centred[i] * rstd[:, None] * g + bias
            store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)
        _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def _sums(
    x,
    residual_ptr,
    h_ptr,
    first_row,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    """Stores h = residual + x, by pieces; and h as stored, in float32."""
    sums = ()
    for i in tl.static_range(pieces):
        residual = load_piece(residual_ptr, i, first_row, rows, cols, tile_rows, block)
        h = rounded_like(residual + x[i], h_ptr)
        store_piece(h_ptr, h, i, first_row, rows, cols, tile_rows, block)
        sums += (h,)
    return sums


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
def norm_fwd_looped(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    next_scale_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    mean_ptr,
    next_rstd_ptr,
    rows,
    scale_rows,
    bias_rows,
    next_scale_rows,
    cols: tl.constexpr,
    op: tl.constexpr,
    epsilon: tl.constexpr,
    subtract_mean: tl.constexpr,
    scale_offset: tl.constexpr,
    scale_floor: tl.constexpr,
    from_output: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Rows are read block after block: for the statistics, and again for what comes of them."""
    first_row = tl.program_id(0) * tile_rows
    row = first_row + tl.arange(0, tile_rows)
    scale_start = start_of_group(row, rows, scale_rows, cols)
    bias_start = start_of_group(row, rows, bias_rows, cols)
    mean = tl.zeros([tile_rows], tl.float32)
    square = tl.zeros([tile_rows], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, 0.0, eviction_policy="evict_last").to(tl.float32)
        if op == "add_norm":
            x = _sum(x, residual_ptr, h_ptr, start + col, exists)
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
    if op == "norm_add_norm":
        _store_stats(rstd_ptr, None, first_row, rows, rstd, mean, tile_rows)
        square = tl.zeros([tile_rows], tl.float32)
        for first_col in tl.range(0, cols, block):
            _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
            at = start + col
            x = tl.load(x_ptr + at, exists, 0.0, eviction_policy="evict_first").to(tl.float32)
            g = gain(scale_ptr, scale_start, col, cols, scale_offset, 0.0)
            h = _sum(x * rstd[:, None] * g, residual_ptr, h_ptr, at, exists)
            square += tl.sum(h * h, axis=1)
        rstd = tl.rsqrt(square / cols + epsilon)
        rstd_ptr = next_rstd_ptr
        scale_ptr = next_scale_ptr
        scale_start = start_of_group(row, rows, next_scale_rows, cols)
    if h_ptr is not None:
        # A thread may read what another has written: all of a program's writes come first.
        tl.debug_barrier()
        x_ptr = h_ptr
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, 0.0, eviction_policy="evict_first").to(tl.float32)
        g = gain(scale_ptr, scale_start, col, cols, scale_offset, scale_floor)
        bias = effective_bias(bias_ptr, bias_start, y_ptr, col, cols, from_output)
        y = (x - mean[:, None]) * rstd[:, None] * g + bias
        if op == "norm_add":
            y += tl.load(residual_ptr + start + col, exists, 0.0).to(tl.float32)
        tl.store(y_ptr + start + col, y, mask=exists)
    _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows)


@triton.jit
def _sum(x, residual_ptr, h_ptr, at, exists):
    """Stores h = residual + x of a tile; and h as stored, in float32."""
    residual = tl.load(residual_ptr + at, exists, 0.0, eviction_policy="evict_first")
    h = rounded_like(residual.to(tl.float32) + x, h_ptr)
    tl.store(h_ptr + at, h, mask=exists)
    return h


@triton.jit
def _store_stats(rstd_ptr, mean_ptr, first_row, rows, rstd, mean, tile_rows: tl.constexpr):
    row = first_row + tl.arange(0, tile_rows)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row < rows)
