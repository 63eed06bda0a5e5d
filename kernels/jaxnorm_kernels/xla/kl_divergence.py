"""The Kullback-Leibler divergence between a teacher and a student, over ``spec.axes``.

p is the softmax of the teacher's logits, and q is the softmax of the student's. The logits are
z = f * g(x), where x is the operand with the logits before scale and cap. With a cap c
(`logit_softcap` or `teacher_softcap`), f is c, and g(x) is tanh(x * logits_scale / c). Without a
cap, f is the magnitude of the scale, and g(x) is x or -x, depending on the scale's sign. Each
softmax is computed from the *depths* d of its logits, where max is the maximum of a row:

    d = z - max(z) = f * (g(x) - max(g(x)))
    e = exp(d)      s = sum(e)      log(p) = d - log(s)

The divergence is KL(P || Q). P is the teacher's p and Q is the student's q. With ``reverse``, P is
the student's q and Q is the teacher's p. A subscript P or Q names the distribution:

    u      = d_P - d_Q
    KL     = sum(e_P u) / s_P + log(s_Q / s_P)
    s_Q    = s_P + sum(e_Q - e_P)           e_Q - e_P = e_P expm1(-u)

If the distributions are nearly equal, u is small. The rounding errors of the two terms of KL are
then small too, because neither term is a difference of large numbers. A class with P = 0 adds
nothing. A class with P > 0 and Q = 0 makes the divergence infinite.

Let c be the cotangent of the divergence. The gradient of the student's z is:

    c (q - p)                           for KL(p || q)      q - p = -q expm1(log(p) - log(q))
    c q (log(q) - log(p) - KL)          for KL(q || p)

If teacher and student have equal logits, divergence and gradient are exactly 0, regardless of how
the compiler fuses or folds operations. Three measures ensure this. First, if teacher and student
have the same f, g(x) - max(g(x)) is computed for each of them, and u is f times the difference of
these two arrays. Second, log(s_Q) is computed as log(s_P) + log(s_Q / s_P). Third, log(p) - log(q)
is computed from u.

The teacher's logits are constants, so they have no gradient.

A row *has no entry* if ``positions`` is False for it, or if all its classes are masked. Its
divergence and gradient are 0. The forward pass stores -inf as the student's log(s) for this row.
The backward and tangent passes recognise the row by this value.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.cross_entropy import without_padding
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.label_sums import Scale, magnitude, oriented, scale_of, times
from jaxnorm_kernels.xla.reductions import (
    on_cpu,
    row_any,
    row_max,
    row_sums,
)

# The module docstring explains the symbols. If |u| is below this number, e_Q - e_P is computed as
# e_P * expm1(-u). Otherwise, e_P is subtracted from e_Q. For large |u|, the subtraction is
# accurate, whereas the product e_P * expm1(-u) could fail: e_P might underflow to 0, and expm1(-u)
# might overflow.
_SMALL = 1.0


class _Logits(NamedTuple):
    """Logits z = factor * g, where g is x or -x or, with a cap, tanh(scale * x / cap).

    Attributes:
      g: an array with the shape of x.
      factor: the cap if there is one, otherwise the magnitude of the scale.
      slope: the derivative dz / dx. It is an array, or a number if there is no cap and the scale is
        a number.
    """

    g: jax.Array
    factor: Scale
    slope: Scale

    def below(self, largest: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Return g - `largest`, with -inf in masked entries.

        `largest` is the maximum of g in each row. The result has the dtype of `largest`.
        """
        difference = self.g.astype(largest.dtype) - largest
        return difference if mask is None else jnp.where(mask, difference, -jnp.inf)


def _logits(x: jax.Array, cap: float | None, scale: jax.Array | None, spec: Spec) -> _Logits:
    """Return the logits z of the input x.

    `scale` is an array with a number for each row. If it is None, the scale is the static number
    `LogitsOptions.logits_scale`.
    """
    slope = scale_of(scale, spec)
    if cap is None:
        return _Logits(oriented(x, slope), magnitude(slope), slope)
    g = jnp.tanh(x.astype(spec.compute_dtype) * (slope / cap))
    return _Logits(g, cap, slope * ((1 - g) * (1 + g)))


def kl_divergence_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the divergence of each row and, if the spec requests them, its statistics."""
    mask, positions = operands.mask, operands.positions
    (student, teacher), spec = without_padding([operands.x, operands.teacher_logits], spec)
    has_entry = _has_entry(operands, spec)
    found = []
    for x, cap in _inputs(student, teacher, spec):
        z = _logits(x, cap, operands.logits_scale, spec)
        masked_x = z.g if mask is None else jnp.where(mask, z.g, -jnp.inf)
        # g need not be converted to the arithmetic dtype first: the maximum is exact in g's dtype.
        m = row_max(masked_x, spec).astype(spec.compute_dtype)
        if mask is not None or positions is not None:
            m = jnp.where(has_entry, m, 0)
        # Without this barrier, XLA on a CPU fuses the differences g - m with the maximum m, and
        # stores the array of differences in memory.
        m = on_cpu(lax.optimization_barrier, m)
        found.append((_Depths(z.below(m, mask), z.factor), m))
    (d_q, m_q), (d_p, m_p) = found
    first, second = (d_q, d_p) if spec.loss.reverse else (d_p, d_q)
    log_ratio, difference, s_first, s_second = _sums(first, second, spec)
    share = difference / s_first
    is_close = jnp.abs(share) < 0.5  # log1p would lose digits if its argument were near -1
    near = jnp.log1p(jnp.where(is_close, share, 0))
    log_share = jnp.where(is_close, near, jnp.log(s_second / s_first))
    y = jnp.where(has_entry, jnp.maximum(log_ratio / s_first + log_share, 0), 0)
    log_first = jnp.log(s_first)
    log_second = jnp.where(is_close, log_first + log_share, jnp.log(s_second))
    log_q, log_p = (log_first, log_second) if spec.loss.reverse else (log_second, log_first)
    log_q, log_p = jnp.where(has_entry, log_q, -jnp.inf), jnp.where(has_entry, log_p, 0)
    y, *stats = (jnp.squeeze(v, spec.axes) for v in (y, m_q, log_q, m_p, log_p))
    return Results(y.astype(spec.y_dtype), stats=tuple(stats) if spec.has_stats else ())


def _inputs(
    x: jax.Array, teacher: jax.Array, spec: Spec
) -> tuple[tuple[jax.Array, float | None], tuple[jax.Array, float | None]]:
    """Return two pairs (logits, cap): first of the student, then of the teacher."""
    if spec.loss.teacher_softcap is not None:
        # If the teacher's logits are constants of the program, XLA evaluates their tanh at compile
        # time, and rounds it differently than the student's tanh. The barrier prevents this.
        teacher = lax.optimization_barrier(teacher)
    return (x, spec.loss.logit_softcap), (teacher, spec.loss.teacher_softcap)


def _has_entry(operands: Operands, spec: Spec) -> jax.Array:
    """Return a mask of the rows whose divergence is computed.

    These rows have at least one unmasked class, and ``positions`` does not exclude them. The
    normalised axes have size 1 in the result.
    """
    is_empty = isinstance(spec.cols, int) and spec.cols == 0
    some = jnp.asarray(not is_empty)
    if operands.mask is not None:
        some = some & row_any(operands.mask, operands.x, spec)
    if operands.positions is not None:
        some = some & jnp.expand_dims(operands.positions, spec.axes)
    return some


class _Depths(NamedTuple):
    """The depths z - max(z) of logits z = factor * g. They are the product `below` * `factor`.

    Attributes:
      below: the array g - max(g), where max(g) is the maximum of each row.
      factor: the number by which g is multiplied, or an array with such a number for each row.
    """

    below: jax.Array
    factor: Scale

    @property
    def of_z(self) -> jax.Array:
        """The depths z - max(z)."""
        return times(self.below, self.factor)


def _differences(first: _Depths, second: _Depths, spec: Spec) -> jax.Array:
    """Return the depths `first` minus the depths `second` (a depth is z - max(z) for a logit z).

    If two logits and their caps are equal, the difference is exactly 0, regardless of how the
    compiler rounds or fuses operations.
    """
    if spec.loss.logit_softcap == spec.loss.teacher_softcap:
        return times(first.below - second.below, first.factor)
    return first.of_z - second.of_z


def _sums(first: _Depths, second: _Depths, spec: Spec) -> list[jax.Array]:
    """Return four sums over each row: sum(e_P * u), sum(e_Q - e_P), s_P and s_Q.

    `first` has the depths of P, and `second` has the depths of Q. The module docstring defines the
    symbols.
    """
    e_first, e_second = jnp.exp(first.of_z), jnp.exp(second.of_z)
    u = _differences(first, second, spec)
    # If e_P is 0, the term is 0: u may be infinite, and e_P * u would be NaN. There is one
    # exception: the term is infinite if Q is exactly 0 (its depth is -inf) and P is not, even if
    # e_P is rounded to 0.
    of_ratio = jnp.where(e_first == 0, 0, e_first * u)
    is_infinite = (second.below == -jnp.inf) & (first.below != -jnp.inf)
    of_ratio = jnp.where(is_infinite, jnp.inf, of_ratio)
    is_small = jnp.abs(u) < _SMALL
    near = e_first * jnp.expm1(jnp.where(is_small, -u, 0))
    difference = jnp.where(is_small, near, e_second - e_first)
    # With `row_sums`, XLA computes these sums in one pass over the logits on an A100, an L4 and an
    # H100. With `fused_row_sums`, it stores the exponentials of 16-bit logits on an H100. On an
    # H200, or with caps, it stores float32 arrays with either function: according to its cost
    # model, this takes less time than recomputing the exponentials (or tanh).
    return row_sums([of_ratio, difference, e_first, e_second], spec)


class _Distributions(NamedTuple):
    """The student's probabilities, and what the gradient with respect to its logits needs.

    Arrays have x's shape, or broadcast to it.

    Attributes:
      q: the probabilities of the student.
      weight: the derivative of the divergence with respect to the student's logits z.
      slope: the derivative dz / dx. It is an array, or a number if there is no cap and the scale is
        a number.
      takes_part: a mask of the unmasked entries. It is False for all entries of a row that
        ``positions`` excludes.
    """

    q: jax.Array
    weight: jax.Array
    slope: Scale
    takes_part: jax.Array


def _distributions(residuals: Residuals, spec: Spec) -> _Distributions:
    mask = residuals.mask
    m_q, log_s_q, m_p, log_s_p = (jnp.expand_dims(stat, spec.axes) for stat in residuals.stats)
    has_entry = log_s_q != -jnp.inf
    log_s_q = jnp.where(has_entry, log_s_q, 0)
    takes_part = has_entry if mask is None else has_entry & mask
    is_masked = mask is not None or spec.loss.has_positions
    depths, slopes = [], []
    statistics = [(m_q, log_s_q), (m_p, log_s_p)]
    inputs = _inputs(residuals.saved, residuals.teacher_logits, spec)
    for (x, cap), (m, _) in zip(inputs, statistics):
        # The logits of masked entries may be NaN, but their derivatives must be 0.
        masked_x = jnp.where(takes_part, x, 0) if is_masked else x
        z = _logits(masked_x, cap, residuals.logits_scale, spec)
        depths.append(_Depths(z.below(m, takes_part), z.factor))
        slopes.append(z.slope)
    of_q, of_p = depths
    q = jnp.exp(of_q.of_z - log_s_q)
    # Compute log(q / p) only where both probabilities are nonzero.
    is_there = of_q.below != -jnp.inf
    are_there = is_there & (of_p.below != -jnp.inf)
    safe_q, safe_p = (_Depths(jnp.where(are_there, d.below, 0), d.factor) for d in depths)
    ratio = _differences(safe_q, safe_p, spec) + (log_s_p - log_s_q)
    if spec.loss.reverse:
        y = jnp.expand_dims(residuals.y.astype(spec.compute_dtype), spec.axes)
        # If q is rounded to 0, the ratio may be infinite, and the product would be NaN.
        is_positive = q != 0
        ratio = jnp.where(is_positive, jnp.where(are_there, ratio, jnp.inf), 0)
        weight = jnp.where(is_positive, q * (ratio - y), 0)
    else:
        p = jnp.exp(of_p.of_z - log_s_p)
        is_small = are_there & (jnp.abs(ratio) < _SMALL)
        near = -q * jnp.expm1(jnp.where(is_small, -ratio, 0))
        weight = jnp.where(is_small, near, q - p)
    return _Distributions(q, weight, slopes[0], takes_part)


def kl_divergence_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """Return the tangent of the divergence and, if the spec requests them, of the statistics."""
    arrays = [residuals.saved, residuals.teacher_logits, tangents.x]
    (x, teacher, dx), spec = without_padding(arrays, spec)
    of = _distributions(residuals._replace(saved=x, teacher_logits=teacher), spec)
    t = jnp.where(of.takes_part, times(dx.astype(spec.compute_dtype), of.slope), 0)
    sums = row_sums([of.weight * t, *([of.q * t] if spec.has_stats else [])], spec)
    along, *dlse = (jnp.squeeze(v, spec.axes) for v in sums)
    zero = jnp.zeros_like(along)
    stats = (zero, *dlse, zero, zero) if spec.has_stats else ()
    return Results(along.astype(spec.y_dtype), stats=stats)


def kl_divergence_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradient of the student's logits."""
    padding = spec.loss.padding
    (x, teacher), spec = without_padding([residuals.saved, residuals.teacher_logits], spec)
    of = _distributions(residuals._replace(saved=x, teacher_logits=teacher), spec)
    dx = jnp.expand_dims(cotangents.y.astype(spec.compute_dtype), spec.axes) * of.weight
    if cotangents.stats:
        dx = dx + jnp.expand_dims(cotangents.stats[1], spec.axes) * of.q
    dx = jnp.where(of.takes_part, times(dx, of.slope), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


FORMULAS: dict[Op, Formulas] = {
    "kl_divergence": Formulas(kl_divergence_fwd, kl_divergence_bwd, kl_divergence_tan)
}
