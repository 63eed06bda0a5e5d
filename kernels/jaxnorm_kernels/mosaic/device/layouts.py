"""Register layouts, and loads and stores that use them.

A register layout defines which thread has which elements of an array in its registers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import inline, is_interpreted
from jaxnorm_kernels.mosaic.device.mgpu import WARP as WARP
from jaxnorm_kernels.mosaic.device.mgpu import WARPS as WARPS
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, arith, ir, vector

WARPGROUP_THREADS = WARP * WARPS
# Maximum number of bytes that one load or store of a thread moves.
VECTOR_BYTES = 16
# The start address and the size of an asynchronous copy must be multiples of this number of bytes.
COPY_BYTES = 16
# `fitting_vector` does not halve a vector of this many elements or fewer.
LEAST_VECTOR = 4

# Pallas has no public types for register layouts and refs.
Layout = Any
Ref = Any


def power_of_2(n: int) -> int:
    """Return the largest power of 2 that is at most `n`, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def vector_width(cols: int, *dtypes: np.dtype | None) -> int:
    """Return the number of elements that one thread loads at once, a power of 2.

    The elements take at most `VECTOR_BYTES` in each of `dtypes`. Their number divides `cols`, so
    that all rows start at aligned addresses. The number is less than `cols`, because Mosaic has no
    canonical form for a layout in which one thread has an entire row.
    """
    width = VECTOR_BYTES // max(dtype.itemsize for dtype in dtypes if dtype is not None)
    while cols % width or cols == width:
        width //= 2
    return width


def fitting_vector(cols: int, vector: int, threads: int) -> int:
    """Return the number of elements that a thread should load at once: `vector` or half of it.

    `threads` threads share a row, so they load ``threads * vector`` columns at once. If this number
    does not divide the row, some columns are read twice, because the last load overlaps an earlier
    one. Half of `vector` is returned in two cases:

    * The row has fewer than ``threads * vector`` columns.
    * With half of `vector`, fewer columns are read twice, and the difference is more than a tenth
      of the row. For softmax over 1152 columns of bfloat16, this raises the bandwidth from 0.94 to
      1.00 of a copy's bandwidth (H100).
    """
    if vector <= LEAST_VECTOR:
        return vector
    whole, half = (-(-cols // (threads * v)) * threads * v for v in (vector, vector // 2))
    return vector // 2 if cols < threads * vector or whole > half + cols / 10 else vector


@functools.cache
def warpgroup_layout(vector: int) -> Layout:
    """Layout of an ``(n,)`` array: neighbouring threads of the warpgroup have neighbouring vectors.

    Each thread has the same elements as in Mosaic's layout ``WG_STRIDED`` with this vector size.
    But Mosaic can slice and reduce parts of an array only in the layout that is returned here.
    """
    unit = WARP * vector
    return _tiled((WARPS * unit,), (unit,), (vector,), warps=(-3,), lanes=(-2,))


@functools.cache
def warps_layout(vector: int) -> Layout:
    """Layout of a ``(4, n)`` array: one row per warp; neighbouring lanes have adjacent vectors."""
    return _tiled((WARPS, WARP * vector), (vector,), warps=(-3,), lanes=(-2,))


@functools.cache
def rows_layout(vector: int, threads: int, height: int) -> Layout:
    """Layout of a ``(height, n)`` array: `threads` neighbouring threads of a warp share a row.

    With a height of 1, the row is replicated: every group of `threads` threads has a copy of it.
    """
    unit = threads * vector
    if height == 1:
        return _tiled((1, unit), (vector,), warps=_ALL_WARPS, lanes=_parts_of_a_warp(threads))
    if threads == WARP:
        return warps_layout(vector)
    rows = WARP // threads
    return _tiled((WARPS * rows, unit), (rows, unit), (vector,), warps=(-5,), lanes=(-3, -2))


@functools.cache
def strip_layout(vector: int, threads: int) -> Layout:
    """Layout of a ``(4, m, n)`` array: each warp has m rows, and `threads` lanes share each row."""
    tile = (WARPS, WARP // threads, threads * vector)
    return _tiled(tile, (vector,), warps=(-4,), lanes=(-3, -2))


@functools.cache
def columns_layout(vector: int, threads: int) -> Layout:
    """Layout of an ``(n,)`` array, such as a scale, that is combined with rows in `rows_layout`.

    Each thread has the same columns of this array and of the rows.
    """
    lanes = _parts_of_a_warp(threads)
    return _tiled((threads * vector,), (vector,), warps=_ALL_WARPS, lanes=lanes)


def flat_index(shape: tuple[int, ...], layout: Layout, axes: int | None = None) -> jax.Array:
    """Return an int32 array whose elements are 0, 1, 2 ... in row-major order.

    If `axes` is given, the numbers count along the first `axes` axes only. Elements that differ
    only in their indices along the other axes then have the same number.
    """
    counted = shape if axes is None else shape[:axes]

    def reference() -> jax.Array:
        numbers = lax.iota(jnp.int32, math.prod(counted)).reshape(counted)
        return lax.broadcast_in_dim(numbers, shape, range(len(counted)))

    @inline(reference, return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout))
    def index(context: Any) -> Any:
        strides = [math.prod(counted[axis + 1 :]) for axis in range(len(counted))]
        strides += [0] * (len(shape) - len(counted))
        return mgpu.indices(layout.to_mgpu(), shape, tuple(strides))

    return index()


def reshaped(ref: Ref, shape: tuple[int, ...]) -> Ref:
    """Return `ref` with another shape. In the interpreter, which cannot do this, return `ref`."""
    return ref if ref.shape == shape or is_interpreted() else ref.reshape(*shape)


def load(ref: Ref, layout: Layout | None, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Load all elements of `ref` as an array of `shape` (the ref's own shape by default).

    If `layout` is None, Mosaic infers a layout from the operations that use the array. In kernels
    with dozens of loads, this inference takes most of the compile time.
    """
    shape = ref.shape if shape is None else shape
    # Mosaic's inline operations lose the layout of an array that fits in one register of a thread.
    # Such arrays are loaded with Pallas' own load.
    if layout is None or layout.to_mgpu().vector_length == math.prod(shape):
        value = plgpu.load(reshaped(ref, shape), layout=layout, optimized=False)
        return value if value.shape == shape else value.reshape(shape)
    return load_arrays([ref], layout, shape)[0]


def load_scalars(refs: Sequence[Ref], first: Any, count: int) -> list[list[jax.Array]]:
    """Load `count` neighbouring elements, from index `first` on, of float32 refs in global memory.

    The result has one list for each index, and each list has one scalar for each ref. One inline
    function loads all scalars. This saves compile time: for Mosaic, lowering a function that loads
    all scalars takes about as long as lowering a function that loads one.
    """
    if not refs:
        return [[] for _ in range(count)]

    @inline(
        lambda first, refs: [ref[first + i] for ref in refs for i in range(count)],
        (plgpu.Layout.WG_SPLAT, [plgpu.RefType()] * len(refs)),
        [plgpu.ShapeDtypeStruct((), jnp.float32, plgpu.Layout.WG_SPLAT)] * (count * len(refs)),
    )
    def read(context: Any, first: Any, refs: Sequence[Any]) -> list[Any]:
        loaded = [mgpu.load_scalars(ref, first.registers.item(), count) for ref in refs]
        return [FragmentedArray.splat(value, ()) for of_ref in loaded for value in of_ref]

    loaded = read(first, list(refs))
    return [list(loaded[i::count]) for i in range(count)]


def widen(value: jax.Array, layout: Layout) -> jax.Array:
    """Convert `value` to float32, with fewer instructions for bfloat16 than `astype`.

    A bfloat16 is the upper half of a float32. For two bfloat16 values in one 32-bit register, one
    shift and one mask suffice; the compiler emits three instructions for `astype`.
    """
    if value.dtype != jnp.bfloat16:
        return value.astype(jnp.float32)

    @inline(
        lambda value: value.astype(jnp.float32),
        (layout,),
        plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout),
    )
    def widened(context: Any, value: Any) -> Any:
        return in_float32(value)

    return widened(value)


def load_wide(
    refs: Sequence[Ref],
    layout: Layout,
    shape: tuple[int, ...],
    at: Sequence[Any] = (),
    starts: Sequence[int] = (0,),
) -> list[jax.Array]:
    """Load the same arrays as `load_arrays`, and convert them to float32."""
    return load_arrays(refs, layout, shape, at, starts, is_wide=True)


def load_arrays(
    refs: Sequence[Ref],
    layout: Layout,
    shape: tuple[int, ...],
    at: Sequence[Any] = (),
    starts: Sequence[int] = (0,),
    *,
    is_wide: bool = False,
) -> list[jax.Array]:
    """For each ref and each start, load an array of `shape`.

    Without `at`, an array has all elements of a ref, or a range of the ref's columns that begins at
    the start. For refs in shared memory, `at` may be the index of an array's first element; the
    start is then added to this index. `at` has an entry for each axis of the ref, or for each axis
    but the last. The function `mgpu.load_arrays` describes these two cases, and the order of the
    arrays.

    If `is_wide` is True, the arrays are float32. Otherwise, they have their ref's dtype.

    One inline function loads all arrays. It compiles faster than several functions, because Mosaic
    spends more time on lowering the function than on the operations inside it. The function gets
    entire refs and indices rather than slices of refs: slices of shared memory take up to half of
    the time of Mosaic's layout inference (jax 0.11.2).
    """
    variables = [i for i in at if not isinstance(i, int)]
    dtypes = [jnp.dtype(jnp.float32) if is_wide else ref.dtype for ref in refs for _ in starts]
    if not refs:
        return []

    def reference(refs: Sequence[Ref], variables: Any) -> list[jax.Array]:
        parts = [_part(ref, at, start, shape) for ref in refs for start in starts]
        loaded = [plgpu.load(part, layout=layout, optimized=False) for part in parts]
        return [v.reshape(shape).astype(dtype) for v, dtype in zip(loaded, dtypes)]

    @inline(
        reference,
        ([plgpu.RefType()] * len(refs), [plgpu.Layout.WG_SPLAT] * len(variables)),
        [plgpu.ShapeDtypeStruct(shape, dtype, layout) for dtype in dtypes],
    )
    def read(context: Any, refs: Sequence[Any], variables: Sequence[Any]) -> Any:
        values = iter(variables)
        first = [i if isinstance(i, int) else mgpu.Word(next(values).registers.item()) for i in at]
        arrays = mgpu.load_arrays(refs, layout.to_mgpu(), shape, at=first, starts=starts)
        return [in_float32(array) for array in arrays] if is_wide else arrays

    if not at and math.prod(shape) == math.prod(refs[0].shape):
        refs = [reshaped(ref, shape) for ref in refs]
    return list(read(list(refs), variables))


def _part(ref: Ref, at: Sequence[Any], start: int, shape: tuple[int, ...]) -> Ref:
    """Return the part of a ref that `load_arrays` loads for one start, for the interpreter."""
    if len(at) == len(ref.shape):
        *before, first = at
        return ref.at[(*before, pl.ds(first + start, math.prod(shape)))]
    if not at and math.prod(shape) == math.prod(ref.shape):
        return ref
    row, column = divmod(start, ref.shape[-1])
    *before, first = at or (0,)
    *rows, width = shape
    place = [pl.ds(first + row, *rows)] if rows else [first + row]
    return ref.at[(*before, *place, pl.ds(column, width))]


def store(ref: Ref, value: jax.Array) -> None:
    """Store `value` in `ref`, rounded to the dtype of `ref`."""
    ref = reshaped(ref, value.shape)
    value = value.astype(ref.dtype)
    if value.shape != ref.shape:
        value = value.reshape(ref.shape)
    if value.ndim and hasattr(plgpu, "store"):
        # From jax 0.12 on, `ref[...] = value` refuses stores that are not perfectly coalesced.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def in_float32(value: Any) -> Any:
    """Convert a Mosaic array (`FragmentedArray`) to float32, as `widen` does with a JAX array."""
    if isinstance(value.mlir_dtype, ir.BF16Type):
        return with_registers(value, [_widen_register(r) for r in value.registers.flat])
    return value.astype(ir.F32Type.get())


def _widen_register(register: Any) -> Any:
    (elements,) = ir.VectorType(register.type).shape
    if elements == 1:
        return arith.extf(ir.VectorType.get((1,), ir.F32Type.get()), register)
    half, i32 = elements // 2, ir.IntegerType.get_signless(32)
    pairs = ir.VectorType.get((half,), i32)
    floats = ir.VectorType.get((half,), ir.F32Type.get())

    words, parts = vector.bitcast(pairs, register), []
    for operation, value in ((arith.shli, 16), (arith.andi, -(2**16))):
        splat = ir.DenseElementsAttr.get_splat(pairs, ir.IntegerAttr.get(i32, value))
        parts.append(vector.bitcast(floats, operation(words, arith.constant(pairs, splat))))
    return vector.shuffle(*parts, [k // 2 + k % 2 * half for k in range(elements)])


def with_registers(value: Any, registers: Sequence[Any], signed: bool | None = None) -> Any:
    """Wrap `registers` as a Mosaic array with the layout and shape of `value`."""
    placed = value.registers.copy()
    for at, register in enumerate(registers):
        placed.flat[at] = register
    return FragmentedArray(_registers=placed, _layout=value.layout, _is_signed=signed)


def of_register(register: Any, layout: Any, shape: tuple[int, ...]) -> Any:
    """Return a Mosaic array of floats that has `register` as its only register in each thread."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    registers.flat[0] = register
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


_ALL_WARPS = (plgpu.Replicated(WARPS),)


def _parts_of_a_warp(threads: int) -> tuple[Any, ...]:
    return (-2,) if threads == WARP else (plgpu.Replicated(WARP // threads), -2)


def _tiled(*tiles: tuple[int, ...], warps: tuple[Any, ...], lanes: tuple[Any, ...]) -> Layout:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)
