"""Parameters against the rows that they belong to: whose axes they have, in which order."""

import jax
import jax.numpy as jnp

from jaxnorm_kernels.specs import Spec


def along_rows(parameter: jax.Array, like: jax.Array, spec: Spec) -> jax.Array:
    """`parameter` against an array like `like`."""
    if _is_of_groups(parameter, like, spec):
        return jnp.repeat(parameter, spec.rows // parameter.shape[0], axis=0)
    axes, lacking = _axes_of_parameter(parameter, like, spec)
    in_order = sorted(axes)
    if axes != in_order:
        parameter = jnp.transpose(parameter, [axes.index(axis) for axis in in_order])
    return jnp.expand_dims(parameter, lacking)


def summed_like(parameter: jax.Array, v: jax.Array, spec: Spec) -> jax.Array:
    """The sums of v over the rows that share a parameter."""
    if _is_of_groups(parameter, v, spec):
        return jnp.sum(v.reshape(parameter.shape[0], -1, spec.cols), axis=1)
    axes, lacking = _axes_of_parameter(parameter, v, spec)
    shared = [axis for axis, size in zip(axes, parameter.shape) if size == 1]
    total = jnp.sum(v, axis=tuple(lacking))
    kept = sorted(axes)
    shared = [kept.index(axis) for axis in shared]
    if shared:
        total = jnp.sum(total, axis=tuple(shared), keepdims=True)
    return total if axes == kept else jnp.transpose(total, [kept.index(axis) for axis in axes])


def _axes_of_parameter(
    parameter: jax.Array, like: jax.Array, spec: Spec
) -> tuple[list[int], list[int]]:
    """Which axes of an array like `like` a parameter has, in its order; and those it lacks.

    Its last axes are the normalised ones. Axes before those, of groups of rows, are right-aligned
    to the others, as numpy broadcasts.
    """
    normalised = [axis % like.ndim for axis in spec.axes]
    others = [axis for axis in range(like.ndim) if axis not in normalised]
    lacks = like.ndim - parameter.ndim
    return others[lacks:] + normalised, others[:lacks]


def _is_of_groups(parameter: jax.Array, like: jax.Array, spec: Spec) -> bool:
    """Whether each row of a parameter belongs to consecutive rows of a two-dimensional view."""
    in_rows = like.ndim == parameter.ndim == 2 and spec.axes == (-1,)
    return in_rows and parameter.shape[0] not in (1, spec.rows)
