"""The log-probability of a label, and the entropy, over ``spec.axes``: from the logits, as a loss.

Row of logits x, label l; sums over what ``mask`` keeps. m, s and log(s) are the cross-entropy's,
whose loss is -y:

    y        = log(p_l)            p = exp(x - m - log(s))
    entropy  = log(s) - T / s      T = sum(exp(x - m) (x - m))

Neither term of the entropy is negative. With t the tangent of x, and a and b the cotangents of y
and of the entropy H:

    tangent  of y: t_l - sum(p t)               of H: -sum(p (log(p) + H) t)
    backward dx = a ([j = l] - p) - b p (log(p) + H)

A row without an entry has 0 for both, and one whose label is none of its columns NaN.
"""

import jax
import jax.numpy as jnp

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.cross_entropy import loss_and_statistics, probabilities, without_padding
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.logits import f_times, g, times_slope
from jaxnorm_kernels.xla.reductions import row_sum, row_sums


def log_prob_and_entropy_fwd(operands: Operands, spec: Spec) -> Results:
    """Both, and the statistics that the spec wants; each of the rows' shape."""
    loss, m, log_s = loss_and_statistics(operands, spec)
    (x,), spec = without_padding([operands.x], spec)
    m, log_s = (jnp.expand_dims(stat, spec.axes) for stat in (m, log_s))
    depth = f_times(g(x, spec).astype(spec.compute_dtype) - m, spec)
    e = jnp.exp(depth)
    takes_part = e > 0  # Else 0 inf, or what the mask does not keep.
    if operands.mask is not None:
        takes_part &= operands.mask
    t = row_sum(jnp.where(takes_part, e * depth, 0), spec)
    entropy = jnp.where(log_s == -jnp.inf, 0, log_s - t * jnp.exp(-log_s))
    m, log_s, entropy = (jnp.squeeze(v, spec.axes) for v in (m, log_s, entropy))
    return Results(0 - loss, entropy=entropy, stats=(m, log_s) if spec.want_stats else ())


def log_prob_and_entropy_tan(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """The tangents of both, and of the statistics where the spec wants them."""
    (x, dx), spec = without_padding([residuals.saved, tangents.x], spec)
    residuals, mask = residuals._replace(saved=x), residuals.mask
    x, p, _, has_entry, at_label = probabilities(residuals, spec)
    # Zeroed before any product: 0 * inf would poison the row.
    t = jnp.where(has_entry, times_slope(dx.astype(spec.compute_dtype), x, spec), 0)
    weighted = p * (t if mask is None else jnp.where(mask, t, 0))
    of_entropy = weighted * _above_mean(x, p, residuals, spec)
    terms = [weighted, jnp.where(at_label, t, 0), of_entropy]
    dlse, t_l, dentropy = (jnp.squeeze(v, spec.axes) for v in row_sums(terms, spec))
    dstats = (jnp.zeros_like(dlse), dlse) if spec.want_stats else ()
    return Results(t_l - dlse, entropy=-dentropy, stats=dstats)


def log_prob_and_entropy_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """The gradient of x."""
    padding = spec.padding
    (x,), spec = without_padding([residuals.saved], spec)
    residuals = residuals._replace(saved=x)
    x, p, _, has_entry, at_label = probabilities(residuals, spec)
    a, b, *dstats = (
        jnp.expand_dims(ct, spec.axes)
        for ct in (cotangents.y, cotangents.entropy, *cotangents.stats)
    )
    dx = a * (jnp.where(at_label, p.dtype.type(1), 0) - p)
    dx = dx - b * (p * _above_mean(x, p, residuals, spec))
    if dstats:
        dx = dx + dstats[1] * p
    dx = jnp.where(has_entry, times_slope(dx, x, spec), 0).astype(spec.dx_dtype)
    return Operands(jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, padding)]) if padding else dx)


def _above_mean(x: jax.Array, p: jax.Array, residuals: Residuals, spec: Spec) -> jax.Array:
    """log(p) + H, from g(x): log(p) less its mean; 0 where p is."""
    m, log_s, entropy = (
        jnp.expand_dims(stat, spec.axes) for stat in (*residuals.stats, residuals.entropy)
    )
    depth = f_times(x.astype(spec.compute_dtype) - m, spec)
    return jnp.where(p > 0, depth - log_s + entropy, 0)


FORMULAS: dict[Op, Formulas] = {
    "log_prob_and_entropy": Formulas(
        log_prob_and_entropy_fwd, log_prob_and_entropy_tan, log_prob_and_entropy_bwd
    )
}
