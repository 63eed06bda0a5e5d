"""softmax and log_softmax, forward and backward. With m = max(x), d = dy, all sums over a row:

    softmax      y = exp(x - m) / sum(exp(x - m))          dx = y (d - sum(d y))
    log_softmax  y = x - m - log(sum(exp(x - m)))          dx = d - exp(y) sum(d)

Rows that fit are held in registers. Wider ones are read twice, block after block (the second time
mostly from the L2 cache), and the sums of the blocks read so far are kept for the greatest element
so far (Milakov, Gimelshein 2018):

    m' = max(m, max(x))                     s' = s exp(m - m') + exp(x - m')
"""

import jax
import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.launch import launch
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import load_rows, store_piece, tile_at

# A block may hold nothing but -inf. Against this maximum its exponentials are 0; against its own,
# -inf, they would be NaN. A whole row of -inf still ends as 0 / 0.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def softmax_fwd(
    x: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> jax.Array:
    del mask, bias  # `supports` refuses them
    schedule = schedule or schedules.choose(spec)
    (y,) = launch(
        _softmax_fwd_looped if schedule.is_looped(spec) else _softmax_fwd_held,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs={"y_ptr": jax.ShapeDtypeStruct(x.shape, spec.y_dtype)},
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        rows=spec.rows,
        cols=spec.cols,
        log=spec.op == "log_softmax",
        **schedule.tiles(spec),
    )
    return y


def softmax_bwd(
    y: jax.Array,
    mask: jax.Array | None,
    dy: jax.Array,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, None]:
    del mask
    schedule = schedule or schedules.choose(spec)
    (dx,) = launch(
        _softmax_bwd_looped if schedule.is_looped(spec) else _softmax_bwd_held,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={"dx_ptr": jax.ShapeDtypeStruct(y.shape, spec.x_dtype)},
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        y_ptr=y,
        dy_ptr=dy,
        rows=spec.rows,
        cols=spec.cols,
        log=spec.op == "log_softmax",
        **schedule.tiles(spec),
    )
    return dx, None


# One kernel each with one switch, `spec.op`.
log_softmax_fwd = softmax_fwd
log_softmax_bwd = softmax_bwd


@triton.jit
def _softmax_fwd_held(
    x_ptr,
    y_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    x = load_rows(x_ptr, first_row, rows, cols, tile_rows, block, pieces, float("-inf"))
    top = x[0]
    for i in tl.static_range(1, pieces):
        top = tl.maximum(top, x[i])
    m = tl.maximum(tl.max(top, axis=1), _LOWEST)[:, None]
    e = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        e += tl.exp(x[i] - m)
    s = tl.sum(e, axis=1)[:, None]
    for i in tl.static_range(pieces):
        y = x[i] - m - tl.log(s) if log else tl.exp(x[i] - m) * (1.0 / s)
        store_piece(y_ptr, y, i, first_row, rows, cols, tile_rows, block)


@triton.jit
def _softmax_fwd_looped(
    x_ptr,
    y_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    m = tl.full([tile_rows, 1], _LOWEST, tl.float32)
    s = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        higher = tl.maximum(m, tl.max(x, axis=1)[:, None])
        s = s * tl.exp(m - higher) + tl.exp(x - higher)
        m = higher
    total = tl.sum(s, axis=1)[:, None]
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, exists, float("-inf"), eviction_policy="evict_first").to(
            tl.float32
        )
        y = x - m - tl.log(total) if log else tl.exp(x - m) * (1.0 / total)
        tl.store(y_ptr + start + col, y, mask=exists)


@triton.jit
def _softmax_bwd_held(
    y_ptr,
    dy_ptr,
    dx_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    y = load_rows(y_ptr, first_row, rows, cols, tile_rows, block, pieces, 0.0)
    d = load_rows(dy_ptr, first_row, rows, cols, tile_rows, block, pieces, 0.0)
    terms = tl.zeros([tile_rows, block], tl.float32)
    for i in tl.static_range(pieces):
        terms += d[i] if log else d[i] * y[i]
    total = tl.sum(terms, axis=1)[:, None]
    for i in tl.static_range(pieces):
        dx = d[i] - tl.exp(y[i]) * total if log else y[i] * (d[i] - total)
        store_piece(dx_ptr, dx, i, first_row, rows, cols, tile_rows, block)


@triton.jit
def _softmax_bwd_looped(
    y_ptr,
    dy_ptr,
    dx_ptr,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    terms = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        d = tl.load(dy_ptr + start + col, exists, 0.0, eviction_policy="evict_last").to(tl.float32)
        if log:
            terms += d
        else:
            y = tl.load(y_ptr + start + col, exists, 0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            terms += d * y
    total = tl.sum(terms, axis=1)[:, None]
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        y = tl.load(y_ptr + start + col, exists, 0.0, eviction_policy="evict_first").to(tl.float32)
        d = tl.load(dy_ptr + start + col, exists, 0.0, eviction_policy="evict_first").to(tl.float32)
        dx = d - tl.exp(y) * total if log else y * (d - total)
        tl.store(dx_ptr + start + col, dx, mask=exists)
