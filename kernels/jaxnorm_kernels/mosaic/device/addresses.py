"""The addresses that a thread loads and stores, in few operations.

Mosaic's own loads and stores are more general. Each of them computes a thread's number and its
place in the layout, in about 30 operations. The compiler merges repeated operations, but lowering
is Python and takes time for each of them. Here, a load takes about 12 operations, and several loads
in one inline function share the thread's place.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.mgpu import (
    WARP,
    WARPS,
    FragmentedArray,
    Word,
    arith,
    ir,
    llvm,
    utils,
    vector,
)


class Places(NamedTuple):
    """The places of the array elements that a thread holds, in elements from the array's start.

    Attributes:
      terms: tuples ``(divisor, size, stride)``. A thread's first element is at the sum of
        ``thread // divisor % size * stride``.
      registers: for each register, the distance of its first element from the thread's first.
      step: the distance between neighbouring elements of a register.
      elements: the number of elements of a register.
    """

    terms: tuple[tuple[int, int, int], ...]
    registers: tuple[int, ...]
    step: int
    elements: int

    def of_thread(self) -> Word:
        """Return the place of this thread's first element."""
        thread, total = mgpu.thread(), None
        for divisor, size, stride in self.terms:
            index = (thread // divisor if divisor > 1 else thread) % size
            term = index * stride if stride > 1 else index
            total = term if total is None else total + term
        return Word(mgpu.i32(0)) if total is None else total


@functools.cache
def places(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Places:
    """Return the places of an array with these strides in one of Mosaic's tiled layouts."""
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
        if terms and stride == math.prod(terms[-1][1:]) and divisor == math.prod(terms[-1][:2]):
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
    """Return the addresses of the registers of an array, for a ref in global memory."""
    where = places(layout, shape, _strides(ref))
    return _from(mgpu.in_global(utils.memref_ptr(ref)), where.of_thread(), where.registers, ref)


def load_arrays(
    refs: Sequence[Any],
    layout: Any,
    shape: tuple[int, ...],
    *,
    starts: Sequence[int] = (0,),
    signed: bool | None = None,
) -> list[Any]:
    """Return arrays of `shape` in a tiled layout: for each ref, one at each of `starts`."""
    arrays, of_threads = [], dict[Places, Word]()
    for ref in refs:
        where = places(layout, shape, _strides(ref))
        if where not in of_threads:
            of_threads[where] = where.of_thread()
        distances = [start + k for start in starts for k in where.registers]
        register = ir.VectorType.get((where.elements,), ir.MemRefType(ref.type).element_type)
        found = _from(utils.memref_ptr(ref), of_threads[where], distances, ref)
        loaded, count = [llvm.load(register, at) for at in found], len(where.registers)
        for first in range(0, len(loaded), count):
            arrays.append(_array(loaded[first : first + count], layout, shape, signed))
    return arrays


def indices(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the place of each element of an array, in elements from its start, as int32."""
    where = places(layout, shape, strides)
    register = ir.VectorType.get((where.elements,), ir.IntegerType.get_signless(32))
    first = vector.broadcast(register, where.of_thread().value)
    registers = []
    for k in where.registers:
        offsets = np.asarray([k + where.step * i for i in range(where.elements)], np.int32)
        values = ir.DenseElementsAttr.get(offsets, type=register)
        registers.append(arith.addi(first, arith.constant(register, values)))
    return _array(registers, layout, shape, signed=True)


def _strides(ref: Any) -> tuple[int, ...]:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return tuple(strides)


def _from(base: Any, of_thread: Word, distances: Sequence[int], ref: Any) -> list[Any]:
    """Return the addresses at these distances from a thread's first element."""
    kind = ir.MemRefType(ref.type).element_type
    first = utils.getelementptr(base, [of_thread.value], kind)
    return [utils.getelementptr(first, [k], kind) if k else first for k in distances]


def _array(registers: Sequence[Any], layout: Any, shape: tuple[int, ...], signed: Any) -> Any:
    placed = np.empty(len(registers), dtype=object)
    placed[:] = registers
    placed = placed.reshape(layout.registers_shape(shape))
    return FragmentedArray(_registers=placed, _layout=layout, _is_signed=signed)
