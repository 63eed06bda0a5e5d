"""A loss's logits z = f g(x), with a = logits_scale and c = logit_softcap.

    g = tanh(a x / c)    f = c    dz / dx = a (1 - g^2)      with a cap
    g = x                f = a    dz / dx = a                else

Maxima and differences are those of g. In f (g - m) a product is rounded; in z - m z would be, by
more than 1 where it is large, or not at all where a compiler makes one instruction of f g - m: then
the largest exponent is not 0, but as far from it as m was rounded.
"""

import jax
import jax.numpy as jnp

from jaxnorm_kernels.specs import Spec


def g(x: jax.Array, spec: Spec) -> jax.Array:
    """In the arithmetic dtype, or x itself, in its dtype."""
    if spec.loss.logit_softcap is None:
        return x
    return jnp.tanh(
        x.astype(spec.compute_dtype) * (spec.logits.logits_scale / spec.loss.logit_softcap)
    )


def f_times(difference: jax.Array, spec: Spec) -> jax.Array:
    """Of z, from that of g."""
    return difference if spec.logit_factor == 1 else spec.logit_factor * difference


def times_slope(d: jax.Array, g: jax.Array, spec: Spec) -> jax.Array:
    """D times dz / dx: a tangent of z, or a cotangent of x."""
    if spec.logits.logits_scale != 1:
        d = spec.logits.logits_scale * d
    return d if spec.loss.logit_softcap is None else d * ((1 - g) * (1 + g))
