"""How a block holds a strip of an array that is normalised over an axis that is not its last.

Of ``(outer, cols, inner)`` with the middle axis normalised, a *strip* is all columns of one outer
index by `width` neighbouring inner elements: wide enough to use whole sectors of memory. A block
holds a strip, or the blocks of a cluster where the columns are many. The copy engine (TMA) brings
it to shared memory once, in the dtype that it has, and each pass over it reads it from there, so
that a thread needs registers for a few of its elements alone.

Each warpgroup owns a slice of the columns (see `pieces`), in units of one vector for each thread,
``(4, columns of a warp, width)``: the lanes of a warp run along the width, then along the columns.
Inner elements that are normalised together are a *group* (see `strip_groups`). Strips overlap where
the width does not divide the inner axis: the last one ends with it, and its first elements, which
are *stale*, are stored twice with the same value. Where groups do not divide the width, each strip
overlaps the next one, and stores those alone that are whole in it and in no strip before: its
*own*.
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

from jaxnorm_kernels.mosaic.device.barriers import in_plain_order, release_used
from jaxnorm_kernels.mosaic.device.edges import store_vectors
from jaxnorm_kernels.mosaic.device.launch import BLOCK, CLUSTER, WARPGROUP
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
from jaxnorm_kernels.mosaic.device.registers import store_global
from jaxnorm_kernels.mosaic.rows import strip_groups
from jaxnorm_kernels.mosaic.rows.pieces import Piece, Slice

# The copy engine takes boxes of up to so many elements along each axis.
_BOX = 256
# Of a thread, read from shared memory at a time: enough to hide its latency, in few registers.
_VALUES = 16

#: A value for each inner element of a strip: ``(width,)``; or for each of those and each warp of
#: the warpgroup, ``(4, width)``, of the columns that it has.
Stat = jax.Array
#: Something for each element of a unit, ``(4, columns of a warp, width)``.
Read = Callable[[Piece], jax.Array]


@dataclasses.dataclass(frozen=True)
class Strips:
    """How an array is cut into strips, and a strip into parts.

    Attributes:
      outer, cols, inner: the array's shape.
      vector: neighbouring elements that one thread reads and writes at once.
      threads: of a warp, whose vectors lie side by side: the width of a strip.
      warpgroups: of a block.
      cluster: blocks that share a strip.
      blocks: (or clusters) of the grid, each of which takes every n-th strip.
      group: neighbouring inner elements that are normalised together.
    """

    outer: int
    cols: int
    inner: int
    vector: int
    threads: int
    warpgroups: int = 1
    cluster: int = 1
    blocks: int = 0
    group: int = 1

    def __post_init__(self) -> None:
        """Refuses sizes that do not fit together."""
        if not 2 <= self.threads < WARP:
            # A layout of one thread, or of a unit with a column for each warp, is not inferred.
            raise ValueError(f"{self} needs 2 to {WARP // 2} threads")
        if self.width > self.inner:
            raise ValueError(f"{self} needs an inner axis of {self.width} elements or more")
        if not 0 < self.blocks <= self.count:
            raise ValueError(f"{self} needs 1 to {self.count} blocks")
        if not self.pitch or self.inner % self.group:
            raise ValueError(f"{self} needs groups that divide the inner axis, and fit the width")
        self.slice()  # raises where the columns are too few

    @property
    def width(self) -> int:
        """Inner elements of a strip."""
        return self.threads * self.vector

    @property
    def holds_groups(self) -> bool:
        """Whether groups are a power of 2 and divide the width."""
        return not self.group & (self.group - 1) and self.width % self.group == 0

    @property
    def pitch(self) -> int:
        """Inner elements from a strip to the next: whole groups, and whole vectors."""
        return self.width // math.lcm(self.group, self.vector) * math.lcm(self.group, self.vector)

    @property
    def across(self) -> int:
        """Strips of each outer index."""
        return 1 + -(-(self.inner - self.width) // self.pitch)

    @property
    def count(self) -> int:
        """Strips of the array."""
        return self.outer * self.across

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a unit in registers."""
        return WARPS, WARP // self.threads, self.width

    @property
    def layout(self) -> Layout:
        """Of a unit."""
        return strip_layout(self.vector, self.threads)

    @property
    def stat_layout(self) -> Layout:
        """Of ``(width,)``, which every warp has."""
        return columns_layout(self.vector, self.threads)

    @property
    def stats_shape(self) -> tuple[int, int]:
        """Of a statistic of each group of the array."""
        return self.outer, self.inner // self.group

    def slice(self, index: Any = 0) -> Slice:
        """The columns of a warpgroup, counted through the cluster."""
        return Slice(self.cols, self.cluster * self.warpgroups, WARPS * self.shape[1], index)

    def scratch(self, dtypes: Sequence[np.dtype]) -> list[Any]:
        """A stage for each array that is read, and a barrier for each warpgroup's part of them."""
        held = (self.warpgroups, self.slice().width, self.width)
        copies = len(dtypes) * sum(len(_boxes(piece)) for piece in self.slice().pieces())
        of_warps = (self.warpgroups, WARPS * self.width)
        return [
            *[plgpu.SMEM(held, dtype) for dtype in dtypes],
            *([] if self.holds_groups else [plgpu.SMEM(of_warps, jnp.float32)]),
            plgpu.Barrier(num_arrivals=copies, num_barriers=self.warpgroups),
        ]

    def each(
        self,
        operands: Sequence[Ref],
        scratch: Sequence[Any],
        finish: Callable[["Strip"], None],
        ready: Callable[[], None],
    ) -> None:
        """Runs `finish` on each strip that this block takes of the operands.

        Args:
          scratch: of `scratch`, for the operands.
          ready: runs once, after the first copies have been started.
        """
        *stages, full = scratch
        in_plain_order(*stages)
        block = lax.axis_index(BLOCK)
        most = -(-self.count // self.blocks)

        def strip(k: Any) -> Strip:
            return Strip.of(self, block + k * self.blocks, k, stages)

        def fill(k: Any) -> None:
            for source, target in zip(operands, stages):
                strip(k).copy(source, target, full)

        fill(jnp.int32(0))
        ready()
        if most == 1:
            plgpu.barrier_wait(full.at[lax.axis_index(WARPGROUP)])
            finish(strip(jnp.int32(0)))
            return
        count = lax.div(self.count - block + self.blocks - 1, self.blocks)

        def step(k: Any) -> None:
            plgpu.barrier_wait(full.at[lax.axis_index(WARPGROUP)])
            finish(strip(k))
            release_used()
            pl.when(k + 1 < count)(lambda: fill(k + 1))

        pl.loop(0, count)(step)


@dataclasses.dataclass(frozen=True)
class Strip:
    """A strip, and what this warpgroup has of it.

    Attributes:
      strips: that it is one of.
      outer, start: where it begins: index of the outer axis, and the first inner element.
      fresh: the first inner element that is in no strip before it; None where all are.
      step: counts the strips of the block.
      slice: the columns of the warpgroup.
      stages: what the block reads, in shared memory; then what `strip_groups.sum_of_any` takes.
    """

    strips: Strips
    outer: Any
    start: Any
    fresh: Any
    step: Any
    slice: Slice
    stages: Sequence[Ref]

    @classmethod
    def of(cls, strips: Strips, index: Any, step: Any, stages: Sequence[Ref]) -> "Strip":
        """Number `index` of the array."""
        fresh = lax.rem(index, strips.across) * strips.pitch
        start = jnp.minimum(fresh, strips.inner - strips.width)
        part = lax.axis_index(WARPGROUP)
        if strips.cluster > 1:
            part += lax.axis_index(CLUSTER) * strips.warpgroups
        return cls(
            strips,
            outer=lax.div(index, strips.across),
            start=start,
            fresh=fresh if strips.inner % strips.width or not strips.holds_groups else None,
            step=step,
            slice=strips.slice(part),
            stages=stages,
        )

    @property
    def inner(self) -> Any:
        """Its inner elements, as an index."""
        return pl.ds(self.start, self.strips.width)

    def copy(self, source: Ref, stage: Ref, full: Ref) -> None:
        """Starts the copies that bring the warpgroup's part to shared memory."""
        warpgroup = lax.axis_index(WARPGROUP)
        for piece in self.slice.pieces():
            for at, columns in _boxes(piece):
                plgpu.copy_gmem_to_smem(
                    source.at[self.outer, pl.ds(piece.start + at, columns), self.inner],
                    stage.at[warpgroup, pl.ds(piece.stage_start + at, columns)],
                    full.at[warpgroup],
                )

    def read(self, which: int, piece: Piece) -> jax.Array:
        """Elements of one of the arrays, in float32."""
        ref = self.stages[which].at[lax.axis_index(WARPGROUP)]
        layout = self.strips.layout
        staged = ref.at[pl.ds(piece.stage_start, piece.width)]
        return widen(load(staged, layout, self.strips.shape), layout)

    def reader(self, which: int) -> Read:
        """One of the arrays: see `read`."""
        return functools.partial(self.read, which)

    def param(self, ref: Ref, piece: Piece) -> jax.Array:
        """What a ``(cols,)`` ref has for the columns of a piece: ``(4, columns of a warp)``."""
        return self.load_columns(ref.at[pl.ds(piece.start, piece.width)])

    def load_columns(self, ref: Ref) -> jax.Array:
        """The columns of a piece as ``(4, columns of a warp)``."""
        return load(ref, self.strips.layout.reduce(2), self.strips.shape[:2])

    def no_columns(self) -> jax.Array:
        """Zeros in the place of `load_columns`."""
        zeros = jnp.zeros(self.strips.shape[:2], jnp.float32)
        return plgpu.layout_cast(zeros, self.strips.layout.reduce(2))

    def of_columns(self, value: jax.Array) -> jax.Array:
        """``(4, columns of a warp)`` for every element of a piece."""
        return lax.broadcast_in_dim(value, self.strips.shape, (0, 1))

    def broadcast(self, stat: Stat) -> jax.Array:
        """A statistic for every element of a piece."""
        axes = (0, 2) if stat.ndim == 2 else (2,)
        return lax.broadcast_in_dim(stat, self.strips.shape, axes)

    def stat(self, ref: Ref) -> Stat:
        """What a ref of `Strips.stats_shape` has for each inner element of this strip."""
        group, layout = self.strips.group, self.strips.stat_layout
        if group == 1:
            return load(ref.at[self.outer, self.inner], layout)
        if not self.strips.holds_groups:
            return strip_groups.load_of_any(ref.at[self.outer], self._span)
        return strip_groups.load_of_groups(self._of_groups(ref), group, self.strips.vector, layout)

    def inner_param(self, ref: Ref) -> Stat:
        """What ``(inner,)``, or ``(n, inner)`` of groups of outer indices, has for this strip."""
        if len(ref.shape) == 2:
            ref = ref.at[lax.div(self.outer, self.strips.outer // ref.shape[0])]
        return load(ref.at[self.inner], self.strips.stat_layout)

    def params(
        self,
        refs: Sequence[Ref],
        prepare: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
    ) -> Callable[[Piece], list[jax.Array]]:
        """What `prepare` makes of the parameters of columns, for every element of a piece."""
        return lambda piece: [
            self.of_columns(column) for column in prepare([self.param(ref, piece) for ref in refs])
        ]

    def same_of_columns(self, stats: Sequence[Stat]) -> Callable[[Piece], list[jax.Array]]:
        """In the place of `params`, what belongs to inner elements: columns have it in common."""
        wide = [self.broadcast(stat) for stat in stats]
        return lambda piece: wide

    def store(self, ref: Ref, piece: Piece, value: jax.Array) -> None:
        """Stores the elements of a piece, rounded to the dtype of `ref`."""
        target = ref.at[self.outer, pl.ds(piece.start, piece.width), self.inner]
        if self.strips.holds_groups:
            store_global(target, value, self.strips.layout)
        else:
            strip_groups.store_own(target, value, self._span, self.strips.layout)

    def store_stat(self, ref: Ref, stat: Stat) -> None:
        """Stores what each group has in common, in a ref of `Strips.stats_shape`."""
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
        """Stores ``(width,)``, which every warp has, in an ``(outer, inner)`` ref."""
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
        """Its inner elements, and which are its own, where groups do not divide the width."""
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
        """Whether this warpgroup is the first of those that share the strip."""
        is_first = lax.axis_index(WARPGROUP) == 0
        if self.strips.cluster > 1:
            is_first &= lax.axis_index(CLUSTER) == 0
        return is_first

    def _of_groups(self, ref: Ref) -> Ref:
        """The ``(width / group,)`` that a ref of `Strips.stats_shape` has for this strip."""
        group = self.strips.group
        return ref.at[self.outer, pl.ds(lax.div(self.start, group), self.strips.width // group)]

    def group_sum(self, stat: Stat) -> Stat:
        """The sum over the inner elements of each group, for each of them."""
        group = self.strips.group
        if group == 1:
            return stat
        if self.strips.holds_groups:
            return strip_groups.group_sum(stat, group, self.strips.stat_layout)
        scratch = self.stages[-1].at[lax.axis_index(WARPGROUP)]
        return strip_groups.sum_of_any(stat, self._span, scratch)

    def max(self, read: Read, least: float) -> Stat:
        """Of each warp's columns, and `least`."""
        (most,) = self._fold(lambda piece: [read(piece)], jnp.maximum, least, 1)
        return jnp.max(most, axis=1)

    def sum(self, terms: Callable[[Piece], Sequence[jax.Array]], count: int = 1) -> list[Stat]:
        """Of each warp's columns, for each of `count` terms."""
        return [jnp.sum(total, axis=1) for total in self._fold(terms, jnp.add, 0, count)]

    def sizes(self) -> Stat | float:
        """How many columns each warp has that no other one has."""
        if not self.slice.has_tail:
            return self.slice.width / WARPS
        (sizes,) = self.sum(lambda piece: [self._all(1)])
        return sizes

    def each_piece(self, step: Callable[[Piece], None], *, together: int = _VALUES) -> None:
        """Runs `step` on each unit of the warpgroup's columns; see `_walk`."""

        def one(piece: Piece, carry: tuple[()]) -> tuple[()]:
            step(piece)
            return carry

        self._walk(one, (), together)

    def sum_inner(self, term: jax.Array) -> jax.Array:
        """The sums over the inner elements that no strip before has: see `load_columns`."""
        if self.fresh is not None:
            inner = self.start + lax.broadcasted_iota(jnp.int32, term.shape, 2)
            term = jnp.where(inner < self.fresh, jnp.float32(0), term)
        return jnp.sum(term, axis=2)

    def _fold(
        self,
        terms: Callable[[Piece], Sequence[jax.Array]],
        pairwise: Callable[[jax.Array, jax.Array], jax.Array],
        start: float,
        count: int,
    ) -> list[jax.Array]:
        """Element by element of a unit, over all units."""

        def add(piece: Piece, carry: list[jax.Array]) -> list[jax.Array]:
            new = [self._skip_columns(term, piece, start) for term in terms(piece)]
            return [pairwise(a, b) for a, b in zip(carry, new, strict=True)]

        return self._walk(add, [self._all(start)] * count)

    def _walk[T](self, step: Callable[[Piece, T], T], carry: T, together: int = _VALUES) -> T:
        """`step` on each unit in turn; where they are many a loop over groups of them.

        `together`: columns of a thread that a group has.
        """
        body, *tail = self.slice.pieces()
        unit, units = self.slice.unit, self.slice.units
        group = max(1, together // self.strips.vector)

        def nth(k: Any, carry: T) -> T:
            return step(Piece(body.start + k * unit, unit, k * unit), carry)

        def several(i: Any, carry: T) -> T:
            return functools.reduce(lambda c, j: nth(i * group + j, c), range(group), carry)

        looped = units // group if units >= 2 * group else 0
        if looped:
            carry = lax.fori_loop(0, looped, several, carry)
        rest = range(looped * group, units)
        if looped and len(rest) > 1:
            carry = lax.fori_loop(rest.start, rest.stop, nth, carry)
        else:
            carry = functools.reduce(lambda c, k: nth(k, c), rest, carry)
        for piece in tail:
            carry = step(piece, carry)
        return carry

    def _skip_columns(self, term: jax.Array, piece: Piece, neutral: float) -> jax.Array:
        """`term`, and `neutral` where another piece has the same column."""
        if piece.fresh is None:
            return term
        column = flat_index(term.shape, self.strips.layout, axes=2)
        return jnp.where(column < piece.fresh - piece.start, jnp.float32(neutral), term)

    def _all(self, value: float) -> jax.Array:
        """`value` for every element of a piece."""
        return plgpu.layout_cast(
            jnp.full(self.strips.shape, value, jnp.float32), self.strips.layout
        )


def _boxes(piece: Piece) -> list[tuple[int, int]]:
    """Where what the copy engine takes at a time begins in a piece, and its columns."""
    return [(at, min(_BOX, piece.width - at)) for at in range(0, piece.width, _BOX)]
