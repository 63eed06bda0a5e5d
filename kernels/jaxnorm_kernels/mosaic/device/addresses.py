"""The addresses that a thread loads and stores, in few operations.

Mosaic's own loads and stores are more general. They compute a thread's number and its place in the
layout anew each time, in some 30 operations. The compiler merges these, but lowering is Python and
takes time for each operation. Here, a load takes some 12 operations, and several loads in one
inline function share the thread's place.
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
    """Where the elements of an array are that a thread holds, in elements from its start.

    Attributes:
      terms: ``(divisor, size, stride)``: a thread starts at the sum of
        ``thread // divisor % size * stride``.
      registers: for each of its registers, the distance of the first element from there.
      step: distance between neighbouring elements of a register.
      elements: of a register.
    """

    terms: tuple[tuple[int, int, int], ...]
    registers: tuple[int, ...]
    step: int
    elements: int

    def register(self, kind: Any) -> Any:
        """Return the type of a register whose elements have this type."""
        return ir.VectorType.get((self.elements,), kind)

    def of_thread(self) -> Word:
        """Return where this thread starts."""
        thread, total = mgpu.thread(), None
        for divisor, size, stride in self.terms:
            index = (thread // divisor if divisor > 1 else thread) % size
            term = index * stride if stride > 1 else index
            total = term if total is None else total + term
        return Word(mgpu.i32(0)) if total is None else total


@functools.cache
def places(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Places:
    """Return where the elements of an array with these strides are, in a tiled layout of Mosaic."""
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


def addresses(
    ref: Any, layout: Any, shape: tuple[int, ...], *, start: int = 0, in_global: bool = False
) -> list[Any]:
    """Return the address of each register of an array of `shape`, in the order of the registers.

    Args:
      start: where the array starts, in elements from the start of `ref`.
      in_global: if the compiler is to know that `ref` is in global memory.
    """
    kind = ir.MemRefType(ref.type)
    strides, _ = kind.get_strides_and_offset()
    where = places(layout, shape, tuple(strides))
    return _Addresses(ref, where.of_thread().value, in_global)(where, start)


class _Addresses:
    """The address of the first element of a thread, and addresses at a fixed distance from it."""

    def __init__(self, ref: Any, of_thread: Any, in_global: bool = False) -> None:
        base, self.kind = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        base = mgpu.in_global(base) if in_global else base
        self.first = utils.getelementptr(base, [of_thread], self.kind)

    def __call__(self, where: Places, start: int) -> list[Any]:
        distances = [start + k for k in where.registers]
        return [
            utils.getelementptr(self.first, [k], self.kind) if k else self.first for k in distances
        ]


def load_arrays(
    refs: Sequence[Any],
    layout: Any,
    shape: tuple[int, ...],
    *,
    starts: Sequence[int] = (0,),
    signed: bool | None = None,
) -> list[Any]:
    """Return arrays of `shape` in a tiled layout: for each ref, one from each of `starts` on."""
    arrays, of_threads = [], dict[Places, Any]()
    for ref in refs:
        kind = ir.MemRefType(ref.type)
        strides, _ = kind.get_strides_and_offset()
        where = places(layout, shape, tuple(strides))
        if where not in of_threads:
            of_threads[where] = where.of_thread().value
        at, register = _Addresses(ref, of_threads[where]), where.register(kind.element_type)
        for start in starts:
            registers = [llvm.load(register, address) for address in at(where, start)]
            arrays.append(_array(registers, layout, shape, signed))
    return arrays


def indices(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return for each element of an array its place, in elements from the start; of int32."""
    where = places(layout, shape, strides)
    register = where.register(ir.IntegerType.get_signless(32))
    first = vector.broadcast(register, where.of_thread().value)
    registers = []
    for k in where.registers:
        offsets = np.asarray([k + where.step * i for i in range(where.elements)], np.int32)
        values = ir.DenseElementsAttr.get(offsets, type=register)
        registers.append(arith.addi(first, arith.constant(register, values)))
    return _array(registers, layout, shape, signed=True)


def _array(registers: Sequence[Any], layout: Any, shape: tuple[int, ...], signed: Any) -> Any:
    placed = np.empty(len(registers), dtype=object)
    placed[:] = registers
    placed = placed.reshape(layout.registers_shape(shape))
    return FragmentedArray(_registers=placed, _layout=layout, _is_signed=signed)
