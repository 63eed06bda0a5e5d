"""The logits of a loss, z = f g(x), with a = logits_scale and c = logit_softcap.

    g = tanh(a x / c)    f = c    dz / dx = a (1 - g^2)      with a cap
    g = x                f = a    dz / dx = a                else

Maxima and differences are computed from g, and multiplied by f in exponents, as in the XLA
implementation.
"""

import math

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import numerics, threads
from jaxnorm_kernels.specs import Spec

# The exponential of this is 0. A lower exponent, such as -inf or float32's lowest number in masks,
# could become infinite when multiplied by a sum or a cotangent, and 0 times infinity is NaN.
_FAR = -1e20


def g(x: jax.Array, spec: Spec) -> jax.Array:
    """Return g of float32 x: elements held by threads, or the label's logit as a scalar.

    With float32 logits, tanh is accurate to 2 units in the last place of 1. 16-bit logits use a
    faster tanh: with the accurate one, the forward pass reached 0.47 of a copy's bandwidth (H200).
    """
    if spec.loss.logit_softcap is None:
        return x
    times = spec.logits.logits_scale / spec.loss.logit_softcap
    if spec.x_dtype.itemsize == 2 and x.ndim:
        return threads.tanh(x, times)
    return jnp.tanh(x * jnp.float32(times))


def f_times(difference: jax.Array, spec: Spec) -> jax.Array:
    """Return the difference of two z, given the difference of their g: f times the latter."""
    return difference if spec.logit_factor == 1 else jnp.float32(spec.logit_factor) * difference


def finite(exponent: jax.Array) -> jax.Array:
    """Raise an exponent to at least `_FAR`, so that its products stay finite."""
    return jnp.maximum(exponent, _FAR)


def probability(
    depth: jax.Array, log_sum: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array, float]:
    """Return p, log_b(p) and log_e(b), where b is the base of the logarithm.

    `depth` is g(x) - m. If dx has 16 bits, b is 2: p then takes a multiplication, an addition and
    one instruction for the exponential.
    """
    if spec.dx_dtype.itemsize > 2:
        log_p = f_times(depth, spec) - log_sum
        return jnp.exp(log_p), log_p, 1.0
    log2_e = math.log2(math.e)
    log_p = depth * (spec.logit_factor * log2_e) - log_sum * log2_e
    return numerics.exp2(log_p), log_p, 1 / log2_e


def times_slope(dz: jax.Array, g: jax.Array, spec: Spec) -> jax.Array:
    """Return the gradient of x, given the gradient dz of the logits z."""
    if spec.loss.logit_softcap is not None:
        dz = dz * ((1 - g) * (1 + g))
    return dz if spec.logits.logits_scale == 1 else jnp.float32(spec.logits.logits_scale) * dz
