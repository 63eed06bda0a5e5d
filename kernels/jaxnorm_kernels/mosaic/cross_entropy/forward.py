"""Cross-entropy of a row x with the label l; or the label's log-probability, and the entropy.

With a = label_smoothing and b = z_loss::

    m = max(x)      s = sum(exp(x - m))      lse = m + log(s)      D = m - x_l
    loss = (1 - a) (D + log(s)) + a (m - r + log(s) - mean(x - r)) + b lse^2
    log_prob = -(D + log(s))      entropy = log(s) - T / s      T = sum(exp(x - m) (x - m))

r is x_l, or 0 if x_l is infinite. It is close to the mean, so the sum of x - r loses little
accuracy. With a scale or a cap, x stands for g(x), differences are multiplied by f, and columns
that are not classes are -inf. Both terms of the entropy are nonnegative.

A row is read once, in a loop. Each thread holds the maximum of what it has read so far, and the
sums relative to it, which it rescales when the maximum grows::

    m' = max(m, x)      s' = s exp(m - m') + sum(exp(x - m'))
                        T' = (T + s (m - m')) exp(m - m') + sum(exp(x - m') (x - m'))

Parts of a row are merged in the same way. The label's own term is not in the sum s_o of the others,
because log(1 + s_o) of a small s_o is accurate, but the log of the rounded sum is not::

    log(s) = log1p(s_o)                 where D = 0
             log1p(s_o - 1 + exp(-D))   elsewhere: s_o has the maximum's term, 1
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, finite, g
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.gpu import SCHEDULES_KEPT, Gpu, kept
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    VECTOR_BYTES,
    Layout,
    Ref,
    flat_index,
    load,
    store,
    widen,
)
from jaxnorm_kernels.mosaic.device.threads import (
    OF_THREADS,
    of_threads,
    spread,
    thread_max,
    thread_sum,
)
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.units import Unit, Units, load_units
from jaxnorm_kernels.specs import Spec

_F32 = np.dtype(np.float32)

#: m and s, as the module's docstring defines them, of the columns read so far. If there is a third
#: element, it is the sum of x - r (with label smoothing), or T / f (for the entropy).
Sums = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class LossForwardSchedule:
    """How a row is read.

    Attributes:
      units: the number of units that a thread loads at a time, while it adds up as many others.
      warpgroups: the number of warpgroups in a block; they share a row.
    """

    units: int
    warpgroups: int = 1


# The bytes of a row for each warpgroup of a block. With this much to load, the time to
# start a block and to merge its sums does not matter. Small blocks are better, because some start
# while others load: over 32768 columns of bfloat16, one warpgroup reaches 1.01 of a copy's
# bandwidth and two reach 0.94 (H200). The second number is for calls with few rows, where smaller
# parts are better. The third is the maximum number of warpgroups.
_SHARE_BYTES, _SHARE_BYTES_OF_FEW, _MOST_WARPGROUPS = 64 * 1024, 32 * 1024, 4
# The number of columns that a thread adds up per step. 64 registers suffice for them, so that the
# 1024 threads of an SM have 32 KiB in flight while they add.
_COLUMNS = 16


@kept
def choose(spec: Spec, gpu: Gpu) -> LossForwardSchedule:
    """Return the schedule of a call."""
    share = _SHARE_BYTES if spec.rows > gpu.sms else _SHARE_BYTES_OF_FEW
    wanted = max(1, spec.cols * spec.x_dtype.itemsize // share)
    # A block of 512 threads would fill an SM.
    most = 2 if takes_80_registers(spec) else _MOST_WARPGROUPS
    warpgroups = 1 << min(wanted, most).bit_length() - 1
    return LossForwardSchedule(units_at_a_time(spec, warpgroups), warpgroups)


def takes_80_registers(spec: Spec) -> bool:
    """Return True if a thread needs 80 registers: with a third sum, or with tanh."""
    return sums_of(spec) > 2 or spec.loss.logit_softcap is not None


def units_at_a_time(spec: Spec, warpgroups: int) -> int:
    """Return the number of units that a thread adds up per step."""
    units = units_of(spec)
    step = max(1, _COLUMNS // units.vector)
    return min(step, max(1, units.count // warpgroups))


@functools.lru_cache(maxsize=SCHEDULES_KEPT)
def units_of(spec: Spec, *, padded: bool = False) -> Units:
    """Return the units of a row's classes; if `padded`, also of the columns after the classes."""
    widest = VECTOR_BYTES // max(dtype.itemsize for dtype in spec.operand_dtypes)
    return Units.of(spec.cols, widest, spec.cols if padded else spec.classes)


def cross_entropy_fwd(
    operands: Operands, spec: Spec, *, schedule: LossForwardSchedule | None = None
) -> Results:
    """Return the loss, or log_prob and entropy, and the statistics.

    `schedule` overrides `choose`.
    """
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or choose(spec)
    results = 1 + spec.returns_entropy + 2 * spec.has_stats
    gather = Gather(schedule.warpgroups, values=sums_of(spec))
    arrays = [a for a in (operands.x, operands.labels, operands.positions) if a is not None]

    def body(*refs: Ref) -> None:
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        result_refs, scratch = refs[:results], refs[results:]

        def counted(label: jax.Array, *values: jax.Array) -> None:
            del label
            store_results(result_refs, *values)

        def excluded() -> None:
            store_results(result_refs, *[0.0] * (1 + spec.returns_entropy), 0.0, -jnp.inf)

        reduce_row(spec, schedule, gather, operand_refs, scratch, counted, excluded)

    y, *rest = launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs=[((spec.rows,), _F32)] * results,
        blocks=spec.rows,
        warpgroups=schedule.warpgroups,
        scratch=gather.scratch(),
    )
    if not spec.returns_entropy:
        return Results(y, stats=tuple(rest))
    entropy, *stats = rest
    return Results(y, entropy=entropy, stats=tuple(stats))


def sums_of(spec: Spec) -> int:
    """Return the number of arrays in `Sums`."""
    return 2 + (bool(spec.loss.label_smoothing) or spec.returns_entropy)


def reduce_row(
    spec: Spec,
    schedule: LossForwardSchedule,
    gather: Gather,
    operands: Sequence[Ref],
    scratch: Sequence[Any],
    counted: Callable[..., None],
    excluded: Callable[[], None],
) -> None:
    """Reduce the row of this block, and run ``counted(label, *results, m, log_s)``.

    If the row does not count, run ``excluded()`` instead. `operands` are the refs of x, the labels
    and, if the call has them, the positions.
    """
    x, labels, *positions = operands
    row = lax.axis_index(BLOCK)
    share = RowShare(spec, units_of(spec), schedule, row)
    # Start the slowest loads first: the label's logit waits for the label.
    label = read_label(labels, row)
    first = load_units(share.first(), x, row)
    # An invalid label is clipped to a column, so that nothing outside the row is read.
    x_l = load(x.at[row, jnp.clip(label, 0, spec.classes - 1)], None)

    def reduce() -> None:
        r = None
        if spec.loss.label_smoothing:
            r = g(x_l.astype(jnp.float32), spec)
            r = jnp.where(jnp.abs(r) < jnp.inf, r, 0.0)
        parts = gather(scratch, *_of_warps(share.reduce(x, first, label, r), spec))
        # Without smoothing, the label's logit is needed only here, not before the row.
        sums = _merge(parts, spec)
        counted(label, *_finish(sums, g(x_l.astype(jnp.float32), spec), r, label, spec))

    if not positions:
        reduce()
        return
    counts = load(positions[0].at[row], None).astype(jnp.int8) != 0
    pl.when(counts)(reduce)
    pl.when(jnp.logical_not(counts))(excluded)


def store_results(results: Sequence[Ref], *values: Any) -> None:
    """Store the numbers of this block's row, from the first warpgroup."""
    row = lax.axis_index(BLOCK)

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, value in zip(results, values):
            store(ref.at[row], jnp.float32(value))


def read_label(labels: Ref, row: Any) -> jax.Array:
    """Load a label as int32. A label out of int32's range becomes -1, which is not a class."""
    label = load(labels.at[row], None)
    if label.dtype.itemsize < 8:
        return label.astype(jnp.int32)
    # Kernels are traced without 64-bit types, so compare in float32.
    fits = jnp.abs(label.astype(jnp.float32)) < 2.0**31
    return jnp.where(fits, label.astype(jnp.int32), -1)


@dataclasses.dataclass(frozen=True)
class RowShare:
    """The units of a row that belong to one warpgroup, grouped into steps.

    Warpgroups that share a row take turns: each reads every n-th unit.
    """

    spec: Spec
    units: Units
    schedule: LossForwardSchedule
    row: Any

    @functools.cached_property
    def whole_steps(self) -> int:
        """The number of steps that consist of whole units."""
        return self.units.whole // (self.schedule.units * self.schedule.warpgroups)

    def step(self, index: Any) -> list[Unit]:
        """Return the units of the step with this index, one of the whole steps."""
        return self._of(index, self.schedule.units, whole=True)

    def rest(self) -> list[Unit]:
        """Return the units that follow the whole steps, if there are any."""
        shares = self.schedule.warpgroups
        left = self.units.count - self.whole_steps * self.schedule.units * shares
        return self._of(self.whole_steps, -(-left // shares), whole=False)

    def first(self) -> list[Unit]:
        """Return the units that the warpgroup reads first."""
        return self.step(0) if self.whole_steps else self.rest()

    def reduce(self, x: Ref, raw: list[jax.Array], label: jax.Array, r: jax.Array | None) -> Sums:
        """Return each thread's sums over its units. `raw` has the elements of the `first` units."""
        sums: Sums = (of_threads(numerics.LOWEST), *[of_threads(0.0)] * (sums_of(self.spec) - 1))

        def advance(i: Any, carry: tuple[list[jax.Array], Sums]) -> tuple[list[jax.Array], Sums]:
            raw, sums = carry
            coming = load_units(self.step(i + 1), x, self.row)
            return coming, self.add(sums, self.step(i), raw, label, r)

        rest = self.rest()
        if self.whole_steps:
            last = self.whole_steps - 1
            raw, sums = lax.fori_loop(0, last, advance, (raw, sums))
            coming = load_units(rest, x, self.row) if rest else []
            sums, raw = self.add(sums, self.step(last), raw, label, r), coming
        if rest:
            sums = self.add(sums, rest, raw, label, r)
        for edge in self.units.edges(self.row):
            read = load_units([edge], x, self.row)
            sums = self.add(sums, [edge], read, label, r, lax.axis_index(WARPGROUP) == 0)
        return sums

    def add(
        self,
        sums: Sums,
        units: Sequence[Unit],
        raw: Sequence[jax.Array],
        label: jax.Array,
        r: jax.Array | None,
        mine: Any = None,
    ) -> Sums:
        """Add the elements of `units` to each thread's sums; with `mine`, only if that is True."""
        m, s, *t = sums
        v, layout = units[0].vector, units[0].layout
        x = [g(widen(value, layout), self.spec) for value in raw]
        fresh = [unit.is_fresh() for unit in units]
        if mine is not None:
            fresh = [jnp.logical_and(f, mine) for f in fresh]
        if r is not None:
            shifted = [_where(is_fresh, value - r, 0.0) for is_fresh, value in zip(fresh, x)]
            t = [t[0] + thread_sum(functools.reduce(jnp.add, shifted))]
        others = [_where(is_fresh, value, -jnp.inf) for is_fresh, value in zip(fresh, x)]
        # Only a few units contain the label, so the other units' columns are not compared with it.
        has_label = functools.reduce(jnp.logical_or, [unit.has(label) for unit in units])
        others = lax.cond(has_label, lambda: _without(label, units, others, layout), lambda: others)
        grown = jnp.maximum(m, thread_max(functools.reduce(jnp.maximum, others)))
        of_each = spread(grown, v)
        exp = functools.partial(numerics.exp_of_term, times=self.spec.logit_factor)
        depth = [value - of_each for value in others]
        e = [exp(d) for d in depth]
        s, *t = _rescaled(s, t, m - grown, exp(m - grown), self.spec)
        s = s + thread_sum(functools.reduce(jnp.add, e))
        if self.spec.returns_entropy:
            products = [a * finite(d) for a, d in zip(e, depth)]
            t = [t[0] + thread_sum(functools.reduce(jnp.add, products))]
        return grown, s, *t

    def _of(self, step: Any, count: int, *, whole: bool) -> list[Unit]:
        shares = self.schedule.warpgroups
        first = step * (self.schedule.units * shares) + lax.axis_index(WARPGROUP)
        return [self.units.unit(self.row, first + k * shares, whole=whole) for k in range(count)]


def _without(
    label: jax.Array, units: Sequence[Unit], x: Sequence[jax.Array], layout: Layout
) -> list[jax.Array]:
    """Replace the label's column by -inf."""
    columns = flat_index(x[0].shape, layout)  # of a unit's elements, from its start on
    return [
        jnp.where(columns == label - unit.start, -jnp.inf, value) for unit, value in zip(units, x)
    ]


def _where(mask: jax.Array | None, value: jax.Array, other: float) -> jax.Array:
    return value if mask is None else jnp.where(mask, value, other)


def _of_warps(sums: Sums, spec: Spec) -> Sums:
    m, s, *t = sums
    of_warp = jnp.max(m, axis=1)
    depth = m - lax.broadcast_in_dim(of_warp, OF_THREADS, (0,))
    rescaled = _rescaled(s, t, depth, _exp(f_times(depth, spec)), spec)
    return of_warp, *[jnp.sum(v, axis=1) for v in rescaled]


def _merge(parts: Sequence[jax.Array], spec: Spec) -> Sums:
    """Merge the parts of a row."""
    m, s, *t = parts
    top = jnp.max(m)
    rescaled = _rescaled(s, t, m - top, _exp(f_times(m - top, spec)), spec)
    return top, *[jnp.sum(v) for v in rescaled]


def _rescaled(
    s: jax.Array, t: Sequence[jax.Array], depth: jax.Array, exp: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Rescale sums from an old maximum to a new one.

    `depth` is the old maximum minus the new one, and `exp` is exp(f depth).
    """
    if spec.returns_entropy:
        t = [(t[0] + s * finite(depth)) * exp]
    return [s * exp, *t]


def _finish(
    sums: Sums, x_l: jax.Array, r: jax.Array | None, label: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Return the results, m and log(s)."""
    m_o, s_o, *t = sums
    a, b = spec.loss.label_smoothing, spec.loss.z_loss
    m = jnp.maximum(m_o, x_l)
    d = f_times(m - x_l, spec)
    others, *t = _rescaled(s_o, t, m_o - m, _exp(f_times(m_o - m, spec)), spec)
    log_s = numerics.log1p(jnp.where(d == 0, others, others - 1 + _exp(-d)))
    # All logits are -inf, or the label is not a class.
    is_nothing = jnp.logical_and(s_o == 0, x_l == -jnp.inf)
    is_column = jnp.logical_and(label >= 0, label < spec.classes)
    log_s = jnp.where(jnp.logical_or(is_nothing, jnp.logical_not(is_column)), jnp.nan, log_s)
    if spec.returns_entropy:
        of_label = _exp(-d)
        total = t[0] + of_label * finite(x_l - m)
        entropy = log_s - f_times(total, spec) / (others + of_label)
        return [0 - (d + log_s), entropy, m, log_s]
    loss = d + log_s
    if r is not None:
        even = f_times(m - r, spec) + log_s - t[0] * (spec.logit_factor / spec.classes)
        loss = even if a == 1 else (1 - a) * loss + a * even
    if b:
        lse = f_times(m, spec) + log_s
        loss = loss + b * lse * lse
    return [loss, m, log_s]


#: An exponential of numbers <= 0 for the terms of a sum. A term such as exp(-80) need not be as
#: accurate as a term of 1.
_exp: Callable[[jax.Array], jax.Array] = numerics.exp(is_wide=False)
