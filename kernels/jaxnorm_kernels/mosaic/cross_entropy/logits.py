"""Logits of a loss, z = f * g(x): a scaled and optionally capped input x.

With a = logits_scale and c = logit_softcap:

    g = tanh(a x / c)    f = c      dz / dx = a (1 - g^2)      with a softcap
    g = sign(a) x        f = |a|    dz / dx = a                without a softcap

The scale is a number, or an array with a number for each row. In the second case, functions of a
kernel take the spec of a row (see `with_scale_of_row`), whose `logits_scale` is a traced scalar.

Kernels compute maxima and differences from g. They multiply by f only in exponents and results. The
XLA implementation does the same.
"""

import math

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import numerics, threads
from jaxnorm_kernels.specs import Spec

# Lower limit of the exponents t in products such as t * exp(t) * sum. At this limit, exp(t) is 0,
# and t * sum is finite, so the product is 0. If t were -inf, the product would be NaN (0 * inf).
_FAR = -1e20
# The smallest normal float32. A GPU may replace smaller numbers by 0.
_TINY = 2.0**-126


def with_scale_of_row(spec: Spec, scale: jax.Array | None) -> Spec:
    """Return the spec for one row: a copy of `spec` with `logits_scale` set to the row's scale.

    `scale` is a traced scalar. If it is None, all rows have the same scale, and `spec` itself is
    returned. A spec with a traced scalar can be neither hashed nor compared, so it must not be
    passed to functions that cache their results.
    """
    return spec if scale is None else spec.replaced(logits_scale=scale)


def _scale(spec: Spec) -> float | jax.Array:
    return spec.logits.logits_scale


def factor(spec: Spec) -> float | jax.Array:
    """Return f, the number by which g(x) is multiplied.

    If a row's scale is 0, f is a tiny positive number: 0 times a masked logit of -inf would be NaN.
    The products with finite logits are then nearly 0.
    """
    if spec.loss.logit_softcap is not None:
        return spec.loss.logit_softcap
    scale = _scale(spec)
    return jnp.maximum(jnp.abs(scale), _TINY) if isinstance(scale, jax.Array) else scale


def _times(factor: float | jax.Array, v: jax.Array) -> jax.Array:
    is_one = not isinstance(factor, jax.Array) and factor == 1
    return v if is_one else jnp.float32(factor) * v


def g(x: jax.Array, spec: Spec) -> jax.Array:
    """Compute g, the logits before the multiplication by f, in float32.

    The logits of the loss are z = f * g(x). Without a softcap, g(x) is x, or -x if the row's scale
    is negative. With a softcap, g(x) is tanh(x * logits_scale / logit_softcap). x is an array of
    logits, or the scalar logit of the label. For float32 logits, the absolute error of tanh is at
    most 2 ulp of 1. Arrays of 16-bit logits use a faster tanh: with the accurate tanh, the forward
    pass reached only 0.47 of a copy's bandwidth (H200).
    """
    scale = _scale(spec)
    if spec.loss.logit_softcap is None:
        return x * jnp.where(scale < 0, -1.0, 1.0) if isinstance(scale, jax.Array) else x
    times = scale / spec.loss.logit_softcap
    if spec.x_dtype.itemsize == 2 and x.ndim:
        return threads.tanh(x, times)
    return jnp.tanh(x * jnp.float32(times))


def f_times(difference: jax.Array, spec: Spec) -> jax.Array:
    """Return f * `difference`, for the factor f of the logits z = f * g(x).

    If `difference` is the difference of two values of g, the result is the difference of the two
    logits z.
    """
    return _times(factor(spec), difference)


def finite(exponent: jax.Array) -> jax.Array:
    """Return `exponent`, but at least `_FAR`.

    Callers multiply the exponent t by exp(t), or by a sum that may be 0. If t were -inf, such a
    product would be NaN (0 * inf). With this limit, all products are finite.
    """
    return jnp.maximum(exponent, _FAR)


def probability(
    depth: jax.Array, log_sum: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array, float]:
    """Return the probability p, log_p and a factor. The natural logarithm of p is factor * log_p.

    `depth` is g(x) minus its maximum over the row, and `log_sum` is log(sum(exp(f * `depth`))), so
    p = exp(f * `depth` - `log_sum`). If dx has 16 bits, log_p is a logarithm to base 2. p is then
    computed faster, with a multiplication, an addition and one instruction for 2^x. The rounding
    errors of p are small compared with the rounding of dx to 16 bits. If dx has 32 bits, log_p is
    the natural logarithm, and the factor is 1.
    """
    if spec.dx_dtype.itemsize > 2:
        log_p = f_times(depth, spec) - log_sum
        return jnp.exp(log_p), log_p, 1.0
    log2_e = math.log2(math.e)
    log_p = depth * (factor(spec) * log2_e) - log_sum * log2_e
    return numerics.exp2(log_p), log_p, 1 / log2_e


def times_slope(dz: jax.Array, g: jax.Array, spec: Spec) -> jax.Array:
    """Return the gradient of x, given the gradient `dz` of the logits z = f * g(x)."""
    if spec.loss.logit_softcap is not None:
        dz = dz * ((1 - g) * (1 + g))
    return _times(_scale(spec), dz)
