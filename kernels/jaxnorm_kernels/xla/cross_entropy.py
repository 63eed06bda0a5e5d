"""Cross-entropy; and a label's log-probability together with the entropy of the row.

Both are computed over ``spec.axes``.

Cross-entropy
-------------

For a row of V logits x with label l, let a = label_smoothing and b = z_loss. [j = l] is 1 in the
label's column and 0 elsewhere. Sums with targets are over all columns. All other sums are over the
unmasked columns:

    lse      = m + log(s)        m = max(x)        s = sum(exp(x - m))
    targets  = (1 - a) [j = l] + a / V
    loss     = lse - sum(targets x) + b lse^2

With p = exp(x - m - log(s)) and the cotangent d of the loss:

    dx = d (p - targets + 2 b lse p) + e p        e = the cotangent of lse

With a scale or a cap, the logits are z = f * g(x) instead of x; `label_sums` defines f and g.
Differences of logits are then computed by `f_times`, which multiplies a difference of two values of
g(x) by f. Gradients of z are converted to gradients of x by `times_slope`, which multiplies by the
derivative dz / dx.

m and log(s) are saved separately: if logits are large, rounding the sum lse = m + log(s) loses most
digits of log(s). As results depend only on this sum, the cotangent of lse is passed as the
cotangent of log(s).

If the label is nearly certain, lse - x_l is the small difference of two large numbers. To keep it
accurate, log(s) is computed as log1p(s - 1). With D = m - x_l, the label's term of s is exp(-D).
The 1 is subtracted from this term before the other terms are added. The difference is exactly 0 if
the label's logit is the largest:

    lse - x_l = D + log(s)      log(s) = log1p(sum(exp(x - m), j != l) + (exp(-D) - 1))

    loss = (1 - a) (lse - x_l) + a (log(s) - mean(x - m)) + b lse^2

A row *has no entry* if ``positions`` is False for it, or if all its columns are masked. Its loss
and gradient are 0. The forward pass stores -inf as the row's log(s). The backward and tangent
passes recognise the row by this value. For a row whose label is not one of its columns, log(s),
loss and gradient are NaN. Columns of padding are not read.

Log-probability of the label, and entropy
-----------------------------------------

For a row of logits x with label l, y is minus the cross-entropy. Sums are over unmasked columns,
and m, s and log(s) are defined as above:

    y        = log(p_l)            p = exp(x - m - log(s))
    entropy  = log(s) - T / s      T = sum(exp(x - m) (x - m))

Neither term of the entropy is negative. Let H be the entropy, a the cotangent of y, and b the
cotangent of H:

    dx = a ([j = l] - p) - b p (log(p) + H)

If t is the tangent of x, the tangent of y is t_l - sum(p t), and the tangent of H is -sum(p (log(p)
+ H) t).

Both results are 0 in a row without an entry. If the label is not one of the columns, y is NaN, and
so is dx unless a is 0. The entropy does not depend on the label: if the label is not a column,
column 0 takes its place in the computation.
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
    scale_of,
    shares_exponentials,
    times_slope,
)
from jaxnorm_kernels.xla.reductions import over_shards, row_any, row_max, row_sums

_INT32_MAX = 2**31 - 1


def cross_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the loss of each row and, if the spec requests them, the statistics of each row."""
    loss, *stats = loss_and_statistics(operands, spec)
    return Results(loss, stats=tuple(stats) if spec.has_stats else ())


def loss_and_statistics(operands: Operands, spec: Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss, m and log(s) of each row; see the module docstring."""
    mask, positions = operands.mask, operands.positions
    (x,), spec = without_padding([operands.x], spec)
    scale = scale_of(operands.logits_scale, spec)
    x = g(x, scale, spec)
    label, a = label_of(operands.labels, spec), spec.loss.label_smoothing
    is_class, label = label >= 0, jnp.maximum(label, 0)
    at_label = columns(x.shape, spec) == label
    masked_x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    # x need not be converted to the arithmetic dtype first: the maximum is exact in x's dtype.
    m = row_max(masked_x, spec).astype(spec.compute_dtype)
    has_entry = None if mask is None else row_any(mask, x, spec)
    if positions is not None:
        positions = jnp.expand_dims(positions, spec.axes)
        has_entry = positions if has_entry is None else positions & has_entry
    if has_entry is not None:
        m = jnp.where(has_entry, m, 0)
    # If all unmasked logits of a row are -inf, the loss is NaN, because m - m = -inf + inf = NaN.
    others, x_l, masked_x_l, *rest = label_sums(x, masked_x, m, label, at_label, spec, scale)
    d = f_times(m - x_l, scale, spec)
    # s is the sum of `others` and the label's term exp(z_label - m), where z are the logits. log1p
    # takes s - 1, which is computed as `others` + `own`. So `own` is the label's term minus 1. If
    # the label's column is masked, the term is 0, and `own` is -1.
    own = jnp.expm1(f_times(masked_x_l - m, scale, spec))
    log_s = jnp.log1p(others + own)
    loss = d + log_s
    if a:
        even = log_s - f_times(rest[0] / spec.cols, scale, spec)
        loss = a * even if a == 1 else (1 - a) * loss + a * even
    if spec.loss.z_loss:
        loss = loss + spec.loss.z_loss * jnp.square(f_times(m, scale, spec) + log_s)
    loss = jnp.where(is_class, loss, jnp.nan)
    if not spec.returns_entropy:
        log_s = jnp.where(is_class, log_s, jnp.nan)
    if has_entry is not None:
        loss, log_s = jnp.where(has_entry, loss, 0), jnp.where(has_entry, log_s, -jnp.inf)
    loss, m, log_s = (jnp.squeeze(v, spec.axes) for v in (loss, m, log_s))
    return loss.astype(spec.y_dtype), m, log_s


def cross_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradient of the logits x of a cross-entropy."""
    dloss, dstats, padding = cotangents.y, cotangents.stats, spec.loss.padding
    (x,), spec = without_padding([residuals.saved], spec)
    x, p, lse, takes_part, at_label = probabilities(residuals._replace(saved=x), spec)
    scale = scale_of(residuals.logits_scale, spec)
    a = spec.loss.label_smoothing
    d = jnp.expand_dims(dloss.astype(spec.compute_dtype), spec.axes)
    even = a / spec.cols if a and 0 not in x.shape else 0.0
    target = jnp.where(at_label, jnp.asarray(1 - a + even, p.dtype), jnp.asarray(even, p.dtype))
    slope = p - target
    if spec.loss.z_loss:
        slope = slope + 2 * spec.loss.z_loss * lse * p
    dx = d * slope
    if dstats:
        _, dlse = dstats
        dx = dx + jnp.expand_dims(dlse, spec.axes) * p
    dx = jnp.where(takes_part, times_slope(dx, x, scale, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def without_padding(arrays: Sequence[jax.Array], spec: Spec) -> tuple[list[jax.Array], Spec]:
    """Return `arrays` without their padding columns, and a spec for the shorter arrays.

    All arrays have the shape of x.
    """
    if not spec.loss.padding:
        return list(arrays), spec
    arrays = [lax.slice_in_dim(a, 0, spec.classes, axis=-1) for a in arrays]
    return arrays, spec.replaced(cols=spec.classes, padding=0)


def probabilities(
    residuals: Residuals, spec: Spec
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return five arrays: g(x), p, lse, and two masks.

    The first mask is True for entries that affect the results: entries that are unmasked, and
    entries in the label's column. The second mask is True in the label's column, or in column 0 if
    the label is not one of the columns. If ``positions`` is False for a row, or if all its columns
    are masked, its lse is 0.
    """
    x, mask = residuals.saved, residuals.mask
    label = jnp.maximum(label_of(residuals.labels, spec), 0)
    at_label = columns(x.shape, spec) == label
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in residuals.stats)
    has_entry = log_s != -jnp.inf
    log_s = jnp.where(has_entry, log_s, 0)
    takes_part = has_entry if mask is None else has_entry & (mask | at_label)
    if spec.loss.logit_softcap is not None and (spec.loss.has_positions or mask is not None):
        # Entries that do not affect the results may be NaN. Replace them by 0, because tanh and its
        # derivative would be NaN, too.
        x = jnp.where(takes_part, x, 0)
    scale = scale_of(residuals.logits_scale, spec)
    x = g(x, scale, spec)

    def made_again() -> jax.Array:
        is_unmasked = has_entry if mask is None else has_entry & mask
        # Mask the argument of the exponential, so that second derivatives are 0 in masked entries
        # and not NaN.
        depth = f_times(x.astype(spec.compute_dtype) - m, scale, spec)
        return jnp.exp(jnp.where(is_unmasked, depth - log_s, -jnp.inf))

    def from_the_forward() -> jax.Array:
        masked_x = x if mask is None else jnp.where(mask, x, -jnp.inf)
        at = jnp.exp(f_times(at_column(masked_x, label) - m, scale, spec))
        others = exponentials_but_label(masked_x, m, label, scale, spec)
        return jnp.exp(-log_s) * jnp.where(at_label, at, others)

    if shares_exponentials(spec):
        p = lax.platform_dependent(cpu=from_the_forward, default=made_again)
    else:
        p = made_again()
    return x, p, f_times(m, scale, spec) + log_s, takes_part, at_label


def label_of(labels: jax.Array, spec: Spec) -> jax.Array:
    """Return the index of each row's label, or -1 if the label is not a column of x."""
    index = labels.astype(jnp.int32)
    is_column = (labels >= 0) & (index < spec.cols)
    if jnp.iinfo(labels.dtype).max > _INT32_MAX:
        is_column &= labels <= labels.dtype.type(_INT32_MAX)
    return jnp.expand_dims(jnp.where(is_column, index, -1), spec.axes)


def columns(shape: Sequence[int], spec: Spec) -> jax.Array:
    """Return the column index of each element, in an array of shape `shape`.

    If the columns are sharded, the columns of all shards are numbered together.
    """
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


#: A negative number whose exponential is 0 even in float64.
_NO_TERM = -1e4


def log_prob_and_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the log-probability and the entropy of each row.

    Also return the statistics if the spec requests them.
    """
    loss, m, log_s = loss_and_statistics(operands, spec)
    (x,), spec = without_padding([operands.x], spec)
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in (m, log_s))
    x = g(x, scale_of(operands.logits_scale, spec), spec)
    t = _exponents(x, m, operands, spec)
    entropy = jnp.where(log_s == -jnp.inf, 0, log_s - t * jnp.exp(-log_s))
    m, log_s, entropy = (jnp.squeeze(v, spec.axes) for v in (m, log_s, entropy))
    return Results(0 - loss, entropy=entropy, stats=(m, log_s) if spec.has_stats else ())


def _exponents(x: jax.Array, m: jax.Array, operands: Operands, spec: Spec) -> jax.Array:
    """Return T = sum(exp(z - max(z)) * (z - max(z))) over the unmasked logits z of each row.

    The argument `x` is not the array z = f * g, but the array g. `label_sums` defines f and g. `m`
    is the maximum of g in each row.
    """
    masked_x = x if operands.mask is None else jnp.where(operands.mask, x, -jnp.inf)
    scale = scale_of(operands.logits_scale, spec)

    def depth(x: jax.Array, m: jax.Array) -> jax.Array:
        return f_times(x.astype(spec.compute_dtype) - m, scale, spec)

    def term(e: jax.Array, depth: jax.Array) -> jax.Array:
        """Return e * depth for e = exp(depth). If the depth is -inf, return 0, not NaN.

        `jnp.maximum` makes the depth finite. `jnp.where` has the same effect but is slow on a CPU,
        where XLA stores the result of the comparison in memory (see `label_sums`).
        """
        return e * jnp.maximum(depth, _NO_TERM)

    def in_one() -> jax.Array:
        of_all = depth(masked_x, m)
        return jnp.sum(term(jnp.exp(of_all), of_all), axis=spec.axes, keepdims=True)

    def beside_the_backward() -> jax.Array:
        """Return T (see `_exponents`), computed in the way that is fastest on a CPU.

        Without the barrier, XLA stores x - m in the forward pass and reuses it in the backward
        pass.
        """
        of_all = depth(*lax.optimization_barrier((masked_x, m)))
        if not (spec.has_stats and shares_exponentials(spec)):
            return jnp.sum(term(jnp.exp(of_all), of_all), axis=spec.axes, keepdims=True)
        column = jnp.maximum(label_of(operands.labels, spec), 0)
        others = term(exponentials_but_label(masked_x, m, column, scale, spec), of_all)
        own = depth(at_column(masked_x, column), m)
        return jnp.sum(others, -1, keepdims=True) + term(jnp.exp(own), own)

    total = lax.platform_dependent(cpu=beside_the_backward, default=in_one)
    return over_shards([total], spec)[0]


def log_prob_and_entropy_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """Return the tangents of both results and, if the spec requests them, of the statistics."""
    (x, dx), spec = without_padding([residuals.saved, tangents.x], spec)
    residuals, mask = residuals._replace(saved=x), residuals.mask
    x, p, _, takes_part, at_label = probabilities(residuals, spec)
    scale = scale_of(residuals.logits_scale, spec)
    # Mask the tangent before it is multiplied, because 0 * inf would be NaN, and so would the sums
    # over the row.
    t = jnp.where(takes_part, times_slope(dx.astype(spec.compute_dtype), x, scale, spec), 0)
    weighted = p * (t if mask is None else jnp.where(mask, t, 0))
    of_entropy = weighted * above_mean(x, p, residuals, spec)
    terms = [weighted, jnp.where(at_label, t, 0), of_entropy]
    dlse, t_l, dentropy = (jnp.squeeze(v, spec.axes) for v in row_sums(terms, spec))
    dstats = (jnp.zeros_like(dlse), dlse) if spec.has_stats else ()
    # The tangent of a masked row is 0, even if its label is not a class.
    is_class = label_of(residuals.labels, spec.replaced(axes=())) >= 0
    dy = jnp.where(is_class | (residuals.stats[1] == -jnp.inf), t_l - dlse, jnp.nan)
    return Results(dy, entropy=-dentropy, stats=dstats)


def log_prob_and_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradient of the logits x.

    It is computed from the cotangents of the log-probability and of the entropy.
    """
    padding = spec.loss.padding
    (x,), spec = without_padding([residuals.saved], spec)
    residuals = residuals._replace(saved=x)
    x, p, _, takes_part, at_label = probabilities(residuals, spec)
    scale = scale_of(residuals.logits_scale, spec)
    a, b, *dstats = (
        jnp.expand_dims(ct, spec.axes)
        for ct in (cotangents.y, cotangents.entropy, *cotangents.stats)
    )
    a = jnp.where((label_of(residuals.labels, spec) >= 0) | (a == 0), a, jnp.nan)
    dx = a * (jnp.where(at_label, p.dtype.type(1), 0) - p)
    dx = dx - b * (p * above_mean(x, p, residuals, spec))
    if dstats:
        dx = dx + dstats[1] * p
    dx = jnp.where(takes_part, times_slope(dx, x, scale, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def above_mean(x: jax.Array, p: jax.Array, residuals: Residuals, spec: Spec) -> jax.Array:
    """Return log(p) + H, or 0 where p is 0. H is the entropy, -sum(p * log(p)).

    The argument `x` is not the array of logits z = f * g, but the array g that `probabilities`
    returns. `label_sums` defines f and g.
    """
    m, log_s, entropy = (
        jnp.expand_dims(stat, spec.axes) for stat in (*residuals.stats, residuals.entropy)
    )
    scale = scale_of(residuals.logits_scale, spec)
    depth = f_times(x.astype(spec.compute_dtype) - m, scale, spec)
    return jnp.where(p > 0, depth - log_s + entropy, 0)


FORMULAS: dict[Op, Formulas] = {
    "cross_entropy": Formulas(cross_entropy_fwd, cross_entropy_bwd),
    "log_prob_and_entropy": Formulas(
        log_prob_and_entropy_fwd, log_prob_and_entropy_bwd, log_prob_and_entropy_tan
    ),
}
