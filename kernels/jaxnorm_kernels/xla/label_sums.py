"""Sums over rows in the forward pass of a cross-entropy, and the scale and cap of its logits.

x is a row of logits, in which masked logits are -inf. m is the maximum of x, l is the row's label,
and j is a column. The main sum is over all columns but the label's:

    others = sum(exp(x - m), j != l)

To leave out the label's term, every column is compared with the label. On a GPU, XLA fuses the
comparison and the exponential into the reduction. On a CPU, XLA calls a fast library function for
each sum. It fuses arithmetic into this call, but not comparisons, whose results it stores in an
array of x's size.

To avoid this array on a CPU, a row is reshaped to a matrix if its length has a suitable divisor.
The columns of the matrix are called *lanes*. Let m_lane be inf in the lane that contains the label,
and m in all other lanes. With m_lane in place of m, all exponentials of the label's lane are 0. A
second sum adds the terms of the label's lane, except for the label's own term:

    others = sum(exp(x - m_lane)) + sum(exp(x - m), j in the label's lane, j != l)

For the second sum, the label's lane is gathered from each row, and only its elements are compared
with the label. The divisor is chosen so that lanes are short, because the gather takes time for
each element of a lane. Both formulas add the same terms. As no term is negative, their order hardly
matters for the accuracy.

On a CPU, exponentials take two thirds of the time of the loss and its gradient. To compute them
only once, the forward pass and the backward pass use the same formula for an array e. In a program
with both passes, XLA finds the common formula, computes e once and stores it:

    e      = exp(x - m), but 0 in the label's column
    others = sum(e)
    p      = e / s, but exp(x_l - m) / s in the label's column      s = others + exp(x_l - m)

This is done only if the logits have the dtype of the arithmetic. For 16-bit logits, e would be
twice as large as x.

Let a = logits_scale. With a scale or a cap c = logit_softcap, the logits are z = f * g(x). Then
g(x) replaces x in these formulas, and differences of g(x) are multiplied by f before the
exponential:

    g = tanh(a x / c)    f = c      dz / dx = a (1 - g^2)      with a cap
    g = sign(a) x        f = |a|    dz / dx = a                without a cap

m is then the maximum of g. As f is positive, the largest g belongs to the largest logit.
Differences are computed from g and not from z, for two reasons. First, a large z may have a
rounding error of more than 1, and z - max(z) would have the same error, while f * (g - m) has a
small error. Second, the compiler may fuse f * g - max(z) into one instruction. Then max(z) would be
rounded but f * g would not, so that the largest exponent would not be 0.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.reductions import fused_row_sums, over_shards

#: The scale a of logits: a number, or an array with one number for each row.
Scale = float | jax.Array


def scale_of(operand: jax.Array | None, spec: Spec) -> Scale:
    """Return the scale of a call's logits: a static number, or an array that broadcasts to x.

    `operand` is the call's operand `logits_scale`. If it is None, the scale is the static number.
    Otherwise, the operand has one number for each row, and the result also has the normalised axes,
    with size 1.
    """
    if operand is None:
        return spec.logits.logits_scale
    return jnp.expand_dims(operand.astype(spec.compute_dtype), spec.axes)


def g(x: jax.Array, scale: Scale, spec: Spec) -> jax.Array:
    """Return the value of g at the logits x (see the module docstring).

    With a cap, it is tanh(scale * x / cap) in the arithmetic dtype. Without a cap, it is x or -x in
    the dtype of x.
    """
    if spec.loss.logit_softcap is None:
        return oriented(x, scale)
    return jnp.tanh(x.astype(spec.compute_dtype) * (scale / spec.loss.logit_softcap))


def f_times(difference: jax.Array, scale: Scale, spec: Spec) -> jax.Array:
    """Return f * `difference` (see the module docstring for f and g).

    If `difference` is a difference of two values of g(x), the result is the difference of the
    logits z = f * g(x).
    """
    cap = spec.loss.logit_softcap
    return times(difference, magnitude(scale) if cap is None else cap)


def times_slope(d: jax.Array, g: jax.Array, scale: Scale, spec: Spec) -> jax.Array:
    """Return the product of d and the derivative dz / dx. `g` is g(x); see the module docstring.

    This converts a tangent of x to a tangent of z, or a cotangent of z to a cotangent of x.
    """
    d = times(d, scale)
    return d if spec.loss.logit_softcap is None else d * ((1 - g) * (1 + g))


def oriented(x: jax.Array, scale: Scale) -> jax.Array:
    """Return sign(scale) * x, and x where the scale is 0."""
    if isinstance(scale, float):
        return -x if scale < 0 else x
    return jnp.where(scale < 0, -x, x)


def magnitude(scale: Scale) -> Scale:
    """Return |scale|, but not 0: 0 times the -inf of a masked entry would be NaN.

    A scale of 0 is replaced by the smallest normal float32, which makes all unmasked logits nearly
    0.
    """
    least = float(np.finfo(np.float32).tiny)
    return max(abs(scale), least) if isinstance(scale, float) else jnp.maximum(abs(scale), least)


def times(v: jax.Array, factor: Scale) -> jax.Array:
    """Return `factor` * v. The factor is a number, or an array with one number for each row."""
    return v if isinstance(factor, float) and factor == 1 else factor * v


# A row is reshaped to a matrix whose columns are called lanes. The preferred number of elements of
# a lane is cols ** _EXPONENT, but at least _PREFERRED. A lane has at least _SHORTEST and at most
# _LONGEST elements, and there are at least _LANES lanes. Short lanes have a disadvantage: there are
# many of them, and each has a copy of the row's maximum m. Long lanes have a different
# disadvantage: the lane of the label is gathered from each row, which is slow for a long lane. The
# optima measured on an x86 CPU with 2 cores are lanes of 16 elements for rows of 1024 and of 8192
# columns, and lanes of 32 elements for rows of 128256 columns.
_SHORTEST, _PREFERRED, _EXPONENT, _LONGEST, _LANES = 8, 16, 0.3, 2048, 32
# The terms of a lane with at most this many elements are added one by one. XLA fuses these
# additions with the arithmetic before and after them, whereas it calls a library for `jnp.sum`.
_UNROLLED = 16


def label_sums(
    x: jax.Array,
    masked_x: jax.Array,
    m: jax.Array,
    label: jax.Array,
    at_label: jax.Array,
    spec: Spec,
    scale: Scale | None = None,
) -> list[jax.Array]:
    """Return three or four arrays with one number for each row.

    * `others`, the sum of exponentials without the label's term (see the module docstring)
    * the element of `x` in the label's column
    * the element of `masked_x` in the label's column
    * only with label smoothing: sum(x - m)

    Args:
      x: logits, or g(x) if the logits are z = f * g(x), in any dtype. Each sum converts them to the
        arithmetic dtype separately. If sums shared a conversion, XLA on a CPU would store it.
      masked_x: x, with -inf in masked columns.
      m: the maximum of `masked_x`, in the arithmetic dtype. The results have this dtype too.
      label: the column of the row's label. If it is -1, the results are arbitrary.
      at_label: a mask of x's shape, True in the label's column.
      scale: the scale a of the logits. If it is None, `LogitsOptions.logits_scale` is used.
    """
    scale = spec.logits.logits_scale if scale is None else scale
    masked, wide = masked_x is not x, spec.compute_dtype
    picked = [x, masked_x] if masked else [x]

    def even(x: jax.Array, m: jax.Array) -> list[jax.Array]:
        return [x.astype(wide) - m] if spec.loss.label_smoothing else []

    def compared() -> list[jax.Array]:
        """Return the terms of each sum, as a list of arrays with the shape of x."""
        terms = jnp.where(at_label, 0, jnp.exp(f_times(masked_x.astype(wide) - m, scale, spec)))
        return [terms, *(jnp.where(at_label, v.astype(wide), 0) for v in picked), *even(x, m)]

    def in_one() -> list[jax.Array]:
        return fused_row_sums(compared(), spec)

    def in_parts() -> list[jax.Array]:
        index = jnp.maximum(label, 0)
        lane = lane_size(x.shape[-1]) if _is_last_and_whole(spec) else None
        if spec.has_stats and shares_exponentials(spec):
            others = jnp.sum(
                exponentials_but_label(masked_x, m, index, scale, spec), -1, keepdims=True
            )
        elif lane is not None:
            others = _others(masked_x, m, index, lane, scale, spec)
        else:
            return [jnp.sum(v, axis=spec.axes, keepdims=True) for v in compared()]
        return [
            others,
            *(at_column(v, index).astype(wide) for v in picked),
            # Without the barrier, XLA stores x - m and reuses it in the backward pass.
            *(jnp.sum(v, -1, keepdims=True) for v in even(*lax.optimization_barrier((x, m)))),
        ]

    others, x_l, *rest = over_shards(lax.platform_dependent(cpu=in_parts, default=in_one), spec)
    return [others, x_l, *rest] if masked else [others, x_l, x_l, *rest]


def shares_exponentials(spec: Spec) -> bool:
    """Return True if forward and backward pass share one array of exponentials on a CPU.

    A call with ``positions`` does not share the array: exponentials of excluded rows may be NaN,
    but the derivatives of these rows must be 0.
    """
    is_as_wide = spec.x_dtype == spec.compute_dtype
    return is_as_wide and _is_last_and_whole(spec) and not spec.loss.has_positions


def exponentials_but_label(
    x: jax.Array, m: jax.Array, label: jax.Array, scale: Scale, spec: Spec
) -> jax.Array:
    """Return exp(f * (x - m)), but 0 in column `label` of each row."""
    e = jnp.exp(f_times(x - m, scale, spec))
    # jnp.put_along_axis does not support a symbolic number of rows.
    rows = [lax.broadcasted_iota(jnp.int32, label.shape, axis) for axis in range(e.ndim - 1)]
    return e.at[(*rows, label)].set(0, mode="promise_in_bounds")


def at_column(x: jax.Array, column: jax.Array) -> jax.Array:
    """From each row of x, return the elements in the columns that `column` lists for this row."""
    return jnp.take_along_axis(x, column, -1, mode="promise_in_bounds")


def _is_last_and_whole(spec: Spec) -> bool:
    return spec.axes == (-1,) and not spec.cols_over


def _others(
    x: jax.Array, m: jax.Array, label: jax.Array, lane: int, scale: Scale, spec: Spec
) -> jax.Array:
    lanes = x.shape[-1] // lane
    rows = x.reshape(*x.shape[:-1], lane, lanes)
    own = lax.rem(label, jnp.int32(lanes))
    index = lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], lanes), x.ndim - 1)
    m_lane = jnp.where(index == own, jnp.inf, m)
    of_lanes = scale if isinstance(scale, float) else scale[..., None]
    depth = f_times(rows.astype(m.dtype) - m_lane[..., None, :], of_lanes, spec)
    total = jnp.sum(jnp.exp(depth), (-2, -1))[..., None]
    part = jnp.take_along_axis(rows, own[..., None], -1, mode="promise_in_bounds")[..., 0]
    place = lax.broadcasted_iota(jnp.int32, part.shape, part.ndim - 1)
    is_label = place == lax.div(label, jnp.int32(lanes))
    terms = jnp.where(is_label, 0, jnp.exp(f_times(part.astype(m.dtype) - m, scale, spec)))
    if lane > _UNROLLED:
        return total + jnp.sum(terms, -1, keepdims=True)
    return total + sum(terms[..., i : i + 1] for i in range(lane))


@functools.cache
def lane_size(cols: int) -> int | None:
    """Return the number of elements of a lane: the divisor of `cols` nearest to the preferred size.

    "Nearest" refers to a logarithmic scale. Return None if no divisor is within the limits, or if
    `cols` is symbolic.
    """
    if not isinstance(cols, int):
        return None
    longest = min(_LONGEST, cols // _LANES)
    sizes = [k for k in range(_SHORTEST, longest + 1) if cols % k == 0]
    preferred = max(_PREFERRED, cols**_EXPONENT)
    return min(sizes, key=lambda k: abs(math.log(k / preferred)), default=None)
