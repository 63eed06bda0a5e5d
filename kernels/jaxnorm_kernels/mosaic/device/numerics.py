"""Elementwise functions that are faster or more accurate than Mosaic's own functions."""

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

# Lower limit of the maxima m that are computed for parts of a row. If a part contains only -inf,
# exp(x - m) would be NaN for m = -inf. With this finite limit, exp(x - m) is 0. If the entire row
# is -inf, the softmax is still NaN, from 0 / 0.
LOWEST = float(np.finfo(np.float32).min)


def log1p(x: jax.Array) -> jax.Array:
    """Return log(1 + x) for x > -1, accurate to a few units in the last place even for small x.

    Let u be the rounded value of 1 + x. The result is x * log(u) / (u - 1), which is accurate
    because log(u) / (u - 1) is close to log(1 + x) / x. The interpreter uses `jnp.log1p`, because
    XLA may simplify u - 1 to x.
    """
    if is_interpreted():
        return jnp.log1p(x)
    u = 1 + x
    return jnp.where(u == 1, x, jnp.log(u) * (x / jnp.where(u == 1, 1.0, u - 1)))


def exp(is_wide: bool) -> Callable[[jax.Array], jax.Array]:
    """Return an exp function for arguments x <= 0.

    If `is_wide` is True, the function is accurate to 2 ulp of float32. Otherwise, it is a cheaper
    function, for results that the caller rounds to 16 bits. The cheaper function computes exp2(x *
    log2(e)), with a multiplication and one more instruction. The rounding of x * log2(e) causes a
    relative error that grows with |x|, up to 2^-17 at x = -88, where float32 results underflow.
    After rounding to 16 bits, this error is negligible. In float32, it would be about 60 ulp.
    """
    return jnp.exp if is_wide else lambda x: jnp.exp2(x * math.log2(math.e))


def exp2(x: jax.Array) -> jax.Array:
    """Return 2^x in one instruction, with results below 2^-126 flushed to 0.

    `jnp.exp2` takes four instructions.
    """
    return jnp.exp2(x) if is_interpreted() else _exp2.bind(x)


def exp_of_term(x: jax.Array, times: float | jax.Array = 1.0) -> jax.Array:
    """Return exp(`times` * x), in one multiplication and one more instruction.

    `times` * x must not be positive. Use this function only for the terms of a sum whose largest
    term is 1. The relative error is larger for small terms, which matter less in that sum.
    """
    return exp2(x * (times * math.log2(math.e)))


_exp2 = Primitive("jaxnorm_exp2")
_exp2.def_abstract_eval(lambda x: x)


@mgpu.register_lowering_rule(_exp2, plgpu.CompilerParams().lowering_semantics)
def _lower_exp2(context: Any, x: Any) -> Any:
    return mgpu.math.exp2(x, fastmath=mgpu.arith.FastMathFlags.afn)
