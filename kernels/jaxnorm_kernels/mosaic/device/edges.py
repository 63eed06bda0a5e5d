"""Loads and stores of consecutive elements that begin, or end, between the vectors of a thread.

A register holds a vector of them; `first` is the index of the first element of all, `places` those
of all counted from it (`flat_index`: some 40 operations, and once for many loads and stores). The
interpreter has no registers: there, these are JAX's operations.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import (
    Layout,
    Ref,
    flat_index,
    load,
    store,
    with_registers,
)
from jaxnorm_kernels.mosaic.device.mgpu import arith, ir, llvm, utils, vector
from jaxnorm_kernels.mosaic.device.registers import moves


def load_each(ref: Ref, first: Any, places: jax.Array, layout: Layout) -> jax.Array:
    """Elements of a ``(n,)`` ref in global memory, one at a time; any where it has none."""
    (size,) = ref.shape
    index = jnp.clip(first + places, 0, size - 1)
    if is_interpreted():
        return load(ref, None)[index]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(places.shape, ref.dtype, layout),
    )
    def read(context: Any, ref: Any, index: Any) -> Any:
        kind, base = ir.MemRefType(ref.type).element_type, mgpu.in_global(utils.memref_ptr(ref))

        def loaded(indices: Any) -> Any:
            elements = [
                llvm.load(kind, utils.getelementptr(base, [i], kind))
                for i in mgpu.elements_of(indices)
            ]
            return vector.from_elements(ir.VectorType.get((len(elements),), kind), elements)

        registers = [loaded(register) for register in index.registers.flat]
        return with_registers(index, registers, mgpu.is_signed(kind))

    return read(ref, index)


def store_each(ref: Ref, first: Any, value: jax.Array, places: jax.Array, layout: Layout) -> None:
    """Stores those elements of `value` that a ``(n,)`` ref in global memory has, one at a time."""
    (size,) = ref.shape
    if is_interpreted():
        store_some(ref, first, value, first, size)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def write(context: Any, ref: Any, value: Any, index: Any) -> None:
        base = mgpu.in_global(utils.memref_ptr(ref))
        kind = ir.MemRefType(ref.type).element_type
        for register, indices in zip(value.registers.flat, index.registers.flat):
            for element, i in zip(mgpu.elements_of(register), mgpu.elements_of(indices)):
                _store(element, utils.getelementptr(base, [i], kind), mgpu.is_below(i, size))

    write(ref, value.astype(ref.dtype), first + places)


def store_inside(
    ref: Ref,
    start: Any,
    value: jax.Array,
    first: Any,
    size: int,
    places: jax.Array,
    layout: Layout,
) -> None:
    """Stores `value` at `start` of a ``(n,)`` ref in global memory, but for what lies outside.

    Only elements of an index in ``[0, size)`` are stored: the vectors of a thread that lie inside,
    and of those that lie there in part their elements.
    """
    if is_interpreted():
        store_some(ref, start, value, first, size)
        return
    target = ref.at[pl.ds(start, value.size)]
    if value.ndim > 1:
        target = target.reshape(*value.shape)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def write(context: Any, ref: Any, value: Any, index: Any) -> None:
        kind = ir.MemRefType(ref.type).element_type
        for register, address in moves(ref, value):
            elements = register(value.registers)
            indices = mgpu.elements_of(register(index.registers))
            inside = [mgpu.is_below(i, size) for i in (indices[0], indices[-1])]
            is_whole = arith.andi(*inside)
            with utils.when(is_whole):
                llvm.store(elements, address)
            with utils.when(arith.xori(*inside)):
                for k, (element, i) in enumerate(zip(mgpu.elements_of(elements), indices)):
                    at = utils.getelementptr(address, [k], kind)
                    _store(element, at, mgpu.is_below(i, size))

    write(target, value.astype(ref.dtype), first + places)


def store_vectors(
    ref: Ref, start: Any, value: jax.Array, first: Any, end: Any, layout: Layout
) -> None:
    """Stores `value` at `start` of a ``(n,)`` ref in global memory, but for what lies outside.

    Only what is at ``[first, end)`` is stored, where a thread's vectors do not lie in part.
    """
    if is_interpreted():
        store_some(ref, start, value, start - first, end - first)
        return
    at = start + flat_index(value.shape, layout)
    target = ref.at[pl.ds(start, value.size)].reshape(*value.shape)
    store_where(target, value, jnp.logical_and(at >= first, at < end), layout)


def store_where(ref: Ref, value: jax.Array, inside: jax.Array, layout: Layout) -> None:
    """Stores the vectors of `value` whose first element is `inside`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def write(context: Any, ref: Any, value: Any, inside: Any) -> None:
        for register, address in moves(ref, value):
            with utils.when(mgpu.elements_of(register(inside.registers))[0]):
                llvm.store(register(value.registers), address)

    write(ref, value.astype(ref.dtype), inside)


def store_some(ref: Ref, start: Any, value: jax.Array, first: Any, size: Any) -> None:
    """In the interpreter: as few slices of the last axis as their sizes, powers of 2, allow.

    Another block, or warpgroup, may be storing what is left out.
    """
    value = value.astype(ref.dtype).reshape(*ref.shape[:-1], -1)
    whole = value.shape[-1]
    at = jnp.clip(-first, 0, whole)
    count = jnp.clip(size - first, 0, whole) - at
    for width in (1 << k for k in reversed(range(whole.bit_length()))):
        has_slice = (count & width) != 0

        @pl.when(has_slice)
        def _(at: Any = at, width: int = width) -> None:
            part = lax.dynamic_slice_in_dim(value, at, width, axis=-1)
            columns = pl.ds(start + at, width)
            store(ref.at[columns] if value.ndim == 1 else ref.at[:, columns], part)

        at = jnp.where(has_slice, at + width, at)


def _store(element: Any, address: Any, predicate: Any) -> None:
    bits = utils.bitwidth(element.type)
    utils.inline_ptx(
        f"st.global.b{bits} [$0], $1;",
        address,
        utils.bitcast(element, ir.IntegerType.get_signless(bits)),
        predicate=predicate,
        has_side_effects=True,
    )
