"""softmax and log_softmax over ``spec.axes``; tangents and backward passes start from the output.

With m = max(x), t the tangent of x, d = dy, all sums over a row:

    softmax      y = exp(x - m) / sum(exp(x - m))
                 tangent  y (t - sum(t y))          dx = y (d - sum(d y))
    log_softmax  y = x - m - log(sum(exp(x - m)))
                 tangent  t - sum(exp(y) t)         dx = d - exp(y) sum(d)

``mask`` keeps the entries where it is True: the row is the softmax of what is kept, the rest is 0
(softmax) or -inf (log_softmax) with zero gradient. A row with nothing kept is all 0 (or -inf).
"""

import jax
import jax.numpy as jnp

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.reductions import row_any, row_max, row_sum


def softmax_fwd(x: jax.Array, mask: jax.Array | None, spec: Spec) -> jax.Array:
    shifted = _shifted(x, mask, spec)
    e = jnp.exp(shifted)
    total = row_sum(e, spec)
    y = e / total if mask is None else jnp.where(mask, e / _nonempty(total, mask, spec), 0)
    return y.astype(spec.y_dtype)


def softmax_tan(y: jax.Array, mask: jax.Array | None, dx: jax.Array, spec: Spec) -> jax.Array:
    # The Jacobian is symmetric: the tangent is what the backward makes of t.
    return _jacobian(y, mask, dx, spec).astype(spec.y_dtype)


def softmax_bwd(y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec) -> jax.Array:
    return _jacobian(y, mask, dy, spec).astype(spec.x_dtype)


def log_softmax_fwd(x: jax.Array, mask: jax.Array | None, spec: Spec) -> jax.Array:
    shifted = _shifted(x, mask, spec)
    total = row_sum(jnp.exp(shifted), spec)
    if mask is None:
        y = shifted - jnp.log(total)
    else:
        y = jnp.where(mask, shifted - jnp.log(_nonempty(total, mask, spec)), -jnp.inf)
    return y.astype(spec.y_dtype)


def log_softmax_tan(y: jax.Array, mask: jax.Array | None, dx: jax.Array, spec: Spec) -> jax.Array:
    t = _masked(dx, mask, spec)
    dy = t - row_sum(jnp.exp(y.astype(spec.compute_dtype)) * t, spec)
    return _masked(dy, mask, spec).astype(spec.y_dtype)


def log_softmax_bwd(y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec) -> jax.Array:
    y, d = y.astype(spec.compute_dtype), _masked(dy, mask, spec)
    # exp(-inf) is 0, so a masked entry gets 0 - 0 here.
    dx = d - jnp.exp(y) * row_sum(d, spec)
    return dx.astype(spec.x_dtype)


def _jacobian(y: jax.Array, mask: jax.Array | None, v: jax.Array, spec: Spec) -> jax.Array:
    """Softmax's Jacobian, which is its own transpose, times v."""
    y, v = y.astype(spec.compute_dtype), _masked(v, mask, spec)
    return y * (v - row_sum(v * y, spec))


def _shifted(x: jax.Array, mask: jax.Array | None, spec: Spec) -> jax.Array:
    """x - max(x), both over what is kept; -inf for the rest."""
    x = x.astype(spec.compute_dtype)
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    m = row_max(x, spec)
    if mask is not None:
        # An empty row would be -inf - -inf = NaN; a genuine row of -inf stays NaN.
        m = jnp.where(row_any(mask, spec), m, 0)
    return x - m


def _nonempty(total: jax.Array, mask: jax.Array, spec: Spec) -> jax.Array:
    """The row sums, with 1 for a row that keeps nothing."""
    return jnp.where(row_any(mask, spec), total, 1)


def _masked(v: jax.Array, mask: jax.Array | None, spec: Spec) -> jax.Array:
    """v with masked entries zeroed *before* any product: 0 * inf would poison the row."""
    v = v.astype(spec.compute_dtype)
    return v if mask is None else jnp.where(mask, v, 0)
