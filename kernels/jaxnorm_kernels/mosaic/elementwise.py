"""What kernels of several kinds do to single elements: G, biases, y, exp. In float32."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.specs import Activation, Spec

# Without a floor (float16) G may be as small as it likes. Below this y has no room for x_hat G, so
# that z is 0, and 1 / G may be infinite: x_hat is taken as 0.
_NO_RECIPROCAL = 2.0**-100

# A part of a row may hold nothing but -inf. Against this maximum its exponentials are 0; against
# its own, -inf, they would be NaN. A whole row of -inf still ends as 0 / 0.
LOWEST = float(np.finfo(np.float32).min)


def gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """G = scale + scale_offset, raised to `Spec.scale_floor` where its magnitude is below that."""
    g = scale.astype(jnp.float32)
    if spec.scale_offset:
        g = g + spec.scale_offset
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
    if spec.saved == "output":
        bias = bias.astype(spec.y_dtype)
    return bias.astype(jnp.float32)


def within_limit(y: jax.Array, spec: Spec) -> jax.Array:
    """A y that is saved; see `Spec.y_limit`."""
    limit = spec.y_limit
    return y if limit is None else jnp.clip(y, -limit, limit)


def scaled(z: jax.Array, spec: Spec) -> jax.Array:
    """A softmax's scale times z; it is part of the derivative, too."""
    return z if spec.logits_scale == 1 else jnp.float32(spec.logits_scale) * z


def norm_output(
    x: jax.Array, rstd: jax.Array, mean: jax.Array | None, columns: Sequence[jax.Array], spec: Spec
) -> jax.Array:
    """y; `columns` is what `norm_columns` gives for the columns of x."""
    rest = list(columns)
    y = (x if mean is None else x - mean) * rstd
    if spec.scale_dtype is not None:
        y = y * rest.pop(0)
    if spec.bias_dtype is not None:
        y = y + rest.pop(0)
    return y


def norm_columns(params: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """G and the bias, of the scale and bias, as far as there are any."""
    rest = list(params)
    columns = []
    if spec.scale_dtype is not None:
        columns.append(gain(rest.pop(0), spec))
    if spec.bias_dtype is not None:
        columns.append(effective_bias(rest.pop(0), spec))
    return columns


def log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) for x > -1, right to a few units in the last place where x is small, too.

    1 + x is rounded to u, whose log(u) / (u - 1) is nearly that of 1 + x. In the interpreter, XLA
    may take u - 1 for x.
    """
    if is_interpreted():
        return jnp.log1p(x)
    u = 1 + x
    return jnp.where(u == 1, x, jnp.log(u) * (x / jnp.where(u == 1, 1.0, u - 1)))


def exp(is_wide: bool) -> Callable[[jax.Array], jax.Array]:
    """exp of numbers <= 0: within 2 ulp for what is wide (float32), cheaper for 16 bits.

    exp2(x log2(e)) is a multiplication and an instruction. The rounding of x log2(e) gives it a
    relative error that grows with |x|: at x = -88, where float32 ends, 2^-17. 16 bits do not show
    that; a float32 would be 60 ulp off.
    """
    return jnp.exp if is_wide else lambda x: jnp.exp2(x * math.log2(math.e))


def activated(z: jax.Array, activation: Activation | None) -> jax.Array:
    """y of z, that of `jax.nn`, in float32."""
    return z if activation is None else _ACTIVATIONS[activation](z)


def _silu(z: jax.Array) -> jax.Array:
    return z / (1 + jnp.exp(-z))


def _gelu(z: jax.Array) -> jax.Array:
    inner = np.sqrt(2 / np.pi).astype(np.float32) * (z + 0.044715 * (z * z * z))
    return 0.5 * z * (1 + jnp.tanh(inner))


_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda z: jnp.maximum(z, 0),
    "leaky_relu": lambda z: jnp.where(z >= 0, z, 0.01 * z),
    "gelu": _gelu,
    "silu": _silu,
}
