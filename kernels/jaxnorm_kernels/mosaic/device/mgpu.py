"""The only module of the kernels that imports JAX's private API: MLIR operations and helpers.

Pallas has no operations for single registers, for PTX instructions or for the shared memory of
another block. So this module, the module `registers` and the package `rows` emit MLIR inside
``plgpu.inline_mgpu``. Pallas' exp2 takes four instructions; `numerics` registers a lowering rule
for a faster one. All these modules import MLIR from here.

Any JAX release may change the private API; `launching.TESTED` lists the tested versions. If a
module or class has been removed, importing the kernels fails with the ImportError below. If a
function has been removed or changed, lowering a kernel fails. In both cases, the default
implementation warns and runs XLA's code, and ``implementation="mosaic"`` raises an error
(`jaxnorm.calls.backends`). Changes that only XLA's compiler finds, or that change values, are not
handled. So run ``tests/mosaic`` first on a new version of JAX.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm_kernels import launching

try:
    from jax._src.lib.mlir import ir as ir
    from jax._src.lib.mlir.dialects import arith as arith
    from jax._src.lib.mlir.dialects import builtin as builtin
    from jax._src.lib.mlir.dialects import gpu as gpu
    from jax._src.lib.mlir.dialects import llvm as llvm
    from jax._src.lib.mlir.dialects import math as math
    from jax._src.lib.mlir.dialects import nvvm as nvvm
    from jax._src.lib.mlir.dialects import vector as vector
    from jax._src.pallas.mosaic_gpu.lowering import register_lowering_rule as register_lowering_rule
    from jax.experimental.mosaic.gpu import FragmentedArray as FragmentedArray
    from jax.experimental.mosaic.gpu import utils as utils
except ImportError as error:
    raise ImportError(
        f"jax {jax.__version__} lacks a part of its private API that the Mosaic GPU kernels "
        f"need; they were tested with jax {' and '.join(launching.TESTED)}: {error}"
    ) from error

# Number of threads per warp.
WARP = 32
# Number of warps per warpgroup.
WARPS = 4
# LLVM's numbers for the address spaces of global memory and of shared memory.
_GLOBAL, _SHARED = 1, 3


def i32(value: int) -> Any:
    """Return an MLIR constant of type i32."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def _operator(operation: Callable[[Any, Any], Any]) -> Callable[["Word", "Word | int"], "Word"]:
    def apply(a: "Word", b: "Word | int") -> "Word":
        kind = ir.IntegerType.get_signless(32)
        return Word(operation(a.value, b.value if isinstance(b, Word) else utils.c(b, kind)))

    return apply


@dataclasses.dataclass(frozen=True)
class Word:
    """A 32-bit MLIR integer with Python's operators. Division and remainder are unsigned."""

    value: Any

    __add__ = _operator(arith.addi)
    __sub__ = _operator(arith.subi)
    __mul__ = _operator(arith.muli)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)

    def is_below(self, limit: int) -> Any:
        """Return an MLIR condition: ``0 <= self < limit`` (an unsigned comparison)."""
        return arith.cmpi(arith.CmpIPredicate.ult, self.value, i32(limit))

    def is_zero(self) -> Any:
        """Return an MLIR condition: the integer is 0."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, i32(0))


def thread() -> Word:
    """Return the index of the current thread in its block."""
    return Word(arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x)))


def load_scalars(ref: Any, first: Any, count: int) -> list[Any]:
    """Load `count` neighbouring elements of a ref in global memory, from index `first` on."""
    kind = ir.MemRefType(ref.type).element_type
    at = utils.getelementptr(in_global(utils.memref_ptr(ref)), [first], kind)
    return [llvm.load(kind, utils.getelementptr(at, [i], kind) if i else at) for i in range(count)]


def load_floats(address: Word, count: int) -> list[Any]:
    """Load `count` float32 values from shared memory.

    The address must be a multiple of the values' total size in bytes.
    """
    kind = ir.VectorType.get((count,), ir.F32Type.get())
    return elements_of(llvm.load(kind, in_shared(address), alignment=4 * count))


def is_signed(kind: Any) -> bool | None:
    """Return Mosaic's flag `is_signed` for arrays of this type: None for floats, otherwise True."""
    return None if isinstance(kind, ir.FloatType) else True


def elements_of(register: Any) -> list[Any]:
    """Return the elements of a vector register as a list of scalars."""
    (count,) = ir.VectorType(register.type).shape
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([k]))
        for k in range(count)
    ]


def in_global(address: Any) -> Any:
    """Convert a generic pointer to a pointer in the address space of global memory.

    Loads and stores through the returned pointer are faster.
    """
    return llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), address)


def address_of(ref: Any) -> Word:
    """Return the address of a ref in shared memory as a 32-bit integer, the form used in PTX."""
    return Word(llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref)))


def in_shared(address: Word) -> Any:
    """Return an LLVM pointer to a 32-bit address in shared memory."""
    return llvm.inttoptr(llvm.PointerType.get(_SHARED), address.value)


# -------------------------------------------------------------------------------------------------
# Computation of the addresses that a thread loads and stores, in few MLIR operations.
#
# Mosaic's own loads and stores are more general: each of them computes the thread's index and the
# position of its elements, in about 30 operations. The compiler merges repeated operations, but
# slow Python code emits every operation. Here, a load takes about 12 operations, and several loads
# in one inline function compute the thread's position only once.


class Places(NamedTuple):
    """The positions in memory of the array elements that each thread has in its registers.

    A position is counted in elements from the start of the array.

    Attributes:
      terms: tuples ``(divisor, size, stride)``. The position of a thread's first element is the sum
        of ``thread // divisor % size * stride`` over all tuples.
      registers: for each register of a thread, the distance from the thread's first element to the
        register's first element.
      step: distance between neighbouring elements of a register.
      elements: number of elements per register.
    """

    terms: tuple[tuple[int, int, int], ...]
    registers: tuple[int, ...]
    step: int
    elements: int

    def thread_position(self) -> Word:
        """Return the position of the current thread's first element, as an MLIR integer."""
        own, total = thread(), None
        for divisor, size, stride in self.terms:
            index = (own // divisor if divisor > 1 else own) % size
            term = index * stride if stride > 1 else index
            total = term if total is None else total + term
        return Word(i32(0)) if total is None else total


@functools.cache
def places(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Places:
    """Return the positions in memory of the array elements that each thread has in its registers.

    `layout` is the tiled Mosaic layout of the array's registers. `strides` are the strides of the
    array in memory, in elements, along each axis of `shape`.
    """
    dims = list(zip(shape, strides))
    for tile in layout.tiling.tiles:
        split = len(dims) - len(tile)
        outer = [(size // t, stride * t) for (size, stride), t in zip(dims[split:], tile)]
        inner = [(t, stride) for (_, stride), t in zip(dims[split:], tile)]
        dims = [*dims[:split], *outer, *inner]
    threads = [*layout.warp_dims, *layout.lane_dims]
    terms: list[tuple[int, int, int]] = []
    divisor = 1
    for dim in reversed(threads):
        size, stride = dims[dim] if isinstance(dim, int) else (dim.times, 0)
        if terms and stride == prod(terms[-1][1:]) and divisor == prod(terms[-1][:2]):
            terms[-1] = (terms[-1][0], terms[-1][1] * size, terms[-1][2])
        elif stride:
            terms.append((divisor, size, stride))
        divisor *= size
    assert divisor == WARP * WARPS, layout
    elements, step = dims[layout.vector_dim]
    for dim in (layout.vector_dim, *(dim for dim in threads if isinstance(dim, int))):
        dims[dim] = (1, 0)
    registers = np.ndindex(*(size for size, _ in dims))
    offsets = [sum(i * stride for i, (_, stride) in zip(at, dims)) for at in registers]
    return Places(tuple(terms), tuple(offsets), step, elements)


def addresses(ref: Any, layout: Any, shape: tuple[int, ...]) -> list[Any]:
    """For each register of an array, return the address in `ref` of the register's first element.

    `ref` is in global memory. The array in registers has the given tiled layout and shape.
    """
    where = places(layout, shape, _strides(ref))
    return _from(in_global(utils.memref_ptr(ref)), where.thread_position(), where.registers, ref)


def load_arrays(
    refs: Sequence[Any],
    layout: Any,
    shape: tuple[int, ...],
    *,
    at: Sequence[Word | int] = (),
    starts: Sequence[int] = (0,),
    signed: bool | None = None,
) -> list[Any]:
    """For each ref and each start, load one array.

    The arrays have the given shape and tiled layout. With a start s, the first element of an array
    is the element of the ref that lies s elements after ``ref[at]`` in memory. Where its other
    elements are depends on `at`:

    * `at` has an index for each axis of the ref: the elements of an array are adjacent in memory.
    * `at` has fewer indices: the missing indices along the last axes are 0. An array with n axes is
      a slice of the ref's last n axes.

    The result is a list. It has the arrays of the first ref, in the order of `starts`, then the
    arrays of the next ref, and so on.
    """
    arrays, positions = [], dict[tuple[int, ...], tuple[Word, list[int]]]()
    register_shape, count = (layout.vector_length,), prod(layout.registers_shape(shape))
    for ref in refs:
        strides = _strides(ref)
        if strides not in positions:
            positions[strides] = _positions(layout, shape, strides, at, starts)
        position, distances = positions[strides]
        register = ir.VectorType.get(register_shape, ir.MemRefType(ref.type).element_type)
        found = _from(utils.memref_ptr(ref), position, distances, ref)
        loaded = [llvm.load(register, address) for address in found]
        for first in range(0, len(loaded), count):
            arrays.append(_array(loaded[first : first + count], layout, shape, signed))
    return arrays


def _positions(
    layout: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    at: Sequence[Word | int],
    starts: Sequence[int],
) -> tuple[Word, list[int]]:
    """Return where the elements that a thread loads from a ref are in memory.

    The result is a pair, in which all numbers count elements. The first entry is a position in the
    ref; it differs between threads. The second entry is a list with one number for each register of
    a thread: the distance from this position to the register's first element. The distances are the
    same for all threads. `strides` are the strides of the ref; the other arguments are the same as
    in `load_arrays`.
    """
    is_range = len(at) == len(strides)
    of_array = [prod(shape[axis + 1 :]) for axis in range(len(shape))] if is_range else strides
    where = places(layout, shape, tuple(of_array[-len(shape) :]))
    position, fixed = where.thread_position(), 0
    for index, stride in zip(at, strides):
        if isinstance(index, int):
            fixed += index * stride
        else:
            position = position + index * stride
    return position, [fixed + start + k for start in starts for k in where.registers]


def indices(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return an int32 array in which the value of each element is the element's position.

    A position is the sum of ``index * stride`` over all axes: `index` is the element's index along
    an axis, and `stride` the axis's entry in `strides`.
    """
    where = places(layout, shape, strides)
    register = ir.VectorType.get((where.elements,), ir.IntegerType.get_signless(32))
    first = vector.broadcast(register, where.thread_position().value)
    registers = []
    for k in where.registers:
        offsets = np.asarray([k + where.step * i for i in range(where.elements)], np.int32)
        values = ir.DenseElementsAttr.get(offsets, type=register)
        registers.append(arith.addi(first, arith.constant(register, values)))
    return _array(registers, layout, shape, signed=True)


def _strides(ref: Any) -> tuple[int, ...]:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return tuple(strides)


def _from(base: Any, position: Word, distances: Sequence[int], ref: Any) -> list[Any]:
    """Return an address for each of `distances`.

    Distances are in elements, and count from `position`, which depends on the thread. `base` is the
    address of the ref's first element.
    """
    kind = ir.MemRefType(ref.type).element_type
    first = utils.getelementptr(base, [position.value], kind)
    return [utils.getelementptr(first, [k], kind) if k else first for k in distances]


def _array(registers: Sequence[Any], layout: Any, shape: tuple[int, ...], signed: Any) -> Any:
    placed = np.empty(len(registers), dtype=object)
    placed[:] = registers
    placed = placed.reshape(layout.registers_shape(shape))
    return FragmentedArray(_registers=placed, _layout=layout, _is_signed=signed)
