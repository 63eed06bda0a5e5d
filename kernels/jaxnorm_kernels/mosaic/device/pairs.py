"""Neighbouring columns taken apart and put together again, and rows of a table, by registers.

The interpreter has no registers: there, these are JAX's operations.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import Layout, Ref, load
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, ir, llvm, utils, vector
from jaxnorm_kernels.specs import Shared


def split_pairs(value: jax.Array, wide: Layout, half: Layout) -> list[jax.Array]:
    """The even and the odd columns, of the last axis: each thread those of its own vectors."""
    shape = (*value.shape[:-1], value.shape[-1] // 2)
    if is_interpreted():
        pairs = value.reshape(*shape, 2)
        return [pairs[..., 0], pairs[..., 1]]
    of_half = plgpu.ShapeDtypeStruct(shape, value.dtype, half)

    @plgpu.inline_mgpu(arg_types=(wide,), return_type=(of_half, of_half))
    def split(context: Any, value: Any) -> Any:

        def every_second(first: int) -> Any:
            def of(register: Any) -> Any:
                (elements,) = ir.VectorType(register.type).shape
                return vector.shuffle(register, register, [*range(first, elements, 2)])

            return _mapped(of, half, value)

        return every_second(0), every_second(1)

    return list(split(value))


def join_pairs(first: jax.Array, second: jax.Array, half: Layout, wide: Layout) -> jax.Array:
    """The inverse of `split_pairs`."""
    shape = (*first.shape[:-1], 2 * first.shape[-1])
    if is_interpreted():
        return jnp.stack([first, second], axis=-1).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(half, half), return_type=plgpu.ShapeDtypeStruct(shape, first.dtype, wide)
    )
    def join(context: Any, first: Any, second: Any) -> Any:

        def of(a: Any, b: Any) -> Any:
            (elements,) = ir.VectorType(a.type).shape
            return vector.shuffle(a, b, [k // 2 + k % 2 * elements for k in range(2 * elements)])

        return _mapped(of, wide, first, second)

    joined: jax.Array = join(first, second)
    return joined


def load_each_row(
    ref: Ref,
    row_of: Callable[[Shared, Any], Any],
    shared: Shared,
    first: Any,
    layout: Layout,
    shape: tuple[int, int],
) -> jax.Array:
    """``(rows, cols)``: for each of the rows from `first` on that of an operand they share.

    `row_of`: of a `Shared` and a row of x, that of the operand, a ``(n, cols)`` ref in global
    memory.
    """
    if is_interpreted():
        return load(ref, None)[row_of(shared, first + lax.iota(jnp.int32, shape[0]))]
    index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), layout)
    rows = row_of(shared, first + index)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout),
    )
    def read(context: Any, ref: Any, rows: Any) -> Any:
        kind, base = ir.MemRefType(ref.type).element_type, mgpu.in_global(utils.memref_ptr(ref))
        i32 = ir.IntegerType.get_signless(32)
        columns = FragmentedArray.broadcasted_iota(i32, shape, 1, rows.layout, is_signed=True)

        def loaded(rows: Any, columns: Any) -> Any:
            (elements,) = ir.VectorType(columns.type).shape
            row, column = (mgpu.elements_of(register)[0] for register in (rows, columns))
            at = mgpu.plus(mgpu.times(row, shape[1]), column)
            return llvm.load(
                ir.VectorType.get((elements,), kind), utils.getelementptr(base, [at], kind)
            )

        return _mapped(loaded, layout.to_mgpu(), rows, columns)

    loaded: jax.Array = read(ref, rows)
    return loaded


def _mapped(function: Callable[..., Any], layout: Any, *values: Any) -> Any:
    """The array of floats that has ``function(*registers)`` for the registers of `values`."""
    held = layout.to_mgpu() if hasattr(layout, "to_mgpu") else layout
    first, *_ = values
    registers = np.empty_like(first.registers)
    for at, of_thread in enumerate(zip(*(value.registers.flat for value in values))):
        registers.flat[at] = function(*of_thread)
    return FragmentedArray(_registers=registers, _layout=held, _is_signed=None)
