"""The divergence of a teacher's and a student's logits, and its gradient.

The divergence is KL(P || Q). P is the teacher's distribution and Q is the student's; with
``reverse``, P is the student's and Q is the teacher's. The module `loss_rows` defines the logits,
z = f * g(x). The *depth* of a logit z is d = z - max(z). Subscripts name the distribution:

    e = exp(d)    s = sum(e)    u = d_P - d_Q    a = sum(e_P u)    b = sum(e_Q - e_P)

    KL = a / s_P + log(s_Q / s_P)
    log(s_Q / s_P) = log1p(b / s_P), which is used if the sums are nearly equal

The forward pass reads both rows once, in one loop. Each thread holds the two maxima m of what it
has read so far, and sums relative to them. When a maximum grows from m to m', the thread rescales
its sums by the factors r = exp(m - m'):

    s' = r s      a' = r_P (a + s_P (log(r_P) - log(r_Q)))      b' = r_P b + s_Q (r_Q - r_P)

The sums of the threads merge in the same way. Equal logits have u = 0 and equal factors r, so a and
b are exactly 0. For a small u, e_Q - e_P is computed as e_P times a polynomial of u, without
cancellation.

The backward pass needs no sum over a row. p and q are the teacher's and the student's
probabilities, and dy is the cotangent of the divergence. The gradient of the student's logits is:

    dz = dy (q - p)                                        for KL(p || q)
    dz = dy q (log(q) - log(p) - KL)                       for KL(q || p), if ``reverse``
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.loss_rows import (
    FAR,
    Cap,
    block_at,
    by_lanes,
    is_column,
    lane_max,
    lane_sum,
    launch_backward,
    launch_forward,
    load_classes,
    log1p,
    of_logits,
    over_blocks,
    rows_at,
    start,
    store_block,
    that_count,
    times_slope,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import LOWEST

# For |u| up to this limit, a polynomial of five terms computes exp(-u) - 1 with an error below one
# unit in the last place.
_SMALL = tl.constexpr(0.125)
# Lower bounds of e_P and of u in the product e_P * u. _TINY is the smallest normal float32; smaller
# numbers may be flushed to 0. For u up to _LOWEST_U, exp(u) is 0 in float32.
_TINY = tl.constexpr(1.1754943508222875e-38)
_LOWEST_U = tl.constexpr(-128.0)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The scale and cap of P's logits, and the scale and cap of Q's logits."""

    p: Cap
    q: Cap

    @classmethod
    def of(cls, spec: Spec) -> "Pair":
        """Return the scales and caps of the call `spec`."""
        scale = spec.logits.logits_scale
        student = Cap.of(scale, spec.loss.logit_softcap)
        teacher = Cap.of(scale, spec.loss.teacher_softcap)
        return cls(student, teacher) if spec.loss.reverse else cls(teacher, student)


def kl_divergence_fwd(
    operands: Operands, spec: Spec, *, schedule: Schedule | None = None
) -> Results:
    """Return the divergence and the statistics. `schedule` replaces the default schedule."""
    assert operands.mask is None, "of classes: `support` refuses it"
    p, q = operands.teacher_logits, operands.x
    if spec.loss.reverse:
        p, q = q, p
    statistics = ("m_p_ptr", "log_s_p_ptr", "m_q_ptr", "log_s_q_ptr")
    y, *stats = launch_forward(
        _kl_divergence_fwd,
        spec,
        schedule or schedules.choose(spec),
        {"y_ptr": True} | dict.fromkeys(statistics, spec.has_stats),
        p_ptr=p,
        q_ptr=q,
        positions_ptr=operands.positions,
        reverse=spec.loss.reverse,
        pair=Pair.of(spec),
    )
    of_p, of_q = stats[:2], stats[2:]
    return Results(y, stats=(*of_p, *of_q) if spec.loss.reverse else (*of_q, *of_p))


def kl_divergence_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Return the gradient of the student's logits. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    m, log_s, teacher_m, teacher_log_s = residuals.stats
    return launch_backward(
        _kl_divergence_bwd,
        residuals.saved,
        spec,
        schedule or schedules.choose(spec),
        teacher_ptr=residuals.teacher_logits,
        m_ptr=m,
        log_s_ptr=log_s,
        teacher_m_ptr=teacher_m,
        teacher_log_s_ptr=teacher_log_s,
        dy_ptr=cotangents.y,
        y_ptr=residuals.y if spec.loss.reverse else None,
        pair=Pair.of(spec),
    )


@triton.jit
def _kl_divergence_fwd(
    p_ptr,
    q_ptr,
    positions_ptr,
    y_ptr,
    m_p_ptr,
    log_s_p_ptr,
    m_q_ptr,
    log_s_q_ptr,
    rows,
    reverse: tl.constexpr,
    layout: tl.constexpr,
    pair: tl.constexpr,
    tiling: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
):
    row, exists = rows_at(tl.program_id(0), rows, tiling)
    counts = that_count(positions_ptr, row, exists)
    begin, lead = start(row, tiling.cols, layout.vector)
    read = counts[:, None]
    of_rows = (p_ptr + begin, q_ptr + begin, lead, read)
    lowest = tl.full([tiling.tile_rows, lanes], LOWEST, tl.float32)
    zero = tl.full([tiling.tile_rows, lanes], 0.0, tl.float32)
    sums = (lowest, lowest, zero, zero, zero, zero)
    sums = over_blocks(_add, sums, of_rows, counts, layout, pair, tiling, stages)
    m_p, m_q = tl.max(sums[0], axis=1)[:, None], tl.max(sums[1], axis=1)[:, None]
    _, _, s_p, s_q, a, b = _rescaled(sums, m_p, m_q, pair)
    s_p, s_q = tl.sum(s_p, axis=1)[:, None], tl.sum(s_q, axis=1)[:, None]
    a, b = tl.sum(a, axis=1)[:, None], tl.sum(b, axis=1)[:, None]

    share = b / s_p
    is_close = tl.abs(share) < 0.5  # log1p would lose digits if its argument were near -1.
    near = log1p(tl.where(is_close, share, 0.0))
    log_share = tl.where(is_close, near, tl.log(s_q / s_p))
    y = a / s_p + log_share
    y = tl.where(y < 0.0, 0.0, y)
    log_s_p = tl.log(s_p)
    log_s_q = tl.where(is_close, log_s_p + log_share, tl.log(s_q))
    of_row, is_row = row[:, None], exists[:, None]
    tl.store(y_ptr + of_row, tl.where(read, y, 0.0), is_row)
    if m_p_ptr is not None:
        # If all logits of a row are -inf, NaN is stored as log(s). The value -inf is reserved: as
        # the student's log(s), it means that the row is masked.
        log_s_p = tl.where(s_p == 0.0, float("nan"), log_s_p)
        log_s_q = tl.where(s_q == 0.0, float("nan"), log_s_q)
        nothing = float("-inf")
        tl.store(m_p_ptr + of_row, tl.where(read, m_p, 0.0), is_row)
        tl.store(log_s_p_ptr + of_row, tl.where(read, log_s_p, nothing if reverse else 0.0), is_row)
        tl.store(m_q_ptr + of_row, tl.where(read, m_q, 0.0), is_row)
        tl.store(log_s_q_ptr + of_row, tl.where(read, log_s_q, 0.0 if reverse else nothing), is_row)


@triton.jit
def _add(
    sums,
    of_rows,
    first,
    layout: tl.constexpr,
    pair: tl.constexpr,
    tiling: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Add a block of both rows to the sums of each thread; see `over_blocks`.

    Args:
      sums: the maxima of g for P and for Q, then s_P, s_Q, a and b; `(tile_rows, lanes)` each.
      of_rows: four arrays `(tile_rows, 1)`: pointers to the first block of each row of P and of Q,
        the number of elements from there to the row's first column, and a mask of the rows that are
        read.
    """
    m_p, m_q, _, _, _, _ = sums
    begin_p, begin_q, lead, read = of_rows
    lane = tl.arange(0, tiling.block)[None, :]
    if not is_whole:
        read = read & is_column(lane, first, lead, layout.classes, tiling.cols, layout.vector)
    g_p = by_lanes(load_classes(begin_p + first + lane, read, pair.p), m_p, layout.vector)
    g_q = by_lanes(load_classes(begin_q + first + lane, read, pair.q), m_q, layout.vector)
    higher_p, higher_q = tl.maximum(m_p, lane_max(g_p)), tl.maximum(m_q, lane_max(g_q))
    _, _, s_p, s_q, a, b = _rescaled(sums, higher_p, higher_q, pair)
    below_p, below_q = g_p - higher_p[:, None, :, None], g_q - higher_q[:, None, :, None]
    e_p, e_q = tl.exp(pair.p.factor * below_p), tl.exp(pair.q.factor * below_q)
    u = _difference(below_p, below_q, pair)
    # The factors of e_P * u have lower bounds, because the term must not become NaN:
    # - If P is 0, u is -inf, or NaN if Q is 0, too. With the bounds, the term is about -1e-36.
    # - If Q is 0, and e_P has underflowed to 0 although P is not 0, u is inf. The term is then inf,
    #   because _TINY is not 0.
    # - If u is finite and below its bound, e_P is 0 anyway.
    of_ratio = tl.maximum(e_p, _TINY) * tl.maximum(u, _LOWEST_U)
    series = (1.0 / 2.0) - u * ((1.0 / 6.0) - u * ((1.0 / 24.0) - u * (1.0 / 120.0)))
    of_difference = tl.where(tl.abs(u) < _SMALL, of_ratio * (u * series - 1.0), e_q - e_p)
    s_p, s_q = s_p + lane_sum(e_p), s_q + lane_sum(e_q)
    return higher_p, higher_q, s_p, s_q, a + lane_sum(of_ratio), b + lane_sum(of_difference)


@triton.jit
def _difference(p, q, pair: tl.constexpr):
    """Return the difference of two logits z = f * g(x), given their values of g.

    The difference is exactly 0 for equal logits with equal caps.
    """
    if pair.p.factor == pair.q.factor:
        u = pair.p.factor * (p - q)
    else:
        u = pair.p.factor * p - pair.q.factor * q
    return u


@triton.jit
def _rescaled(sums, m_p, m_q, pair: tl.constexpr):
    """Return the sums relative to new maxima, which must not be smaller than the old ones."""
    old_p, old_q, s_p, s_q, a, b = sums
    below_p, below_q = tl.maximum(old_p - m_p, FAR), tl.maximum(old_q - m_q, FAR)
    r_p, r_q = tl.exp(pair.p.factor * below_p), tl.exp(pair.q.factor * below_q)
    # An infinite sum stays infinite, even if r_p is 0.
    rescaled = (a + s_p * _difference(below_p, below_q, pair)) * r_p
    a = tl.where(a == float("inf"), float("inf"), rescaled)
    return m_p, m_q, s_p * r_p, s_q * r_q, a, b * r_p + s_q * (r_q - r_p)


@triton.jit
def _kl_divergence_bwd(
    x_ptr,
    teacher_ptr,
    m_ptr,
    log_s_ptr,
    teacher_m_ptr,
    teacher_log_s_ptr,
    dy_ptr,
    y_ptr,
    dx_ptr,
    rows,
    layout: tl.constexpr,
    pair: tl.constexpr,
    tiling: tl.constexpr,
):
    if dx_ptr is None:
        dx_ptr = x_ptr
    of_student, of_teacher = (m_ptr, log_s_ptr), (teacher_m_ptr, teacher_log_s_ptr)
    pointers = (x_ptr, teacher_ptr, of_student, of_teacher, dy_ptr, y_ptr, dx_ptr)
    store_block(_store_gradient, pointers, rows, layout, pair, tiling)


@triton.jit
def _store_gradient(
    pointers,
    row,
    exists,
    nth,
    layout: tl.constexpr,
    pair: tl.constexpr,
    tiling: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Store dx of block number `nth`; see `store_block`.

    `y_ptr` is None unless the divergence is the reverse one, KL(student || teacher).
    """
    x_ptr, teacher_ptr, of_student, of_teacher, dy_ptr, y_ptr, dx_ptr = pointers
    of_x: tl.constexpr = pair.q if y_ptr is None else pair.p
    of_other: tl.constexpr = pair.p if y_ptr is None else pair.q
    offset, read, lane, first_col = block_at(row, exists, nth, layout, tiling, is_whole)
    # Load the logits first. The row's few other numbers then arrive at the same time.
    raw_x, raw_teacher = (
        tl.load(x_ptr + offset, read, 0.0),
        tl.load(teacher_ptr + offset, read, 0.0),
    )
    x, teacher = of_logits(raw_x, of_x), of_logits(raw_teacher, of_other)
    m, log_s = _statistics(of_student, row, exists)
    teacher_m, teacher_log_s = _statistics(of_teacher, row, exists)
    d = tl.load(dy_ptr + row, exists, 0.0)[:, None]
    below, teacher_below = x - m, teacher - teacher_m
    q = tl.exp(of_x.factor * below - log_s)
    if y_ptr is None:
        # Compute p with the same operations as q, so that equal logits have a gradient of 0.
        dz = d * (q - tl.exp(of_other.factor * teacher_below - teacher_log_s))
    else:
        y = tl.load(y_ptr + row, exists, 0.0)[:, None]
        ratio = _difference(below, teacher_below, pair) + (teacher_log_s - log_s)
        dz = d * tl.where(q == 0.0, 0.0, q * (ratio - y))
    counts = log_s != float("-inf")
    if layout.classes < tiling.cols:
        counts = counts & (lane < layout.classes + first_col)
    dx = times_slope(dz, x, of_x)
    tl.store(dx_ptr + offset, tl.where(counts, dx, 0.0), read)


@triton.jit
def _statistics(pointers, row, exists):
    """Load m and log(s) of the rows."""
    m_ptr, log_s_ptr = pointers
    m = tl.load(m_ptr + row, exists, 0.0)[:, None]
    return m, tl.load(log_s_ptr + row, exists, 0.0)[:, None]
