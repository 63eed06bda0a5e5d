"""Elementwise functions that are more precise, or faster, than XLA's or the hardware's."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted

# A part of a row may contain only -inf, so its maximum is raised to this lower limit. Relative to
# this limit, the exponentials of such a part are 0. Relative to -inf, they would be NaN. A row that
# is -inf throughout still gives 0 / 0.
LOWEST = float(np.finfo(np.float32).min)


def log1p(x: jax.Array) -> jax.Array:
    """Return log(1 + x) for x > -1, accurate to a few units in the last place even for small x.

    1 + x is rounded to u, and log(u) / (u - 1) is close to log(1 + x) / x. The interpreter uses
    `jnp.log1p`, because XLA may simplify u - 1 to x.
    """
    if is_interpreted():
        return jnp.log1p(x)
    u = 1 + x
    return jnp.where(u == 1, x, jnp.log(u) * (x / jnp.where(u == 1, 1.0, u - 1)))


def exp(is_wide: bool) -> Callable[[jax.Array], jax.Array]:
    """Return an exp for numbers <= 0: within 2 ulp if `is_wide` (float32), or cheaper for 16 bits.

    The cheaper function, exp2(x log2(e)), takes a multiplication and one more instruction. The
    rounding of x log2(e) causes a relative error that grows with |x|: at x = -88, where float32
    ends, 2^-17. This error vanishes in the rounding to 16 bits; a float32 result would be 60 ulp
    off.
    """
    return jnp.exp if is_wide else lambda x: jnp.exp2(x * math.log2(math.e))


def exp2(x: jax.Array) -> jax.Array:
    """Return 2^x in one instruction that flushes results below 2^-126 to 0 (`jnp.exp2`: four)."""
    return jnp.exp2(x) if is_interpreted() else _exp2.bind(x)


def exp_of_term(x: jax.Array, times: float = 1.0) -> jax.Array:
    """Return exp(times x) for numbers <= 0, in one multiplication and one instruction.

    Use it only for terms of a sum that contains a term of 1: the relative error of a term grows as
    the term gets small.
    """
    return exp2(x * (times * math.log2(math.e)))


_exp2 = Primitive("jaxnorm_exp2")
_exp2.def_abstract_eval(lambda x: x)


@mgpu.register_lowering_rule(_exp2, plgpu.CompilerParams().lowering_semantics)
def _lower_exp2(context: Any, x: Any) -> Any:
    return mgpu.math.exp2(x, fastmath=mgpu.arith.FastMathFlags.afn)
