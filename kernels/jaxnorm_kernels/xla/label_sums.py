"""What the forward of a cross-entropy sums along rows: x its logits, -inf for what is masked.

    others   sum(exp(x - m), j != l)

On a GPU XLA fuses one reduction with what it sums. On a CPU it gives each sum to a library, which
adds many terms side by side, and fuses a chain of arithmetic into it. A comparison is no part of
such a chain: its result is stored, in an array of x's size. So there a row becomes a matrix, if its
length has a fitting divisor. Its columns are *lanes*, and m is inf for the label's lane:

    others   sum(exp(x - m_lane)) + sum(exp(x - m), j in the label's lane, j != l)

The label's lane is gathered from each row, and only there columns are compared with the label.
Lanes are short, since gathers are slow. Their sums differ in the order of the terms alone, all of
which are at least 0.

Exponentials are two thirds of a CPU's time for the loss and its gradient. Where they are as narrow
as the logits, a forward that has a backward, and the backward, make one and the same array of them:

    e = exp(x - m), but 0 at the label      others = sum(e)      p = e / s, but exp(x_l - m) / s
In one program XLA makes it once. Of 16-bit logits it would be twice as large as they are.

With a scale or a cap x is g(x), whose differences are multiplied by f before they are exponents.

Scale and cap: the logits are z = f g(x), with a = logits_scale and c = logit_softcap.

    g = tanh(a x / c)    f = c    dz / dx = a (1 - g^2)      with a cap
    g = x                f = a    dz / dx = a                else

Maxima and differences are those of g. In f (g - m) a product is rounded; in z - m z would be, by
more than 1 where it is large, or not at all where a compiler makes one instruction of f g - m: then
the largest exponent is not 0, but as far from it as m was rounded.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.reductions import fused_row_sums, over_shards


def g(x: jax.Array, spec: Spec) -> jax.Array:
    """In the arithmetic dtype, or x itself, in its dtype."""
    if spec.loss.logit_softcap is None:
        return x
    return jnp.tanh(
        x.astype(spec.compute_dtype) * (spec.logits.logits_scale / spec.loss.logit_softcap)
    )


def f_times(difference: jax.Array, spec: Spec) -> jax.Array:
    """Of z, from that of g."""
    return difference if spec.logit_factor == 1 else spec.logit_factor * difference


def times_slope(d: jax.Array, g: jax.Array, spec: Spec) -> jax.Array:
    """D times dz / dx: a tangent of z, or a cotangent of x."""
    if spec.logits.logits_scale != 1:
        d = spec.logits.logits_scale * d
    return d if spec.loss.logit_softcap is None else d * ((1 - g) * (1 + g))


# Elements of a lane, near _LANE: fewer make the library's sums slow, more the gather. And the least
# number of lanes.
_SHORTEST, _LANE, _LONGEST, _LANES = 8, 16, 2048, 32


def label_sums(
    x: jax.Array, kept: jax.Array, m: jax.Array, label: jax.Array, at_label: jax.Array, spec: Spec
) -> list[jax.Array]:
    """Along rows: others of `kept`; x and `kept` at the label; where it is smoothed sum(x - m).

    Args:
      x: logits; `kept` is x, or -inf where a mask leaves them out. Of any dtype: each sum converts
        them for itself, or XLA on a CPU would write them out for several.
      m: the maximum of `kept`, in the arithmetic dtype, as the results.
      label: a column, or -1 for none, whose sums are any.
      at_label: where that column is.
    """
    masked, wide = kept is not x, spec.compute_dtype
    picked = [x, kept] if masked else [x]

    def even(x: jax.Array, m: jax.Array) -> list[jax.Array]:
        return [x.astype(wide) - m] if spec.loss.label_smoothing else []

    def compared() -> list[jax.Array]:
        """Values whose sums are the results."""
        terms = jnp.where(at_label, 0, jnp.exp(f_times(kept.astype(wide) - m, spec)))
        return [terms, *(jnp.where(at_label, v.astype(wide), 0) for v in picked), *even(x, m)]

    def in_one() -> list[jax.Array]:
        return fused_row_sums(compared(), spec)

    def in_parts() -> list[jax.Array]:
        index = jnp.maximum(label, 0)
        lane = lane_size(x.shape[-1]) if _is_last_and_whole(spec) else None
        if spec.has_stats and shares_exponentials(spec):
            others = jnp.sum(exponentials_but_label(kept, m, index, spec), -1, keepdims=True)
        elif lane is not None:
            others = _others(kept, m, index, lane, spec)
        else:
            return [jnp.sum(v, axis=spec.axes, keepdims=True) for v in compared()]
        return [
            others,
            *(at_column(v, index).astype(wide) for v in picked),
            # The backward makes x - m, too: without the barrier XLA would write it out for both.
            *(jnp.sum(v, -1, keepdims=True) for v in even(*lax.optimization_barrier((x, m)))),
        ]

    others, x_l, *rest = over_shards(lax.platform_dependent(cpu=in_parts, default=in_one), spec)
    return [others, x_l, *rest] if masked else [others, x_l, x_l, *rest]


def shares_exponentials(spec: Spec) -> bool:
    """Whether, on a CPU, forward and backward make one array of the exponentials of rows.

    Not where positions are left out: whatever their logits are, their derivatives are 0.
    """
    is_as_wide = spec.x_dtype == spec.compute_dtype
    return is_as_wide and _is_last_and_whole(spec) and not spec.loss.has_positions


def exponentials_but_label(x: jax.Array, m: jax.Array, label: jax.Array, spec: Spec) -> jax.Array:
    """exp(x - m), and 0 in each row's column `label`."""
    e = jnp.exp(f_times(x - m, spec))
    # Not jnp.put_along_axis, which needs numbers of rows that are known.
    rows = [lax.broadcasted_iota(jnp.int32, label.shape, axis) for axis in range(e.ndim - 1)]
    return e.at[(*rows, label)].set(0, mode="promise_in_bounds")


def at_column(x: jax.Array, column: jax.Array) -> jax.Array:
    """What each row of x has in a column."""
    return jnp.take_along_axis(x, column, -1, mode="promise_in_bounds")


def _is_last_and_whole(spec: Spec) -> bool:
    return spec.axes == (-1,) and not spec.cols_over


def _others(x: jax.Array, m: jax.Array, label: jax.Array, lane: int, spec: Spec) -> jax.Array:
    lanes = x.shape[-1] // lane
    rows = x.reshape(*x.shape[:-1], lane, lanes)
    own = lax.rem(label, jnp.int32(lanes))
    index = lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], lanes), x.ndim - 1)
    m_lane = jnp.where(index == own, jnp.inf, m)
    depth = f_times(rows.astype(m.dtype) - m_lane[..., None, :], spec)
    total = jnp.sum(jnp.exp(depth), (-2, -1))[..., None]
    part = jnp.take_along_axis(rows, own[..., None], -1, mode="promise_in_bounds")[..., 0]
    place = lax.broadcasted_iota(jnp.int32, part.shape, part.ndim - 1)
    is_label = place == lax.div(label, jnp.int32(lanes))
    terms = jnp.where(is_label, 0, jnp.exp(f_times(part.astype(m.dtype) - m, spec)))
    return total + jnp.sum(terms, -1, keepdims=True)


@functools.cache
def lane_size(cols: int) -> int | None:
    """Return the divisor of `cols` nearest to `_LANE`; None if none fits or `cols` is symbolic."""
    if not isinstance(cols, int):
        return None
    longest = min(_LONGEST, cols // _LANES)
    sizes = [k for k in range(_SHORTEST, longest + 1) if cols % k == 0]
    return min(sizes, key=lambda k: abs(math.log(k / _LANE)), default=None)
