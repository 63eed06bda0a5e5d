"""Neighbouring inner elements of a strip that belong to one row, such as GroupNorm's channels.

What such a group has in common is the same in all its elements, ``(width,)``, bit by bit; in memory
it is there once, ``(width / group,)``. Groups are a power of 2 wide: of a thread's vector, or of
the vectors of neighbouring threads, which shuffles reach. Mosaic's layouts know no such groups, so
this is done register by register, but in the interpreter.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import Layout, Ref, load, store
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, arith, ir, llvm, utils, vector


def group_sum(stat: jax.Array, group: int, layout: Layout) -> jax.Array:
    """``(width,)``: the sums over each `group` of neighbours, for each of these."""
    if is_interpreted():
        return jnp.repeat(jnp.sum(stat.reshape(-1, group), axis=1), group)

    def summed(register: Any) -> Any:
        (size,) = ir.VectorType(register.type).shape
        distance = 1
        while distance < min(size, group):
            swapped = [at ^ distance for at in range(size)]
            register = arith.addf(register, vector.shuffle(register, register, swapped))
            distance *= 2
        if group <= size:
            return register
        total, distance = mgpu.elements_of(register)[0], 1
        while distance < group // size:
            total = arith.addf(total, utils.shfl_bfly(total, distance))
            distance *= 2
        return vector.broadcast(register.type, total)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(stat.shape, jnp.float32, layout),
    )
    def sum_up(context: Any, value: Any) -> Any:
        del context
        return mgpu.with_registers(value, [summed(r) for r in value.registers.flat])

    return sum_up(stat)


def load_of_groups(ref: Ref, group: int, vector_width: int, layout: Layout) -> jax.Array:
    """``(width,)``: what a ref ``(width / group,)`` has for each element; float32, global."""
    (groups,) = ref.shape
    if is_interpreted():
        return jnp.repeat(load(ref, layout), group)
    threads, f32 = groups * group // vector_width, ir.F32Type.get

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((groups * group,), jnp.float32, layout),
    )
    def read(context: Any, ref: Any) -> Any:
        del context
        values = [llvm.load(f32(), at) for at in _addresses(ref, group, vector_width, threads)]
        vector_type = ir.VectorType.get((vector_width,), f32())
        register = vector.from_elements(
            vector_type, [values[at * len(values) // vector_width] for at in range(vector_width)]
        )
        zeros = utils.c(0.0, f32())
        splat = FragmentedArray.splat(zeros, (groups * group,), layout=layout.to_mgpu())
        return mgpu.with_registers(splat, [register] * splat.registers.size)

    return read(ref)


def store_of_groups(
    ref: Ref, stat: jax.Array, group: int, vector_width: int, layout: Layout
) -> None:
    """The inverse of `load_of_groups`: all threads of a group store what they have in common."""
    if is_interpreted():
        store(ref, stat[::group])
        return
    threads = stat.shape[0] // vector_width

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(context: Any, ref: Any, value: Any) -> None:
        del context
        elements = mgpu.elements_of(value.registers.item())
        for at, address in enumerate(_addresses(ref, group, vector_width, threads)):
            llvm.store(elements[at * group], address)

    write(ref, stat)


def _addresses(ref: Any, group: int, vector_width: int, threads: int) -> list[Any]:
    """Where the groups of this thread's vector have theirs."""
    thread = mgpu.remainder(utils.thread_idx(), threads)
    each = max(1, vector_width // group)
    if group <= vector_width:
        first = mgpu.times(thread, each)
    else:
        first = mgpu.quotient(thread, group // vector_width)
    start = utils.memref_ptr(ref)
    return [
        utils.getelementptr(start, [mgpu.plus(first, at)], ir.F32Type.get()) for at in range(each)
    ]
