"""Conversions and stores, register by register, where Mosaic's own cost more instructions or time.

The interpreter has no registers: there, these are JAX's operations.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import Layout, Ref, load, store
from jaxnorm_kernels.mosaic.device.mgpu import (
    FragmentedArray,
    builtin,
    ir,
    llvm,
    utils,
)


def load_columns(ref: Ref, start: int, width: int, layout: Layout) -> jax.Array:
    """``(rows, width)``: the columns of a ``(rows, cols)`` ref that begin at `start`, in its dtype.

    Mosaic's own load takes columns of shared memory only where their width divides the row.
    """
    if width == ref.shape[1]:
        return load(ref, layout)
    if is_interpreted():
        return load(ref.at[:, pl.ds(start, width)], layout)
    shape = (ref.shape[0], width)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout)
    )
    def read(context: Any, ref: Any) -> Any:
        columns = utils.memref_slice(ref, (slice(None), slice(start, start + width)))
        return FragmentedArray.load_untiled(columns, layout=layout.to_mgpu(), optimized=False)

    return read(ref)


def load_mask(ref: Ref, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """A boolean ref in global memory as int8, an array of `shape`.

    An element is a byte. Mosaic's own load of several takes them for bits (jax 0.11.2 and 0.12.0).
    """
    if is_interpreted():
        return load(ref, layout, shape).astype(jnp.int8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.int8, layout)
    )
    def read(context: Any, ref: Any) -> Any:
        of_bits, i64 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(64)
        pointer, sizes = llvm.PointerType.get(), llvm.ArrayType.get(i64, len(of_bits.shape))
        descriptor = llvm.StructType.get_literal([pointer, pointer, i64, sizes, sizes])
        of_bytes = ir.MemRefType.get(
            of_bits.shape, ir.IntegerType.get_signless(8), of_bits.layout, of_bits.memory_space
        )
        same = builtin.unrealized_conversion_cast([descriptor], [ref])
        ref = builtin.unrealized_conversion_cast([of_bytes], [same])
        if tuple(of_bits.shape) != shape:
            ref = utils.memref_reshape(ref, shape)
        held = layout.to_mgpu()
        return FragmentedArray.load_untiled(ref, layout=held, is_signed=True, optimized=False)

    return read(ref)


def rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """`value` in `dtype`. XLA on CPU drops a rounding that is undone; in the interpreter, too."""
    value = value.astype(dtype)
    return lax.optimization_barrier(value) if is_interpreted() else value


def opaque(value: jax.Array) -> jax.Array:
    """An int32 scalar, of which the compiler does not know what it may be.

    So tests of it stay branches, and the compiler does not move instructions across a branch.
    """
    return _through(value, "mov.b32 $0, $1;")


def renewed(value: jax.Array) -> jax.Array:
    """An int32 scalar that the assembler, too, takes for another one: from the first lane.

    So what is computed from it is computed again, where to keep it would take more registers.
    """
    return _through(value, "shfl.sync.idx.b32 $0, $1, 0, 31, -1;")


def _through(value: jax.Array, instruction: str) -> jax.Array:
    if is_interpreted():
        return value
    layout = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout)
    )
    def hide(context: Any, value: Any) -> Any:
        hidden = utils.inline_ptx(
            instruction,
            value.registers.item(),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return FragmentedArray.splat(hidden, (), is_signed=True)

    return hide(value)


def store_global(ref: Ref, value: jax.Array, layout: Layout) -> None:
    """Stores `value`, rounded to the dtype of `ref`, in global memory.

    Mosaic's stores do not say which memory they are to: reads from shared memory that follow have
    to wait for them.
    """
    if is_interpreted():
        store(ref, value)
        return
    value = value.astype(ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(context: Any, ref: Any, value: Any) -> None:
        for register, address in moves(ref, value):
            llvm.store(register(value.registers), address)

    write(ref if value.shape == ref.shape else ref.reshape(*value.shape), value)


def moves(ref: Any, value: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yield, for each register of `value`, what picks it, and its address in global memory."""
    one_tile = utils.memref_reshape(ref, (*[1] * len(value.shape), *value.shape))
    each = value.transfer_tiled(one_tile, 16, value.layout, value.shape, optimized=False)
    for register, _, _, address in each:
        yield register, mgpu.in_global(address)
