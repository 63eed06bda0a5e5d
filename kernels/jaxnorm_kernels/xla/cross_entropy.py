"""Softmax cross-entropy with integer labels over ``spec.axes``; all passes start from the logits.

Row of V logits x, label l, a = label_smoothing, b = z_loss; sums over what ``mask`` keeps, but
those of the targets over all. With a scale or a cap, differences of x are `f_times` those of g(x),
and `times_slope` leads to x's tangent, and from its gradient:

    lse      = m + log(s)        m = max(x)        s = sum(exp(x - m))
    targets  = (1 - a) [j = l] + a / V
    loss     = lse - sum(targets x) + b lse^2

With p = exp(x - m - log(s)) and d = dloss:

    dx = d (p - targets + 2 b lse p), and p times lse's cotangent

m and log(s) are kept apart: rounded to one number, lse would miss log(s) where logits are large.
Nothing depends on one alone, so that the whole cotangent of lse is log(s)'.

Where the label is nearly certain, lse - x_l is nearly 0 and would cancel. So the label's own term
is left out of the sum; D = m - x_l is 0 where the label is the largest:

    lse - x_l = D + log(s)      log(s) = log1p(sum(exp(x - m), j != l) + exp(-D) - 1)

    loss = (1 - a) (lse - x_l) + a (log(s) - mean(x - m)) + b lse^2

A row without an entry, whose ``positions`` is False or of which ``mask`` keeps nothing, has loss
and gradient 0, and log(s) = -inf, by which the other passes know it. One with a label that is none
of its columns has NaN for log(s), loss and gradient. Columns of padding are not read.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.label_sums import (
    at_column,
    exponentials_but_label,
    label_sums,
    shares_exponentials,
)
from jaxnorm_kernels.xla.logits import f_times, g, times_slope
from jaxnorm_kernels.xla.reductions import row_any, row_max

_INT32_MAX = 2**31 - 1


def cross_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """The loss, and the statistics that the spec wants; each of the rows' shape."""
    loss, *stats = loss_and_statistics(operands, spec)
    return Results(loss, stats=tuple(stats) if spec.want_stats else ())


def loss_and_statistics(operands: Operands, spec: Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss, m and log(s)."""
    mask, positions = operands.mask, operands.positions
    (x,), spec = without_padding([operands.x], spec)
    x = g(x, spec)
    label, a = label_of(operands.labels, spec), spec.label_smoothing
    at_label = _columns(x.shape, spec) == label
    kept = x if mask is None else jnp.where(mask, x, -jnp.inf)
    # The maximum in the dtype of what it is of: nothing is rounded.
    m = row_max(kept, spec).astype(spec.compute_dtype)
    has_entry = None if mask is None else row_any(mask, x, spec)
    if positions is not None:
        positions = jnp.expand_dims(positions, spec.axes)
        has_entry = positions if has_entry is None else positions & has_entry
    if has_entry is not None:
        m = jnp.where(has_entry, m, 0)
    # -inf - -inf: a row of -inf is NaN.
    others, x_l, kept_l, *rest = label_sums(x, kept, m, label, at_label, spec)
    d = f_times(m - x_l, spec)
    # -1 where the label is none of what is kept.
    own = jnp.expm1(f_times(kept_l - m, spec))
    log_s = jnp.log1p(others + own)
    loss = d + log_s
    if a:
        even = log_s - f_times(rest[0] / spec.cols, spec)
        loss = a * even if a == 1 else (1 - a) * loss + a * even
    if spec.z_loss:
        loss = loss + spec.z_loss * jnp.square(f_times(m, spec) + log_s)
    loss, log_s = (jnp.where(label < 0, jnp.nan, v) for v in (loss, log_s))
    if has_entry is not None:
        loss, log_s = jnp.where(has_entry, loss, 0), jnp.where(has_entry, log_s, -jnp.inf)
    loss, m, log_s = (jnp.squeeze(v, spec.axes) for v in (loss, m, log_s))
    return loss.astype(spec.y_dtype), m, log_s


def cross_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradient of x."""
    dloss, dstats, padding = cotangents.y, cotangents.stats, spec.padding
    (x,), spec = without_padding([residuals.saved], spec)
    x, p, lse, takes_part, at_label = probabilities(residuals._replace(saved=x), spec)
    a = spec.label_smoothing
    d = jnp.expand_dims(dloss.astype(spec.compute_dtype), spec.axes)
    even = a / spec.cols if a else 0.0
    target = jnp.where(at_label, jnp.asarray(1 - a + even, p.dtype), jnp.asarray(even, p.dtype))
    slope = p - target
    if spec.z_loss:
        slope = slope + 2 * spec.z_loss * lse * p
    dx = d * slope
    if dstats:
        _, dlse = dstats
        dx = dx + jnp.expand_dims(dlse, spec.axes) * p
    dx = jnp.where(takes_part, times_slope(dx, x, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


FORMULAS: dict[Op, Formulas] = {"cross_entropy": Formulas(cross_entropy_fwd, cross_entropy_bwd)}


def without_padding(arrays: Sequence[jax.Array], spec: Spec) -> tuple[list[jax.Array], Spec]:
    """Arrays of x's shape and a spec, of classes alone."""
    if not spec.padding:
        return list(arrays), spec
    arrays = [lax.slice_in_dim(a, 0, spec.classes, axis=-1) for a in arrays]
    return arrays, dataclasses.replace(spec, cols=spec.classes, padding=0)


def probabilities(
    residuals: Residuals, spec: Spec
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """g(x), p; along rows lse, 0 without an entry; what takes part; the label's place."""
    x, mask, label = residuals.saved, residuals.mask, label_of(residuals.labels, spec)
    at_label = _columns(x.shape, spec) == label
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in residuals.stats)
    has_entry = log_s != -jnp.inf
    log_s = jnp.where(has_entry, log_s, 0)
    takes_part = has_entry if mask is None else has_entry & (mask | at_label)
    if spec.logit_softcap is not None and (spec.has_positions or mask is not None):
        # Of what takes no part, which may be NaN, tanh's derivative is to be 0.
        x = jnp.where(takes_part, x, 0)
    x = g(x, spec)

    def made_again() -> jax.Array:
        kept = has_entry if mask is None else has_entry & mask
        # Before the exponential, so that the derivative of what is not kept is 0, not NaN.
        depth = f_times(x.astype(spec.compute_dtype) - m, spec)
        return jnp.exp(jnp.where(kept, depth - log_s, -jnp.inf))

    def from_the_forward() -> jax.Array:
        kept = x if mask is None else jnp.where(mask, x, -jnp.inf)
        index = jnp.maximum(label, 0)
        at = jnp.exp(f_times(at_column(kept, index) - m, spec))
        others = exponentials_but_label(kept, m, index, spec)
        return jnp.exp(-log_s) * jnp.where(at_label, at, others)

    if shares_exponentials(spec):
        p = lax.platform_dependent(cpu=from_the_forward, default=made_again)
    else:
        p = made_again()
    return x, p, f_times(m, spec) + log_s, takes_part, at_label


def label_of(labels: jax.Array, spec: Spec) -> jax.Array:
    """The column of each row's label, along rows; -1 for one that is no column."""
    index = labels.astype(jnp.int32)
    is_column = (labels >= 0) & (index < spec.cols)
    if jnp.iinfo(labels.dtype).max > _INT32_MAX:
        is_column &= labels <= labels.dtype.type(_INT32_MAX)
    return jnp.expand_dims(jnp.where(is_column, index, -1), spec.axes)


def _columns(shape: Sequence[int], spec: Spec) -> jax.Array:
    """The column of each element, of all shards of a row."""
    column: jax.Array | None = None
    over = spec.axes_over or ((),) * len(spec.axes)
    for axis, names in zip(spec.axes, over):
        size = shape[axis]
        index = lax.broadcasted_iota(jnp.int32, shape, axis % len(shape))
        if names:
            index = index + lax.axis_index(names) * size
            size = size * lax.axis_size(names)
        column = index if column is None else column * size + index
    assert column is not None
    return column
