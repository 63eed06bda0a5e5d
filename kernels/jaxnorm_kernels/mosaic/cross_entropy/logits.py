"""A loss's logits z = f g(x), with a = logits_scale and c = logit_softcap.

    g = tanh(a x / c)    f = c    dz / dx = a (1 - g^2)      with a cap
    g = x                f = a    dz / dx = a                else

Maxima and differences are those of g, and are times f as exponents, as in the plain implementation.
"""

import math

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import numerics, threads
from jaxnorm_kernels.specs import Spec

# An exponential is 0 long before. Lower, times a sum or a cotangent it would be infinite, and NaN
# times that 0: of logits that are -inf, and of float32's lowest, which masks are made of.
_FAR = -1e20


def g(x: jax.Array, spec: Spec) -> jax.Array:
    """Of what is float32 by now: elements of threads, or the label's.

    The tanh of float32 logits is right to 2 units in the last place of 1. That of 16 bits need not
    be: with it the forward reached 0.47 of a copy's bandwidth (H200).
    """
    if spec.loss.logit_softcap is None:
        return x
    times = spec.logits.logits_scale / spec.loss.logit_softcap
    if spec.x_dtype.itemsize == 2 and x.ndim:
        return threads.tanh(x, times)
    return jnp.tanh(x * jnp.float32(times))


def f_times(difference: jax.Array, spec: Spec) -> jax.Array:
    """Of z, from that of g."""
    return difference if spec.logit_factor == 1 else jnp.float32(spec.logit_factor) * difference


def finite(exponent: jax.Array) -> jax.Array:
    """As a factor of its exponential, a sum or a cotangent."""
    return jnp.maximum(exponent, _FAR)


def probability(
    depth: jax.Array, log_sum: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array, float]:
    """p, its logarithm to a base, and the natural logarithm of that; `depth` is g(x) - m.

    For a dx of 16 bits the base is 2: a multiplication, an addition and an instruction.
    """
    if spec.dx_dtype.itemsize > 2:
        log_p = f_times(depth, spec) - log_sum
        return jnp.exp(log_p), log_p, 1.0
    log2_e = math.log2(math.e)
    log_p = depth * (spec.logit_factor * log2_e) - log_sum * log2_e
    return numerics.exp2(log_p), log_p, 1 / log2_e


def times_slope(dz: jax.Array, g: jax.Array, spec: Spec) -> jax.Array:
    """The gradient of x, from that of z."""
    if spec.loss.logit_softcap is not None:
        dz = dz * ((1 - g) * (1 + g))
    return dz if spec.logits.logits_scale == 1 else jnp.float32(spec.logits.logits_scale) * dz
