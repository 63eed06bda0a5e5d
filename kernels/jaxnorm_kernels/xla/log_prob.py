"""The log-probability of a label, and the entropy, over ``spec.axes``: from the logits, as a loss.

Row of logits x, label l; sums over what ``mask`` keeps. m, s and log(s) are the cross-entropy's,
whose loss is -y:

    y        = log(p_l)            p = exp(x - m - log(s))
    entropy  = log(s) - T / s      T = sum(exp(x - m) (x - m))

Neither term of the entropy is negative. With a and b the cotangents of y and of the entropy H:

    dx = a ([j = l] - p) - b p (log(p) + H)

With t the tangent of x, that of y is t_l - sum(p t), and that of H -sum(p (log(p) + H) t).

A row without an entry has 0 for both, and one whose label is none of its columns NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.cross_entropy import (
    label_of,
    loss_and_statistics,
    probabilities,
    without_padding,
)
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.label_sums import at_column, exponentials_but_label, shares_exponentials
from jaxnorm_kernels.xla.logits import f_times, g, times_slope
from jaxnorm_kernels.xla.reductions import over_shards, row_sums

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
    "log_prob_and_entropy": Formulas(
        log_prob_and_entropy_fwd, log_prob_and_entropy_bwd, log_prob_and_entropy_tan
    )
}
