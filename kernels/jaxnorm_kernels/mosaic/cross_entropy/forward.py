"""Forward passes of two operations: `cross_entropy` and `log_prob_and_entropy`.

The first operation returns the loss. The second operation returns two results: the log-probability
of the label, and the entropy of the row's distribution.

For a row x of V logits with the label l, a = label_smoothing and b = z_loss::

    m = max(x)      s = sum(exp(x - m))      lse = m + log(s)      D = m - x_l
    loss = (1 - a) (D + log(s)) + a (m - r + log(s) - mean(x - r)) + b lse^2
    log_prob = -(D + log(s))      entropy = log(s) - T / s      T = sum(exp(x - m) (x - m))

r is a number near the logits, so that the sum of x - r loses little accuracy: r = x_l, or 0 if x_l
is infinite. Both terms of the entropy, log(s) and -T / s, are nonnegative, so nothing cancels.
Columns of padding are treated as logits of -inf. With a logits scale or a softcap, the logits are
f * g(x), as defined in the module `logits`. The formulas then hold with f * g(x) in place of x. The
kernel computes m and all differences from g(x), and multiplies them by f when it uses them.

A row is read once, in a loop. Each thread holds the maximum of the elements that it has read so
far, and sums relative to this maximum. When the maximum grows to m', the sums are rescaled::

    m' = max(m, x)      s' = s exp(m - m') + sum(exp(x - m'))
                        T' = (T + s (m - m')) exp(m - m') + sum(exp(x - m') (x - m'))

The sums of threads, warps and warpgroups are merged in the same way.

The label's own term of s is exp(x_l - m) = exp(-D). The loop leaves it out, and computes s_o, the
sum of the other terms. So s = s_o + exp(-D). One term of s is 1, the term of the maximum. log1p
computes log(s) accurately from the sum of the other terms, even if this sum is small::

    D = 0:   the label has the maximum, exp(-D) = 1          log(s) = log1p(s_o)
    D > 0:   another column has it, and s_o contains the 1   log(s) = log1p((s_o - 1) + exp(-D))
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, factor, finite, g
from jaxnorm_kernels.mosaic.cross_entropy.passes import (
    LossRow,
    LossSchedule,
    fresh_of,
    is_class,
    launch_forward,
    read_label,
    store_row,
    units_of,
    where,
)
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.gpu import Gpu, cached
from jaxnorm_kernels.mosaic.device.layouts import (
    Layout,
    Ref,
    flat_index,
    load,
    power_of_2,
    widen,
)
from jaxnorm_kernels.mosaic.device.threads import (
    PER_THREAD,
    per_thread,
    spread,
    thread_max,
    thread_sum,
)
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.mosaic.rows.units import load_units
from jaxnorm_kernels.specs import Spec

#: A maximum and sums over the columns that have been read so far: a tuple with two or three
#: elements. The first is the maximum m, and the second is the sum s; both leave out the label's
#: column. A third element exists in two cases. With label smoothing, it is the sum of x - r. If the
#: entropy is returned, it is T / f without the label's term, where f is the factor of the logits
#: f * g(x). The module's docstring defines these letters.
Sums = tuple[jax.Array, ...]


# A block has one warpgroup for each `_SHARE_BYTES` of its row, up to `_MOST_WARPGROUPS`. With this
# many bytes to load, the time to start a block and to merge its sums does not matter. Small blocks
# are better, because an SM starts some blocks while other blocks load: for rows of 32768 bfloat16
# elements, blocks of one warpgroup reach 1.01 of a copy's bandwidth, and blocks of two reach 0.94
# (H200). Calls with at most one row per SM use `_SHARE_BYTES_OF_FEW` instead: more warpgroups per
# row are better there.
_SHARE_BYTES, _SHARE_BYTES_OF_FEW, _MOST_WARPGROUPS = 64 * 1024, 32 * 1024, 4
# Number of columns that a thread adds up in one step of the loop over a row. With 16 columns, a
# thread needs at most 64 registers, so an SM runs 1024 threads. Together, these threads have 32 KiB
# of loads in flight.
_COLUMNS = 16


@cached
def choose(spec: Spec, gpu: Gpu) -> LossSchedule:
    """Choose the schedule of a forward pass."""
    # A thread needs 80 registers instead of 64 if it computes a third sum (see `Sums`), or the tanh
    # of a softcap. An SM then does not have enough registers for two blocks of 512 threads, so a
    # block has at most 256.
    takes_80 = sums_of(spec) > 2 or spec.loss.logit_softcap is not None
    most = 2 if takes_80 else _MOST_WARPGROUPS
    return LossSchedule.of(units_of(spec), _COLUMNS, warpgroups_of(spec, gpu, most))


def warpgroups_of(spec: Spec, gpu: Gpu, most: int) -> int:
    """Return the number of warpgroups of a block, a power of 2 that is at most `most`."""
    share = _SHARE_BYTES if spec.rows > gpu.sms else _SHARE_BYTES_OF_FEW
    row_bytes = spec.cols * sum(dtype.itemsize for dtype in spec.operand_dtypes)
    return power_of_2(max(1, min(row_bytes // share, most)))


def cross_entropy_fwd(
    operands: Operands, spec: Spec, *, schedule: LossSchedule | None = None
) -> Results:
    """Return the loss, or log_prob and entropy.

    The results include the statistics m and log(s) if the call saves them. `schedule` replaces the
    default schedule.
    """
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or choose(spec)
    results = 1 + spec.returns_entropy + 2 * spec.has_stats
    arrays = (operands.x, operands.labels, operands.positions)
    y, *rest = launch_forward(
        spec, schedule, operands.logits_scale, arrays, _row, results=results, sums=sums_of(spec)
    )
    if not spec.returns_entropy:
        return Results(y, stats=tuple(rest))
    entropy, *stats = rest
    return Results(y, entropy=entropy, stats=tuple(stats))


def sums_of(spec: Spec) -> int:
    """Return the number of arrays in a `Sums` tuple: two or three."""
    return 2 + (bool(spec.loss.label_smoothing) or spec.returns_entropy)


def _row(row: LossRow, operands: Sequence[Ref], results: Sequence[Ref]) -> None:
    x, labels, *positions = operands
    spec, steps = row.spec, row.steps
    # Load the label first. Its logit can be loaded only after the label has arrived, so these two
    # loads together take longest.
    label = read_label(labels, row.index)
    first = load_units(steps.first(), x, row.index)
    # An invalid label is clipped to a column, so that nothing outside the row is read.
    column = jnp.clip(label, 0, spec.classes - 1)
    x_l = load(x.at[row.index, column], None)

    def reduce() -> list[jax.Array]:
        r = None
        if spec.loss.label_smoothing:
            r = g(x_l.astype(jnp.float32), spec)
            r = jnp.where(jnp.abs(r) < jnp.inf, r, 0.0)
        nothing: Sums = (per_thread(numerics.LOWEST), *[per_thread(0.0)] * (sums_of(spec) - 1))
        read = functools.partial(load_units, ref=x, row=row.index)
        add = functools.partial(_add, label=column, r=r, spec=spec)
        parts = row.gather(*_of_warps(steps.reduce(read, add, nothing, first), spec))
        # Without smoothing, the label's logit is needed only here, not before the loop.
        sums = _merge(parts, spec)
        return _finish(sums, g(x_l.astype(jnp.float32), spec), r, label, spec)

    zeros = [0.0] * (1 + spec.returns_entropy)
    store_row(row.index, results, positions, reduce, [*zeros, 0.0, -jnp.inf])


def _add(
    sums: Sums,
    units: Sequence[Fragment],
    raw: Sequence[jax.Array],
    mine: Any,
    *,
    label: jax.Array,
    r: jax.Array | None,
    spec: Spec,
) -> Sums:
    """Add the elements of `units` to each thread's sums; see `Steps.reduce`."""
    m, s, *t = sums
    v, layout = units[0].vector, units[0].layout
    x = [g(widen(value, layout), spec) for value in raw]
    fresh = fresh_of(units, mine)
    if r is not None:
        shifted = [where(is_fresh, value - r, 0.0) for is_fresh, value in zip(fresh, x)]
        t = [t[0] + thread_sum(functools.reduce(jnp.add, shifted))]
    others = [where(is_fresh, value, -jnp.inf) for is_fresh, value in zip(fresh, x)]
    # Most calls of this function add units that do not contain the label. Compare columns with the
    # label only if one of the units does.
    has_label = functools.reduce(jnp.logical_or, [unit.has(label) for unit in units])
    others = lax.cond(has_label, lambda: _without(label, units, others, layout), lambda: others)
    grown = jnp.maximum(m, thread_max(functools.reduce(jnp.maximum, others)))
    of_each = spread(grown, v)
    exp = functools.partial(numerics.exp_of_term, times=factor(spec))
    depth = [value - of_each for value in others]
    e = [exp(d) for d in depth]
    s, *t = _rescaled(s, t, m - grown, exp(m - grown), spec)
    s = s + thread_sum(functools.reduce(jnp.add, e))
    if spec.returns_entropy:
        products = [a * finite(d) for a, d in zip(e, depth)]
        t = [t[0] + thread_sum(functools.reduce(jnp.add, products))]
    return grown, s, *t


def _without(
    label: jax.Array, units: Sequence[Fragment], x: Sequence[jax.Array], layout: Layout
) -> list[jax.Array]:
    """Replace x by -inf in the label's column."""
    columns = flat_index(x[0].shape, layout)  # relative to the unit's first column
    return [
        jnp.where(columns == label - unit.start, -jnp.inf, value) for unit, value in zip(units, x)
    ]


def _of_warps(sums: Sums, spec: Spec) -> Sums:
    m, s, *t = sums
    of_warp = jnp.max(m, axis=1)
    depth = m - lax.broadcast_in_dim(of_warp, PER_THREAD, (0,))
    rescaled = _rescaled(s, t, depth, _exp(f_times(depth, spec)), spec)
    return of_warp, *[jnp.sum(v, axis=1) for v in rescaled]


def _merge(parts: Sequence[jax.Array], spec: Spec) -> Sums:
    """Merge the sums of all warps that share a row."""
    m, s, *t = parts
    top = jnp.max(m)
    rescaled = _rescaled(s, t, m - top, _exp(f_times(m - top, spec)), spec)
    return top, *[jnp.sum(v) for v in rescaled]


def _rescaled(
    s: jax.Array, t: Sequence[jax.Array], depth: jax.Array, exp: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Rescale sums from an old maximum to a new one.

    `depth` is the old maximum minus the new one, and `exp` is exp(f * depth), where f is the factor
    of the logits f * g(x).
    """
    if spec.returns_entropy:
        t = [(t[0] + s * finite(depth)) * exp]
    return [s * exp, *t]


def _finish(
    sums: Sums, x_l: jax.Array, r: jax.Array | None, label: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Return the results of a row: (loss, m, log(s)) or (log_prob, entropy, m, log(s))."""
    m_o, s_o, *t = sums
    a, b = spec.loss.label_smoothing, spec.loss.z_loss
    m = jnp.maximum(m_o, x_l)
    d = f_times(m - x_l, spec)
    others, *t = _rescaled(s_o, t, m_o - m, _exp(f_times(m_o - m, spec)), spec)
    log_s = numerics.log1p(jnp.where(d == 0, others, others - 1 + _exp(-d)))
    # The results are NaN if all logits are -inf. If the label is not a class, the loss or the
    # log-probability is NaN. The entropy is not affected.
    is_nothing = jnp.logical_and(s_o == 0, x_l == -jnp.inf)
    log_s = jnp.where(is_nothing, jnp.nan, log_s)
    if spec.returns_entropy:
        of_label = _exp(-d)
        total = t[0] + of_label * finite(x_l - m)
        entropy = log_s - f_times(total, spec) / (others + of_label)
        return [jnp.where(is_class(label, spec), 0 - (d + log_s), jnp.nan), entropy, m, log_s]
    log_s = jnp.where(is_class(label, spec), log_s, jnp.nan)
    loss = d + log_s
    if r is not None:
        even = f_times(m - r, spec) + log_s - t[0] * (factor(spec) / spec.classes)
        loss = even if a == 1 else (1 - a) * loss + a * even
    if b:
        lse = f_times(m, spec) + log_s
        loss = loss + b * lse * lse
    return [loss, m, log_s]


#: A cheap exp for arguments <= 0, used only for terms of sums. Its relative error grows with the
#: argument's magnitude. In a sum this does not matter, because the largest term is 1: next to it,
#: an inaccurate exp(-80) is negligible.
_exp: Callable[[jax.Array], jax.Array] = numerics.exp(is_wide=False)
