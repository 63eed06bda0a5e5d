"""Backward passes of two operations: `cross_entropy` and `log_prob_and_entropy`.

`cross_entropy` returns the loss. `log_prob_and_entropy` returns the log-probability of the label,
and the entropy of the row's distribution.

x is a row of V logits, j the index of a column, and l the label. [j = l] is 1 if j equals l, else
0. The forward pass saves x and two statistics: m = max(x), and log(s) with s = sum(exp(x - m)). The
probabilities are p = exp(x - m - log(s)). a is the label smoothing and b the factor of the z-loss.

If d is the cotangent of the loss:

    dx = d (p - targets + 2 b lse p)      lse = m + log(s)      targets = (1 - a) [j = l] + a / V

If d is the cotangent of the log-probability, e the cotangent of the entropy, and H the entropy:

    dx = d ([j = l] - p) - e p (log(p) + H)

With a logits scale or a softcap, the logits are f * g(x), as defined in the module `logits`. The
equations then give the gradient of f * g(x), and x - m stands for f * (g(x) - m).

An element of dx depends on the same element of x, and on the label, the statistics and the
cotangents of the row. It does not depend on other elements of x. So a block can process a part of a
row, and dx may overwrite x. If the row's position is masked, the forward pass saves log(s) = -inf,
and dx is 0. If the label is not a class, the log(s) of a cross-entropy is NaN, and so is dx. The
log(s) of a log-probability does not depend on the label. If the label is not a class, dx of a
log-probability is NaN unless d is 0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, finite, g, probability, times_slope
from jaxnorm_kernels.mosaic.cross_entropy.passes import (
    BACKWARD,
    Label,
    LossSchedule,
    is_class,
    launch_backward,
)
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.specs import Spec


def cross_entropy_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossSchedule | None = None,
) -> Operands:
    """Return the gradient of the logits x. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    numbers = [*residuals.stats, cotangents.y]
    if spec.returns_entropy:
        numbers += [residuals.entropy, cotangents.entropy]
    return launch_backward(
        spec,
        schedule or BACKWARD,
        [residuals.saved],
        residuals.labels,
        numbers,
        gradient,
        residuals.logits_scale,
    )


def gradient(
    spec: Spec,
    x: jax.Array,
    unit: Fragment,
    columns: jax.Array,
    label: Label,
    numbers: Sequence[jax.Array],
) -> jax.Array:
    """Return dx in float32 for one unit of an unmasked row; see `launch_backward`."""
    top, log_sum, d, *entropy_and_cotangent = numbers
    g_x = g(x, spec)
    p, log_p, base = probability(g_x - top, log_sum, spec)
    if entropy_and_cotangent:
        entropy, e = entropy_and_cotangent
        is_valid = jnp.logical_or(is_class(label.label, spec), d == 0)
        d = jnp.where(is_valid, d, jnp.nan)
        log_term = (e * base) * finite(log_p)
        dz, label_term = -p * ((d + e * entropy) + log_term), d
    else:
        label_term = -(1 - spec.loss.label_smoothing) * d
        factor = d
        if spec.loss.z_loss:
            factor = (1 + 2 * spec.loss.z_loss * (f_times(top, spec) + log_sum)) * d
        dz = p * factor
        if spec.loss.label_smoothing:
            dz = dz - (spec.loss.label_smoothing / spec.classes) * d

    def with_label() -> jax.Array:
        return jnp.where(columns == label.label - unit.start, dz + label_term, dz)

    # Most units do not contain the label. Compare the columns with the label only in units that do.
    dx = times_slope(lax.cond(label.is_in_unit, with_label, lambda: dz), g_x, spec)
    if not spec.loss.padding:
        return dx
    return jnp.where(columns < spec.classes - unit.start, dx, 0.0)
