"""Activations of a gate or a norm g, and their derivatives, in float32: both of one sigmoid.

    sigmoid       s(g)              s (1 - s)
    silu          g s(g)            s (1 + g - g s)
    gelu          g s(z)            s (1 + g (1 - s) z')         z = sqrt(8 / pi) (g + 0.044715 g^3)
    relu          max(g, 0)         1 for g > 0, else 0
    leaky_relu    g or 0.01 g       1 for g >= 0, else 0.01

gelu is the approximation by tanh, since (1 + tanh(v)) / 2 = s(2 v). The rounding of an exponent
gives s an error of |g| u, relative to what is as small as exp(-|g|) where that is large.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.numerics import exp2
from jaxnorm_kernels.specs import Activation, Spec

_LOG2_E = math.log2(math.e)
_GELU, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715
_LEAKY = 0.01

ValueAndSlope = tuple[jax.Array, jax.Array]


def _logistic(g: jax.Array) -> jax.Array:
    """1 / (1 + exp(-g)): a root's reciprocal, squared, is quicker than a division."""
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


#: Both of each: what a kernel does not use, its compiler leaves out.
ACTIVATIONS: dict[Activation, Callable[[jax.Array], ValueAndSlope]] = {
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "sigmoid": _sigmoid,
}


def activation_of(spec: Spec) -> Callable[[jax.Array], ValueAndSlope]:
    """That of a call which has one."""
    assert spec.norm.activation is not None
    return ACTIVATIONS[spec.norm.activation]
