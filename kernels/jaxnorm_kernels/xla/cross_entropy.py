"""Functions of logits and integer labels over ``spec.axes``; all passes start from the logits.

Cross-entropy
-------------

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

Log-probability of the label, and entropy
-----------------------------------------

Row of logits x, label l; sums over what ``mask`` keeps. m, s and log(s) are the cross-entropy's,
whose loss is -y:

    y        = log(p_l)            p = exp(x - m - log(s))
    entropy  = log(s) - T / s      T = sum(exp(x - m) (x - m))

Neither term of the entropy is negative. With a and b the cotangents of y and of the entropy H:

    dx = a ([j = l] - p) - b p (log(p) + H)

With t the tangent of x, that of y is t_l - sum(p t), and that of H -sum(p (log(p) + H) t).

A row without an entry has 0 for both, and one whose label is none of its columns NaN.
"""

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
    f_times,
    g,
    label_sums,
    shares_exponentials,
    times_slope,
)
from jaxnorm_kernels.xla.reductions import over_shards, row_any, row_max, row_sums

_INT32_MAX = 2**31 - 1


def cross_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """The loss, and the statistics that the spec wants; each of the rows' shape."""
    loss, *stats = loss_and_statistics(operands, spec)
    return Results(loss, stats=tuple(stats) if spec.has_stats else ())


def loss_and_statistics(operands: Operands, spec: Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss, m and log(s)."""
    mask, positions = operands.mask, operands.positions
    (x,), spec = without_padding([operands.x], spec)
    x = g(x, spec)
    label, a = label_of(operands.labels, spec), spec.loss.label_smoothing
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
    if spec.loss.z_loss:
        loss = loss + spec.loss.z_loss * jnp.square(f_times(m, spec) + log_s)
    loss, log_s = (jnp.where(label < 0, jnp.nan, v) for v in (loss, log_s))
    if has_entry is not None:
        loss, log_s = jnp.where(has_entry, loss, 0), jnp.where(has_entry, log_s, -jnp.inf)
    loss, m, log_s = (jnp.squeeze(v, spec.axes) for v in (loss, m, log_s))
    return loss.astype(spec.y_dtype), m, log_s


def cross_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradient of x."""
    dloss, dstats, padding = cotangents.y, cotangents.stats, spec.loss.padding
    (x,), spec = without_padding([residuals.saved], spec)
    x, p, lse, takes_part, at_label = probabilities(residuals._replace(saved=x), spec)
    a = spec.loss.label_smoothing
    d = jnp.expand_dims(dloss.astype(spec.compute_dtype), spec.axes)
    even = a / spec.cols if a else 0.0
    target = jnp.where(at_label, jnp.asarray(1 - a + even, p.dtype), jnp.asarray(even, p.dtype))
    slope = p - target
    if spec.loss.z_loss:
        slope = slope + 2 * spec.loss.z_loss * lse * p
    dx = d * slope
    if dstats:
        _, dlse = dstats
        dx = dx + jnp.expand_dims(dlse, spec.axes) * p
    dx = jnp.where(takes_part, times_slope(dx, x, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def without_padding(arrays: Sequence[jax.Array], spec: Spec) -> tuple[list[jax.Array], Spec]:
    """Arrays of x's shape and a spec, of classes alone."""
    if not spec.loss.padding:
        return list(arrays), spec
    arrays = [lax.slice_in_dim(a, 0, spec.classes, axis=-1) for a in arrays]
    return arrays, spec.replaced(cols=spec.classes, padding=0)


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
    if spec.loss.logit_softcap is not None and (spec.loss.has_positions or mask is not None):
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


#: An exponent whose exponential is 0, in float64 too.
_NO_TERM = -1e4


def log_prob_and_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """Both, and the statistics that the spec wants; each of the rows' shape."""
    loss, m, log_s = loss_and_statistics(operands, spec)
    (x,), spec = without_padding([operands.x], spec)
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in (m, log_s))
    t = _exponents(g(x, spec), m, operands, spec)
    entropy = jnp.where(log_s == -jnp.inf, 0, log_s - t * jnp.exp(-log_s))
    m, log_s, entropy = (jnp.squeeze(v, spec.axes) for v in (m, log_s, entropy))
    return Results(0 - loss, entropy=entropy, stats=(m, log_s) if spec.has_stats else ())


def _exponents(x: jax.Array, m: jax.Array, operands: Operands, spec: Spec) -> jax.Array:
    """T, from g(x) and m along rows."""
    kept = x if operands.mask is None else jnp.where(operands.mask, x, -jnp.inf)

    def depth(x: jax.Array, m: jax.Array) -> jax.Array:
        return f_times(x.astype(spec.compute_dtype) - m, spec)

    def term(e: jax.Array, depth: jax.Array) -> jax.Array:
        """Not 0 inf; by no comparison, which a CPU would write out: see `label_sums`."""
        return e * jnp.maximum(depth, _NO_TERM)

    def in_one() -> jax.Array:
        of_all = depth(kept, m)
        return jnp.sum(term(jnp.exp(of_all), of_all), axis=spec.axes, keepdims=True)

    def beside_the_backward() -> jax.Array:
        """On a CPU, which would write out x - m, because the backward makes it, too."""
        of_all = depth(*lax.optimization_barrier((kept, m)))
        if not (spec.has_stats and shares_exponentials(spec)):
            return jnp.sum(term(jnp.exp(of_all), of_all), axis=spec.axes, keepdims=True)
        column = jnp.maximum(label_of(operands.labels, spec), 0)
        others = term(exponentials_but_label(kept, m, column, spec), of_all)
        own = depth(at_column(kept, column), m)
        return jnp.sum(others, -1, keepdims=True) + term(jnp.exp(own), own)

    total = lax.platform_dependent(cpu=beside_the_backward, default=in_one)
    return over_shards([total], spec)[0]


def log_prob_and_entropy_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """The tangents of both, and of the statistics where the spec wants them."""
    (x, dx), spec = without_padding([residuals.saved, tangents.x], spec)
    residuals, mask = residuals._replace(saved=x), residuals.mask
    x, p, _, takes_part, at_label = probabilities(residuals, spec)
    # Zeroed before any product: 0 * inf would poison the row.
    t = jnp.where(takes_part, times_slope(dx.astype(spec.compute_dtype), x, spec), 0)
    weighted = p * (t if mask is None else jnp.where(mask, t, 0))
    of_entropy = weighted * _above_mean(x, p, residuals, spec)
    terms = [weighted, jnp.where(at_label, t, 0), of_entropy]
    dlse, t_l, dentropy = (jnp.squeeze(v, spec.axes) for v in row_sums(terms, spec))
    dstats = (jnp.zeros_like(dlse), dlse) if spec.has_stats else ()
    return Results(t_l - dlse, entropy=-dentropy, stats=dstats)


def log_prob_and_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradient of x."""
    padding = spec.loss.padding
    (x,), spec = without_padding([residuals.saved], spec)
    residuals = residuals._replace(saved=x)
    x, p, _, takes_part, at_label = probabilities(residuals, spec)
    a, b, *dstats = (
        jnp.expand_dims(ct, spec.axes)
        for ct in (cotangents.y, cotangents.entropy, *cotangents.stats)
    )
    dx = a * (jnp.where(at_label, p.dtype.type(1), 0) - p)
    dx = dx - b * (p * _above_mean(x, p, residuals, spec))
    if dstats:
        dx = dx + dstats[1] * p
    dx = jnp.where(takes_part, times_slope(dx, x, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def _above_mean(x: jax.Array, p: jax.Array, residuals: Residuals, spec: Spec) -> jax.Array:
    """log(p) + H, from g(x): log(p) less its mean; 0 where p is."""
    m, log_s, entropy = (
        jnp.expand_dims(stat, spec.axes) for stat in (*residuals.stats, residuals.entropy)
    )
    depth = f_times(x.astype(spec.compute_dtype) - m, spec)
    return jnp.where(p > 0, depth - log_s + entropy, 0)


FORMULAS: dict[Op, Formulas] = {
    "cross_entropy": Formulas(cross_entropy_fwd, cross_entropy_bwd),
    "log_prob_and_entropy": Formulas(
        log_prob_and_entropy_fwd, log_prob_and_entropy_bwd, log_prob_and_entropy_tan
    ),
}
