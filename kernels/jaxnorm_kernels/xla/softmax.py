"""softmax and log_softmax over ``spec.axes``, with a backward pass from the output.

Let z = scale * x + bias, m = max(z) and d = dy. If x is finite, scale * x is clipped to the finite
numbers. All sums are over a row, except for the sum in dbias:

    softmax      y = exp(z - m) / sum(exp(z - m))       dz = y (d - sum(d y) / sum(y))
    log_softmax  y = z - m - log(sum(exp(z - m)))       dz = d - exp(y) sum(d)
    both         dx = scale * dz,  dbias = sum(dz) over the axes along which the bias is broadcast

The Jacobian of softmax is symmetric: if t is the tangent of z, the tangent of y is y * (t - sum(t *
y) / sum(y)). sum(y) is computed only if y is rounded to 16 bits (`Spec.renormalises`). Otherwise,
it is taken to be 1.

An entry is masked if ``mask`` is False for it, or if ``causal`` is set and it is above the
diagonal. The result is the softmax of the row's unmasked entries. For masked entries, y is 0
(softmax) or -inf (log_softmax) and the gradient is 0, even if all entries of the row are masked. If
``SoftmaxOptions.masked_logit`` is finite, it replaces masked logits. They then count like other
logits.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.label_sums import scale_of, times
from jaxnorm_kernels.xla.reductions import (
    over_shards,
    partial_sum,
    read_again,
    row_max,
    row_sum,
    sum_apart,
)


def softmax_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the softmax y in ``spec.y_dtype``. It is 0 for masked entries."""
    unmasked, z = _logits(operands, spec)
    e = jnp.exp(z - row_max(z, spec))
    total = row_sum(e, spec)
    y = (e / total).astype(spec.y_dtype)
    if unmasked is None or not spec.drops_masked:
        return Results(y)
    return Results(_without_masked_nan(y, operands.mask, spec))


def softmax_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """Return the tangent of the softmax y, computed from y and the operands' tangents."""
    y, unmasked = residuals.saved, _unmasked(residuals.mask, residuals.saved.shape, spec)
    along = _jacobian(y, _tangent(residuals, tangents, spec), unmasked, spec)
    if spec.drops_masked:
        along = _masked(along, unmasked, spec)
    return Results(along.astype(spec.y_dtype))


def softmax_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradients of x and, if the spec requests it, of the bias.

    They are computed from the saved y = softmax(z).
    """
    y, dy = residuals.saved, cotangents.y
    unmasked = _unmasked(residuals.mask, y.shape, spec)
    dz = _jacobian(y, dy, unmasked if spec.drops_masked else None, spec)
    return _gradients(_masked(dz, unmasked, spec), residuals, spec)


def log_softmax_fwd(operands: Operands, spec: Spec) -> Results:
    """Return the log_softmax y in ``spec.y_dtype``. It is -inf for masked entries."""
    m = row_max(_logits(operands, spec)[-1], spec)
    x, m = read_again((operands.x, m))
    total = sum_apart(jnp.exp(_logits(operands._replace(x=x), spec)[-1] - m), spec)
    # On a CPU, computing z - m twice is faster than storing it.
    x, m = read_again((x, m))
    unmasked, z = _logits(operands._replace(x=x), spec)
    y = z - m - jnp.log(total)
    if unmasked is not None:
        y = jnp.where(unmasked, y, -jnp.inf)  # y may be NaN there; see `_without_masked_nan`
    return Results(y.astype(spec.y_dtype))


def log_softmax_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradients of x and, if the spec requests it, of the bias.

    They are computed from the saved y = log_softmax(z).
    """
    y, dy = residuals.saved, cotangents.y
    unmasked = _unmasked(residuals.mask, y.shape, spec)
    dy, total = read_again((dy, row_sum(_masked(dy, unmasked, spec), spec)))
    dz = _masked(dy, unmasked, spec) - jnp.exp(y.astype(spec.compute_dtype)) * total
    return _gradients(_masked(dz, unmasked, spec), residuals, spec)


FORMULAS: dict[Op, Formulas] = {
    "softmax": Formulas(softmax_fwd, softmax_bwd, softmax_tan),
    "log_softmax": Formulas(log_softmax_fwd, log_softmax_bwd),
}


def _jacobian(y: jax.Array, v: jax.Array, unmasked: jax.Array | None, spec: Spec) -> jax.Array:
    """Return the product of softmax's Jacobian (which is symmetric) and v.

    Entries of v for which `unmasked` is False count as 0. On a CPU, v is masked where it is used.
    Without the first call of `read_again`, XLA masks v before the forward pass and stores the
    masked array. This takes longer, because memory must be allocated for the array.
    """
    y, v = read_again((y, v))
    if not spec.renormalises:
        y, v = y.astype(spec.compute_dtype), _masked(v, unmasked, spec)
        return y * (v - sum_apart(v * y, spec))
    weight = partial_sum(y.astype(spec.compute_dtype), spec)
    y, v, weight = read_again((y, v, weight))
    total = partial_sum(y.astype(spec.compute_dtype) * _masked(v, unmasked, spec), spec)
    total, weight = over_shards([total, weight], spec)
    y, v, mean = read_again((y, v, total / jnp.where(weight == 0, 1, weight)))
    return y.astype(spec.compute_dtype) * (_masked(v, unmasked, spec) - mean)


def _tangent(residuals: Residuals, tangents: Operands, spec: Spec) -> jax.Array:
    """Return the tangent of the logits z = scale * x + bias."""
    y, scale = residuals.saved, scale_of(residuals.logits_scale, spec)
    dx, dbias = tangents.x, tangents.logits_bias
    terms = [] if dx is None else [times(dx.astype(spec.compute_dtype), scale)]
    if dbias is not None:
        terms.append(jnp.broadcast_to(dbias.astype(spec.compute_dtype), y.shape))
    return sum(terms[1:], terms[0])


def _gradients(dz: jax.Array, residuals: Residuals, spec: Spec) -> Operands:
    """Return the gradients of x and of the bias, given `dz`, the gradient of z = scale * x + bias.

    The gradient of the bias is summed over the axes along which the bias is broadcast.
    """
    dbias = None
    if spec.softmax.logits_bias_dtype is not None:
        broadcast = [axis for axis, size in enumerate(spec.softmax.logits_bias_shape) if size == 1]
        dbias = jnp.sum(dz, axis=broadcast, keepdims=True).astype(spec.softmax.logits_bias_dtype)
    dx = times(dz, scale_of(residuals.logits_scale, spec)).astype(spec.x_dtype)
    return Operands(dx, logits_bias=dbias)


def _logits(operands: Operands, spec: Spec) -> tuple[jax.Array | None, jax.Array]:
    """Return two arrays: a mask, and the logits z.

    The mask is True for unmasked entries. It is None if all entries are unmasked. In masked
    entries, z is `SoftmaxOptions.masked_logit`.
    """
    x, bias = operands.x, operands.logits_bias
    unmasked = _unmasked(operands.mask, x.shape, spec)
    x = x.astype(spec.compute_dtype)
    z = times(x, scale_of(operands.logits_scale, spec))
    if spec.scale_may_overflow:
        # Users may set all entries of a row to the lowest finite number to mask them. z must stay
        # finite there: if all entries were -inf, the row's softmax would be NaN. An infinite x
        # stays infinite.
        info = jnp.finfo(z.dtype)
        z = jnp.clip(z, jnp.minimum(x, info.min), jnp.maximum(x, info.max))
    if bias is not None:
        z = z + bias.astype(spec.compute_dtype)
    return unmasked, z if unmasked is None else jnp.where(unmasked, z, spec.softmax.masked_logit)


def _unmasked(mask: jax.Array | None, shape: tuple[int, ...], spec: Spec) -> jax.Array | None:
    """Return a mask that is True for unmasked entries, or None if all entries are unmasked.

    The mask broadcasts to x's shape.
    """
    if not spec.softmax.causal:
        return mask
    rank = len(shape)

    def index(axis: int, over: tuple[str, ...]) -> jax.Array:
        sizes = [1] * rank
        sizes[axis] = shape[axis]
        first = lax.axis_index(over) * shape[axis] if over else 0
        return first + lax.broadcasted_iota(jnp.int32, sizes, axis % rank)

    row = index(-2, spec.softmax.queries_over)
    if spec.softmax.queries:  # x has the rows of several matrices, one matrix after the other
        row = row % spec.softmax.queries
    reached = row >= index(-1, spec.cols_over)
    return reached if mask is None else mask & reached


def _without_masked_nan(y: jax.Array, mask: jax.Array | None, spec: Spec) -> jax.Array:
    """Set the masked entries of the softmax y to 0.

    They are 0 already, except in rows whose sum is NaN. In such a row, all of y is NaN. The sum is
    NaN if an unmasked entry is NaN. It is also NaN if all entries are masked, because the maximum m
    is then -inf, so that z - m is NaN.

    Such rows are rare. A CPU reads the first entry of each row to find out whether there are any.
    If there are none, it skips the pass over y.
    """

    def masked(y: jax.Array) -> jax.Array:
        unmasked = _unmasked(mask, y.shape, spec)
        return y if unmasked is None else jnp.where(unmasked, y, 0)

    def masked_if_nan(y: jax.Array) -> jax.Array:
        axes = [axis % y.ndim for axis in spec.axes]
        first = y[tuple(slice(1) if axis in axes else slice(None) for axis in range(y.ndim))]
        return lax.cond(jnp.any(jnp.isnan(first)), masked, lambda y: y, y)

    return lax.platform_dependent(y, cpu=masked_if_nan, default=masked)


def _masked(v: jax.Array, unmasked: jax.Array | None, spec: Spec) -> jax.Array:
    """Return v with masked entries set to 0, even if they are infinite or NaN.

    Cotangents are masked before any multiplication, because 0 * inf would make the row NaN.
    If an array is multiplied by a sum over the row, the result is masked again: if one unmasked
    element of the row is NaN, the sum is NaN, and the multiplication makes masked entries NaN, too.
    """
    v = v.astype(spec.compute_dtype)
    return v if unmasked is None else jnp.where(unmasked, v, 0)
