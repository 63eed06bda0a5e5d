"""Operations in which each thread works on its own elements of a ``(4, 32 v)`` array.

The array has `warps_layout`: 4 warps of 32 threads, and v neighbouring elements per thread. One
value per thread forms a ``(4, 32)`` array. Pallas has no operations that work on the elements of
each thread separately, such as the sum of a thread's elements. The interpreter has no threads, and
reduces groups of v neighbouring elements instead.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import inline
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPS,
    of_register,
    warps_layout,
    with_registers,
)
from jaxnorm_kernels.mosaic.device.mgpu import arith, ir, utils, vector
from jaxnorm_kernels.mosaic.device.numerics import exp2

PER_THREAD = (WARPS, WARP)

# Number of elements whose reciprocals are computed from a single reciprocal instruction, which
# inverts their product (see `_reciprocals`). Per clock, an SM computes only 16 reciprocals, but 128
# multiplications.
_SHARING = 4


def per_thread(value: float) -> jax.Array:
    """Return a ``(4, 32)`` array, one element per thread, filled with `value`."""
    return plgpu.layout_cast(jnp.full(PER_THREAD, value, jnp.float32), warps_layout(1))


def thread_max(unit: jax.Array) -> jax.Array:
    """Return the maximum of each thread's elements, as a ``(4, 32)`` float32 array."""
    return _fold(unit, arith.maximumf, jnp.max)


def thread_sum(unit: jax.Array) -> jax.Array:
    """Return the sum of each thread's elements, as a ``(4, 32)`` float32 array."""
    return _fold(unit, arith.addf, jnp.sum)


def spread(value: jax.Array, v: int) -> jax.Array:
    """Make `v` copies of each thread's value: ``(4, 32)`` becomes ``(4, 32 * v)``."""
    shape = (WARPS, WARP * v)
    if v == 1:
        return value

    @inline(
        lambda value: lax.broadcast_in_dim(value, (*PER_THREAD, v), (0, 1)).reshape(shape),
        (warps_layout(1),),
        plgpu.ShapeDtypeStruct(shape, jnp.float32, warps_layout(v)),
    )
    def copy(context: Any, value: Any) -> Any:
        (register,) = value.registers.flat
        kind = ir.VectorType.get((v,), ir.F32Type.get())
        value = vector.broadcast(kind, mgpu.elements_of(register)[0])
        return of_register(value, warps_layout(v).to_mgpu(), shape)

    return copy(value)


def tanh(unit: jax.Array, times: float | jax.Array) -> jax.Array:
    """Compute ``tanh(times * unit)`` with an absolute error of at most 8 ulp of 1.

    The formula is ``1 - 2 / (1 + exp(2 * times * unit))``. `_reciprocals` multiplies several of the
    denominators, and this product must not overflow. So the argument of exp has an upper limit. The
    limit changes only results that are within 2^-28 of 1: they become 1.

    The reciprocal has an error of at most 3 ulp, including 1 ulp from the instruction. The
    exponential contributes at most a quarter ulp. The factor 2 in the formula doubles these errors.
    """
    e = exp2(jnp.minimum(unit * (2 * times * math.log2(math.e)), 29.0))
    return 1 - 2 * _reciprocals(1 + e)


def _reciprocals(unit: jax.Array) -> jax.Array:
    """Return 1 / unit elementwise, with one reciprocal instruction per `_SHARING` elements.

    The instruction computes the reciprocal of the product of these elements. Multiplications then
    give each reciprocal. For two elements a and b: 1 / a = b * (1 / (a * b)).
    """
    layout = warps_layout(unit.shape[1] // WARP)

    def inverses(elements: Sequence[Any], of_product: Any) -> list[Any]:
        if len(elements) == 1:
            return [of_product]
        half = len(elements) // 2
        halves = elements[:half], elements[half:]
        products = [functools.reduce(arith.mulf, each) for each in halves]
        return [
            inverse
            for each, other in zip(halves, products[::-1])
            for inverse in inverses(each, arith.mulf(of_product, other))
        ]

    @inline(
        lambda unit: 1 / unit,
        (layout,),
        plgpu.ShapeDtypeStruct(unit.shape, jnp.float32, layout),
    )
    def shared(context: Any, value: Any) -> Any:
        (register,) = value.registers.flat
        elements, f32 = mgpu.elements_of(register), ir.F32Type.get()
        results = []
        for first in range(0, len(elements), _SHARING):
            group = elements[first : first + _SHARING]
            product = functools.reduce(arith.mulf, group)
            inverse = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", product, result_types=f32)
            results += inverses(group, inverse)
        kind = ir.VectorType.get((len(elements),), f32)
        return with_registers(value, [vector.from_elements(kind, results)])

    return shared(unit)


def _fold(unit: jax.Array, pairwise: Callable[..., Any], of_axis: Callable[..., Any]) -> jax.Array:
    v = unit.shape[1] // WARP
    if v == 1:
        return unit

    @inline(
        lambda unit: of_axis(unit.reshape(*PER_THREAD, v), axis=2),
        (warps_layout(v),),
        plgpu.ShapeDtypeStruct(PER_THREAD, jnp.float32, warps_layout(1)),
    )
    def fold(context: Any, unit: Any) -> Any:
        (register,) = unit.registers.flat
        elements = mgpu.elements_of(register)
        while len(elements) > 1:
            elements = [pairwise(a, b) for a, b in zip(elements[::2], elements[1::2])]
        kind = ir.VectorType.get((1,), ir.F32Type.get())
        value = vector.broadcast(kind, elements[0])
        return of_register(value, warps_layout(1).to_mgpu(), PER_THREAD)

    return fold(unit)
