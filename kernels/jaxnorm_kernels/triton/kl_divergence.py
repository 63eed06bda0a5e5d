"""The divergence of a teacher's and a student's logits, and its gradient.

The divergence is KL(P || Q). P is the teacher's distribution and Q is the student's; with
``reverse``, P is the student's and Q is the teacher's. The module `loss_rows` defines the logits,
z = f * g(x). The *depth* of a logit z is d = z - max(z), where max(z) is the maximum of the row. A
subscript P or Q names the distribution:

    e = exp(d)    s = sum(e)    u = d_P - d_Q    a = sum(e_P u)    b = sum(e_Q - e_P)

    KL = a / s_P + log(s_Q / s_P)
    log(s_Q / s_P) = log1p(b / s_P), which is used if the sums are nearly equal

The forward pass reads both rows once, in one loop. Each thread holds the maximum m_P of the
elements of P's row that it has read so far, and the maximum m_Q for Q's row. Its sums s, a and b
are relative to these maxima. When a maximum grows from m to m', let r = exp(m - m'). The thread
then rescales its sums:

    s' = r s      a' = r_P a + s'_P (log(r_P) - log(r_Q))      b' = r_P b + s_Q (r_Q - r_P)

The sums of the threads are merged in the same way. If all logits of P and Q are equal, u = 0 and
r_P = r_Q, so all terms of a and b are exactly 0. For a small u, e_Q - e_P is computed as e_P times
a polynomial of u, which avoids cancellation.

The backward pass needs no sum over a row. Unlike P and Q, p and q do not depend on ``reverse``: p
are always the teacher's probabilities, and q are the student's. dy is the cotangent of the
divergence. The gradient of the student's logits is:

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

# If |u| is below this number, a polynomial of five terms computes exp(-u) - 1 with an error below
# one unit in the last place.
_SMALL = tl.constexpr(0.125)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The scales and caps of both logits: `p` for the logits of P, and `q` for the logits of Q."""

    p: Cap
    q: Cap

    @classmethod
    def of(cls, spec: Spec) -> "Pair":
        """Return the scales and caps for the call `spec`."""
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
        # If all logits of a row are -inf, NaN is stored as log(s). The value -inf is reserved: it
        # is stored as the student's log(s) if the row is masked.
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
    """Add one block of P's rows and the same block of Q's rows to the sums of each thread.

    Return the new sums. The module docstring defines s, a and b. `over_blocks` calls this function.

    Args:
      sums: a tuple of six arrays `(tile_rows, lanes)` with one number per row and thread: the
        maximum of g for P, the maximum of g for Q, s_P, s_Q, a and b.
      of_rows: a tuple of four arrays `(tile_rows, 1)`.
        1. Pointers to the first block of each row of P.
        2. Pointers to the first block of each row of Q.
        3. The number of elements from the start of the first block to the row's first column. It is
           the same for P and Q.
        4. A mask of the rows that are read.
      first: the number of elements from the start of a row's first block to the start of this
        block.
      is_whole: True if the block lies entirely inside the row.
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
    # If e_P is 0, the term e_P * u is 0, although u may be infinite. There is one exception: if Q
    # is exactly 0 and P is positive but e_P is rounded to 0, the term and the divergence are
    # infinite. Then Q's depth is -inf, P's depth is finite, and u is +inf. Q's depth must be
    # checked, because u is also +inf if its multiplication by f overflows.
    of_none = tl.where((u == float("inf")) & (below_q == float("-inf")), float("inf"), 0.0)
    of_ratio = tl.where(e_p > 0.0, e_p * u, of_none)
    series = (1.0 / 2.0) - u * ((1.0 / 6.0) - u * ((1.0 / 24.0) - u * (1.0 / 120.0)))
    of_difference = tl.where(tl.abs(u) < _SMALL, of_ratio * (u * series - 1.0), e_q - e_p)
    s_p, s_q = s_p + lane_sum(e_p), s_q + lane_sum(e_q)
    return higher_p, higher_q, s_p, s_q, a + lane_sum(of_ratio), b + lane_sum(of_difference)


@triton.jit
def _difference(p, q, pair: tl.constexpr):
    """Return f_P * p - f_Q * q, where f_P and f_Q are the factors f in the logits z = f * g(x).

    `p` is an array of values g(x) of P's logits, and `q` of Q's logits. They may also be arrays of
    differences between two such values. If `p` and `q` are equal, and f is the same for P and Q,
    the result is exactly 0.
    """
    if pair.p.factor == pair.q.factor:
        u = pair.p.factor * (p - q)
    else:
        u = pair.p.factor * p - pair.q.factor * q
    return u


@triton.jit
def _rescaled(sums, m_p, m_q, pair: tl.constexpr):
    """Return the sums, rescaled so that they are relative to the new maxima `m_p` and `m_q`.

    The new maxima must not be smaller than the old ones.
    """
    old_p, old_q, s_p, s_q, a, b = sums
    below_p, below_q = old_p - m_p, old_q - m_q
    r_p, r_q = tl.exp(pair.p.factor * below_p), tl.exp(pair.q.factor * below_q)
    s_p *= r_p
    # If s_p is 0, a must be 0, although `_difference` may return infinite numbers or NaN. If the
    # old a is infinite, it must stay infinite.
    rescaled = tl.where(s_p > 0.0, a * r_p + s_p * _difference(below_p, below_q, pair), 0.0)
    a = tl.where(a == float("inf"), float("inf"), rescaled)
    return m_p, m_q, s_p, s_q * r_q, a, b * r_p + s_q * (r_q - r_p)


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
    """Store block number `nth` of dx, for the rows whose indices are in `row`.

    `store_block` calls this function. `y_ptr` points to the divergences if `reverse` is set.
    Otherwise, it is None.
    """
    x_ptr, teacher_ptr, of_student, of_teacher, dy_ptr, y_ptr, dx_ptr = pointers
    of_x: tl.constexpr = pair.q if y_ptr is None else pair.p
    of_other: tl.constexpr = pair.p if y_ptr is None else pair.q
    offset, read, lane, first_col = block_at(row, exists, nth, layout, tiling, is_whole)
    # Load the logits first, so that their loads overlap with the loads of the few numbers per row
    # (statistics, cotangents).
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
        # Compute p with the same operations as q, so that the gradient is exactly 0 for equal
        # logits.
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
    """Load m and log(s) of the rows, from the two pointers in `pointers`."""
    m_ptr, log_s_ptr = pointers
    m = tl.load(m_ptr + row, exists, 0.0)[:, None]
    return m, tl.load(log_s_ptr + row, exists, 0.0)[:, None]
