"""Forward pass of cross-entropy, and of the label's log-probability with the entropy.

For a row x of V logits with the label l, a = label_smoothing and b = z_loss::

    m = max(x)      s = sum(exp(x - m))      lse = m + log(s)      D = m - x_l
    loss = (1 - a) (D + log(s)) + a (m - r + log(s) - mean(x - r)) + b lse^2
    log_prob = -(D + log(s))      entropy = log(s) - T / s      T = sum(exp(x - m) (x - m))

r is x_l, or 0 if x_l is infinite. It is close to the mean of the logits, so the sum of x - r loses
little accuracy. Both terms of the entropy are nonnegative. Padding columns, which are not classes,
count as -inf. With a logits scale or a softcap, the logits are f * g(x), where the module `logits`
defines the factor f and the function g. In the equations, g(x) then replaces x, and every
difference is multiplied by f.

A row is read once, in a loop. Each thread keeps the maximum of the elements that it has read so
far, and sums relative to this maximum. When the maximum grows to m', the sums are rescaled::

    m' = max(m, x)      s' = s exp(m - m') + sum(exp(x - m'))
                        T' = (T + s (m - m')) exp(m - m') + sum(exp(x - m') (x - m'))

The sums of threads, warps and warpgroups are merged in the same way. The loop leaves out the
label's own term, exp(-D), and computes s_o, the sum of the other terms. So s = s_o + exp(-D). One
of the terms of s is the maximum's, which is 1, and log(s) = log1p(s - 1). This is accurate even if
the other terms are small, while the logarithm of the rounded sum s is not::

    log(s) = log1p(s_o)                 if D = 0: the label has the maximum, so exp(-D) = 1
             log1p(s_o - 1 + exp(-D))   otherwise: s_o contains the maximum's term
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

#: m and s of the columns read so far, as the module's docstring defines them. There may be a third
#: array: with label smoothing, it is the sum of x - r; for the entropy, it is T / f.
Sums = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class LossForwardSchedule:
    """How the forward pass of a loss reads a row.

    Attributes:
      units: number of units per step. A unit consists of one vector of at most 16 bytes per thread
        (`Unit`). A warpgroup loads the units of the next step while it adds up those of the current
        step.
      warpgroups: number of warpgroups (of 128 threads) in a block. They read different units of the
        same row.
    """

    units: int
    warpgroups: int = 1


# A block has one warpgroup for each `_SHARE_BYTES` of a row, and at most `_MOST_WARPGROUPS`. If
# there are no more rows than SMs, it has one for each `_SHARE_BYTES_OF_FEW`. A warpgroup with 64
# KiB has so much work that the time to start a block and to merge its sums is negligible. With less
# work per warpgroup, blocks would have more warpgroups. Small blocks are better, because some start
# while others load: over 32768 columns of bfloat16, one warpgroup per block reaches 1.01 of a
# copy's bandwidth, and two warpgroups reach 0.94 (H200).
_SHARE_BYTES, _SHARE_BYTES_OF_FEW, _MOST_WARPGROUPS = 64 * 1024, 32 * 1024, 4
# Number of columns that a thread adds up per step. With this number, a thread needs at most 64
# registers, so an SM runs 1024 threads. Together they have 32 KiB of loads in flight.
_COLUMNS = 16


@kept
def choose(spec: Spec, gpu: Gpu) -> LossForwardSchedule:
    """Choose the schedule of a forward pass."""
    units = units_of(spec)
    share = _SHARE_BYTES if spec.rows > gpu.sms else _SHARE_BYTES_OF_FEW
    wanted = max(1, spec.cols * spec.x_dtype.itemsize // share)
    # With a third sum or with tanh, a thread needs 80 registers. Then a block of 512 threads would
    # leave no room for a second block on the SM.
    takes_80 = _sums(spec) > 2 or spec.loss.logit_softcap is not None
    most = 2 if takes_80 else _MOST_WARPGROUPS
    warpgroups = 1 << min(wanted, most).bit_length() - 1
    step = max(1, _COLUMNS // units.vector)
    return LossForwardSchedule(min(step, max(1, units.count // warpgroups)), warpgroups)


@functools.lru_cache(maxsize=SCHEDULES_KEPT)
def units_of(spec: Spec, *, padded: bool = False) -> Units:
    """Return the column ranges (units of one vector per thread) that cover a row's classes.

    If `padded` is True, they also cover the padding columns after the classes.
    """
    widest = VECTOR_BYTES // max(dtype.itemsize for dtype in spec.operand_dtypes)
    return Units.of(spec.cols, widest, spec.cols if padded else spec.classes)


def cross_entropy_fwd(
    operands: Operands, spec: Spec, *, schedule: LossForwardSchedule | None = None
) -> Results:
    """Return the loss, or log_prob and entropy.

    The results include the statistics m and log(s) if the call saves them.
    `schedule` replaces the default schedule.
    """
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or choose(spec)
    results = 1 + spec.returns_entropy + 2 * spec.has_stats
    gather = Gather(schedule.warpgroups, values=_sums(spec))
    arrays = [a for a in (operands.x, operands.labels, operands.positions) if a is not None]

    def body(*refs: Ref) -> None:
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        result_refs, scratch = refs[:results], refs[results:]
        _row(spec, schedule, gather, operand_refs, result_refs, scratch)

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


def _sums(spec: Spec) -> int:
    """Return the number of arrays in a `Sums` tuple: two or three."""
    return 2 + (bool(spec.loss.label_smoothing) or spec.returns_entropy)


def _row(
    spec: Spec,
    schedule: LossForwardSchedule,
    gather: Gather,
    operands: Sequence[Ref],
    results: Sequence[Ref],
    scratch: Sequence[Any],
) -> None:
    x, labels, *positions = operands
    row = lax.axis_index(BLOCK)
    share = _Share(spec, units_of(spec), schedule, row)
    # Start the slowest loads first. The load of the label's logit must wait for the label.
    label = read_label(labels, row)
    first = load_units(share.first(), x, row)
    # An invalid label is clipped to a valid column, so that no load is outside the row.
    x_l = load(x.at[row, jnp.clip(label, 0, spec.classes - 1)], None)

    def write(*values: Any) -> None:
        @pl.when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            for ref, value in zip(results, values):
                store(ref.at[row], jnp.float32(value))

    def reduce() -> None:
        r = None
        if spec.loss.label_smoothing:
            r = g(x_l.astype(jnp.float32), spec)
            r = jnp.where(jnp.abs(r) < jnp.inf, r, 0.0)
        parts = gather(scratch, *_of_warps(share.reduce(x, first, label, r), spec))
        # Use the label's logit only now, because its first use waits for its load.
        sums = _merge(parts, spec)
        write(*_finish(sums, g(x_l.astype(jnp.float32), spec), r, label, spec))

    if not positions:
        reduce()
        return
    counts = load(positions[0].at[row], None).astype(jnp.int8) != 0
    pl.when(counts)(reduce)
    pl.when(jnp.logical_not(counts))(
        lambda: write(*[0.0] * (1 + spec.returns_entropy), 0.0, -jnp.inf)
    )


def read_label(labels: Ref, row: Any) -> jax.Array:
    """Load the label of a row as int32.

    A label outside the range of int32 becomes -1, which is not a class.
    """
    label = load(labels.at[row], None)
    if label.dtype.itemsize < 8:
        return label.astype(jnp.int32)
    # Kernels are traced without 64-bit types, so the comparison is in float32.
    fits = jnp.abs(label.astype(jnp.float32)) < 2.0**31
    return jnp.where(fits, label.astype(jnp.int32), -1)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The units of a row that one warpgroup reads, grouped into steps of ``schedule.units`` units.

    A unit consists of one vector per thread (`Unit`). If n warpgroups share the row, each reads
    every n-th unit.
    """

    spec: Spec
    units: Units
    schedule: LossForwardSchedule
    row: Any

    @functools.cached_property
    def whole_steps(self) -> int:
        """Number of leading steps whose columns are all added to the sums (see `Units.whole`)."""
        return self.units.whole // (self.schedule.units * self.schedule.warpgroups)

    def step(self, index: Any) -> list[Unit]:
        """Return this warpgroup's units in step `index`, which must be below `whole_steps`."""
        return self._of(index, self.schedule.units, whole=True)

    def rest(self) -> list[Unit]:
        """Return this warpgroup's units that the first `whole_steps` steps leave, possibly none."""
        shares = self.schedule.warpgroups
        left = self.units.count - self.whole_steps * self.schedule.units * shares
        return self._of(self.whole_steps, -(-left // shares), whole=False)

    def first(self) -> list[Unit]:
        return self.step(0) if self.whole_steps else self.rest()

    def reduce(self, x: Ref, raw: list[jax.Array], label: jax.Array, r: jax.Array | None) -> Sums:
        """Return the thread's sums over this warpgroup's units of the row, as `Sums`.

        `raw` contains the elements of the units that ``first()`` returns. The caller has already
        loaded these elements. With label smoothing, `r` is the number that is subtracted from each
        logit; otherwise it is None.
        """
        sums: Sums = (of_threads(numerics.LOWEST), *[of_threads(0.0)] * (_sums(self.spec) - 1))

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
        """Add the loaded elements `raw` of `units` to the thread's sums, and return the new sums.

        If `mine` is given and False, nothing is added, because another warpgroup adds these
        elements.
        """
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
        # Compare columns with the label's column only if a unit contains that column, which is
        # rare.
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
    """Replace x by -inf in the label's column."""
    columns = flat_index(x[0].shape, layout)  # relative to the unit's first column
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
    """Merge the sums of all warps that share a row."""
    m, s, *t = parts
    top = jnp.max(m)
    rescaled = _rescaled(s, t, m - top, _exp(f_times(m - top, spec)), spec)
    return top, *[jnp.sum(v) for v in rescaled]


def _rescaled(
    s: jax.Array, t: Sequence[jax.Array], depth: jax.Array, exp: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Rescale sums from an old maximum to a new one.

    `depth` is the old maximum minus the new one. The argument `exp` is the value of
    exp(f * `depth`), where f is the factor of the logits f * g(x).
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
    # The result is NaN if all logits are -inf, or if the label is not a class.
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


#: A cheap exp for arguments <= 0. Its relative error grows with the argument's magnitude, so it is
#: used for terms of sums only: an inaccurate exp(-80) is negligible next to the largest term, 1.
_exp: Callable[[jax.Array], jax.Array] = numerics.exp(is_wide=False)
