"""Statistics of groups of neighbouring inner elements, for GroupNorm.

An array ``(outer, cols, inner)`` is normalised over its middle axis. An index along the last axis
is called an inner element. A strip, which one block processes, has `width` neighbouring inner
elements (see `strips`). In GroupNorm, `group` neighbouring inner elements form a group. A group is
normalised together, so it has one mean and one variance. In registers, a statistic is a
``(width,)`` array, in which all elements of a group have the same value, with identical bits. In
memory, it is a ``(width / group,)`` array, with one value per group.

If the group size is a power of 2, a group lies in one thread's vector or in the vectors of
neighbouring threads, which exchange values by warp shuffles. For other group sizes, functions whose
names end in ``_any`` use shared memory and a `Span`. A strip may then contain only a part of its
first and last group. The statistics of such incomplete groups are meaningless and are not stored.
Mosaic's layouts do not support groups, so this code handles the registers of each thread one by
one. In the interpreter, which has no registers, it uses ordinary array operations.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import inline
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPS,
    Layout,
    Ref,
    flat_index,
    load,
    store,
    with_registers,
)
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, arith, ir, llvm, utils, vector
from jaxnorm_kernels.mosaic.device.registers import load_each, store_each, store_where


def group_sum(stat: jax.Array, group: int, layout: Layout) -> jax.Array:
    """Replace each element by the sum over its group, which has `group` neighbouring elements."""

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

    @inline(
        lambda stat: jnp.repeat(jnp.sum(stat.reshape(-1, group), axis=1), group),
        (layout,),
        plgpu.ShapeDtypeStruct(stat.shape, jnp.float32, layout),
    )
    def sum_up(context: Any, value: Any) -> Any:
        return with_registers(value, [summed(r) for r in value.registers.flat])

    return sum_up(stat)


def load_of_groups(ref: Ref, group: int, vector_width: int, layout: Layout) -> jax.Array:
    """Load one value per group, and repeat it for each element of the group: ``(width,)``.

    The ref is in global memory, with the shape ``(width / group,)``.
    """
    (groups,) = ref.shape
    threads, f32 = groups * group // vector_width, ir.F32Type.get

    @inline(
        lambda ref: jnp.repeat(load(ref, layout), group),
        (plgpu.RefType(),),
        plgpu.ShapeDtypeStruct((groups * group,), jnp.float32, layout),
    )
    def read(context: Any, ref: Any) -> Any:
        values = [llvm.load(f32(), at) for at in _addresses(ref, group, vector_width, threads)]
        vector_type = ir.VectorType.get((vector_width,), f32())
        register = vector.from_elements(
            vector_type, [values[at * len(values) // vector_width] for at in range(vector_width)]
        )
        zeros = utils.c(0.0, f32())
        splat = FragmentedArray.splat(zeros, (groups * group,), layout=layout.to_mgpu())
        return with_registers(splat, [register] * splat.registers.size)

    return read(ref)


def store_of_groups(
    ref: Ref, stat: jax.Array, group: int, vector_width: int, layout: Layout
) -> None:
    """Store one value per group in a ``(width / group,)`` ref (the inverse of `load_of_groups`).

    All threads of a group store the same value.
    """
    threads = stat.shape[0] // vector_width

    @inline(lambda ref, stat: store(ref, stat[::group]), (plgpu.RefType(), layout))
    def write(context: Any, ref: Any, value: Any) -> None:
        elements = mgpu.elements_of(value.registers.item())
        for at, address in enumerate(_addresses(ref, group, vector_width, threads)):
            llvm.store(elements[at * group], address)

    write(ref, stat)


def _addresses(ref: Any, group: int, vector_width: int, threads: int) -> list[Any]:
    """Return one address for each group that overlaps this thread's vector.

    It is the address of the group's value in `ref`.
    """
    thread, each = mgpu.thread() % threads, max(1, vector_width // group)
    is_whole = group <= vector_width
    first = thread * each if is_whole else thread // (group // vector_width)
    start = utils.memref_ptr(ref)
    return [
        utils.getelementptr(start, [(first + at).value], ir.F32Type.get()) for at in range(each)
    ]


@dataclasses.dataclass(frozen=True)
class Span:
    """The inner elements of a strip, and the range of elements that the strip stores.

    This class is used if the strip's width is not a multiple of the group size, or if the group
    size is not a power of 2. Groups at the ends of the strip may then be incomplete.

    Attributes:
      start: index of the strip's first element along the inner axis.
      first, end: the strip stores the elements with indices from `first` to ``end - 1`` along the
        inner axis. They form complete groups and complete vectors.
      width: number of elements of the strip.
      group: number of elements in a group.
      vector: number of neighbouring elements per thread in `layout`.
      layout: register layout of a ``(width,)`` statistic.
    """

    start: Any
    first: Any
    end: Any
    width: int
    group: int
    vector: int
    layout: Layout

    def inner(self) -> jax.Array:
        """Return the index along the inner axis of each element of the strip."""
        return self.start + flat_index((self.width,), self.layout)


def load_of_any(ref: Ref, span: Span) -> jax.Array:
    """Load the value of each group, and repeat it for each inner element of the group.

    The ref is ``(inner / group,)``, in global memory. The result is ``(width,)``.
    """
    return load_each(ref, jnp.int32(0), lax.div(span.inner(), jnp.int32(span.group)), span.layout)


def store_of_any(ref: Ref, stat: jax.Array, span: Span) -> None:
    """Store the values of the groups that this strip owns.

    The ref is ``(inner / group,)``, in global memory. The strip owns the inner elements with
    indices from ``span.first`` to ``span.end - 1``, which form complete groups.
    """
    group = jnp.int32(span.group)
    inner = span.inner()
    groups = lax.div(inner, group)
    is_stored = (groups * group == inner) & (inner >= span.first) & (inner < span.end)
    store_each(ref, jnp.where(is_stored, groups, jnp.int32(-1)), stat, span.layout)


def store_own(ref: Ref, value: jax.Array, span: Span, layout: Layout) -> None:
    """Store those elements of `value` whose index along the inner axis is in the span's range.

    The range is ``[span.first, span.end)``. Values are rounded to the dtype of `ref`. The shape of
    `value` is ``(4, columns of a warp, width)``. `ref` is ``(columns, width)``, in global memory.
    """
    inner = span.start + lax.broadcasted_iota(jnp.int32, value.shape, 2)
    store_where(ref, value, inner, span.first, span.end, layout)


def sum_of_any(stat: jax.Array, span: Span, scratch: Ref) -> jax.Array:
    """Do the same as `group_sum`, for any group size, through shared memory.

    Each warp writes its elements to shared memory. Then each thread reads all elements of the
    groups that overlap its vector. `scratch` is the warpgroup's scratch memory: a ``(4 * width,)``
    ref in shared memory.
    """
    group, width, v = span.group, span.width, span.vector

    def reference(scratch: Ref, stat: jax.Array, start: jax.Array) -> jax.Array:
        groups = lax.div(span.inner(), jnp.int32(group))
        return jnp.sum(jnp.where(groups[:, None] == groups[None], stat[None], 0), axis=1)

    # Maximum number of groups that overlap a thread's vector. The first and the last of these
    # groups are counted, too, although the vector may contain only a part of them.
    count, f32 = (v - 1) // group + 2, ir.F32Type.get

    @inline(
        reference,
        (plgpu.RefType(), span.layout, plgpu.Layout.WG_SPLAT),
        plgpu.ShapeDtypeStruct(stat.shape, jnp.float32, span.layout),
    )
    def sum_up(context: Any, scratch: Any, value: Any, start: Any) -> Any:
        start, thread = mgpu.Word(start.registers.item()), mgpu.thread()
        of_warp = mgpu.address_of(scratch) + thread // WARP % WARPS * (4 * width)
        lane_first = thread % (width // v) * v

        def place(element: mgpu.Word) -> Any:
            return mgpu.in_shared(of_warp + element * 4)

        for at, element in enumerate(mgpu.elements_of(value.registers.item())):
            llvm.store(element, place(lane_first + at))
        utils.warp_barrier()
        first = start + lane_first
        first_group = first // group
        totals = []
        for nth in range(count):
            begin = ((first_group + nth) * group - start).value
            begin = arith.minsi(arith.maxsi(begin, mgpu.i32(0)), mgpu.i32(width - group))
            terms = [llvm.load(f32(), place(mgpu.Word(begin) + at)) for at in range(group)]
            totals.append(functools.reduce(arith.addf, terms))
        utils.warp_barrier()
        results = []
        for at in range(v):
            nth = (first + at) // group - first_group
            total = totals[0]
            for k in range(1, count):
                total = arith.select((nth + -k).is_below(1), totals[k], total)
            results.append(total)
        register = vector.from_elements(ir.VectorType.get((v,), f32()), results)
        return with_registers(value, [register])

    return sum_up(scratch, stat, span.start)
