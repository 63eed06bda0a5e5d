"""What a warpgroup has of a strip, and how it reads, reduces and stores it: see `strips`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.barriers import in_plain_order
from jaxnorm_kernels.mosaic.device.launch import BLOCK, CLUSTER, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARPS, Ref, flat_index, load, store, widen
from jaxnorm_kernels.mosaic.device.registers import store_global, store_vectors
from jaxnorm_kernels.mosaic.rows import strip_groups
from jaxnorm_kernels.mosaic.rows.pieces import Piece, Slice
from jaxnorm_kernels.mosaic.rows.strips import BOX, Strips, boxes_of

# Of a thread, read from shared memory at a time: enough to hide its latency, in few registers.
_VALUES = 16

#: A value for each inner element of a strip: ``(width,)``; or for each of those and each warp of
#: the warpgroup, ``(4, width)``, of the columns that it has.
Stat = jax.Array


@dataclasses.dataclass(frozen=True)
class Strip:
    """A strip, and what this warpgroup has of it.

    Attributes:
      strips: that it is one of.
      outer, start: where it begins: index of the outer axis, and the first inner element.
      fresh: the first inner element that is in no strip before it.
      slice: the columns of the warpgroup.
      stages: what the block reads, in shared memory; then what `strip_groups.sum_of_any` takes.
      full: barriers of the parts of each warpgroup.
    """

    strips: Strips
    outer: Any
    start: Any
    fresh: Any
    slice: Slice
    stages: Sequence[Ref]
    full: Ref

    @classmethod
    def begin(cls, strips: Strips, operands: Sequence[Ref], scratch: Sequence[Any]) -> "Strip":
        """Return the block's strip, and start to copy what it has of the operands.

        Args:
          scratch: of `Strips.scratch`, for the operands.
        """
        *stages, full = scratch
        in_plain_order(*stages)
        index = lax.axis_index(BLOCK)
        fresh = lax.rem(index, strips.across) * strips.pitch
        start = jnp.minimum(fresh, strips.inner - strips.width)
        part = lax.axis_index(WARPGROUP)
        if strips.cluster > 1:
            part += lax.axis_index(CLUSTER) * strips.warpgroups
        outer = lax.div(index, strips.across)
        strip = cls(strips, outer, start, fresh, strips.slice(part), stages, full)
        for source, stage in zip(operands, stages):
            strip._copy(source, stage)
        return strip

    @property
    def inner(self) -> Any:
        """Its inner elements, as an index."""
        return pl.ds(self.start, self.strips.width)

    def _copy(self, source: Ref, stage: Ref) -> None:
        """Starts the copies that bring the warpgroup's columns to shared memory."""
        boxes = [(piece, *box) for piece in self.slice.pieces() for box in boxes_of(piece)]
        for nth, (piece, at, columns) in enumerate(boxes):
            plgpu.copy_gmem_to_smem(
                source.at[self.outer, pl.ds(piece.start + at, columns), self.inner],
                stage.at[lax.axis_index(WARPGROUP), pl.ds(piece.stage_start + at, columns)],
                self._full(nth // self.strips.boxes_of_part),
            )

    def _full(self, part: Any) -> Ref:
        return self.full.at[lax.axis_index(WARPGROUP) * self.strips.parts + part]

    def read(self, which: int, piece: Piece) -> jax.Array:
        """Elements of one of the arrays, in float32."""
        ref = self.stages[which].at[lax.axis_index(WARPGROUP)]
        layout = self.strips.layout
        staged = ref.at[pl.ds(piece.stage_start, piece.width)]
        return widen(load(staged, layout, self.strips.shape), layout)

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

    def sum(
        self,
        terms: Callable[[Piece], Sequence[jax.Array]],
        count: int = 1,
        *,
        waits: bool = False,
    ) -> list[Stat]:
        """Of each warp's columns, for each of `count` terms; see `_walk`."""

        def add(piece: Piece, carry: list[jax.Array]) -> list[jax.Array]:
            new = [self._skip_columns(term, piece) for term in terms(piece)]
            return [a + b for a, b in zip(carry, new, strict=True)]

        totals = self._walk(add, [self._all(0)] * count, waits=waits)
        return [jnp.sum(total, axis=1) for total in totals]

    def sizes(self) -> Stat | float:
        """How many columns each warp has that no other one has."""
        if not self.slice.has_tail:
            return self.slice.width / WARPS
        (sizes,) = self.sum(lambda piece: [self._all(1)])
        return sizes

    def each_piece(self, step: Callable[[Piece], None]) -> None:
        """Runs `step` on each unit of the warpgroup's columns; see `_walk`."""

        def one(piece: Piece, carry: tuple[()]) -> tuple[()]:
            step(piece)
            return carry

        self._walk(one, ())

    def _walk[T](
        self,
        step: Callable[[Piece, T], T],
        carry: T,
        waits: bool = False,
    ) -> T:
        """`step` on each unit in turn; where they are many a loop over groups of them.

        `waits`: for each part before it is read.
        """
        body, *tail = self.slice.pieces()
        units, parts = self.slice.units, self.strips.parts if waits else 1
        of_part = self.strips.boxes_of_part * BOX // self.slice.unit if parts > 1 else units

        def part(nth: Any, carry: T, count: int = of_part) -> T:
            if waits:
                plgpu.barrier_wait(self._full(nth))
            return self._walk_units(step, carry, body.start, nth * of_part, count)

        whole = units // of_part
        carry = lax.fori_loop(0, whole, part, carry) if parts > 1 else part(0, carry)
        for nth in range(whole, parts):
            carry = part(nth, carry, max(0, units - nth * of_part))
        for piece in tail:
            carry = step(piece, carry)
        return carry

    def _walk_units[T](
        self,
        step: Callable[[Piece, T], T],
        carry: T,
        start: Any,
        first: Any,
        units: int,
    ) -> T:
        """`step` on so many units from the `first`, of the columns that begin at `start`."""
        unit = self.slice.unit
        group = max(1, _VALUES // self.strips.vector)

        def nth(k: Any, carry: T) -> T:
            return step(Piece(start + (first + k) * unit, unit, (first + k) * unit), carry)

        def several(i: Any, carry: T) -> T:
            return functools.reduce(lambda c, j: nth(i * group + j, c), range(group), carry)

        looped = units // group if units >= 2 * group else 0
        if looped:
            carry = lax.fori_loop(0, looped, several, carry)
        rest = range(looped * group, units)
        if looped and len(rest) > 1:
            return lax.fori_loop(rest.start, rest.stop, nth, carry)
        return functools.reduce(lambda c, k: nth(k, c), rest, carry)

    def _skip_columns(self, term: jax.Array, piece: Piece) -> jax.Array:
        """`term`, and 0 where another piece has the same column."""
        if piece.fresh is None:
            return term
        column = flat_index(term.shape, self.strips.layout, axes=2)
        return jnp.where(column < piece.fresh - piece.start, jnp.float32(0), term)

    def _all(self, value: float) -> jax.Array:
        """`value` for every element of a piece."""
        return plgpu.layout_cast(
            jnp.full(self.strips.shape, value, jnp.float32), self.strips.layout
        )
