"""Kernels of cross-entropy, and of a label's log-probability with the entropy of the row.

x is a row of logits for V classes, l is its label, and x_l is the label's logit. [j = l] is 1 in
the label's column and 0 elsewhere. r is x_l, or 0 if x_l is infinite. With a = label_smoothing,
b = z_loss and the cotangent d of the loss::

    m = max(x)      s = sum(exp(x - m))      lse = m + log(s)      D = m - x_l
    loss = (1 - a) (D + log(s)) + a (m - r + log(s) - mean(x - r)) + b lse^2
    dx = d (p - targets + 2 b lse p)      p = exp(x - m - log(s))
                                          targets = (1 - a) [j = l] + a / V

Usually, r is close to the mean of the row, so that the sum of x - r loses little accuracy. For the
log-probability and the entropy H, with their cotangents d and e::

    log_prob = -(D + log(s))      H = log(s) - T / s      T = sum(exp(x - m) (x - m))
    dx = d ([j = l] - p) - e p (log(p) + H)

With a scale or a cap, the logits are z = f * g(x); see `loss_rows`. Then g(x) replaces x in these
formulas, and differences of g(x) are multiplied by f. The formulas of dx then give the gradient of
z, which is multiplied by the derivative of z with respect to x.

The forward pass reads a row once, block after block. The threads exchange nothing while they read.
Each thread holds the maximum m of the elements that it has read so far, and its sums s and T are
relative to this m (Milakov, Gimelshein 2018). If x now stands for a new block of the row, the
thread's m, s and T become:

    m' = max(m, x)      s' = s exp(m - m') + sum(exp(x - m'))
                        T' = (T + s (m - m')) exp(m - m') + sum(exp(x - m') (x - m'))

The maxima and sums of the threads are merged at the end. The label's term of s, which is exp(-D),
is added last. Let s_o be the sum of all other terms:

    log(s) = log1p(s_o)                 if D = 0, because the label's term is then 1
             log1p(s_o - 1 + exp(-D))   if D > 0; the term 1 of the maximum is then part of s_o

For a small s_o, log1p(s_o) is accurate, but the logarithm of the rounded sum 1 + s_o is not.

If ``positions`` is False for a row, its log(s) is -inf and its dx is 0. If the label of a row is
not a class, the log(s) of a cross-entropy is NaN, and so is dx. The log(s) of a log-probability
does not depend on the label. If the label is not a class, the log-probability is NaN, and its dx is
NaN unless d is 0.
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The compile-time parameters of a kernel, apart from the tile sizes and the layout of rows.

    Attributes:
      classes: the number of columns that are classes; these are the first columns.
      label_smoothing, z_loss: the options of the public function with these names.
      cap: how the logits are computed from x: their scale and softcap.
      entropy: True if the kernel computes log-probability and entropy, False if it computes a loss.
    """

    classes: int
    label_smoothing: float
    z_loss: float
    cap: Cap
    entropy: bool

    @property
    def factor(self) -> float:
        """The number f in the logits z = f * g(x)."""
        return self.cap.factor

    @property
    def other_target(self) -> float:
        """The target probability of each class that is not the label."""
        return self.label_smoothing / self.classes

    @property
    def label_target(self) -> float:
        """The target probability of the label."""
        return 1 - self.label_smoothing + self.other_target

    @classmethod
    def of(cls, spec: Spec) -> "Options":
        """Return the compile-time parameters of the call `spec`."""
        return cls(
            spec.classes,
            spec.loss.label_smoothing,
            spec.loss.z_loss,
            Cap.of(spec.logits.logits_scale, spec.loss.logit_softcap),
            spec.returns_entropy,
        )


def cross_entropy_fwd(
    operands: Operands, spec: Spec, *, schedule: Schedule | None = None
) -> Results:
    """Return the results and the statistics. `schedule` replaces the default schedule."""
    assert operands.mask is None, "of classes: `support` refuses it"
    y, *rest = launch_forward(
        _cross_entropy_fwd,
        spec,
        schedule or schedules.choose(spec),
        {
            "y_ptr": True,
            "entropy_ptr": spec.returns_entropy,
            "m_ptr": spec.has_stats,
            "log_s_ptr": spec.has_stats,
        },
        x_ptr=operands.x,
        labels_ptr=operands.labels,
        positions_ptr=operands.positions,
        options=Options.of(spec),
    )
    if not spec.returns_entropy:
        return Results(y, stats=tuple(rest))
    entropy, *stats = rest
    return Results(y, entropy=entropy, stats=tuple(stats))


def cross_entropy_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Return the gradient of x. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    m, log_s = residuals.stats
    return launch_backward(
        _cross_entropy_bwd,
        residuals.saved,
        spec,
        schedule or schedules.choose(spec),
        m_ptr=m,
        log_s_ptr=log_s,
        labels_ptr=residuals.labels,
        dy_ptr=cotangents.y,
        entropy_ptr=residuals.entropy,
        dentropy_ptr=cotangents.entropy,
        options=Options.of(spec),
    )


@triton.jit
def _cross_entropy_fwd(
    x_ptr,
    labels_ptr,
    positions_ptr,
    y_ptr,
    entropy_ptr,
    m_ptr,
    log_s_ptr,
    rows,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
):
    row, exists = rows_at(tl.program_id(0), rows, tiling)
    label, is_class = _load_label(labels_ptr, row, exists, options.classes)
    counts = that_count(positions_ptr, row, exists)
    begin, lead = start(row, tiling.cols, layout.vector)
    at = label[:, None] + lead
    read = counts[:, None]
    x_l = of_logits(tl.load(x_ptr + begin + at, read, 0.0), options.cap)
    r = tl.where(tl.abs(x_l) < float("inf"), x_l, 0.0)

    of_rows = (x_ptr + begin, lead, at, r, read)
    m = tl.full([tiling.tile_rows, lanes], LOWEST, tl.float32)
    zero = tl.full([tiling.tile_rows, lanes], 0.0, tl.float32)
    m, s, t = over_blocks(_add, (m, zero, zero), of_rows, counts, layout, options, tiling, stages)
    m_o = tl.max(m, axis=1)[:, None]
    s, t = _rescaled(s, t, m - m_o, options)
    s_o, t_o = tl.sum(s, axis=1)[:, None], tl.sum(t, axis=1)[:, None]
    m = tl.maximum(m_o, x_l)
    d = options.factor * (m - x_l)
    others, t_o = _rescaled(s_o, t_o, m_o - m, options)
    log_s = log1p(tl.where(d == 0.0, others, others - 1.0 + tl.exp(-d)))
    is_nothing = (s_o == 0.0) & (x_l == float("-inf"))
    log_s = tl.where(is_nothing, float("nan"), log_s)
    if not options.entropy:
        log_s = tl.where(is_class[:, None], log_s, float("nan"))
    of_row, is_row = row[:, None], exists[:, None]
    loss = d + log_s
    if options.entropy:
        of_label = tl.exp(-d)
        total = options.factor * (t_o + of_label * tl.maximum(x_l - m, FAR))
        entropy = log_s - total / (others + of_label)
        tl.store(entropy_ptr + of_row, tl.where(read, entropy, 0.0), is_row)
        loss = tl.where(is_class[:, None], 0.0 - loss, float("nan"))
    if options.label_smoothing > 0.0:
        even = options.factor * (m - r - t_o * (1.0 / options.classes)) + log_s
        if options.label_smoothing == 1.0:
            loss = even
        else:
            loss = (1.0 - options.label_smoothing) * loss + options.label_smoothing * even
    if options.z_loss > 0.0:
        lse = options.factor * m + log_s
        loss += options.z_loss * lse * lse
    tl.store(y_ptr + of_row, tl.where(read, loss, 0.0), is_row)
    if m_ptr is not None:
        tl.store(m_ptr + of_row, tl.where(read, m, 0.0), is_row)
        tl.store(log_s_ptr + of_row, tl.where(read, log_s, float("-inf")), is_row)


@triton.jit
def _add(
    sums,
    of_rows,
    first,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Add one block of the rows to the sums of each thread, and return the new sums.

    The module docstring defines m, s, r, T and f. `over_blocks` calls this function.

    Args:
      sums: a tuple of three arrays `(tile_rows, lanes)` with one number per row and thread. The
        first is m, the second is s. The third is T / f for an entropy, the sum of x - r for label
        smoothing, and otherwise unused.
      of_rows: a tuple of five arrays `(tile_rows, 1)`.
        1. Pointers to the start of each row's first block. The start is an aligned address, at or
           before the row's first column.
        2. The number of elements from this start to the row's first column.
        3. The number of elements from this start to the label's column.
        4. r.
        5. A mask of the rows that are read.
      first: the number of elements from the start of a row's first block to the start of this
        block.
      is_whole: True if the block lies entirely inside the row.
    """
    m, s, t = sums
    begin, lead, at, r, read = of_rows
    lane = tl.arange(0, tiling.block)[None, :]
    if not is_whole:
        read = read & is_column(lane, first, lead, options.classes, tiling.cols, layout.vector)
    x = load_classes(begin + first + lane, read, options.cap)
    if options.label_smoothing > 0.0:
        t += lane_sum(by_lanes(tl.where(read, x - r, 0.0), m, layout.vector))
    others = by_lanes(tl.where(lane == at - first, float("-inf"), x), m, layout.vector)
    higher = tl.maximum(m, lane_max(others))
    depth = others - higher[:, None, :, None]
    e = tl.exp(options.factor * depth)
    s, t = _rescaled(s, t, m - higher, options)
    if options.entropy:
        t += lane_sum(e * tl.maximum(depth, FAR))
    return higher, s + lane_sum(e), t


@triton.jit
def _rescaled(s, t, depth, options: tl.constexpr):
    """Rescale s and t to a new maximum. `depth` is the old maximum minus the new one."""
    exp = tl.exp(options.factor * depth)
    # `depth` may be -inf, and -inf times a sum of 0 is NaN. So `depth` gets a finite lower bound.
    if options.entropy:
        t = (t + s * tl.maximum(depth, FAR)) * exp
    return s * exp, t


@triton.jit
def _cross_entropy_bwd(
    x_ptr,
    m_ptr,
    log_s_ptr,
    labels_ptr,
    dy_ptr,
    entropy_ptr,
    dentropy_ptr,
    dx_ptr,
    rows,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
):
    if dx_ptr is None:
        dx_ptr = x_ptr
    pointers = (x_ptr, m_ptr, log_s_ptr, labels_ptr, dy_ptr, entropy_ptr, dentropy_ptr, dx_ptr)
    store_block(_store_gradient, pointers, rows, layout, options, tiling)


@triton.jit
def _store_gradient(
    pointers,
    row,
    exists,
    nth,
    layout: tl.constexpr,
    options: tl.constexpr,
    tiling: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Store block number `nth` of dx, for the rows whose indices are in `row`.

    `store_block` calls this function.
    """
    x_ptr, m_ptr, log_s_ptr, labels_ptr, dy_ptr, entropy_ptr, dentropy_ptr, dx_ptr = pointers
    offset, read, lane, first_col = block_at(row, exists, nth, layout, tiling, is_whole)
    # Load the logits first, so that their loads overlap with the loads of the few numbers per row
    # (statistics, cotangents).
    x = of_logits(tl.load(x_ptr + offset, read, 0.0), options.cap)
    label, is_class = _load_label(labels_ptr, row, exists, options.classes)
    m = tl.load(m_ptr + row, exists, 0.0)[:, None]
    log_s = tl.load(log_s_ptr + row, exists, 0.0)[:, None]
    d = tl.load(dy_ptr + row, exists, 0.0)[:, None]
    log_p = options.factor * (x - m) - log_s
    p = tl.exp(log_p)
    is_label = lane == label[:, None] + first_col
    if options.entropy:
        d = tl.where(is_class[:, None] | (d == 0.0), d, float("nan"))
        e = tl.load(dentropy_ptr + row, exists, 0.0)[:, None]
        of_row = d + e * tl.load(entropy_ptr + row, exists, 0.0)[:, None]
        dz = tl.where(is_label, d, 0.0) - p * (of_row + e * tl.maximum(log_p, FAR))
    else:
        slope = p - tl.where(is_label, options.label_target, options.other_target)
        if options.z_loss > 0.0:
            slope += 2.0 * options.z_loss * (options.factor * m + log_s) * p
        dz = d * slope
    counts = log_s != float("-inf")
    if options.classes < tiling.cols:
        counts = counts & (lane < options.classes + first_col)
    dx = times_slope(dz, x, options.cap)
    tl.store(dx_ptr + offset, tl.where(counts, dx, 0.0), read)


@triton.jit
def _load_label(labels_ptr, row, exists, classes: tl.constexpr):
    """Return two arrays: the label of each row, and a mask that is True if the label is a class.

    If a label is not a class, 0 is returned in its place, so that no logit outside the row is read.
    """
    label = tl.load(labels_ptr + row, exists, 0).to(tl.int64)
    is_class = (label >= 0) & (label < classes)
    return tl.where(is_class, label, 0).to(tl.int32), is_class
