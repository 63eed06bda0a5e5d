"""What XLA or the hardware does to single elements with too little precision, or too slowly."""

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

# A part of a row may hold nothing but -inf. Against this maximum its exponentials are 0; against
# its own, -inf, they would be NaN. A whole row of -inf still ends as 0 / 0.
LOWEST = float(np.finfo(np.float32).min)


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


def exp2(x: jax.Array) -> jax.Array:
    """2^x in one instruction, by which what is below 2^-126 is 0; `jnp.exp2` has it in four."""
    return jnp.exp2(x) if is_interpreted() else _exp2.bind(x)


def exp_of_term(x: jax.Array, times: float = 1.0) -> jax.Array:
    """exp(times x), of numbers <= 0, in one multiplication and one instruction.

    For terms of a sum that has one of 1: of a term, the error grows as it gets small.
    """
    return exp2(x * (times * math.log2(math.e)))


_exp2 = Primitive("jaxnorm_exp2")
_exp2.def_abstract_eval(lambda x: x)


@mgpu.register_lowering_rule(_exp2, plgpu.CompilerParams().lowering_semantics)
def _lower_exp2(context: Any, x: Any) -> Any:
    return mgpu.math.exp2(x, fastmath=mgpu.arith.FastMathFlags.afn)
