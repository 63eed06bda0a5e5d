"""What a thread does with its own vector of a ``(4, 32 v)`` array in `warps_layout`.

A value for each thread is a ``(4, 32)`` array. Pallas knows no such reductions; the interpreter,
which has no threads, takes v neighbouring elements for those of one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPS, warps_layout
from jaxnorm_kernels.mosaic.device.mgpu import arith, ir, vector

OF_THREADS = (WARPS, WARP)


def of_threads(value: float) -> jax.Array:
    """`value` in each thread."""
    return plgpu.layout_cast(jnp.full(OF_THREADS, value, jnp.float32), warps_layout(1))


def thread_max(unit: jax.Array) -> jax.Array:
    """The largest of each thread's elements, in float32."""
    return _fold(unit, arith.maximumf, jnp.max)


def thread_sum(unit: jax.Array) -> jax.Array:
    """The sum of each thread's elements, in float32."""
    return _fold(unit, arith.addf, jnp.sum)


def spread(value: jax.Array, v: int) -> jax.Array:
    """A value of each thread, for each of its v elements."""
    shape = (WARPS, WARP * v)
    if v == 1:
        return value
    if is_interpreted():
        return lax.broadcast_in_dim(value, (*OF_THREADS, v), (0, 1)).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(warps_layout(1),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, warps_layout(v)),
    )
    def copy(context: Any, value: Any) -> Any:
        del context
        (register,) = value.registers.flat
        kind = ir.VectorType.get((v,), ir.F32Type.get())
        value = vector.broadcast(kind, mgpu.elements_of(register)[0])
        return mgpu.of_register(value, warps_layout(v).to_mgpu(), shape)

    return copy(value)


def exp_of_term(unit: jax.Array, times: float = 1.0) -> jax.Array:
    """exp(times unit), of numbers <= 0, in one multiplication and one instruction.

    Below 2^-126 it is 0.

    For terms of a sum that has one of 1: of a term, the error grows as it gets small.
    """
    scaled = unit * (times * math.log2(math.e))
    if is_interpreted():
        return jnp.exp2(scaled)
    layout = warps_layout(unit.shape[1] // WARP)

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(unit.shape, jnp.float32, layout)
    )
    def exp2(context: Any, value: Any) -> Any:
        del context
        return value.exp2(approx=True)

    return exp2(scaled)


def _fold(unit: jax.Array, pairwise: Callable[..., Any], of_axis: Callable[..., Any]) -> jax.Array:
    v = unit.shape[1] // WARP
    if v == 1:
        return unit
    if is_interpreted():
        return of_axis(unit.reshape(*OF_THREADS, v), axis=2)

    @plgpu.inline_mgpu(
        arg_types=(warps_layout(v),),
        return_type=plgpu.ShapeDtypeStruct(OF_THREADS, jnp.float32, warps_layout(1)),
    )
    def fold(context: Any, unit: Any) -> Any:
        del context
        (register,) = unit.registers.flat
        elements = mgpu.elements_of(register)
        while len(elements) > 1:
            elements = [pairwise(a, b) for a, b in zip(elements[::2], elements[1::2])]
        kind = ir.VectorType.get((1,), ir.F32Type.get())
        value = vector.broadcast(kind, elements[0])
        return mgpu.of_register(value, warps_layout(1).to_mgpu(), OF_THREADS)

    return fold(unit)
