"""Strips: how an array that is normalised over an axis other than its last is split (GroupNorm).

The array is ``(outer, cols, inner)``, and the middle axis is normalised. A *strip* consists of all
columns for one outer index and `width` neighbouring inner elements. The width is large enough to
use complete memory sectors of 32 bytes. One block processes a strip; if there are many columns, a
cluster of blocks does. Asynchronous copies (TMA) load the strip into shared memory once, in the
array's dtype. Each pass over the strip reads it from there, so a thread needs registers for few
elements only. The copies are divided into *parts*. The first pass waits for one part after the
other, so it starts before the last part has arrived.

Each warpgroup has a partition of the columns (see `partitions`). It processes the partition in
units. A unit has one vector for each thread of the 4 warps, and the shape ``(4, columns of a warp,
width)``. The 32 lanes of a warp run along the width first, then along the columns. In GroupNorm,
neighbouring inner elements that are normalised together form a *group* (see `strip_groups`).

If the width does not divide the inner axis, the last strip ends with the axis and overlaps the
previous strip. Its first elements are *stale*: they are stored twice, with the same value. If the
group size does not divide the width, a strip may contain only a part of its last group. Strips then
overlap, so that each group is complete in some strip. Each strip *owns* a range of complete groups,
and stores only these. Each group is owned by exactly one strip.
"""

import dataclasses
import functools
import itertools
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
    store,
    strip_layout,
    widen,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, store_vectors
from jaxnorm_kernels.mosaic.rows import strip_groups
from jaxnorm_kernels.mosaic.rows.exchange import (
    MESSAGE,
    TransactionBarriers,
    announce,
    send,
)
from jaxnorm_kernels.mosaic.rows.partitions import Fragment, Partition

#: Maximum size of an asynchronous copy (TMA box) along each axis.
BOX = 256
# Maximum number of parts into which the copies of a warpgroup's columns are divided. The first pass
# waits for one part at a time. GroupNorm with silu takes 97 us with one part, 88 us with two and 90
# us with four (8x128x128x128 bfloat16, forward and backward; H100).
_PARTS = 2


@dataclasses.dataclass(frozen=True)
class Strips:
    """How an array is split into strips, and a strip into parts (see the module's docstring).

    Attributes:
      outer, cols, inner: shape of the array.
      vector: number of neighbouring inner elements that one thread loads and stores at once.
      threads: number of threads whose neighbouring vectors cover a strip's width.
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
            # Mosaic cannot infer a layout if one thread covers the width, or if each warp has only
            # one column.
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
    def holds_groups(self) -> bool:
        """True if the group size is a power of 2 and divides the width."""
        return not self.group & (self.group - 1) and self.width % self.group == 0

    @property
    def pitch(self) -> int:
        """Distance between the starts of neighbouring strips, along the inner axis.

        It is a multiple of the group size and of the vector.
        """
        return self.width // math.lcm(self.group, self.vector) * math.lcm(self.group, self.vector)

    @property
    def across(self) -> int:
        """Number of strips that cover the inner axis, for each index of the outer axis."""
        return 1 + -(-(self.inner - self.width) // self.pitch)

    @property
    def count(self) -> int:
        """Number of strips of the array. Each is processed by one block or one cluster."""
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
        """Return a warpgroup's columns, given its index among all warpgroups of the cluster."""
        return Partition(self.cols, self.cluster * self.warpgroups, WARPS * self.shape[1], index)

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

        Each warpgroup has a barrier for each part of its columns. If the group size requires
        `strip_groups.sum_of_any`, there is also memory for this function.
        """
        held = (self.warpgroups, self.partition().width, self.width)
        of_warps = (self.warpgroups, WARPS * self.width)
        return [
            *[plgpu.SMEM(held, dtype) for dtype in dtypes],
            *([] if self.holds_groups else [plgpu.SMEM(of_warps, jnp.float32)]),
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
#: exchanged values, it is ``(4, width)``: each of the warpgroup's four warps has a value over its
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
      stages: a list of refs in shared memory, one for each loaded array. If the group size requires
        `strip_groups.sum_of_any`, the scratch memory of this function is one more entry, at the end
        of the list.
      full: barriers, one for each part of each warpgroup's columns. The copies that load a part
        signal its barrier.
    """

    strips: Strips
    outer: Any
    start: Any
    fresh: Any
    partition: Partition
    stages: Sequence[Ref]
    full: Ref

    @classmethod
    def begin(cls, strips: Strips, operands: Sequence[Ref], scratch: Sequence[Any]) -> "Strip":
        """Return the block's strip, and start the copies that load it from `operands`.

        `scratch` is the shared memory that `Strips.scratch` requests.
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
        """Repeat a statistic, which has one value per inner element, for each column of a unit.

        A unit consists of one vector per thread. The result has the shape `Strips.shape`.
        """
        axes = (0, 2) if stat.ndim == 2 else (2,)
        return lax.broadcast_in_dim(stat, self.strips.shape, axes)

    def stat(self, ref: Ref) -> Stat:
        """Load a statistic of the strip's inner elements.

        In `ref`, a statistic has one value for each group of inner elements that are normalised
        together (see `Strips.stats_shape`). The result has one value for each inner element of the
        strip, so the value of a group is repeated for each of its elements.
        """
        group, layout = self.strips.group, self.strips.stat_layout
        if group == 1:
            return load(ref.at[self.outer, self.inner], layout)
        if not self.strips.holds_groups:
            return strip_groups.load_of_any(ref.at[self.outer], self._span)
        return strip_groups.load_of_groups(self._of_groups(ref), group, self.strips.vector, layout)

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
        if self.strips.holds_groups:
            store_global(target, value, self.strips.layout)
        else:
            strip_groups.store_own(target, value, self._span, self.strips.layout)

    def store_stat(self, ref: Ref, stat: Stat) -> None:
        """Store a statistic of the strip's inner elements.

        In `ref`, it has one value for each group of inner elements that are normalised together
        (see `Strips.stats_shape`).
        """
        strips = self.strips
        if strips.group == 1:
            self.store_inner(ref, stat)
            return
        if not strips.holds_groups:
            row, span = ref.at[self.outer], self._span
            pl.when(self._is_first)(lambda: strip_groups.store_of_any(row, stat, span))
            return
        target, layout = self._of_groups(ref), strips.stat_layout
        pl.when(self._is_first)(
            lambda: strip_groups.store_of_groups(target, stat, strips.group, strips.vector, layout)
        )

    def store_inner(self, ref: Ref, stat: Stat) -> None:
        """Store a statistic in an ``(outer, inner)`` ref: one value for each inner element.

        The statistic is ``(width,)``, and every warp has a complete copy of it.
        """
        strips = self.strips
        if strips.holds_groups:
            pl.when(self._is_first)(lambda: store(ref.at[self.outer, self.inner], stat))
            return
        row, span = ref.at[self.outer], self._span
        pl.when(self._is_first)(
            lambda: store_vectors(row, span.start, stat, span.first, span.end, strips.stat_layout)
        )

    @property
    def _span(self) -> strip_groups.Span:
        """The strip's inner elements, and the range of elements that the strip stores.

        The property is used only if `Strips.holds_groups` is False. Groups at the ends of the strip
        may then be incomplete, and the strip does not store their elements.
        """
        strips = self.strips
        end = jnp.minimum(self.fresh + strips.pitch, strips.inner)
        return strip_groups.Span(
            self.start,
            self.fresh,
            end,
            strips.width,
            strips.group,
            strips.vector,
            strips.stat_layout,
        )

    @property
    def _is_first(self) -> Any:
        """True in the first of the warpgroups that share the strip."""
        is_first = lax.axis_index(WARPGROUP) == 0
        if self.strips.cluster > 1:
            is_first &= lax.axis_index(CLUSTER) == 0
        return is_first

    def _of_groups(self, ref: Ref) -> Ref:
        """Return the part of a statistic's ref that belongs to this strip: ``(width / group,)``."""
        group = self.strips.group
        return ref.at[self.outer, pl.ds(lax.div(self.start, group), self.strips.width // group)]

    def group_sum(self, stat: Stat) -> Stat:
        """For each inner element, return the sum of a statistic over the element's group."""
        group = self.strips.group
        if group == 1:
            return stat
        if self.strips.holds_groups:
            return strip_groups.group_sum(stat, group, self.strips.stat_layout)
        scratch = self.stages[-1].at[lax.axis_index(WARPGROUP)]
        return strip_groups.sum_of_any(stat, self._span, scratch)

    def sum(
        self,
        terms: Callable[[Fragment], Sequence[jax.Array]],
        count: int = 1,
        *,
        waits: bool = False,
    ) -> list[Stat]:
        """Compute `count` sums over each warp's columns.

        ``terms(fragment)`` returns one array of terms for each sum, for a range of columns.
        Asynchronous copies load the columns in several parts. If `waits` is True, wait for the
        copies of a part before reading the part.
        """

        def add(fragment: Fragment, carry: list[jax.Array]) -> list[jax.Array]:
            new = [self._skip_columns(term, fragment) for term in terms(fragment)]
            return [a + b for a, b in zip(carry, new, strict=True)]

        totals = self._walk(add, [self._all(0)] * count, waits=waits)
        return [jnp.sum(total, axis=1) for total in totals]

    def sizes(self) -> Stat | float:
        """Return how many columns each warp sums up.

        If two fragments contain the same column, it is counted only once. The result is a float if
        all warps have the same number of columns, otherwise an array ``(4, width)`` like a `Stat`.
        """
        if not self.partition.has_tail:
            return self.partition.width / WARPS
        (sizes,) = self.sum(lambda fragment: [self._all(1)])
        return sizes

    def each_fragment(self, step: Callable[[Fragment], None]) -> None:
        """Run `step` on each unit of the warpgroup's columns.

        A unit consists of one vector per thread. The copies that load the columns must have
        arrived.
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
        """Run `step` on each unit of the warpgroup's columns, in a loop if there are many.

        A unit consists of one vector per thread. Asynchronous copies load the columns in several
        parts. If `waits` is True, wait for the copies of a part before reading the part.
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
        """Run `step` on `units` consecutive units, each of which consists of one vector per thread.

        The first of them begins `first` units after column `start`.
        """
        unit = self.partition.unit
        group = max(1, _VALUES // self.strips.vector)

        def nth(k: Any, carry: T) -> T:
            return step(Fragment(start + (first + k) * unit, unit, (first + k) * unit), carry)

        def several(i: Any, carry: T) -> T:
            return functools.reduce(lambda c, j: nth(i * group + j, c), range(group), carry)

        looped = units // group if units >= 2 * group else 0
        if looped:
            carry = lax.fori_loop(0, looped, several, carry)
        rest = range(looped * group, units)
        if looped and len(rest) > 1:
            return lax.fori_loop(rest.start, rest.stop, nth, carry)
        return functools.reduce(lambda c, k: nth(k, c), rest, carry)

    def _skip_columns(self, term: jax.Array, fragment: Fragment) -> jax.Array:
        """Return `term` with 0 in stale columns, because another unit adds their terms."""
        if fragment.fresh is None:
            return term
        column = flat_index(term.shape, self.strips.layout, axes=2)
        return jnp.where(column < fragment.fresh - fragment.start, jnp.float32(0), term)

    def _all(self, value: float) -> jax.Array:
        """Return an array with the shape of `Strips.shape` whose elements all equal `value`."""
        return plgpu.layout_cast(
            jnp.full(self.strips.shape, value, jnp.float32), self.strips.layout
        )


# -------------------------------------------------------------------------------------------------
# Exchange of statistics between the warps that share a strip, in a block or in a cluster.
#
# Each warp has statistics of its own columns, for each inner element. It writes them to shared
# memory, and then every warp of the block merges the statistics of all warps. In a cluster, each
# block sends its merged statistics to all blocks (`TransactionBarriers`), which merge them again.


@dataclasses.dataclass(frozen=True)
class Parts:
    """Statistics of several parts of a strip's columns, in shared memory.

    A part consists of the columns of one warp, or of one block.

    Attributes:
      count: number of parts.
      stats: one entry per statistic. An entry is a function that maps the index of a part to the
        part's value, or a number if all parts have the same value.
    """

    count: int
    stats: Sequence[Callable[[Any], Stat] | float]

    def sum(self, term: Callable[..., Stat]) -> Stat:
        """Apply `term` to the statistics of each part, and return the sum of the results.

        This is a loop, because otherwise the compiler would load the statistics of all parts into
        registers at once.
        """

        def of(part: Any) -> Stat:
            return term(*[s if isinstance(s, float) else s(part) for s in self.stats])

        return lax.fori_loop(1, self.count, lambda part, total: total + of(part), of(0))

    def total(self, which: int) -> Stat | float:
        """Return the sum of statistic number `which` over all parts."""
        stat = self.stats[which]
        return self.count * stat if isinstance(stat, float) else self.sum(lambda *s: s[which])


#: A function that merges statistics. Each part of the columns has its own statistics. The function
#: takes the statistics of all parts, and returns the statistics over all columns.
Merge = Callable[[Parts], list[Any]]


@dataclasses.dataclass(frozen=True)
class StripExchange:
    """Exchange of statistics between the warps that share a strip, once per strip.

    Attributes:
      strips: how the array is split into strips.
      stats: maximum number of statistics in an exchange.
    """

    strips: Strips
    stats: int

    @property
    def _parts(self) -> int:
        return WARPS * self.strips.warpgroups

    def scratch(self) -> list[Any]:
        """Return the shared memory and the barriers of the exchange."""
        strips = self.strips
        of_warps = (self.stats, self._parts, strips.width)
        of_blocks = (self.stats, strips.cluster, strips.width)
        scratch = [
            plgpu.SMEM(of_warps, jnp.float32),
            plgpu.Barrier(num_arrivals=strips.warpgroups),
        ]
        if strips.cluster == 1:
            return scratch
        return [*scratch, plgpu.SMEM(of_blocks, jnp.float32), self._barriers.scratch()]

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise the barriers of a cluster. A kernel must call this first."""
        if self.strips.cluster > 1:
            self._barriers.open(scratch[-1])

    def ready(self) -> None:
        """Wait until all blocks of the cluster have initialised their barriers."""
        if self.strips.cluster > 1:
            self._barriers.ready()

    def __call__(
        self, scratch: Sequence[Any], merge: Merge, stats: Sequence[Stat | float]
    ) -> list[Any]:
        """Merge the statistics of all warps that share the strip.

        The shape of a warpgroup's statistics is ``(4, width)``. The results are ``(width,)``, and
        equal in all warps.

        Args:
          scratch: the shared memory and barriers of the exchange, in the order in which the method
            `scratch` describes them.
          merge: the function that merges statistics. It is applied to the warps of a block, and in
            a cluster once more to its blocks.
          stats: statistics of this warpgroup's four warps.
        """
        of_warps, barrier, *of_cluster = scratch
        arrays = [stat for stat in stats if not isinstance(stat, float)]
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for at, stat in enumerate(arrays):
            store(of_warps.at[at, mine], stat)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        merged = merge(self._parts_in(of_warps, stats, self._parts))
        if self.strips.cluster == 1:
            return merged
        arrays = [stat for stat in merged if not isinstance(stat, float)]
        of_blocks, barriers = of_cluster
        rank = lax.axis_index(CLUSTER)
        slots = [of_blocks.at[at, rank] for at in range(len(arrays))]
        self._send(slots, arrays, barriers)
        self._barriers.receive(barriers, jnp.int32(0), jnp.int32(0))
        return merge(self._parts_in(of_blocks, merged, self.strips.cluster))

    def _parts_in(self, slots: Ref, stats: Sequence[Any], parts: int) -> Parts:
        """Return the statistics of all parts of a strip, as a `Parts` object.

        If an entry of `stats` is a number, all parts have this value. The other statistics differ
        between parts, and are read from `slots`, in shared memory.
        """
        rows = itertools.count()
        readers = [
            stat if isinstance(stat, float) else functools.partial(self._part, slots, next(rows))
            for stat in stats
        ]
        return Parts(parts, readers)

    def _part(self, slots: Ref, row: Any, part: Any) -> Stat:
        return load(slots.at[row, part], self.strips.stat_layout)

    def _send(self, slots: Sequence[Ref], stats: Sequence[Stat], barriers: Ref) -> None:
        """Send this block's statistics to all blocks of the cluster.

        The threads of the block form groups of `Strips.threads` neighbouring threads. Every group
        has a complete copy of the strip's statistics. Group i sends its copy to block i of the
        cluster. If there are more groups than blocks, the remaining groups send nothing.
        """
        threads, cluster, width = self.strips.threads, self.strips.cluster, self.strips.width
        ref, layout = plgpu.RefType(), self.strips.stat_layout

        @plgpu.inline_mgpu(arg_types=([ref] * len(stats), [layout] * len(stats), ref))
        def send_stats(context: Any, slots: Any, stats: Any, barriers: Any) -> None:
            thread = mgpu.thread()
            barrier = mgpu.address_of(barriers)
            announce(barrier, 4 * len(stats) * cluster * width, thread.is_zero())
            block, lane = thread // threads, thread % threads
            for slot, stat in zip(slots, stats):
                values = mgpu.elements_of(stat.registers.item())
                first = mgpu.address_of(slot) + lane * (4 * len(values))
                for at in range(0, len(values), MESSAGE):
                    send(values[at : at + MESSAGE], first + 4 * at, barrier, block, cluster)

        send_stats(list(slots), list(stats), barriers)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(arrivals=1, stages=1)
