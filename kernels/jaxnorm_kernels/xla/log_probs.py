"""Log-probabilities of several labels of each row, and the row's entropy.

`cross_entropy` has the formulas for a single label. For labels l_1 to l_k of a row, they are:

    y_i      = -(m - x_{l_i}) - log(s)
    dx       = sum_i a_i [j = l_i] - sum(a) p - b p (log(p) + H)

x is a row of logits with the probabilities p, the entropy H and the columns j. [j = l_i] is 1 in
column l_i and 0 elsewhere. a_i is the cotangent of y_i, and b is the cotangent of H. m and s are
defined as in `cross_entropy`. log(s) is computed as in `cross_entropy`, but the column of the
largest logit takes the role of the label. A nearly certain label is in this column, so its
log-probability is accurate.

If a label is not a column of the row, its y_i is NaN. The gradient of the row is then NaN too,
unless the cotangent a_i is 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla import cross_entropy
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.label_sums import at_column, f_times, g, oriented, scale_of, times_slope
from jaxnorm_kernels.xla.reductions import over_shards, row_max, row_sums

_NO_COLUMN = 2**31 - 1
# Each label adds its cotangent a_i to one column of the gradient (see the module docstring). This
# is done by one of two methods: a comparison of every column with every label, or a scatter. The
# scatter is used if a row has more labels than this number and is not sharded.
_COMPARED = 32


def log_probs_and_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the log-probabilities, the entropy and, if the spec requests them, the statistics."""
    largest = _largest_column(operands, spec)
    of_one = cross_entropy.log_prob_and_entropy_fwd(
        operands._replace(labels=largest), spec.replaced(outputs=(*spec.outputs, "max", "log_sum"))
    )
    m, log_s = of_one.stats
    (x,), whole = cross_entropy.without_padding([operands.x], spec)
    scale = scale_of(operands.logits_scale, spec)
    labels = _labels(operands.candidates, whole)
    at_labels = _at(g(x, scale, spec), labels, whole).astype(spec.compute_dtype)
    # A row's scale multiplies the logits of all its labels.
    of_row = scale if isinstance(scale, float) else jnp.squeeze(scale, spec.axes)[..., None]
    has_entry = (log_s != -jnp.inf)[..., None]
    below = f_times(m[..., None] - at_labels, of_row, spec)
    y = jnp.where(labels < 0, jnp.nan, 0 - (below + log_s[..., None]))
    y = jnp.where(has_entry, y, 0).astype(spec.y_dtype)
    return of_one._replace(y=y, stats=(m, log_s) if spec.has_stats else ())


def log_probs_and_entropy_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """Return the tangents of the results and, if the spec requests them, of the statistics."""
    (x, dx), spec = cross_entropy.without_padding([residuals.saved, tangents.x], spec)
    residuals, labels = residuals._replace(saved=x), _labels(residuals.candidates, spec)
    mask, scale = residuals.mask, scale_of(residuals.logits_scale, spec)
    x, p, has_entry, _ = _probabilities(residuals, labels, spec)
    t = times_slope(dx.astype(spec.compute_dtype), x, scale, spec)
    of_classes = jnp.where(has_entry if mask is None else has_entry & mask, t, 0)
    weighted = p * of_classes
    terms = [weighted, weighted * cross_entropy.above_mean(x, p, residuals, spec)]
    dlse, dentropy = (jnp.squeeze(v, spec.axes) for v in row_sums(terms, spec))
    t_labels = _at(jnp.where(has_entry, t, 0), labels, spec)
    dy = jnp.where(labels < 0, jnp.nan, t_labels - dlse[..., None])
    dy = jnp.where(jnp.squeeze(has_entry, spec.axes)[..., None], dy, 0)
    dstats = (jnp.zeros_like(dlse), dlse) if spec.has_stats else ()
    return Results(dy, entropy=-dentropy, stats=dstats)


def log_probs_and_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradient of the logits x."""
    padding, mask = spec.loss.padding, residuals.mask
    (x,), spec = cross_entropy.without_padding([residuals.saved], spec)
    residuals, labels = residuals._replace(saved=x), _labels(residuals.candidates, spec)
    scale = scale_of(residuals.logits_scale, spec)
    x, p, _, takes_part = _probabilities(residuals, labels, spec)
    a = cotangents.y.astype(spec.compute_dtype)
    total = jnp.where(labels < 0, jnp.where(a == 0, 0, jnp.nan), a).sum(-1)
    rows = total, cotangents.entropy, *cotangents.stats[1:]
    total, b, *dlse = (jnp.expand_dims(v, spec.axes) for v in rows)
    of_classes = -total * p - b * (p * cross_entropy.above_mean(x, p, residuals, spec))
    if dlse:
        of_classes = of_classes + dlse[0] * p
    if mask is not None:
        of_classes = jnp.where(mask, of_classes, 0)
    dx = of_classes + _spread(a, labels, x.shape, spec)
    dx = jnp.where(takes_part, times_slope(dx, x, scale, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def _probabilities(
    residuals: Residuals, labels: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return g(x), the probabilities p, a mask of valid rows, and a mask of relevant elements.

    A row is valid if ``positions`` does not exclude it and it has an unmasked column. In a valid
    row, an element is relevant if it is unmasked, or if it is in the column of a label. In all
    other rows, no element is relevant. Only derivatives with respect to relevant elements may be
    nonzero.
    """
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in residuals.stats)
    has_entry = log_s != -jnp.inf
    mask, scale = residuals.mask, scale_of(residuals.logits_scale, spec)
    x, takes_part = residuals.saved, has_entry
    if mask is not None:
        # The logit of a label affects the results even if its column is masked.
        counts = jnp.ones(labels.shape, spec.compute_dtype)
        takes_part = has_entry & (mask | (_spread(counts, labels, x.shape, spec) > 0))
    if mask is not None or spec.loss.has_positions:
        # Logits that do not affect the results may be NaN, but their derivatives must be 0.
        x = jnp.where(takes_part, x, 0)
    x = g(x, scale, spec)
    depth = f_times(x.astype(spec.compute_dtype) - m, scale, spec)
    is_unmasked = has_entry if mask is None else has_entry & mask
    # Mask the argument of the exponential, so that second derivatives are 0 in masked entries and
    # not NaN.
    log_p = jnp.where(is_unmasked, depth - jnp.where(has_entry, log_s, 0), -jnp.inf)
    return x, jnp.exp(log_p), has_entry, takes_part


def _labels(candidates: jax.Array, spec: Spec) -> jax.Array:
    """Return the index of each label, or -1 if the label is not a column of x."""
    columns = cross_entropy.label_of(candidates, spec.replaced(axes=()))
    return jax.lax.stop_gradient(columns)


def _largest_column(operands: Operands, spec: Spec) -> jax.Array:
    """Return the column of each row's largest unmasked logit.

    If several columns have the largest logit, this is the first of them.
    """
    (x,), spec = cross_entropy.without_padding([operands.x], spec)
    x = oriented(x, scale_of(operands.logits_scale, spec))
    masked_x = x if operands.mask is None else jnp.where(operands.mask, x, -jnp.inf)
    is_largest = masked_x == row_max(masked_x, spec)
    columns = jnp.where(is_largest, cross_entropy.columns(x.shape, spec), _NO_COLUMN)
    first = jnp.min(columns, axis=spec.axes, initial=_NO_COLUMN)
    return lax.pmin(first, spec.cols_over) if spec.cols_over else first


def _at(v: jax.Array, labels: jax.Array, spec: Spec) -> jax.Array:
    """Return the elements of v in the columns of the labels: for each row, one element per label.

    If a label is -1, its element is arbitrary.
    """
    if spec.axes == (-1,) and not spec.cols_over:
        return at_column(v, jnp.maximum(labels, 0))
    columns = cross_entropy.columns(v.shape, spec)

    def of_one(label: jax.Array) -> jax.Array:
        is_label = columns == jnp.expand_dims(label, spec.axes)
        return jnp.sum(jnp.where(is_label, v, 0), axis=spec.axes)

    found = jax.vmap(of_one, in_axes=-1, out_axes=-1)(labels)
    return over_shards([found], spec)[0]


def _spread(a: jax.Array, labels: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """Return an array of `shape` that is 0 except in the columns of the labels.

    `a` has a value for each label. This value is put into the label's column. If several labels of
    a row are equal, their values are added up.
    """
    count = labels.shape[-1]
    is_number = isinstance(count, int)  # False in `jax.export` with a symbolic number of labels.
    is_small = is_number and count <= _COMPARED
    if not is_small and spec.axes == (-1,) and not spec.cols_over:
        rows = [lax.broadcasted_iota(jnp.int32, a.shape, axis) for axis in range(a.ndim - 1)]
        # The scatter drops an index beyond the columns. Use such an index for a label of -1.
        index = (*rows, jnp.where(labels < 0, shape[-1], labels))
        return jnp.zeros(shape, a.dtype).at[index].add(a, mode="drop")
    columns = cross_entropy.columns(shape, spec)

    def of_one(label: jax.Array, value: jax.Array) -> jax.Array:
        label, value = (jnp.expand_dims(v, spec.axes) for v in (label, value))
        return jnp.where(columns == label, value, 0)

    if not is_number:
        return jnp.sum(jax.vmap(of_one, in_axes=-1)(labels, a), axis=0)
    each = (of_one(labels[..., i], a[..., i]) for i in range(count))
    return functools.reduce(jnp.add, each, jnp.zeros(shape, a.dtype))


FORMULAS: dict[Op, Formulas] = {
    "log_probs_and_entropy": Formulas(
        log_probs_and_entropy_fwd, log_probs_and_entropy_bwd, log_probs_and_entropy_tan
    )
}
