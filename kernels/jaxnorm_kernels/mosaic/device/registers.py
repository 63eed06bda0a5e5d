"""Loads, stores and conversions that are written register by register in MLIR.

They replace Mosaic operations that are slow or do not exist:

* loads of masks, and of the table row that each row of x uses;
* stores to global memory, including rows that start or end at an unaligned address;
* splitting an array into its even and its odd columns, and joining them again.

In the interpreter, which has no registers, these functions use JAX operations.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import inline, is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import (
    Layout,
    Ref,
    flat_index,
    in_float32,
    load,
    reshaped,
    store,
    with_registers,
)
from jaxnorm_kernels.mosaic.device.mgpu import (
    FragmentedArray,
    builtin,
    ir,
    llvm,
    utils,
    vector,
)


def load_mask(ref: Ref, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """Load a boolean ref in global memory as an int8 array of `shape`.

    In memory, a boolean takes one byte. Mosaic's own vector load reads one bit per boolean instead
    (jax 0.11.2 and 0.12.0).
    """

    @inline(
        lambda ref: load(ref, layout, shape).astype(jnp.int8),
        (plgpu.RefType(),),
        plgpu.ShapeDtypeStruct(shape, jnp.int8, layout),
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
        (loaded,) = mgpu.load_arrays([ref], layout.to_mgpu(), shape, signed=True)
        return loaded

    return read(ref)


def rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Round `value` to `dtype`, in a way that XLA cannot optimise away in the interpreter.

    Without an optimisation barrier, XLA on a CPU removes a rounding that is followed by a
    conversion back to the wider dtype.
    """
    value = value.astype(dtype)
    return lax.optimization_barrier(value) if is_interpreted() else value


def opaque(value: jax.Array) -> jax.Array:
    """Return an int32 scalar unchanged, but hide its value from the compiler.

    If a condition depends on the result, the compiler must emit a branch for this condition. The
    compiler does not move instructions across the branch.
    """
    return _through(value, "mov.b32 $0, $1;")


def renewed(value: jax.Array) -> jax.Array:
    """Return an int32 scalar unchanged, but as a new value for the compiler.

    Use this to free registers. The compiler cannot reuse values that earlier code computed from the
    scalar: it computes these values again from the new scalar, instead of keeping them in
    registers. The scalar passes through a warp shuffle, so even the assembler (ptxas) does not
    recognise that the value is the same.
    """
    return _through(value, "shfl.sync.idx.b32 $0, $1, 0, 31, -1;")


def _through(value: jax.Array, instruction: str) -> jax.Array:
    layout = plgpu.Layout.WG_SPLAT

    @inline(lambda value: value, (layout,), plgpu.ShapeDtypeStruct((), jnp.int32, layout))
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
    """Store `value` in a ref in global memory, rounded to the dtype of `ref`.

    This function uses global addresses. Mosaic's own stores use generic addresses, which might be
    in shared memory, so later loads from shared memory would wait for them.
    """

    @inline(store, (plgpu.RefType(), layout))
    def write(context: Any, ref: Any, value: Any) -> None:
        for register, address in _moves(ref, value):
            llvm.store(register, address)

    write(reshaped(ref, value.shape), value.astype(ref.dtype))


def _moves(ref: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Yield one tuple ``(*registers, address)`` for each register of an array.

    `values` are arrays with the same shape and layout, so they have the same number of registers.
    Tuple number i contains register number i of each array. Its last entry is the address in `ref`
    at which the elements of this register begin. `ref` is in global memory.
    """
    first, *_ = values
    at = mgpu.addresses(ref, first.layout, first.shape)
    return zip(*(value.registers.flat for value in values), at)


# -------------------------------------------------------------------------------------------------
# Loads and stores of ranges of elements that start or end within a thread's vector.


def load_each(ref: Ref, index: jax.Array, layout: Layout) -> jax.Array:
    """Load the elements at the indices `index` of an ``(n,)`` ref in global memory, one at a time.

    If an index is outside the ref, the loaded value is meaningless, because such indices are
    clamped.
    """
    (size,) = ref.shape
    index = jnp.clip(index, 0, size - 1)

    @inline(
        lambda ref, index: load(ref, None)[index],
        (plgpu.RefType(), layout),
        plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout),
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


def store_each(ref: Ref, index: jax.Array, value: jax.Array, layout: Layout) -> None:
    """Store each element of `value` at its index of an ``(n,)`` ref, one element at a time.

    The ref is in global memory. Elements whose index is outside the ref are not stored.
    """
    (size,) = ref.shape

    def reference(ref: Ref, value: jax.Array, index: jax.Array) -> None:
        @pl.loop(0, value.size)
        def _(k: Any) -> None:
            @pl.when(jnp.logical_and(index[k] >= 0, index[k] < size))
            def _() -> None:
                ref[index[k]] = value[k]

    @inline(reference, (plgpu.RefType(), layout, layout))
    def write(context: Any, ref: Any, value: Any, index: Any) -> None:
        base = mgpu.in_global(utils.memref_ptr(ref))
        kind = ir.MemRefType(ref.type).element_type
        for register, indices in zip(value.registers.flat, index.registers.flat):
            for element, i in zip(mgpu.elements_of(register), mgpu.elements_of(indices)):
                _store(element, utils.getelementptr(base, [i], kind), mgpu.Word(i).is_below(size))

    write(ref, value.astype(ref.dtype), index)


def store_vectors(
    ref: Ref, start: Any, value: jax.Array, first: Any, end: Any, layout: Layout
) -> None:
    """Store the elements of `value` whose index in `ref` is in the range [first, end).

    `ref` is an ``(n,)`` ref in global memory. The first element of `value` has index `start` in
    `ref`, the next element has index ``start + 1``, and so on. Each thread's vector must be either
    entirely inside the range or entirely outside.
    """
    at = start + flat_index(value.shape, layout)
    store_where(ref.at[pl.ds(start, value.size)], value, at, first, end, layout)


def store_where(
    ref: Ref, value: jax.Array, index: jax.Array, first: Any, end: Any, layout: Layout
) -> None:
    """Store the elements of `value` whose `index` is in the range [first, end).

    `index` contains consecutive numbers along the last axis of `ref`, starting with any number.
    Each thread's vector must be either entirely inside the range or entirely outside. Elements of
    `ref` outside the range are not written, because another block or warpgroup may write them at
    the same time.
    """

    def reference(ref: Ref, value: jax.Array, inside: jax.Array) -> None:
        value, start = value.reshape(*ref.shape[:-1], -1), index.reshape(-1)[0]
        whole = value.shape[-1]
        at = jnp.clip(first - start, 0, whole)
        count = jnp.clip(end - start, 0, whole) - at
        # Sizes of slices must be static, so the range is stored in a few slices of powers of 2.
        for width in (1 << k for k in reversed(range(whole.bit_length()))):
            has_slice = (count & width) != 0

            @pl.when(has_slice)
            def _(at: Any = at, width: int = width) -> None:
                columns = pl.ds(at, width)
                part = lax.dynamic_slice_in_dim(value, at, width, axis=-1)
                store(ref.at[columns] if value.ndim == 1 else ref.at[:, columns], part)

            at = jnp.where(has_slice, at + width, at)

    @inline(reference, (plgpu.RefType(), layout, layout))
    def write(context: Any, ref: Any, value: Any, inside: Any) -> None:
        for register, is_inside, address in _moves(ref, value, inside):
            with utils.when(mgpu.elements_of(is_inside)[0]):
                llvm.store(register, address)

    inside = jnp.logical_and(index >= first, index < end)
    write(reshaped(ref, value.shape), value.astype(ref.dtype), inside)


def _store(element: Any, address: Any, predicate: Any) -> None:
    bits = utils.bitwidth(element.type)
    utils.inline_ptx(
        f"st.global.b{bits} [$0], $1;",
        address,
        utils.bitcast(element, ir.IntegerType.get_signless(bits)),
        predicate=predicate,
        has_side_effects=True,
    )


# -------------------------------------------------------------------------------------------------
# Splitting and joining of neighbouring columns, and loads of table rows, register by register.


def split_pairs(value: jax.Array, wide: Layout, half: Layout) -> list[jax.Array]:
    """Return the even columns and the odd columns of the last axis, as two arrays.

    `wide` is the layout of `value`. `half` is the layout of both results. No data moves between
    threads.
    """
    shape = (*value.shape[:-1], value.shape[-1] // 2)
    of_half = plgpu.ShapeDtypeStruct(shape, value.dtype, half)

    @inline(lambda value: (value[..., ::2], value[..., 1::2]), (wide,), (of_half, of_half))
    def split(context: Any, value: Any) -> Any:

        def every_second(first: int) -> Any:
            def of(register: Any) -> Any:
                (elements,) = ir.VectorType(register.type).shape
                return vector.shuffle(register, register, [*range(first, elements, 2)])

            return _mapped(of, half, value)

        return every_second(0), every_second(1)

    return list(split(value))


def join_pairs(first: jax.Array, second: jax.Array, half: Layout, wide: Layout) -> jax.Array:
    """Return an array that takes its even columns from `first` and its odd columns from `second`.

    This is the inverse of `split_pairs`. `half` is the layout of both arguments. `wide` is the
    layout of the result.
    """
    shape = (*first.shape[:-1], 2 * first.shape[-1])

    @inline(
        lambda first, second: jnp.stack([first, second], axis=-1).reshape(shape),
        (half, half),
        plgpu.ShapeDtypeStruct(shape, first.dtype, wide),
    )
    def join(context: Any, first: Any, second: Any) -> Any:

        def of(a: Any, b: Any) -> Any:
            (elements,) = ir.VectorType(a.type).shape
            return vector.shuffle(a, b, [k // 2 + k % 2 * elements for k in range(2 * elements)])

        return _mapped(of, wide, first, second)

    joined: jax.Array = join(first, second)
    return joined


def load_each_row(
    refs: Sequence[Ref],
    row_of: Callable[[Shared, Any], Any],
    shared: Shared,
    first: Any,
    layout: Layout,
    shape: tuple[int, int],
) -> list[jax.Array]:
    """Load from each table the rows that a tile of x uses: one table row for each row of the tile.

    Several rows of x may use the same table row.

    Args:
      refs: the tables, ``(n, cols)`` refs in global memory, for example cos and sin of a rotation.
      row_of: ``row_of(shared, i)`` returns the index of the table row that row i of x uses.
      shared: describes which table row each row of x uses.
      first: index of the tile's first row in x.
      layout: layout of the results.
      shape: ``(rows, cols)``, the shape of the results, which are float32.
    """
    index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), layout)

    @inline(
        lambda rows, refs: [load(ref, None)[rows[:, 0]].astype(jnp.float32) for ref in refs],
        (layout, [plgpu.RefType()] * len(refs)),
        [plgpu.ShapeDtypeStruct(shape, jnp.float32, layout)] * len(refs),
    )
    def read(context: Any, rows: Any, refs: Sequence[Any]) -> Any:
        columns = mgpu.indices(rows.layout, shape, (0, 1))

        def loaded(ref: Any) -> Any:
            kind, base = ir.MemRefType(ref.type).element_type, mgpu.in_global(utils.memref_ptr(ref))

            def register(rows: Any, columns: Any) -> Any:
                (elements,) = ir.VectorType(columns.type).shape
                row, column = (mgpu.elements_of(register)[0] for register in (rows, columns))
                at = utils.getelementptr(
                    base, [(mgpu.Word(row) * shape[1] + mgpu.Word(column)).value], kind
                )
                return llvm.load(ir.VectorType.get((elements,), kind), at)

            return in_float32(_mapped(register, layout.to_mgpu(), rows, columns))

        return [loaded(ref) for ref in refs]

    return list(read(row_of(shared, first + index), list(refs)))


def _mapped(function: Callable[..., Any], layout: Any, *values: Any) -> Any:
    """Apply `function` register by register, and return an array of the resulting registers.

    The n-th call of `function` gets the n-th register of each of `values`. `layout` is the layout
    of the returned array, whose elements are floats.
    """
    held = layout.to_mgpu() if hasattr(layout, "to_mgpu") else layout
    first, *_ = values
    registers = np.empty_like(first.registers)
    for at, of_thread in enumerate(zip(*(value.registers.flat for value in values))):
        registers.flat[at] = function(*of_thread)
    return FragmentedArray(_registers=registers, _layout=held, _is_signed=None)
