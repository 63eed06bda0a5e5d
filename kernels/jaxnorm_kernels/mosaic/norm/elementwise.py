"""What is done to single elements of a norm: G, the bias, y. In float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.norm.activations import activation_of
from jaxnorm_kernels.specs import Spec

# Without a floor (float16) G may be as small as it likes. Below this y has no room for x_hat G, so
# that z is 0, and 1 / G may be infinite: x_hat is taken as 0.
_NO_RECIPROCAL = 2.0**-100


def gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """G = scale + scale_offset, raised to `Spec.scale_floor` where its magnitude is below that."""
    g = scale.astype(jnp.float32)
    if spec.norm.scale_offset:
        g = g + spec.norm.scale_offset
    floor = spec.scale_floor
    return g if floor is None else jnp.where(jnp.abs(g) < floor, jnp.where(g < 0, -floor, floor), g)


def reciprocal(g: jax.Array, spec: Spec) -> jax.Array:
    """1 / G."""
    if spec.scale_floor is not None:
        return 1 / g
    none = jnp.abs(g) < _NO_RECIPROCAL
    return jnp.where(none, jnp.float32(0), 1 / jnp.where(none, jnp.float32(1), g))


def effective_bias(bias: jax.Array, spec: Spec) -> jax.Array:
    """The bias; rounded to y's dtype where the output is saved."""
    if spec.norm.saved == "output":
        bias = bias.astype(spec.y_dtype)
    return bias.astype(jnp.float32)


def within_limit(y: jax.Array, spec: Spec) -> jax.Array:
    """A y that is saved; see `Spec.y_limit`."""
    limit = spec.y_limit
    return y if limit is None else jnp.clip(y, -limit, limit)


def norm_output(
    x: jax.Array, rstd: jax.Array, mean: jax.Array | None, columns: Sequence[jax.Array], spec: Spec
) -> jax.Array:
    """y; `columns` is what `norm_columns` gives for the columns of x."""
    rest = list(columns)
    y = (x if mean is None else x - mean) * rstd
    if spec.norm.scale_dtype is not None:
        y = y * rest.pop(0)
    if spec.norm.bias_dtype is not None:
        y = y + rest.pop(0)
    return y if spec.norm.activation is None else activation_of(spec)(y)[0]


def norm_columns(params: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """G and the bias, of the scale and bias, as far as there are any."""
    rest = list(params)
    columns = []
    if spec.norm.scale_dtype is not None:
        columns.append(gain(rest.pop(0), spec))
    if spec.norm.bias_dtype is not None:
        columns.append(effective_bias(rest.pop(0), spec))
    return columns
