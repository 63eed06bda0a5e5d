"""softmax and log_softmax over ``spec.axes``; the backward starts from the output.

Of z = scale x + bias. With m = max(z), d = dy, all sums over a row:

    softmax      y = exp(z - m) / sum(exp(z - m))       dz = y (d - sum(d y) / sum(y))
    log_softmax  y = z - m - log(sum(exp(z - m)))       dz = d - exp(y) sum(d)
    both         dx = scale dz,  dbias = sum(dz) where the bias is broadcast

softmax's Jacobian is symmetric: with t the tangent of z, that of y is y (t - sum(t y) / sum(y)).
sum(y) is 1, and not computed, unless y is rounded to 16 bits (`Spec.renormalises`).

``mask`` keeps the entries where it is True; so does ``causal`` those up to the diagonal. The row is
the softmax of what is kept, the rest is 0 (softmax) or -inf (log_softmax) with zero gradient. A row
with nothing kept is all 0 (or -inf). With a finite ``Spec.masked_logit`` the rest is that number, a
constant.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.reductions import row_any, row_max, row_sum, row_sums


def softmax_fwd(operands: Operands, spec: Spec) -> Results:
    """y in ``spec.y_dtype``; 0 for what the mask does not keep."""
    kept, shifted = _shifted(operands, spec)
    e = jnp.exp(shifted)
    total = row_sum(e, spec)
    if kept is None or not spec.drops_masked:
        return Results((e / total).astype(spec.y_dtype))
    y = jnp.where(kept, e / _nonempty(total, kept, e, spec), 0)
    return Results(y.astype(spec.y_dtype))


def softmax_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """The tangent of y, from y."""
    y, kept = residuals.saved, _kept(residuals.mask, residuals.saved.shape, spec)
    t = _masked(_tangent(y, tangents, spec), kept, spec)
    along = _jacobian(y, t, spec)
    if spec.drops_masked:
        along = _masked(along, kept, spec)
    return Results(along.astype(spec.y_dtype))


def softmax_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradients of x and, if the spec wants it, of the bias, from y."""
    y, dy = residuals.saved, cotangents.y
    kept = _kept(residuals.mask, y.shape, spec)
    d = _masked(dy, kept, spec) if spec.drops_masked else dy.astype(spec.compute_dtype)
    return _gradients(_masked(_jacobian(y, d, spec), kept, spec), spec)


def log_softmax_fwd(operands: Operands, spec: Spec) -> Results:
    """y in ``spec.y_dtype``; -inf for what the mask does not keep."""
    kept, shifted = _shifted(operands, spec)
    total = row_sum(jnp.exp(shifted), spec)
    if kept is None:
        y = shifted - jnp.log(total)
    else:
        y = jnp.where(kept, shifted - jnp.log(_nonempty(total, kept, shifted, spec)), -jnp.inf)
    return Results(y.astype(spec.y_dtype))


def log_softmax_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradients of x and, if the spec wants it, of the bias, from y."""
    y, kept = residuals.saved, _kept(residuals.mask, residuals.saved.shape, spec)
    d = _masked(cotangents.y, kept, spec)
    dz = d - jnp.exp(y.astype(spec.compute_dtype)) * row_sum(d, spec)
    return _gradients(_masked(dz, kept, spec), spec)


FORMULAS: dict[Op, Formulas] = {
    "softmax": Formulas(softmax_fwd, softmax_bwd, softmax_tan),
    "log_softmax": Formulas(log_softmax_fwd, log_softmax_bwd),
}


def _jacobian(y: jax.Array, v: jax.Array, spec: Spec) -> jax.Array:
    """Softmax's Jacobian, which is its own transpose, times v."""
    y = y.astype(spec.compute_dtype)
    if not spec.renormalises:
        return y * (v - row_sum(v * y, spec))
    total, weight = row_sums([v * y, y], spec)
    return y * (v - total / jnp.where(weight == 0, 1, weight))


def _tangent(y: jax.Array, tangents: Operands, spec: Spec) -> jax.Array:
    """That of z."""
    dx, dbias = tangents.x, tangents.logits_bias
    terms = [] if dx is None else [_scaled(dx.astype(spec.compute_dtype), spec)]
    if dbias is not None:
        terms.append(jnp.broadcast_to(dbias.astype(spec.compute_dtype), y.shape))
    return sum(terms[1:], terms[0])


def _gradients(dz: jax.Array, spec: Spec) -> Operands:
    """Of x, and of the bias, as wide as it is."""
    dbias = None
    if spec.logits_bias_dtype is not None:
        broadcast = [axis for axis, size in enumerate(spec.logits_bias_shape) if size == 1]
        dbias = jnp.sum(dz, axis=broadcast, keepdims=True).astype(spec.logits_bias_dtype)
    return Operands(_scaled(dz, spec).astype(spec.x_dtype), logits_bias=dbias)


def _scaled(z: jax.Array, spec: Spec) -> jax.Array:
    return z if spec.logits_scale == 1 else spec.logits_scale * z


def _shifted(operands: Operands, spec: Spec) -> tuple[jax.Array | None, jax.Array]:
    """Which entries take part; and z - max(z), both over these, for the rest -inf or finite.

    Finite is `Spec.masked_logit`.
    """
    x, bias = operands.x, operands.logits_bias
    kept = _kept(operands.mask, x.shape, spec)
    z = _scaled(x.astype(spec.compute_dtype), spec)
    if bias is not None:
        z = z + bias.astype(spec.compute_dtype)
    if kept is not None:
        z = jnp.where(kept, z, spec.masked_logit)
    m = row_max(z, spec)
    if kept is not None and spec.drops_masked:
        # An empty row would be -inf - -inf = NaN; a genuine row of -inf stays NaN.
        m = jnp.where(row_any(kept, z, spec), m, 0)
    return kept, z - m


def _kept(mask: jax.Array | None, shape: tuple[int, ...], spec: Spec) -> jax.Array | None:
    """Which entries take part, of a shape that broadcasts to x's; None for all."""
    if not spec.causal:
        return mask
    rank = len(shape)

    def index(axis: int, over: tuple[str, ...]) -> jax.Array:
        sizes = [1] * rank
        sizes[axis] = shape[axis]
        first = lax.axis_index(over) * shape[axis] if over else 0
        return first + lax.broadcasted_iota(jnp.int32, sizes, axis % rank)

    reached = index(-2, spec.queries_over) >= index(-1, spec.cols_over)
    return reached if mask is None else mask & reached


def _nonempty(total: jax.Array, kept: jax.Array, like: jax.Array, spec: Spec) -> jax.Array:
    """The row sums, with 1 for a row that keeps nothing; `like` has whole rows."""
    return jnp.where(row_any(kept, like, spec), total, 1)


def _masked(v: jax.Array, kept: jax.Array | None, spec: Spec) -> jax.Array:
    """v with masked entries set to 0, by a selection.

    Before any product, or 0 * inf would poison the row; and after the products with sums over the
    row, which NaN of one entry would carry to the masked ones.
    """
    v = v.astype(spec.compute_dtype)
    return v if kept is None else jnp.where(kept, v, 0)
