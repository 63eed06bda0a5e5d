"""Strips: parts of an array that is normalised over an axis other than the last (GroupNorm).

The array is ``(outer, cols, inner)``, and the middle axis is normalised. A *strip* consists of all
columns for one outer index and `width` neighbouring inner elements. The width is large enough to
use complete memory sectors of 32 bytes. One block processes a strip; if there are many columns, a
cluster of blocks does. Asynchronous copies (TMA) load the strip into shared memory once, in the
array's dtype. Each pass over the strip reads it from there, so a thread needs registers for few
elements only. The copies are divided into *parts*. The first pass waits for one part after the
other, so it starts before the last part has arrived.

Each warpgroup has a partition of the columns (see `partitions`). It processes the partition in
units. A unit has one vector for each thread of the 4 warps, and the shape ``(4, columns of a warp,
width)``. The 32 lanes of a warp run along the width first, then along the columns.

In GroupNorm, `group` neighbouring inner elements are normalised together, so they share one mean
and one variance. In registers, a statistic is a ``(width,)`` array, in which all elements of a
group have the same value, with identical bits. In global memory, it has one value per group.

If the width does not divide the inner axis, the last strip ends with the axis and overlaps the
previous strip. If the group size does not divide the width, a strip may contain only a part of its
last group. Strips then overlap, so that each group is complete in some strip. Each strip *owns* a
range of complete groups, and stores only results of these groups. Each group is owned by exactly
one strip. The statistics of incomplete groups are meaningless.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    CLUSTER,
    WARPGROUP,
    in_plain_order,
    inline,
    warpgroup_index,
)
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPS,
    Layout,
    Ref,
    columns_layout,
    flat_index,
    load,
    strip_layout,
    widen,
    with_registers,
)
from jaxnorm_kernels.mosaic.device.mgpu import arith, ir, llvm, utils, vector
from jaxnorm_kernels.mosaic.device.registers import (
    load_each,
    store_each,
    store_global,
    store_vectors,
    store_where,
)
from jaxnorm_kernels.mosaic.rows.partitions import Fragment, Partition

#: Maximum size of an asynchronous copy (TMA box) along each axis.
BOX = 256
# Maximum number of parts into which the copies of a warpgroup's columns are divided. The first pass
# waits for one part at a time. GroupNorm with silu takes 97 us with one part, 88 us with two and 90
# us with four (8x128x128x128 bfloat16, forward and backward; H100).
_PARTS = 2


@dataclasses.dataclass(frozen=True)
class StripSchedule:
    """How an array is split into strips, and a strip among threads; see the module's docstring.

    Attributes:
      outer, cols, inner: shape of the array.
      vector: number of neighbouring inner elements that one thread loads and stores at once.
      threads: number of neighbouring threads whose vectors together cover a strip's width.
      warpgroups: number of warpgroups (of 128 threads) per block.
      cluster: number of blocks that share a strip.
      group: number of neighbouring inner elements that are normalised together.
    """

    outer: int
    cols: int
    inner: int
    vector: int
    threads: int
    warpgroups: int = 1
    cluster: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError if the sizes do not fit together."""
        if not 2 <= self.threads < WARP:
            # Mosaic cannot infer a layout if one thread covers a strip's width (threads = 1), or if
            # a warp has only one column of each unit (threads = WARP).
            raise ValueError(f"{self} needs 2 to {WARP // 2} threads")
        if self.width > self.inner:
            raise ValueError(f"{self} needs an inner axis of {self.width} elements or more")
        if not self.pitch or self.inner % self.group:
            raise ValueError(f"{self} needs groups that divide the inner axis, and fit the width")
        self.partition()  # raises ValueError if there are too few columns

    @property
    def width(self) -> int:
        """Number of inner elements in a strip."""
        return self.threads * self.vector

    @property
    def overlaps(self) -> bool:
        """True if some elements of the array are in several strips."""
        return self.pitch < self.width or self.inner % self.width != 0

    @property
    def pitch(self) -> int:
        """Distance between the starts of neighbouring strips, along the inner axis.

        It is a multiple of the group size and of the number of elements in a vector.
        """
        return self.width // math.lcm(self.group, self.vector) * math.lcm(self.group, self.vector)

    @property
    def across(self) -> int:
        """Number of strips that cover the inner axis, for each index of the outer axis."""
        return 1 + -(-(self.inner - self.width) // self.pitch)

    @property
    def count(self) -> int:
        """Number of strips of the array. Each strip is processed by one block or one cluster."""
        return self.outer * self.across

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape in registers of a unit, which consists of one vector per thread."""
        return WARPS, WARP // self.threads, self.width

    @property
    def layout(self) -> Layout:
        """Register layout of a unit, which consists of one vector per thread."""
        return strip_layout(self.vector, self.threads)

    @property
    def stat_layout(self) -> Layout:
        """Register layout of a ``(width,)`` statistic, of which every warp has a complete copy."""
        return columns_layout(self.vector, self.threads)

    @property
    def stats_shape(self) -> tuple[int, int]:
        """Shape of a statistic in memory: one value per group of inner elements."""
        return self.outer, self.inner // self.group

    def partition(self, index: Any = 0) -> Partition:
        """Return the columns that warpgroup number `index` of the block or cluster processes."""
        unit = WARPS * self.shape[1]
        return Partition(self.cols, self.cluster * self.warpgroups, unit, index=index)

    @property
    def parts(self) -> int:
        """Number of parts into which a warpgroup's columns are divided for loading.

        Each part is loaded by the same number of asynchronous copies.
        """
        return math.gcd(_PARTS, self._box_count)

    @property
    def boxes_of_part(self) -> int:
        """Number of asynchronous copies that load a part of a warpgroup's columns."""
        return self._box_count // self.parts

    @property
    def _box_count(self) -> int:
        return sum(len(boxes_of(fragment)) for fragment in self.partition().fragments())

    def scratch(self, dtypes: Sequence[np.dtype]) -> list[Any]:
        """Return the shared memory of a block: the strip of each loaded array, and barriers.

        Each warpgroup has a barrier for each part of its columns. If there are groups of inner
        elements, there is also memory for `group_sum`.
        """
        held = (self.warpgroups, self.partition().width, self.width)
        of_warps = (self.warpgroups, WARPS * self.width)
        return [
            *[plgpu.SMEM(held, dtype) for dtype in dtypes],
            *[plgpu.SMEM(of_warps, jnp.float32)] * (self.group > 1),
            plgpu.Barrier(
                num_arrivals=len(dtypes) * self.boxes_of_part,
                num_barriers=self.warpgroups * self.parts,
            ),
        ]


def boxes_of(fragment: Fragment) -> list[tuple[int, int]]:
    """Return a pair (first column, number of columns) for each copy that loads a range of columns.

    These are asynchronous copies (TMA). First columns are relative to the start of the range.
    """
    return [(at, min(BOX, fragment.width - at)) for at in range(0, fragment.width, BOX)]


# Number of values that a thread loads from shared memory at once. It is large enough to hide the
# latency, and small enough to need few registers.
_VALUES = 16

#: A statistic with a value for each inner element of a strip, ``(width,)``. Before the warps have
#: exchanged values, it is ``(4, width)``: each of the warpgroup's four warps has a statistic of its
#: own columns.
Stat = jax.Array


@dataclasses.dataclass(frozen=True)
class Strip:
    """A block's strip, and which of its columns the current warpgroup processes.

    Attributes:
      strips: how the array is split into strips.
      outer: index of the strip along the outer axis.
      start: index of the strip's first element along the inner axis.
      fresh: index of the first inner element that no earlier strip stores.
      partition: the warpgroup's columns.
      stages: a list of refs in shared memory, one for each loaded array. If there are groups of
        inner elements, the memory for `group_sum` is one more entry, at the end of the list.
      full: barriers, one for each part of each warpgroup's columns. The copies that load a part
        signal its barrier.
    """

    strips: StripSchedule
    outer: Any
    start: Any
    fresh: Any
    partition: Partition
    stages: Sequence[Ref]
    full: Ref

    @classmethod
    def begin(
        cls, strips: StripSchedule, operands: Sequence[Ref], scratch: Sequence[Any]
    ) -> "Strip":
        """Return the block's strip, and start the copies that load it from `operands`.

        `scratch` is the shared memory that `StripSchedule.scratch` requests.
        """
        *stages, full = scratch
        in_plain_order(*stages)
        index = lax.axis_index(BLOCK)
        fresh = lax.rem(index, strips.across) * strips.pitch
        start = jnp.minimum(fresh, strips.inner - strips.width)
        part = warpgroup_index(strips.warpgroups, strips.cluster)
        outer = lax.div(index, strips.across)
        strip = cls(strips, outer, start, fresh, strips.partition(part), stages, full)
        for source, stage in zip(operands, stages):
            strip._copy(source, stage)
        return strip

    @property
    def inner(self) -> Any:
        """Slice of the strip's elements along the inner axis."""
        return pl.ds(self.start, self.strips.width)

    def _copy(self, source: Ref, stage: Ref) -> None:
        """Start the copies that load the warpgroup's columns of one operand into shared memory."""
        boxes = [
            (fragment, *box)
            for fragment in self.partition.fragments()
            for box in boxes_of(fragment)
        ]
        for nth, (fragment, at, columns) in enumerate(boxes):
            plgpu.copy_gmem_to_smem(
                source.at[self.outer, pl.ds(fragment.start + at, columns), self.inner],
                stage.at[lax.axis_index(WARPGROUP), pl.ds(fragment.stage_start + at, columns)],
                self._full(nth // self.strips.boxes_of_part),
            )

    def _full(self, part: Any) -> Ref:
        return self.full.at[lax.axis_index(WARPGROUP) * self.strips.parts + part]

    def read(self, which: int, fragment: Fragment) -> jax.Array:
        """Load a fragment (column range) of array number `which` from shared memory, in float32."""
        ref = self.stages[which].at[lax.axis_index(WARPGROUP)]
        layout = self.strips.layout
        staged = ref.at[pl.ds(fragment.stage_start, fragment.width)]
        return widen(load(staged, layout, self.strips.shape), layout)

    def broadcast(self, stat: Stat) -> jax.Array:
        """Repeat a statistic for each column of a unit.

        A statistic has one value for each index of the last (inner) axis. A unit consists of one
        vector per thread. The result has the shape `StripSchedule.shape`.
        """
        axes = (0, 2) if stat.ndim == 2 else (2,)
        return lax.broadcast_in_dim(stat, self.strips.shape, axes)

    def stat(self, ref: Ref) -> Stat:
        """Load a statistic of the strip's inner elements.

        In `ref`, a statistic has one value for each group of inner elements that are normalised
        together (see `StripSchedule.stats_shape`). The result has one value for each inner element
        of the strip, so the value of a group is repeated for each of its elements.
        """
        group, layout = self.strips.group, self.strips.stat_layout
        if group == 1:
            return load(ref.at[self.outer, self.inner], layout)
        return load_each(ref.at[self.outer], lax.div(self._index, jnp.int32(group)), layout)

    def inner_param(self, ref: Ref) -> Stat:
        """Load the elements of a parameter for the strip's inner elements.

        The parameter is ``(inner,)``. It is ``(n, inner)`` if the outer axis is divided into n
        equal parts that have different parameters.
        """
        if len(ref.shape) == 2:
            ref = ref.at[lax.div(self.outer, self.strips.outer // ref.shape[0])]
        return load(ref.at[self.inner], self.strips.stat_layout)

    def store(self, ref: Ref, fragment: Fragment, value: jax.Array) -> None:
        """Store the elements of a fragment (a range of columns), rounded to the dtype of `ref`."""
        target = ref.at[self.outer, pl.ds(fragment.start, fragment.width), self.inner]
        if not self.strips.overlaps:
            store_global(target, value, self.strips.layout)
            return
        index = self.start + lax.broadcasted_iota(jnp.int32, value.shape, 2)
        store_where(target, value, index, self.fresh, self._end, self.strips.layout)

    def store_stat(self, ref: Ref, stat: Stat) -> None:
        """Store a statistic of the strip's inner elements.

        In `ref`, the statistic has one value for each group of inner elements that are normalised
        together (see `StripSchedule.stats_shape`).
        """
        if self.strips.group == 1:
            self.store_inner(ref, stat)
            return
        index, group = self._index, jnp.int32(self.strips.group)
        nth = lax.div(index, group)
        # Store the value of a group's first element, if the strip owns the group.
        is_stored = (nth * group == index) & (index >= self.fresh) & (index < self._end)
        nth = jnp.where(is_stored, nth, jnp.int32(-1))
        row, layout = ref.at[self.outer], self.strips.stat_layout
        pl.when(self._is_first)(lambda: store_each(row, nth, stat, layout))

    def store_inner(self, ref: Ref, stat: Stat) -> None:
        """Store one value for each inner element, such as the gradient of a parameter.

        `ref` is ``(outer, inner)``. `stat` is ``(width,)``; every warp has a complete copy of it.
        """
        row, layout = ref.at[self.outer], self.strips.stat_layout
        pl.when(self._is_first)(
            lambda: store_vectors(row, self.start, stat, self.fresh, self._end, layout)
        )

    @property
    def _end(self) -> Any:
        """Index after the last inner element that this strip stores."""
        return jnp.minimum(self.fresh + self.strips.pitch, self.strips.inner)

    @property
    def _index(self) -> jax.Array:
        """Index along the inner axis of each element of the strip."""
        return self.start + flat_index((self.strips.width,), self.strips.stat_layout)

    @property
    def _is_first(self) -> Any:
        """True in the first of the warpgroups that share the strip."""
        is_first = lax.axis_index(WARPGROUP) == 0
        if self.strips.cluster > 1:
            is_first &= lax.axis_index(CLUSTER) == 0
        return is_first

    def group_sum(self, stat: Stat) -> Stat:
        """For each inner element, return the sum of a statistic over the element's group.

        A group consists of the inner elements that are normalised together.
        """
        if self.strips.group == 1:
            return stat
        return group_sum(stat, self.start, self.strips, self.stages[-1])

    def sum(
        self,
        terms: Callable[[Fragment], Sequence[jax.Array]],
        count: int = 1,
        *,
        waits: bool = False,
    ) -> list[Stat]:
        """Compute `count` sums over each warp's columns, for each inner element.

        ``terms(fragment)`` returns, for a range of columns, one array of terms for each sum.
        Asynchronous copies load the columns in several parts. If `waits` is True, wait for the
        copies of a part before reading the part.
        """

        def add(fragment: Fragment, carry: list[jax.Array]) -> list[jax.Array]:
            shape, layout = self.strips.shape, self.strips.layout
            index = functools.partial(flat_index, shape, layout, axes=2)
            new = [fragment.skip_stale(term, 0, index) for term in terms(fragment)]
            return [a + b for a, b in zip(carry, new, strict=True)]

        totals = self._walk(add, [self._all(0)] * count, waits=waits)
        return [jnp.sum(total, axis=1) for total in totals]

    def sizes(self) -> Stat | float:
        """Return how many columns each warp sums up.

        If two fragments contain the same column, the column is counted only once. The result is a
        float if all warps have the same number of columns, otherwise an array ``(4, width)`` like a
        `Stat`.
        """
        if not self.partition.has_tail:
            return self.partition.width / WARPS
        (sizes,) = self.sum(lambda fragment: [self._all(1)])
        return sizes

    def each_fragment(self, step: Callable[[Fragment], None]) -> None:
        """Call ``step(fragment)`` for each fragment (range of columns) of the warpgroup's columns.

        Here, a fragment is a unit: one vector per thread. All copies that load the columns into
        shared memory must be complete, because this function does not wait for them.
        """

        def one(fragment: Fragment, carry: tuple[()]) -> tuple[()]:
            step(fragment)
            return carry

        self._walk(one, ())

    def _walk[T](
        self,
        step: Callable[[Fragment, T], T],
        carry: T,
        waits: bool = False,
    ) -> T:
        """Call ``carry = step(fragment, carry)`` for each fragment of the warpgroup's columns.

        A fragment is a range of columns. Here, it is a unit: one vector per thread. If there are
        many units, this is a loop. Asynchronous copies load the columns in several parts. If
        `waits` is True, wait for the copies of a part before reading the part. The last `carry` is
        returned.
        """
        body, *tail = self.partition.fragments()
        units, parts = self.partition.units, self.strips.parts if waits else 1
        of_part = self.strips.boxes_of_part * BOX // self.partition.unit if parts > 1 else units

        def part(nth: Any, carry: T, count: int = of_part) -> T:
            if waits:
                plgpu.barrier_wait(self._full(nth))
            return self._walk_units(step, carry, body.start, nth * of_part, count)

        whole = units // of_part
        carry = lax.fori_loop(0, whole, part, carry) if parts > 1 else part(0, carry)
        for nth in range(whole, parts):
            carry = part(nth, carry, max(0, units - nth * of_part))
        for fragment in tail:
            carry = step(fragment, carry)
        return carry

    def _walk_units[T](
        self,
        step: Callable[[Fragment, T], T],
        carry: T,
        start: Any,
        first: Any,
        units: int,
    ) -> T:
        """Call ``carry = step(fragment, carry)`` for `units` consecutive units; see `_walk`.

        The unit with index `first`, counted from column `start`, is processed first.
        """
        unit = self.partition.unit
        group = max(1, _VALUES // self.strips.vector)

        def nth(k: Any, carry: T) -> T:
            at = (first + k) * unit
            return step(Fragment(start + at, unit, stage_start=at), carry)

        def several(i: Any, carry: T) -> T:
            return functools.reduce(lambda c, j: nth(i * group + j, c), range(group), carry)

        looped = units // group if units >= 2 * group else 0
        if looped:
            carry = lax.fori_loop(0, looped, several, carry)
        rest = range(looped * group, units)
        if looped and len(rest) > 1:
            return lax.fori_loop(rest.start, rest.stop, nth, carry)
        return functools.reduce(lambda c, k: nth(k, c), rest, carry)

    def _all(self, value: float) -> jax.Array:
        """Return an array of shape `StripSchedule.shape` whose elements all equal `value`."""
        return plgpu.layout_cast(
            jnp.full(self.strips.shape, value, jnp.float32), self.strips.layout
        )


def group_sum(stat: Stat, start: Any, strips: StripSchedule, scratch: Ref) -> Stat:
    """For each inner element of a strip, return the sum of a statistic over the element's group.

    Mosaic's layouts do not support groups, so this function handles the elements of each thread one
    by one. Each warp writes its elements to shared memory. Then each thread reads all elements of
    the groups that overlap its vector. `start` is the index of the strip's first element along the
    inner axis. `scratch` is a ``(warpgroups, 4 * width)`` ref in shared memory.
    """
    group, width, v, layout = strips.group, strips.width, strips.vector, strips.stat_layout

    def reference(scratch: Ref, stat: Stat, start: Any) -> Stat:
        groups = lax.div(start + flat_index((width,), layout), jnp.int32(group))
        return jnp.sum(jnp.where(groups[:, None] == groups[None], stat[None], 0), axis=1)

    # `count` is the maximum number of groups that overlap a thread's vector of v elements. The
    # vector starts at a multiple of v along the inner axis. So it overlaps one group if the group
    # size is a multiple of v, and consists of complete groups if v is a multiple of the group size.
    is_even = group % v == 0 or v % group == 0
    count, f32 = max(1, v // group) if is_even else (v - 1) // group + 2, ir.F32Type.get

    @inline(
        reference,
        (plgpu.RefType(), layout, plgpu.Layout.WG_SPLAT),
        plgpu.ShapeDtypeStruct(stat.shape, jnp.float32, layout),
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

    return sum_up(scratch.at[lax.axis_index(WARPGROUP)], stat, start)
