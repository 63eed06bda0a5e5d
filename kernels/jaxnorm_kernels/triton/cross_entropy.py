"""Cross-entropy of a row x with the label l; or log-probability of l and entropy of the row.

With a = label_smoothing, b = z_loss, d = dloss::

    m = max(x)      s = sum(exp(x - m))      lse = m + log(s)      D = m - x_l
    loss = (1 - a) (D + log(s)) + a (m - r + log(s) - mean(x - r)) + b lse^2
    dx = d (p - targets + 2 b lse p)      p = exp(x - m - log(s))
                                          targets = (1 - a) [j = l] + a / V

With d = dlog_prob, e = dentropy and the entropy H::

    log_prob = -(D + log(s))      H = log(s) - T / s      T = sum(exp(x - m) (x - m))
    dx = d ([j = l] - p) - e p (log(p) + H)

r is x_l, or 0 if x_l is infinite. Usually, r is close to the mean of the row, so that the sum of x
- r loses little accuracy. With a scale k = logits_scale or a cap c = logit_softcap, the logits are
z = f g(x). Then g(x) replaces x above, differences of g(x) are multiplied by f, and dx is

    dx = dz (dz / dx)    g = tanh(k x / c)    f = c    dz / dx = k (1 - g^2)    with a cap
                         g = x                f = k    dz / dx = k              without

The forward pass reads a row once, block after block, without exchange between threads. Each thread
holds the maximum m of the elements that it has read so far, and the sums s and T relative to it
(Milakov, Gimelshein 2018):

    m' = max(m, x)      s' = s exp(m - m') + sum(exp(x - m'))
                        T' = (T + s (m - m')) exp(m - m') + sum(exp(x - m') (x - m'))

The maxima and sums of the threads are merged at the end. s_o is the sum of all terms but the
label's, because log1p(s_o) is accurate for a small s_o, but the logarithm of the rounded sum 1 +
s_o is not:

    log(s) = log1p(s_o)                 where D = 0
             log1p(s_o - 1 + exp(-D))   elsewhere: s_o has the maximum's term, 1

In the backward pass, elements do not depend on each other. A program loads its block of x before it
stores the block of dx, so dx may overwrite x. A row that ``positions`` excludes has log(s) = -inf
and dx = 0. If the label of a row is not a class, both are NaN.

If the length of rows is not a multiple of 16 bytes, most rows do not begin at a multiple of 16
bytes. The first block of such a row begins at the last multiple before its first column. All blocks
but the first and the last can then be loaded and stored 16 bytes at a time.
"""

import dataclasses

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.schedule import Schedule, loss_blocks, loss_vector
from jaxnorm_kernels.triton.tiles import LOWEST

# A lower limit for exponents that are also used as factors. Its exponential is 0. Lower exponents
# occur if a logit is -inf, or if a user masks a class by the lowest float32 number. If such an
# exponent is multiplied by a sum or a cotangent, the product may be infinite, and the exponential 0
# times infinity is NaN.
_FAR = tl.constexpr(-1e20)


@dataclasses.dataclass(frozen=True)
class Options:
    """The compile-time parameters of a kernel, besides the tile sizes.

    Attributes:
      classes: the number of columns that are classes; these are the first columns.
      label_smoothing, z_loss: the options of the public function with these names.
      logits_scale, softcap: the factor k and the cap c of the logits; a cap of 0 means no cap.
      factor: the outer factor f of the logits z = f g(x): the cap if there is one, else the scale.
      entropy: True to compute log-probability and entropy instead of a loss.
      blocks: the number of blocks in a row.
      vector: the number of elements that a thread loads at once.
    """

    classes: int
    label_smoothing: float
    z_loss: float
    logits_scale: float
    softcap: float
    factor: float
    entropy: bool
    blocks: int
    vector: int

    @property
    def other_target(self) -> float:
        """The target probability of each class that is not the label."""
        return self.label_smoothing / self.classes

    @property
    def label_target(self) -> float:
        """The target probability of the label."""
        return 1 - self.label_smoothing + self.other_target

    @classmethod
    def of(cls, spec: Spec, schedule: Schedule) -> "Options":
        """Return the compile-time parameters of a call."""
        blocks, vector = loss_blocks(spec, schedule), loss_vector(spec, schedule)
        return cls(
            spec.classes,
            spec.loss.label_smoothing,
            spec.loss.z_loss,
            spec.logits.logits_scale,
            spec.loss.logit_softcap or 0.0,
            spec.logit_factor,
            spec.returns_entropy,
            blocks,
            vector,
        )


def cross_entropy_fwd(
    operands: Operands, spec: Spec, *, schedule: Schedule | None = None
) -> Results:
    """Return the results and the statistics. `schedule` replaces the default schedule."""
    x, labels, positions = operands.x, operands.labels, operands.positions
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or schedules.choose(spec)
    of_rows = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    stat = of_rows if spec.has_stats else None
    options = Options.of(spec, schedule)
    y, *rest = schedule.launch(
        _cross_entropy_fwd,
        spec,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs={
            "y_ptr": of_rows,
            "entropy_ptr": of_rows if spec.returns_entropy else None,
            "m_ptr": stat,
            "log_s_ptr": stat,
        },
        x_ptr=x,
        labels_ptr=labels,
        positions_ptr=positions,
        options=options,
        lanes=min(32 * schedule.warps, schedule.block // options.vector),
        stages=schedule.stages,
    )
    if not spec.returns_entropy:
        return Results(y, stats=tuple(rest))
    entropy, *stats = rest
    return Results(y, entropy=entropy, stats=tuple(stats))


def cross_entropy_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Return the gradient of x. `schedule` replaces the default schedule."""
    x, labels, dy = residuals.saved, residuals.labels, cotangents.y
    assert residuals.mask is None, "of classes: `support` refuses it"
    schedule = schedule or schedules.choose(spec)
    m, log_s = residuals.stats
    options = Options.of(spec, schedule)
    (tiles,) = schedule.grid(spec)
    place = jax.new_ref(x) if spec.overwrites_x else None
    dx = None if spec.overwrites_x else jax.ShapeDtypeStruct(x.shape, spec.dx_dtype)
    results = schedule.launch(
        _cross_entropy_bwd,
        spec,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs={"dx_ptr": dx},
        grid=(tiles * options.blocks,),
        x_ptr=x if place is None else place,
        m_ptr=m,
        log_s_ptr=log_s,
        labels_ptr=labels,
        dy_ptr=dy,
        entropy_ptr=residuals.entropy,
        dentropy_ptr=cotangents.entropy,
        options=options,
    )
    return Operands(results[0] if place is None else jax.freeze(place))


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
    options: tl.constexpr,
    tiling: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(0) * tiling.tile_rows + tl.arange(0, tiling.tile_rows)
    exists = row < rows
    label, is_column = _load_label(labels_ptr, row, exists, options.classes)
    counts = exists
    if positions_ptr is not None:
        counts = exists & tl.load(positions_ptr + row, exists, 0)
    begin, lead = _start(row, tiling.cols, options.vector)
    at = label[:, None] + lead
    # Do not load the logit of an invalid label: it would be outside the row.
    read = counts[:, None]
    x_l = _g(tl.load(x_ptr + begin + at, read & is_column[:, None], 0.0), options)
    r = tl.where(tl.abs(x_l) < float("inf"), x_l, 0.0)

    of_rows = (x_ptr + begin, lead, at, r, read)
    block: tl.constexpr = tiling.block
    blocks: tl.constexpr = options.blocks
    first_whole: tl.constexpr = 0 if tiling.cols % options.vector == 0 else 1
    whole: tl.constexpr = options.classes // block
    m = tl.full([tiling.tile_rows, lanes], LOWEST, tl.float32)
    zero = tl.full([tiling.tile_rows, lanes], 0.0, tl.float32)
    sums = (m, zero, zero)
    if first_whole > 0:
        sums = _add(sums, of_rows, 0, options, tiling, False)
    # If `positions` excludes all rows of a tile, load no block.
    end = tl.where(tl.max(counts.to(tl.int32), axis=0) > 0, whole * block, 0)
    for first in tl.range(first_whole * block, end, block, num_stages=stages):
        sums = _add(sums, of_rows, first, options, tiling, True)
    for i in tl.static_range(max(whole, first_whole), blocks):
        sums = _add(sums, of_rows, i * block, options, tiling, False)

    m, s, t = sums
    m_o = tl.max(m, axis=1)[:, None]
    s, t = _rescaled(s, t, m - m_o, options)
    s_o, t_o = tl.sum(s, axis=1)[:, None], tl.sum(t, axis=1)[:, None]
    m = tl.maximum(m_o, x_l)
    d = options.factor * (m - x_l)
    others, t_o = _rescaled(s_o, t_o, m_o - m, options)
    log_s = _log1p(tl.where(d == 0.0, others, others - 1.0 + tl.exp(-d)))
    is_nothing = (s_o == 0.0) & (x_l == float("-inf"))
    log_s = tl.where(is_column[:, None] & (is_nothing == 0), log_s, float("nan"))
    of_row, is_row = row[:, None], exists[:, None]
    loss = d + log_s
    if options.entropy:
        of_label = tl.exp(-d)
        total = options.factor * (t_o + of_label * tl.maximum(x_l - m, _FAR))
        entropy = log_s - total / (others + of_label)
        tl.store(entropy_ptr + of_row, tl.where(read, entropy, 0.0), is_row)
        loss = 0.0 - loss
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
def _add(sums, of_rows, first, options: tl.constexpr, tiling: tl.constexpr, is_whole: tl.constexpr):
    """Return the sums of each thread after a further block of logits is added to them.

    Args:
      sums: three arrays `(tile_rows, lanes)`: m, s and a third sum. The third sum is the sum of
        x - r with label smoothing, and T / f for an entropy.
      of_rows: five arrays `(tile_rows, 1)`: a pointer to the row's first block, the number of
        elements of this block that come before the row, the position of the label counted from the
        beginning of this block, r, and True if the row is read.
      first: the offset of this block from the row's first block, in elements.
      is_whole: True if the block is entirely inside the row.
    """
    m, s, t = sums
    begin, lead, at, r, read = of_rows
    lane = tl.arange(0, tiling.block)[None, :]
    if not is_whole:
        read = read & _is_column(lane, first, lead, options.classes, tiling.cols, options.vector)
    x = _g(tl.load(begin + first + lane, read, float("-inf")), options)
    if options.softcap > 0.0:  # tanh(-inf) is -1, so set excluded elements to -inf again
        x = tl.where(read, x, float("-inf"))
    if options.label_smoothing > 0.0:
        rest = _by_lanes(tl.where(read, x - r, 0.0), m, options.vector)
        t += tl.sum(tl.sum(rest, axis=3), axis=1)
    others = _by_lanes(tl.where(lane == at - first, float("-inf"), x), m, options.vector)
    higher = tl.maximum(m, tl.max(tl.max(others, axis=3), axis=1))
    depth = others - higher[:, None, :, None]
    e = tl.exp(options.factor * depth)
    s, t = _rescaled(s, t, m - higher, options)
    if options.entropy:
        t += tl.sum(tl.sum(e * tl.maximum(depth, _FAR), axis=3), axis=1)
    return higher, s + tl.sum(tl.sum(e, axis=3), axis=1), t


@triton.jit
def _rescaled(s, t, depth, options: tl.constexpr):
    """Rescale the sums s and t if the maximum changes. `depth` is the old minus the new maximum."""
    exp = tl.exp(options.factor * depth)
    # `depth` is bounded from below, because -inf times a sum of 0 would be NaN.
    if options.entropy:
        t = (t + s * tl.maximum(depth, _FAR)) * exp
    return s * exp, t


@triton.jit
def _by_lanes(x, m, vector: tl.constexpr):
    """Reshape a block to `(tile_rows, n, lanes, vector)`.

    A thread holds all elements along the second and the last axis, so sums over these axes need no
    exchange between threads.
    """
    tile_rows: tl.constexpr = m.shape[0]
    lanes: tl.constexpr = m.shape[1]
    return tl.reshape(x, [tile_rows, x.shape[1] // (lanes * vector), lanes, vector])


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
    options: tl.constexpr,
    tiling: tl.constexpr,
):
    if dx_ptr is None:
        dx_ptr = x_ptr
    row = tl.program_id(0) // options.blocks * tiling.tile_rows + tl.arange(0, tiling.tile_rows)
    nth = tl.program_id(0) % options.blocks
    of_rows = (m_ptr, log_s_ptr, labels_ptr, dy_ptr, entropy_ptr, dentropy_ptr, row, row < rows)
    if tiling.cols % options.vector == 0:
        fits: tl.constexpr = tiling.cols % tiling.block == 0
        _store_gradient(x_ptr, dx_ptr, of_rows, nth, options, tiling, fits)
    elif (nth > 0) & (nth < tiling.cols // tiling.block):
        _store_gradient(x_ptr, dx_ptr, of_rows, nth, options, tiling, True)
    else:
        _store_gradient(x_ptr, dx_ptr, of_rows, nth, options, tiling, False)


@triton.jit
def _store_gradient(
    x_ptr, dx_ptr, of_rows, nth, options: tl.constexpr, tiling: tl.constexpr, is_whole: tl.constexpr
):
    """Store dx for block number `nth` of each row of a tile.

    `is_whole` is True if the block is entirely inside the row.
    """
    m_ptr, log_s_ptr, labels_ptr, dy_ptr, entropy_ptr, dentropy_ptr, row, exists = of_rows
    begin, lead = _start(row, tiling.cols, options.vector)
    lane, first = tl.arange(0, tiling.block)[None, :], nth * tiling.block
    read = exists[:, None]
    if not is_whole:
        read = read & _is_column(lane, first, lead, tiling.cols, tiling.cols, options.vector)
    offset = begin + first + lane
    # Load the logits first. The loads of the row's statistics and cotangents then overlap with this
    # long load.
    x = _g(tl.load(x_ptr + offset, read, 0.0), options)
    label, _ = _load_label(labels_ptr, row, exists, options.classes)
    m = tl.load(m_ptr + row, exists, 0.0)[:, None]
    log_s = tl.load(log_s_ptr + row, exists, 0.0)[:, None]
    d = tl.load(dy_ptr + row, exists, 0.0)[:, None]
    log_p = options.factor * (x - m) - log_s
    p = tl.exp(log_p)
    is_label = lane == label[:, None] + lead - first
    if options.entropy:
        e = tl.load(dentropy_ptr + row, exists, 0.0)[:, None]
        of_row = d + e * tl.load(entropy_ptr + row, exists, 0.0)[:, None]
        dz = tl.where(is_label, d, 0.0) - p * (of_row + e * tl.maximum(log_p, _FAR))
    else:
        slope = p - tl.where(is_label, options.label_target, options.other_target)
        if options.z_loss > 0.0:
            slope += 2.0 * options.z_loss * (options.factor * m + log_s) * p
        dz = d * slope
    counts = log_s != float("-inf")
    if options.classes < tiling.cols:
        counts = counts & (lane < options.classes + lead - first)
    dx = _times_slope(dz, x, options)
    tl.store(dx_ptr + offset, tl.where(counts, dx, 0.0), read)


@triton.jit
def _g(x, options: tl.constexpr):
    """Return g(x) in float32: x, or tanh(scale x / cap) if the logits have a cap."""
    x = x.to(tl.float32)
    if options.softcap > 0.0:
        x = _tanh(x * (options.logits_scale / options.softcap))
    return x


@triton.jit
def _times_slope(dz, g, options: tl.constexpr):
    """Return the gradient of x, given the gradient dz of the logits z, and g(x)."""
    if options.softcap > 0.0:
        dz *= (1.0 - g) * (1.0 + g)
    if options.logits_scale != 1.0:
        dz *= options.logits_scale
    return dz


@triton.jit
def _load_label(labels_ptr, row, exists, classes: tl.constexpr):
    """Return each row's label, or -1 if it is not a class, and whether it is a class."""
    label = tl.load(labels_ptr + row, exists, 0).to(tl.int64)
    is_column = (label >= 0) & (label < classes)
    return tl.where(is_column, label, -1).to(tl.int32), is_column


@triton.jit
def _start(row, cols: tl.constexpr, vector: tl.constexpr):
    """Return the offset of each row's first block, and the number of its elements before the row.

    The block begins at a multiple of `vector` elements, which may lie before the row.
    """
    start = row.to(tl.int64)[:, None] * cols
    begin = start // vector * vector
    return begin, (start - begin).to(tl.int32)


@triton.jit
def _is_column(lane, first, lead, end: tl.constexpr, cols: tl.constexpr, vector: tl.constexpr):
    """Return True for the elements of a block that are columns of the row and come before `end`.

    If `vector` divides `cols` and `end`, each `vector` consecutive elements have the same value, so
    that they can be loaded at once.
    """
    if cols % vector == 0:
        is_column = lane + first < end
    else:
        is_column = (lane >= lead - first) & (lane < end + lead - first)
    return is_column


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x > -1, with an error of a few ulps even for small x.

    1 + x is rounded to u, and log(u) / (u - 1) is close to log(1 + x) / x.
    """
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _tanh(x):
    """Return tanh(x), with an error of a few ulps even for small x.

    For small x, 1 - exp(-2 |x|) would lose digits, so a power series is used where it is accurate.
    """
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -size, size))
