"""KL divergence of a teacher's and a student's distribution, forward and backward pass.

The forward pass computes KL(P || Q). P is the teacher's distribution and Q the student's; if
``reverse``, P is the student's and Q the teacher's. The module `logits` defines the logits, z =
f * g(x). The *depth* of a logit z is d = z - max(z). Subscripts name the distribution:

    e = exp(d)    s = sum(e)    u = d_P - d_Q    a = sum(e_P u)    b = sum(e_Q - e_P)

    KL = a / s_P + log(s_Q / s_P)
    log(s_Q / s_P) = log1p(b / s_P), which is used if the sums are nearly equal

Both rows are read once, in one loop. Each thread holds the two maxima of the elements that it has
read so far, and sums relative to these maxima. When a maximum grows from m to m', the thread
rescales its sums by r = exp(m - m'):

    s' = r s      a' = r_P a + s'_P (log(r_P) - log(r_Q))      b' = r_P b + s_Q (r_Q - r_P)

The sums of threads, warps and warpgroups are merged in the same way. If the logits of P and Q are
equal, u is 0 and r_P = r_Q, so a and b are exactly 0. If u is small, e_Q - e_P is computed without
cancellation, as e_P times a polynomial of u.

The backward pass needs no sum over a row. Unlike P and Q, p and q do not depend on ``reverse``: p
is always the teacher's probability, and q is always the student's. dy is the cotangent of the
divergence. The gradient of the student's logits is:

    dz = dy (q - p)                                        for KL(p || q)
    dz = dy q (log(q) - log(p) - KL)                       for KL(q || p), if ``reverse``
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.forward import warpgroups_of
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, factor, g, probability, times_slope
from jaxnorm_kernels.mosaic.cross_entropy.passes import (
    LossRow,
    LossSchedule,
    fresh_of,
    launch_backward,
    launch_forward,
    store_row,
    units_of,
    where,
)
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.gpu import Gpu, cached
from jaxnorm_kernels.mosaic.device.layouts import Ref, widen
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

# Maximum number of warpgroups of a block. With more, an SM's registers would not suffice for two
# blocks, because each thread has two maxima and four sums.
_MOST_WARPGROUPS = 2
# Number of columns that a thread processes per step, in each of the two rows.
_COLUMNS = 8
# For |u| up to this limit, a polynomial of five terms computes exp(-u) - 1 with an error below one
# ulp. u is the difference of a teacher's and a student's logit, each relative to its row's maximum.
_SMALL = 0.125


class _Sums(NamedTuple):
    """The maxima and sums over the columns that a thread, a warp or a block has read so far.

    Attributes:
      m_p, m_q: maxima of g(x) over these columns, in P's row and in Q's row.
      s_p, s_q, a, b: sums that the module's docstring defines.
    """

    m_p: jax.Array
    m_q: jax.Array
    s_p: jax.Array
    s_q: jax.Array
    a: jax.Array
    b: jax.Array


_SUMS = len(_Sums._fields)


class _Pair(NamedTuple):
    """The specs of P's and Q's logits. The two specs may differ in dtype and softcap."""

    p: Spec
    q: Spec

    @classmethod
    def of(cls, spec: Spec) -> "_Pair":
        student, teacher = spec, _of_teacher(spec)
        return cls(student, teacher) if spec.loss.reverse else cls(teacher, student)

    def difference(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """Return f_P * p - f_Q * q, where f_P and f_Q are the factors f in the logits z = f * g(x).

        `p` has values g(x) of P's logits, and `q` has values g(x) of Q's logits. The result is then
        the difference of the logits. `p` and `q` may also be differences of such values. If `p` and
        `q` are equal, and f is the same for P and Q, the result is exactly 0. The module `logits`
        defines f and g.
        """
        if self.p.loss.logit_softcap == self.q.loss.logit_softcap:
            return f_times(p - q, self.p)
        return f_times(p, self.p) - f_times(q, self.q)


def _of_teacher(spec: Spec) -> Spec:
    return spec.replaced(
        x_dtype=spec.loss.teacher_dtype,
        logit_softcap=spec.loss.teacher_softcap,
        gradient_dtype=None,
    )


@cached
def choose(spec: Spec, gpu: Gpu) -> LossSchedule:
    """Choose the schedule of a forward pass."""
    warpgroups = warpgroups_of(spec, gpu, _MOST_WARPGROUPS)
    return LossSchedule.of(units_of(spec), _COLUMNS, warpgroups)


def kl_divergence_fwd(
    operands: Operands, spec: Spec, *, schedule: LossSchedule | None = None
) -> Results:
    """Return the divergence and the statistics. `schedule` replaces the default schedule."""
    assert operands.mask is None, "of classes: `support` refuses it"
    schedule = schedule or choose(spec)
    results = 1 + len(spec.statistics) * spec.has_stats
    arrays = (operands.x, operands.teacher_logits, operands.positions)
    y, *stats = launch_forward(
        spec, schedule, operands.logits_scale, arrays, _row, results=results, sums=_SUMS
    )
    return Results(y, stats=tuple(stats))


def _row(row: LossRow, operands: Sequence[Ref], results: Sequence[Ref]) -> None:
    x, teacher, *positions = operands
    spec, steps = row.spec, row.steps
    pair = _Pair.of(spec)
    refs = (x, teacher) if spec.loss.reverse else (teacher, x)

    def read(units: Sequence[Fragment]) -> list[list[jax.Array]]:
        """Return the elements of P's row and of Q's row."""
        return [load_units(units, ref, row.index) for ref in refs]

    first = read(steps.first())

    def reduce() -> list[jax.Array]:
        lowest, zero = per_thread(numerics.LOWEST), per_thread(0.0)
        nothing = _Sums(lowest, lowest, zero, zero, zero, zero)
        sums = steps.reduce(read, functools.partial(_add, pair=pair), nothing, first)
        return _finish(_merge(_Sums(*row.gather(*_of_warps(sums, pair))), pair), spec)

    store_row(row.index, results, positions, reduce, [0.0, 0.0, -jnp.inf, 0.0, 0.0])


def _add(
    sums: _Sums, units: Sequence[Fragment], raw: list[list[jax.Array]], mine: Any, *, pair: _Pair
) -> _Sums:
    """Add the elements of `units` to each thread's sums; see `Steps.reduce`."""
    v, layout = units[0].vector, units[0].layout
    fresh = fresh_of(units, mine)
    x_p, x_q = (
        [
            where(is_fresh, g(widen(value, layout), spec), -jnp.inf)
            for is_fresh, value in zip(fresh, values)
        ]
        for values, spec in zip(raw, pair)
    )
    grown_p, grown_q = (
        jnp.maximum(m, thread_max(functools.reduce(jnp.maximum, x)))
        for m, x in ((sums.m_p, x_p), (sums.m_q, x_q))
    )
    sums = _rescaled(sums, grown_p, grown_q, pair)
    top_p, top_q = spread(grown_p, v), spread(grown_q, v)
    terms = [_terms(p - top_p, q - top_q, pair) for p, q in zip(x_p, x_q)]
    added = [thread_sum(functools.reduce(jnp.add, values)) for values in zip(*terms)]
    totals = (total + more for total, more in zip(sums[2:], added))
    return _Sums(grown_p, grown_q, *totals)


def _terms(
    depth_p: jax.Array, depth_q: jax.Array, pair: _Pair
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the terms of the sums s_P, s_Q, a and b, elementwise.

    The terms are e_P, e_Q, e_P * u and e_Q - e_P, as the module's docstring defines them.
    """
    e_p = numerics.exp_of_term(depth_p, times=factor(pair.p))
    e_q = numerics.exp_of_term(depth_q, times=factor(pair.q))
    u = pair.difference(depth_p, depth_q)
    # If e_P is 0, the term e_P * u is 0, even if u is infinite. There is one exception: if d_Q is
    # -inf and d_P is finite, Q is 0 and the exact P is positive, although e_P is rounded to 0. Then
    # u is +inf, and the term and the divergence are infinite. The code also checks d_Q, because u
    # may be +inf for a finite d_Q, if the multiplication by f overflows.
    infinite_term = jnp.where((u == jnp.inf) & (depth_q == -jnp.inf), jnp.inf, 0.0)
    term_of_a = jnp.where(e_p > 0, e_p * u, infinite_term)
    near = -u * (1 - u * (1 / 2) * (1 - u * (1 / 3) * (1 - u * (1 / 4) * (1 - u * (1 / 5)))))
    difference = jnp.where(jnp.abs(u) < _SMALL, e_p * near, e_q - e_p)
    return e_p, e_q, term_of_a, difference


def _rescaled(sums: _Sums, m_p: jax.Array, m_q: jax.Array, pair: _Pair) -> _Sums:
    """Return the sums relative to new maxima, which must be at least as large as the old ones."""
    below_p, below_q = sums.m_p - m_p, sums.m_q - m_q
    r_p = numerics.exp_of_term(below_p, times=factor(pair.p))
    r_q = numerics.exp_of_term(below_q, times=factor(pair.q))
    s_p = sums.s_p * r_p
    # If the rescaled s_p is 0, the rescaled a is 0, too, although the difference may be infinite or
    # NaN. But if the sum a is infinite, it must stay infinite.
    a = jnp.where(s_p > 0, sums.a * r_p + s_p * pair.difference(below_p, below_q), 0.0)
    a = jnp.where(sums.a == jnp.inf, jnp.inf, a)
    b = sums.b * r_p + sums.s_q * (r_q - r_p)
    return _Sums(m_p, m_q, s_p, sums.s_q * r_q, a, b)


def _of_warps(sums: _Sums, pair: _Pair) -> _Sums:
    """Return the sums of each of the four warps, from the sums of their threads."""
    tops = [jnp.max(m, axis=1) for m in (sums.m_p, sums.m_q)]
    broadcast_tops = (lax.broadcast_in_dim(top, PER_THREAD, (0,)) for top in tops)
    rescaled = _rescaled(sums, *broadcast_tops, pair)
    return _Sums(*tops, *[jnp.sum(v, axis=1) for v in rescaled[2:]])


def _merge(parts: _Sums, pair: _Pair) -> _Sums:
    """Return the sums of the row, from the sums of all warps that share it."""
    tops = [jnp.max(parts.m_p), jnp.max(parts.m_q)]
    rescaled = _rescaled(parts, *tops, pair)
    return _Sums(*tops, *[jnp.sum(v) for v in rescaled[2:]])


def _finish(sums: _Sums, spec: Spec) -> list[jax.Array]:
    """Return the five results of a row.

    They are the divergence; m and log(s) of the student; m and log(s) of the teacher. m is the
    maximum of g(x) over the row. s is defined in the module's docstring.
    """
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
    schedule: LossSchedule | None = None,
) -> Operands:
    """Return the gradient of the student's logits. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    numbers = [*residuals.stats, cotangents.y]
    if spec.loss.reverse:
        numbers.append(residuals.y)
    return launch_backward(
        spec,
        schedule or LossSchedule(units=2),
        [residuals.saved, residuals.teacher_logits],
        None,
        numbers,
        _gradient,
        residuals.logits_scale,
    )


def _gradient(
    spec: Spec,
    x: jax.Array,
    teacher: jax.Array,
    unit: Fragment,
    columns: jax.Array,
    numbers: Sequence[jax.Array],
) -> jax.Array:
    """Return dx in float32 for one unit of an unmasked row; see `launch_backward`."""
    m_q, log_s_q, m_p, log_s_p, d, *of_reverse = numbers
    teacher_spec, g_x = _of_teacher(spec), g(x, spec)
    below_q, below_p = g_x - m_q, g(teacher, teacher_spec) - m_p
    q, _, _ = probability(below_q, log_s_q, spec)
    if of_reverse:
        pair = _Pair(spec, teacher_spec)
        ratio = pair.difference(below_q, below_p) + (log_s_p - log_s_q)
        dz = d * jnp.where(q == 0, 0.0, q * (ratio - of_reverse[0]))
    else:
        # Compute p in the same precision as q, so that equal logits have a gradient of exactly 0.
        alike = teacher_spec.replaced(gradient_dtype=spec.dx_dtype)
        p, _, _ = probability(below_p, log_s_p, alike)
        dz = d * (q - p)
    dx = times_slope(dz, g_x, spec)
    if not spec.loss.padding:
        return dx
    return jnp.where(columns < spec.classes - unit.start, dx, 0.0)
