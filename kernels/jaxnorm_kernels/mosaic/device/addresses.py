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


def addresses(refs: Sequence[Any], layout: Any, *, in_global: bool = False) -> list[list[Any]]:
    """Return for each ref, of one shape, the addresses of the registers of an array.

    Args:
      in_global: if the compiler is to know that the refs are in global memory.
    """
    starts: dict[Places, Any] = {}
    result = []
    for ref in refs:
        kind = ir.MemRefType(ref.type)
        strides, _ = kind.get_strides_and_offset()
        where = places(layout, tuple(kind.shape), tuple(strides))
        if where not in starts:
            starts[where] = where.of_thread().value
        base, element = utils.memref_ptr(ref), kind.element_type
        if in_global:
            base = mgpu.in_global(base)
        start = utils.getelementptr(base, [starts[where]], element)
        at = [utils.getelementptr(start, [k], element) if k else start for k in where.registers]
        result.append(at)
    return result


def load_arrays(refs: Sequence[Any], layout: Any, signed: bool | None = None) -> list[Any]:
    """Return the elements of each ref, of one shape, as arrays in a tiled layout."""
    arrays = []
    for ref, at in zip(refs, addresses(refs, layout)):
        kind = ir.MemRefType(ref.type)
        shape = layout.registers_shape(tuple(kind.shape))
        register = ir.VectorType.get((layout.vector_length,), kind.element_type)
        registers = np.empty(len(at), dtype=object)
        registers[:] = [llvm.load(register, address) for address in at]
        arrays.append(
            FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=signed)
        )
    return arrays


def indices(layout: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return for each element of an array its place, in elements from the start; of int32."""
    where, i32 = places(layout, shape, strides), ir.IntegerType.get_signless(32)
    register = ir.VectorType.get((where.elements,), i32)
    start = vector.broadcast(register, where.of_thread().value)
    registers = np.empty(len(where.registers), dtype=object)
    for k, first in enumerate(where.registers):
        offsets = [first + where.step * element for element in range(where.elements)]
        values = ir.DenseElementsAttr.get(np.asarray(offsets, np.int32), type=register)
        registers[k] = arith.addi(start, arith.constant(register, values))
    registers = registers.reshape(layout.registers_shape(shape))
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
