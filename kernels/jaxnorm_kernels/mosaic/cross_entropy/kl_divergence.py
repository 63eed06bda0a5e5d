"""KL divergence of a teacher's and a student's distribution, forward and backward pass.

The forward pass computes KL(P || Q). P is the teacher's distribution and Q the student's; if
``reverse``, P is the student's and Q the teacher's. With logits z = f g(x) as defined in the module
`logits`, and d = z - max(z) for each of P and Q:

    e = exp(d)    s = sum(e)    u = d_P - d_Q    a = sum(e_P u)    b = sum(e_Q - e_P)

    KL = a / s_P + log(s_Q / s_P)
    log(s_Q / s_P) = log1p(b / s_P), which is used if the sums are nearly equal

Both rows are read once, in one loop. Each thread keeps the two maxima of the elements that it has
read so far, and sums relative to these maxima. When a maximum grows from m to m', the thread
rescales its sums by r = exp(m - m'):

    s' = r s      a' = r_P (a + s_P (log(r_P) - log(r_Q)))      b' = r_P b + s_Q (r_Q - r_P)

The sums of threads, warps and warpgroups are merged in the same way. For equal logits, u is 0 and
the factors r are equal, so a and b are exactly 0. If u is small, e_Q - e_P is computed without
cancellation, as e_P times a polynomial of u.

The backward pass needs no sum over a row. p is always the teacher's and q the student's
probability of a class, whether or not ``reverse`` is set. With the cotangent c of the divergence:

    dz = c (q - p)                                         for KL(p || q)
    dz = c q (log(q) - log(p) - KL)                        for KL(q || p), if ``reverse``
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.backward import LossBackwardSchedule
from jaxnorm_kernels.mosaic.cross_entropy.forward import LossForwardSchedule, units_of
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, finite, g, probability, times_slope
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.gpu import Gpu, kept
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import Ref, flat_index, load, store, widen
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
# A block has one warpgroup for each `_SHARE_BYTES` of both rows together. If the call has no more
# rows than the GPU has SMs, it has one for each `_SHARE_BYTES_OF_FEW`. `_MOST_WARPGROUPS` is the
# maximum: a thread has two maxima and four sums, which take so many registers that two blocks with
# more warpgroups would not fit on an SM.
_SHARE_BYTES, _SHARE_BYTES_OF_FEW, _MOST_WARPGROUPS = 64 * 1024, 32 * 1024, 2
# Number of columns that a thread processes per step, in each of the two rows.
_COLUMNS = 8
# For |u| up to this limit, a polynomial of five terms computes exp(-u) - 1 with an error below one
# ulp. u is the difference of a teacher's and a student's logit, each relative to its row's maximum.
_SMALL = 0.125


class _Sums(NamedTuple):
    """The maxima and sums over the columns that a thread, a warp or a block has read so far.

    Attributes:
      m_p, m_q: maxima of g(x) over the columns of P and of Q.
      s_p, s_q, a, b: sums that the module's docstring defines.
    """

    m_p: jax.Array
    m_q: jax.Array
    s_p: jax.Array
    s_q: jax.Array
    a: jax.Array
    b: jax.Array


class _Pair(NamedTuple):
    """The specs of P's and Q's logits, which may differ in dtype and softcap."""

    p: Spec
    q: Spec

    @classmethod
    def of(cls, spec: Spec) -> "_Pair":
        student, teacher = spec, _of_teacher(spec)
        return cls(student, teacher) if spec.loss.reverse else cls(teacher, student)

    def difference(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """Return the difference of two logits, z_P - z_Q, where z = f * g(x).

        `p` and `q` are the two values of g(x). If they are equal, and both logits have the same
        factor f, the result is exactly 0.
        """
        if self.p.logit_factor == self.q.logit_factor:
            return f_times(p - q, self.p)
        return f_times(p, self.p) - f_times(q, self.q)


def _of_teacher(spec: Spec) -> Spec:
    return spec.replaced(
        x_dtype=spec.loss.teacher_dtype,
        logit_softcap=spec.loss.teacher_softcap,
        gradient_dtype=None,
    )


@kept
def choose(spec: Spec, gpu: Gpu) -> LossForwardSchedule:
    """Choose the schedule of a forward pass."""
    units = units_of(spec)
    share = _SHARE_BYTES if spec.rows > gpu.sms else _SHARE_BYTES_OF_FEW
    row = spec.cols * sum(dtype.itemsize for dtype in spec.operand_dtypes)
    warpgroups = 1 << min(max(1, row // share), _MOST_WARPGROUPS).bit_length() - 1
    step = max(1, _COLUMNS // units.vector)
    return LossForwardSchedule(min(step, max(1, units.count // warpgroups)), warpgroups)


def kl_divergence_fwd(
    operands: Operands, spec: Spec, *, schedule: LossForwardSchedule | None = None
) -> Results:
    """Return the divergence and the statistics. `schedule` replaces the default schedule."""
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or choose(spec)
    results = 1 + len(spec.statistics) * spec.has_stats
    gather = Gather(schedule.warpgroups, values=len(_Sums._fields))
    arrays = [operands.x, operands.teacher_logits]
    if operands.positions is not None:
        arrays.append(operands.positions)

    def body(*refs: Ref) -> None:
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        _row(spec, schedule, gather, operand_refs, refs[:results], refs[results:])

    y, *stats = launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs=[((spec.rows,), _F32)] * results,
        blocks=spec.rows,
        warpgroups=schedule.warpgroups,
        scratch=gather.scratch(),
    )
    return Results(y, stats=tuple(stats))


def _row(
    spec: Spec,
    schedule: LossForwardSchedule,
    gather: Gather,
    operands: Sequence[Ref],
    results: Sequence[Ref],
    scratch: Sequence[Any],
) -> None:
    x, teacher, *positions = operands
    row, pair = lax.axis_index(BLOCK), _Pair.of(spec)
    refs = (x, teacher) if spec.loss.reverse else (teacher, x)
    share = _Share(pair, units_of(spec), schedule, row)
    first = share.load(share.first(), refs)

    def write(*values: Any) -> None:
        @pl.when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            for ref, value in zip(results, values):
                store(ref.at[row], jnp.float32(value))

    def reduce() -> None:
        parts = gather(scratch, *_of_warps(share.reduce(refs, first), pair))
        write(*_finish(_merge(_Sums(*parts), pair), spec))

    if not positions:
        reduce()
        return
    counts = load(positions[0].at[row], None).astype(jnp.int8) != 0
    pl.when(counts)(reduce)
    pl.when(jnp.logical_not(counts))(lambda: write(0.0, 0.0, -jnp.inf, 0.0, 0.0))


#: Loaded elements of P's row and of Q's row: for each row, one array per unit (`Unit`).
_Raw = tuple[list[jax.Array], list[jax.Array]]


class _Share(NamedTuple):
    """The units of both rows that one warpgroup reads, in steps of ``schedule.units`` units.

    A unit consists of one vector per thread (`Unit`). If n warpgroups share the rows, each reads
    every n-th unit.
    """

    pair: _Pair
    units: Units
    schedule: LossForwardSchedule
    row: Any

    @property
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

    def load(self, units: Sequence[Unit], refs: Sequence[Ref]) -> _Raw:
        p, q = (load_units(units, ref, self.row) if units else [] for ref in refs)
        return p, q

    def reduce(self, refs: Sequence[Ref], raw: _Raw) -> _Sums:
        """Return the thread's sums over this warpgroup's columns of the two rows.

        `raw` contains the elements of the units that ``first()`` returns. The caller has already
        loaded these elements.
        """
        lowest, zero = of_threads(numerics.LOWEST), of_threads(0.0)
        sums = _Sums(lowest, lowest, zero, zero, zero, zero)

        def advance(i: Any, carry: tuple[_Raw, _Sums]) -> tuple[_Raw, _Sums]:
            raw, sums = carry
            coming = self.load(self.step(i + 1), refs)
            return coming, self.add(sums, self.step(i), raw)

        rest = self.rest()
        if self.whole_steps:
            last = self.whole_steps - 1
            raw, sums = lax.fori_loop(0, last, advance, (raw, sums))
            coming = self.load(rest, refs)
            sums, raw = self.add(sums, self.step(last), raw), coming
        if rest:
            sums = self.add(sums, rest, raw)
        for edge in self.units.edges(self.row):
            read = self.load([edge], refs)
            sums = self.add(sums, [edge], read, lax.axis_index(WARPGROUP) == 0)
        return sums

    def add(self, sums: _Sums, units: Sequence[Unit], raw: _Raw, mine: Any = None) -> _Sums:
        """Add the loaded elements `raw` of `units` to the thread's sums, and return the new sums.

        If `mine` is given and False, nothing is added, because another warpgroup adds these
        elements.
        """
        v, layout = units[0].vector, units[0].layout
        fresh = [unit.is_fresh() for unit in units]
        if mine is not None:
            fresh = [jnp.logical_and(f, mine) for f in fresh]
        x_p, x_q = (
            [
                _where(is_fresh, g(widen(value, layout), spec), -jnp.inf)
                for is_fresh, value in zip(fresh, values)
            ]
            for values, spec in zip(raw, self.pair)
        )
        grown_p, grown_q = (
            jnp.maximum(m, thread_max(functools.reduce(jnp.maximum, x)))
            for m, x in ((sums.m_p, x_p), (sums.m_q, x_q))
        )
        sums = _rescaled(sums, grown_p, grown_q, self.pair)
        top_p, top_q = spread(grown_p, v), spread(grown_q, v)
        terms = [_terms(p - top_p, q - top_q, self.pair) for p, q in zip(x_p, x_q)]
        added = [thread_sum(functools.reduce(jnp.add, values)) for values in zip(*terms)]
        totals = (total + more for total, more in zip(sums[2:], added))
        return _Sums(grown_p, grown_q, *totals)

    def _of(self, step: Any, count: int, *, whole: bool) -> list[Unit]:
        shares = self.schedule.warpgroups
        first = step * (self.schedule.units * shares) + lax.axis_index(WARPGROUP)
        return [self.units.unit(self.row, first + k * shares, whole=whole) for k in range(count)]


def _where(mask: jax.Array | None, value: jax.Array, other: float) -> jax.Array:
    return value if mask is None else jnp.where(mask, value, other)


def _terms(
    depth_p: jax.Array, depth_q: jax.Array, pair: _Pair
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the terms of s_P, s_Q, a and b: e_P, e_Q, e_P u and e_Q - e_P, elementwise."""
    e_p = numerics.exp_of_term(depth_p, times=pair.p.logit_factor)
    e_q = numerics.exp_of_term(depth_q, times=pair.q.logit_factor)
    u = pair.difference(depth_p, depth_q)
    # A column with e_P = 0 contributes 0, unless u is infinite. Then the probability Q is 0, and
    # the probability P is not, although e_P may have underflowed to 0. So the divergence is
    # infinite.
    of_none = jnp.where(u == jnp.inf, jnp.inf, 0.0)
    of_ratio = jnp.where(e_p > 0, e_p * u, of_none)
    near = -u * (1 - u * (1 / 2) * (1 - u * (1 / 3) * (1 - u * (1 / 4) * (1 - u * (1 / 5)))))
    difference = jnp.where(jnp.abs(u) < _SMALL, e_p * near, e_q - e_p)
    return e_p, e_q, of_ratio, difference


def _rescaled(sums: _Sums, m_p: jax.Array, m_q: jax.Array, pair: _Pair) -> _Sums:
    """Return the sums relative to new maxima, which must be at least as large as the old ones."""
    below_p, below_q = finite(sums.m_p - m_p), finite(sums.m_q - m_q)
    r_p = numerics.exp_of_term(below_p, times=pair.p.logit_factor)
    r_q = numerics.exp_of_term(below_q, times=pair.q.logit_factor)
    a = (sums.a + sums.s_p * pair.difference(below_p, below_q)) * r_p
    # An infinite sum must stay infinite, even if the factor r_p is 0.
    a = jnp.where(sums.a == jnp.inf, jnp.inf, a)
    b = sums.b * r_p + sums.s_q * (r_q - r_p)
    return _Sums(m_p, m_q, sums.s_p * r_p, sums.s_q * r_q, a, b)


def _of_warps(sums: _Sums, pair: _Pair) -> _Sums:
    """Return the sums of each of the four warps, from the sums of their threads."""
    tops = [jnp.max(m, axis=1) for m in (sums.m_p, sums.m_q)]
    of_threads_of = (lax.broadcast_in_dim(top, OF_THREADS, (0,)) for top in tops)
    rescaled = _rescaled(sums, *of_threads_of, pair)
    return _Sums(*tops, *[jnp.sum(v, axis=1) for v in rescaled[2:]])


def _merge(parts: _Sums, pair: _Pair) -> _Sums:
    """Return the sums of the row, from the sums of all warps that share it."""
    tops = [jnp.max(parts.m_p), jnp.max(parts.m_q)]
    rescaled = _rescaled(parts, *tops, pair)
    return _Sums(*tops, *[jnp.sum(v) for v in rescaled[2:]])


def _finish(sums: _Sums, spec: Spec) -> list[jax.Array]:
    """Return the divergence, and then m and log(s) of the student and of the teacher."""
    share = sums.b / sums.s_p
    is_close = jnp.abs(share) < 0.5
    near = numerics.log1p(jnp.where(is_close, share, 0.0))
    log_share = jnp.where(is_close, near, jnp.log(sums.s_q / sums.s_p))
    y = jnp.maximum(sums.a / sums.s_p + log_share, 0.0)
    log_p = jnp.log(sums.s_p)
    log_q = jnp.where(is_close, log_p + log_share, jnp.log(sums.s_q))
    # If all logits of a row are -inf, log(s) must be NaN: a saved log(s) of -inf means that the
    # position is masked.
    log_p, log_q = (
        jnp.where(s == 0, jnp.nan, log) for s, log in ((sums.s_p, log_p), (sums.s_q, log_q))
    )
    p, q = (sums.m_p, log_p), (sums.m_q, log_q)
    return [y, *p, *q] if spec.loss.reverse else [y, *q, *p]


def kl_divergence_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossBackwardSchedule | None = None,
) -> Operands:
    """Return the gradient of the student's logits. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    schedule = schedule or LossBackwardSchedule(units=2)
    of_rows = units_of(spec, padded=True)
    parts, units = schedule.parts(spec), min(schedule.units, of_rows.count)
    of_one_row = [*residuals.stats, cotangents.y]
    if spec.loss.reverse:
        of_one_row.append(residuals.y)

    def body(x: Ref, teacher: Ref, *refs: Ref) -> None:
        of_row, (dx,) = refs[: len(of_one_row)], refs[len(of_one_row) :] or (x,)
        block = lax.axis_index(BLOCK)
        row, part = lax.div(block, parts), lax.rem(block, parts)

        def write(of_block: Sequence[Unit]) -> None:
            # Start the loads of the logits first, so that the loads of statistics and cotangents
            # overlap them.
            raw = [load_units(of_block, ref, row) for ref in (x, teacher)]
            numbers = [load(ref.at[row], None) for ref in of_row]
            has_entry = numbers[1] != -jnp.inf
            shape, layout = of_block[0].shape, of_block[0].layout
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            columns = flat_index(shape, layout)
            for unit, *values in zip(of_block, *raw):
                wide = [widen(value, layout) for value in values]
                gradient = functools.partial(_gradient, *wide, unit, columns, numbers, spec)
                unit.store(dx, row, lax.cond(has_entry, gradient, lambda: zero))

        write([of_rows.unit(row, part * units + k) for k in range(units)])
        if of_rows.has_edges:
            pl.when(part == 0)(lambda: write(of_rows.edges(row)))

    (dx,) = launch(
        body,
        [residuals.saved, residuals.teacher_logits, *of_one_row],
        name=f"jaxnorm_{spec.op}_bwd",
        outputs=[] if spec.overwrites_x else [((spec.rows, spec.cols), spec.dx_dtype)],
        overwritten=int(spec.overwrites_x),
        blocks=spec.rows * parts,
    )
    return Operands(dx)


def _gradient(
    x: jax.Array,
    teacher: jax.Array,
    unit: Unit,
    columns: jax.Array,
    numbers: Sequence[jax.Array],
    spec: Spec,
) -> jax.Array:
    """Return dx in float32 for one unit (one vector per thread) of an unmasked row."""
    m_q, log_s_q, m_p, log_s_p, d, *of_reverse = numbers
    of_teacher, g_x = _of_teacher(spec), g(x, spec)
    below_q, below_p = g_x - m_q, g(teacher, of_teacher) - m_p
    q, _, _ = probability(below_q, log_s_q, spec)
    if of_reverse:
        pair = _Pair(spec, of_teacher)
        ratio = pair.difference(below_q, below_p) + (log_s_p - log_s_q)
        dz = d * jnp.where(q == 0, 0.0, q * (ratio - of_reverse[0]))
    else:
        # Compute p in the same precision as q, so that equal logits have a gradient of exactly 0.
        alike = of_teacher.replaced(gradient_dtype=spec.dx_dtype)
        p, _, _ = probability(below_p, log_s_p, alike)
        dz = d * (q - p)
    dx = times_slope(dz, g_x, spec)
    if not spec.loss.padding:
        return dx
    return jnp.where(columns < spec.classes - unit.start, dx, 0.0)
