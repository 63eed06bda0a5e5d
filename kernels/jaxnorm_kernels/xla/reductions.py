"""Reductions over rows, which may be sharded, and broadcasts of parameters to rows."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.specs import Spec


def row_sum(v: jax.Array, spec: Spec) -> jax.Array:
    """Return the sum of v over the normalised axes, including all shards.

    The normalised axes have size 1 in the result.
    """
    total = partial_sum(v, spec)
    return lax.psum(total, spec.cols_over) if spec.cols_over else total


def partial_sum(v: jax.Array, spec: Spec) -> jax.Array:
    """Return the sum of v over the normalised axes. Only the columns of this device are added."""
    return jnp.sum(v, axis=spec.axes, keepdims=True)


def row_sums(values: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """Return the `row_sum` of each array.

    If the columns are sharded, a single all-reduce adds up the shards of every array.
    """
    return over_shards([partial_sum(v, spec) for v in values], spec)


def over_shards(totals: list[jax.Array], spec: Spec) -> list[jax.Array]:
    """Add up the partial sums that the shards of the columns have computed.

    `totals` are arrays of partial sums. A single all-reduce adds up all of these arrays.
    """
    return list(lax.psum(jnp.stack(totals), spec.cols_over)) if spec.cols_over else totals


def fused_row_sums(values: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """Return the sums of each array over the normalised axes, computed by a single reduction.

    If the columns are sharded, these are partial sums over the columns of this shard. JAX cannot
    differentiate the reduction.

    On a GPU, XLA fuses the computation of the values into the reduction. On a CPU, XLA compiles the
    reduction to a slow scalar loop.
    """
    axes = [axis % values[0].ndim for axis in spec.axes]
    zeros = tuple(jnp.zeros((), v.dtype) for v in values)
    totals = lax.reduce(tuple(values), zeros, lambda a, b: [*map(jnp.add, a, b)], axes)
    return [jnp.expand_dims(total, axes) for total in totals]


def row_mean(v: jax.Array, spec: Spec) -> jax.Array:
    """Return the mean of v over the normalised axes, including all shards.

    The normalised axes have size 1 in the result.
    """
    if spec.cols_over:
        return row_sum(v, spec) / spec.cols
    return jnp.mean(v, axis=spec.axes, keepdims=True)


def sum_apart(v: jax.Array, spec: Spec) -> jax.Array:
    """Return `row_sum(v)`. On a CPU, prevent XLA from fusing the sum with operations that use it.

    On a CPU, XLA calls a library for a sum, and also for elementwise operations that are fused with
    the sum. Elementwise operations are faster in loops that XLA itself generates: such a loop takes
    two thirds of the library's time, and can reuse the buffer of an operand. So elementwise
    operations should not be fused with the sum.
    """
    return on_cpu(lax.optimization_barrier, row_sum(v, spec))


def mean_apart(v: jax.Array, spec: Spec) -> jax.Array:
    """Return `row_mean(v)`.

    On a CPU, prevent XLA from fusing the mean with operations that use it; see `sum_apart`.
    """
    return on_cpu(lax.optimization_barrier, row_mean(v, spec))


def row_max(v: jax.Array, spec: Spec) -> jax.Array:
    """Return the maximum of v over the normalised axes, including all shards.

    The normalised axes have size 1 in the result. The maximum of a row without columns is -inf.

    If the columns are sharded, the derivative of the result is 0, because `lax.pmax` has none. The
    derivatives of formulas are correct without it, because the maximum cancels in each result.
    """
    # `initial` is the maximum of a row without columns.
    largest = jnp.max(v, axis=spec.axes, keepdims=True, initial=-jnp.inf)
    return lax.pmax(lax.stop_gradient(largest), spec.cols_over) if spec.cols_over else largest


def row_any(mask: jax.Array, like: jax.Array, spec: Spec) -> jax.Array:
    """Return a mask of the rows that have an unmasked entry.

    `like` is x, or an array that varies over the same mesh axes.

    Inside `jax.shard_map`, `lax.psum` over several mesh axes requires that its operand varies over
    all of them. A mask that is broadcast along a sharded axis is equal on all shards, so in JAX's
    types it does not vary. `vary_like` marks it as varying over the same axes as `like`.
    """
    if not spec.cols_over:
        return jnp.any(mask, axis=spec.axes, keepdims=True)
    return row_sum(vary_like(mask.astype(jnp.int32), like), spec) > 0


def vary_like(a: jax.Array, like: jax.Array) -> jax.Array:
    """Make `a` vary over all mesh axes over which `like` varies, inside `jax.shard_map`."""
    over, own = (jax.typeof(v).manual_axis_type.varying for v in (like, a))
    return lax.pcast(a, tuple(sorted(over - own)), to="varying") if over - own else a


def on_cpu[T](function: Callable[[T], T], values: T) -> T:
    """Return ``function(values)`` on a CPU, and `values` on other platforms."""
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)


def read_again[T](arrays: T) -> T:
    """Return `arrays`. On a CPU, prevent XLA from reusing earlier computations from them.

    Without this function, XLA computes an intermediate that two sums use, such as a 16-bit array
    converted to float32, only once, and stores it in memory. On a CPU, it is faster to load the
    arrays again and to repeat the arithmetic.
    """
    return on_cpu(lax.optimization_barrier, arrays)


def along_rows(parameter: jax.Array, like: jax.Array, spec: Spec) -> jax.Array:
    """Transpose and reshape `parameter` so that it broadcasts to the shape of `like`."""
    if _is_of_groups(parameter, like, spec):
        return jnp.repeat(parameter, spec.rows // parameter.shape[0], axis=0)
    axes, lacking = _axes_of_parameter(parameter, like, spec)
    in_order = sorted(axes)
    if axes != in_order:
        parameter = jnp.transpose(parameter, [axes.index(axis) for axis in in_order])
    return jnp.expand_dims(parameter, lacking)


def summed_like(parameter: jax.Array, v: jax.Array, spec: Spec) -> jax.Array:
    """Sum v over all elements that use the same element of `parameter`.

    The result has the parameter's shape.
    """
    if _is_of_groups(parameter, v, spec):
        return jnp.sum(v.reshape(parameter.shape[0], -1, spec.cols), axis=1)
    axes, lacking = _axes_of_parameter(parameter, v, spec)
    shared = [axis for axis, size in zip(axes, parameter.shape) if size == 1]
    total = jnp.sum(v, axis=tuple(lacking))
    remaining = sorted(axes)
    shared = [remaining.index(axis) for axis in shared]
    if shared:
        total = jnp.sum(total, axis=tuple(shared), keepdims=True)
    return (
        total
        if axes == remaining
        else jnp.transpose(total, [remaining.index(axis) for axis in axes])
    )


def _axes_of_parameter(
    parameter: jax.Array, like: jax.Array, spec: Spec
) -> tuple[list[int], list[int]]:
    """Return two lists of axes of `like`: the axes that `parameter` has, and all other axes.

    The first list is in the order of the parameter's axes. The last axes of the parameter are the
    normalised axes. If groups of rows have separate values, the parameter also has n leading axes.
    They correspond, in order, to the last n axes of `like` that are not normalised, as in numpy's
    broadcasting.
    """
    normalised = [axis % like.ndim for axis in spec.axes]
    others = [axis for axis in range(like.ndim) if axis not in normalised]
    lacks = like.ndim - parameter.ndim
    return others[lacks:] + normalised, others[:lacks]


def _is_of_groups(parameter: jax.Array, like: jax.Array, spec: Spec) -> bool:
    """Return True if `like` is a matrix whose rows form groups with separate parameters.

    `parameter` then has one row for each group of rows of `like`.
    """
    in_rows = like.ndim == parameter.ndim == 2 and spec.axes == (-1,)
    return in_rows and parameter.shape[0] not in (1, spec.rows)
