"""Elementwise computations of norms, in float32.

They apply the scale and the bias, compute the output, and compute activations and their
derivatives.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.numerics import exp2
from jaxnorm_kernels.specs import Activation, Spec

# -------------------------------------------------------------------------------------------------
# Activations and their derivatives, in float32. The argument g is a gate or a norm's output. An
# activation and its derivative share the sigmoid s.
#
#     sigmoid       s(g)              s (1 - s)
#     silu          g s(g)            s (1 + g - g s)
#     gelu          g s(z)            s (1 + g (1 - s) z')    z = sqrt(8 / pi) (g + 0.044715 g^3)
#     relu          max(g, 0)         1 for g > 0, else 0
#     leaky_relu    max(g, 0.01 g)    1 for g >= 0, else 0.01
#
# z' is the derivative of z. gelu is the tanh approximation; it can be written with the sigmoid
# because (1 + tanh(v)) / 2 = s(2 v). The exponent of s is rounded, which causes a relative error of
# |g| * 2^-24 in s. This error is large only for very negative g, where s itself is about exp(g).


_LOG2_E = math.log2(math.e)
_GELU, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715
_LEAKY = 0.01

ValueAndSlope = tuple[jax.Array, jax.Array]


def _logistic(g: jax.Array) -> jax.Array:
    """Return 1 / (1 + exp(-g)), computed as the square of a reciprocal square root.

    This is faster than a division.
    """
    return jnp.square(lax.rsqrt(1 + exp2(g * -_LOG2_E)))


def _sigmoid(g: jax.Array) -> ValueAndSlope:
    s = _logistic(g)
    return s, s * (1 - s)


def _silu(g: jax.Array) -> ValueAndSlope:
    s = _logistic(g)
    a = g * s
    return a, s + s * (g - a)


def _gelu(g: jax.Array) -> ValueAndSlope:
    square = g * g
    s = _logistic(g * (_GELU + _GELU * _GELU_CUBE * square))
    a = g * s
    return a, s + a * (1 - s) * (_GELU + 3 * _GELU * _GELU_CUBE * square)


def _relu(g: jax.Array) -> ValueAndSlope:
    return jnp.maximum(g, 0), jnp.where(g > 0, jnp.float32(1), jnp.float32(0))


def _leaky_relu(g: jax.Array) -> ValueAndSlope:
    slope = jnp.where(g >= 0, jnp.float32(1), jnp.float32(_LEAKY))
    return g * slope, slope


#: Maps the name of an activation to a function that returns the activation's value and its
#: derivative. If a kernel uses only one of the two, the compiler removes the other.
ACTIVATIONS: dict[Activation, Callable[[jax.Array], ValueAndSlope]] = {
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "sigmoid": _sigmoid,
}


def activation_of(spec: Spec) -> Callable[[jax.Array], ValueAndSlope]:
    """Return the activation function of a call. The call must have an activation."""
    assert spec.norm.activation is not None
    return ACTIVATIONS[spec.norm.activation]


# Minimum |G| for which 1 / G is computed; G = scale + scale_offset. If |G| is smaller, y = xh * G
# has underflowed to 0, and 1 / G may be infinite. The normalised input xh is then taken to be 0.
# This occurs only in float16. In other dtypes, |G| is at least `Spec.scale_floor`, which is greater
# than this number.
_NO_RECIPROCAL = 2.0**-100


def gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """Return G = scale + scale_offset.

    Where |G| is less than `Spec.scale_floor`, G is replaced by this limit, with the sign of G.
    """
    g = scale.astype(jnp.float32)
    if spec.norm.scale_offset:
        g = g + spec.norm.scale_offset
    floor = spec.scale_floor
    return g if floor is None else jnp.where(jnp.abs(g) < floor, jnp.where(g < 0, -floor, floor), g)


def reciprocal(g: jax.Array, spec: Spec) -> jax.Array:
    """Return 1 / g, or 0 where g is so small that xh cannot be recovered from y = xh * g.

    `g` is the result of `gain`, and xh is the normalised input.
    """
    if spec.scale_floor is not None:
        return 1 / g
    none = jnp.abs(g) < _NO_RECIPROCAL
    return jnp.where(none, jnp.float32(0), 1 / jnp.where(none, jnp.float32(1), g))


def effective_bias(bias: jax.Array, spec: Spec) -> jax.Array:
    """Return the bias in float32. If y is saved, the bias is first rounded to y's dtype."""
    if spec.norm.saved == "output":
        bias = bias.astype(spec.y_dtype)
    return bias.astype(jnp.float32)


def within_limit(y: jax.Array, spec: Spec) -> jax.Array:
    """Clip a saved y to finite numbers; see `Spec.y_limit`."""
    limit = spec.y_limit
    return y if limit is None else jnp.clip(y, -limit, limit)


def norm_output(
    x: jax.Array, rstd: jax.Array, mean: jax.Array | None, columns: Sequence[jax.Array], spec: Spec
) -> jax.Array:
    """Return the norm's output y, after the activation if there is one.

    `columns` are the results of `norm_columns` for the columns of x.
    """
    rest = list(columns)
    y = (x if mean is None else x - mean) * rstd
    if spec.norm.scale_dtype is not None:
        y = y * rest.pop(0)
    if spec.norm.bias_dtype is not None:
        y = y + rest.pop(0)
    return y if spec.norm.activation is None else activation_of(spec)(y)[0]


def norm_columns(params: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """Return a list with G and the bias, for `norm_output`. Absent parameters are left out."""
    rest = list(params)
    columns = []
    if spec.norm.scale_dtype is not None:
        columns.append(gain(rest.pop(0), spec))
    if spec.norm.bias_dtype is not None:
        columns.append(effective_bias(rest.pop(0), spec))
    return columns
