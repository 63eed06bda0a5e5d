"""Reductions over the rows of a call: over ``spec.axes``, and over the shards of a sharded row."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.specs import Spec


def row_sum(v: jax.Array, spec: Spec) -> jax.Array:
    total = jnp.sum(v, axis=spec.axes, keepdims=True)
    return lax.psum(total, spec.cols_over) if spec.cols_over else total


def row_mean(v: jax.Array, spec: Spec) -> jax.Array:
    if spec.cols_over:
        return row_sum(v, spec) / spec.cols
    return jnp.mean(v, axis=spec.axes, keepdims=True)


def row_max(v: jax.Array, spec: Spec) -> jax.Array:
    # `initial` gives rows of length 0 a maximum.
    largest = jnp.max(v, axis=spec.axes, keepdims=True, initial=-jnp.inf)
    return lax.pmax(largest, spec.cols_over) if spec.cols_over else largest


def row_any(mask: jax.Array, spec: Spec) -> jax.Array:
    """Whether a row of the mask keeps anything."""
    if not spec.cols_over:
        return jnp.any(mask, axis=spec.axes, keepdims=True)
    return row_sum(mask.astype(jnp.int32), spec) > 0
