"""Reductions over the rows of a call: over ``spec.axes``, and over the shards of a sharded row."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.specs import Spec


def row_sum(v: jax.Array, spec: Spec) -> jax.Array:
    """The sum over the normalised axes, which stay as 1; over all shards of them."""
    total = jnp.sum(v, axis=spec.axes, keepdims=True)
    return lax.psum(total, spec.cols_over) if spec.cols_over else total


def row_sums(values: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """`row_sum` of each, in one exchange with the other shards."""
    return over_shards([jnp.sum(v, axis=spec.axes, keepdims=True) for v in values], spec)


def over_shards(totals: list[jax.Array], spec: Spec) -> list[jax.Array]:
    """Sums over a shard of each row, made those over all shards, in one exchange."""
    return list(lax.psum(jnp.stack(totals), spec.cols_over)) if spec.cols_over else totals


def fused_row_sums(values: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """The sums of each, of this shard alone, in one reduction; has no derivative.

    What makes the values is fused with it on a GPU. On a CPU it is one long sum of scalars.
    """
    axes = [axis % values[0].ndim for axis in spec.axes]
    zeros = tuple(jnp.zeros((), v.dtype) for v in values)
    totals = lax.reduce(tuple(values), zeros, lambda a, b: [*map(jnp.add, a, b)], axes)
    return [jnp.expand_dims(total, axes) for total in totals]


def row_mean(v: jax.Array, spec: Spec) -> jax.Array:
    """The mean, likewise."""
    if spec.cols_over:
        return row_sum(v, spec) / spec.cols
    return jnp.mean(v, axis=spec.axes, keepdims=True)


def sum_apart(v: jax.Array, spec: Spec) -> jax.Array:
    """Return `row_sum`, on a CPU without what follows it.

    XLA has a library compute sums there, and elementwise functions of them. Its own loops compute
    those in two thirds of the time, and write them over one of their operands.
    """
    return on_cpu(lax.optimization_barrier, row_sum(v, spec))


def mean_apart(v: jax.Array, spec: Spec) -> jax.Array:
    """Return `row_mean`, in the same way as `sum_apart`."""
    return on_cpu(lax.optimization_barrier, row_mean(v, spec))


def row_max(v: jax.Array, spec: Spec) -> jax.Array:
    """The maximum, likewise; -inf of nothing."""
    # `initial` gives rows of length 0 a maximum.
    largest = jnp.max(v, axis=spec.axes, keepdims=True, initial=-jnp.inf)
    return lax.pmax(largest, spec.cols_over) if spec.cols_over else largest


def row_any(mask: jax.Array, like: jax.Array, spec: Spec) -> jax.Array:
    """True for each row that the mask does not leave out entirely; `like` has whole rows.

    A mask that is broadcast along an axis does not vary over the mesh axes that split it, and a sum
    over several mesh axes needs to vary over all of them.
    """
    if not spec.cols_over:
        return jnp.any(mask, axis=spec.axes, keepdims=True)
    return row_sum(vary_like(mask.astype(jnp.int32), like), spec) > 0


def vary_like(a: jax.Array, like: jax.Array) -> jax.Array:
    """Cast `a` to vary over the mesh axes over which `like` does, inside `jax.shard_map`."""
    over, own = (jax.typeof(v).manual_axis_type.varying for v in (like, a))
    return lax.pcast(a, tuple(sorted(over - own)), to="varying") if over - own else a


def on_cpu[T](function: Callable[[T], T], values: T) -> T:
    """Return ``function(values)`` in code for a CPU, and `values` elsewhere."""
    return lax.platform_dependent(values, cpu=function, default=lambda values: values)
