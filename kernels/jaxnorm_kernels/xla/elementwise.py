"""What the norms do to single elements: G, the bias, x_hat recovered; with their derivatives."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.specs import Spec


def gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """G = scale + scale_offset in the arithmetic dtype, floored where the spec says so."""
    g = scale.astype(spec.compute_dtype) + spec.norm.scale_offset
    return g if spec.scale_floor is None else _floor(g, spec.scale_floor)


def effective_bias(bias: jax.Array, spec: Spec) -> jax.Array:
    """bias in the arithmetic dtype; rounded to y's dtype where the output is saved."""
    b = bias.astype(spec.compute_dtype)
    return _rounded(b, spec.y_dtype.name) if spec.norm.saved == "output" else b


def safe_divide(z: jax.Array, g: jax.Array) -> jax.Array:
    """z / g, and 0 where g is 0 (only without a floor: in float16)."""
    zero = g == 0
    return jnp.where(zero, 0, z / jnp.where(zero, 1, g))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _floor(g: jax.Array, floor: float) -> jax.Array:
    return jnp.where(jnp.abs(g) < floor, jnp.where(g < 0, -floor, floor).astype(g.dtype), g)


@_floor.defjvp
def _floor_jvp(
    floor: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Only second derivatives come here, and below the floor y cannot carry them: NaN.

    There the cotangent of the saved y is the sum of an ordinary one and one of x_hat / floor, which
    swallows it. A loud answer, where the alternative is noise of any size.
    """
    (g,), (t,) = primals, tangents
    return _floor(g, floor), t * jnp.where(jnp.abs(g) < floor, jnp.nan, 1).astype(t.dtype)


def _straight_through[T](
    f: Callable[[jax.Array, T], jax.Array],
) -> Callable[[jax.Array, T], jax.Array]:
    """f with the derivative of the identity: a correction of representation, not of the function.

    Again for second derivatives: one-hot rows sit on the clip's bound, where they must not vanish.
    """
    wrapped = jax.custom_jvp(f, nondiff_argnums=(1,))
    wrapped.defjvp(lambda arg, primals, tangents: (f(primals[0], arg), tangents[0]))
    return wrapped


@_straight_through
def clip(v: jax.Array, bound: float | jax.Array) -> jax.Array:
    """v within its true bound: x_hat that is recovered from a rounded y may lie beyond."""
    return jnp.clip(v, -bound, bound)


def round_to(v: jax.Array, dtype: np.dtype) -> jax.Array:
    """v in `dtype`, and as rounded for those who go on from it, too, whatever they widen it to."""
    if dtype.itemsize < v.dtype.itemsize:
        v = _rounded_where_casts_are_dropped(v, dtype.name)
    return v.astype(dtype)


@_straight_through
def _rounded_where_casts_are_dropped(v: jax.Array, dtype: str) -> jax.Array:
    """XLA keeps casts on a CPU, where `_rounded` takes twice the time of a norm in float16."""
    return lax.platform_dependent(v, cpu=lambda v: v, default=lambda v: _rounded(v, dtype))


@_straight_through
def _rounded(v: jax.Array, dtype: str) -> jax.Array:
    """v rounded to the values of `dtype`, kept in its own dtype.

    Not a pair of casts: XLA may drop such a pair (`xla_allow_excess_precision`), in the forward and
    not in the backward. `reduce_precision` is never dropped, but it flushes subnormals, which are
    ordinary numbers in float16: those are rounded to multiples of its smallest one.
    """
    info, own = jnp.finfo(dtype), jnp.finfo(v.dtype)
    if info.bits >= own.bits:
        return v
    rounded = lax.reduce_precision(v, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp == own.nexp:
        return rounded
    normal, quantum = float(info.smallest_normal), float(info.smallest_subnormal)
    return jnp.where(jnp.abs(v) < normal, jnp.round(v / quantum) * quantum, rounded)
