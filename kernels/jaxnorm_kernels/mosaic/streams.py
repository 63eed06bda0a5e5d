"""Rows that do not stay in registers: a block reads each row twice, chunk by chunk.

The first pass folds the chunks of a row into statistics, the second writes the output. Where the
second pass finds the row again is the stream's business::

    ReloadedRow   in the L1 or L2 cache: it reads from global memory once more
    RingRow       in shared memory, as far as it holds the row; asynchronous copies (TMA) fill it,
                  also with the next rows while this one is worked on

All warpgroups of a block work on the same row. A chunk is what one of them takes at a time: a list
of units, ``(4, 32 * vector)`` arrays with one vector for each thread. As with tiles, the chunks at
the end of a row may overlap others; their columns before `fresh` are stale.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic import tiles
from jaxnorm_kernels.mosaic.launch import BLOCK, WARPGROUP
from jaxnorm_kernels.mosaic.tiles import WARP, WARPGROUP_THREADS, WARPS, Exchange, Piece, Ref, Stat

Units = list[jax.Array]


class Row:
    """One row in the hands of one warpgroup."""

    index: Any

    def fold[T](
        self,
        first: Callable[[Units], T],
        step: Callable[[T, Units], T],
        neutral: Callable[[T], jax.Array],
    ) -> T:
        """First pass: `first` takes the first chunk, `step` each of the others, in float32.

        Stale columns hold ``neutral(carry)``.
        """
        raise NotImplementedError

    def write(self, y: Ref, params: Sequence[Ref], function: Callable[..., jax.Array]) -> None:
        """Second pass: stores ``function(x, *params)`` of each unit; `x` is in float32."""
        raise NotImplementedError

    def gather(self, *stats: Stat) -> list[jax.Array]:
        """See `Exchange.gather`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Stream:
    """How rows are cut: chunk ``j`` of warpgroup ``w`` is the row's ``j * warpgroups + w``-th."""

    cols: int
    vector: int
    warpgroups: int
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk % self.unit or self.cols < self.warpgroups * self.chunk:
            raise ValueError(
                f"{self}: a chunk must be k * {self.unit} columns, and all warpgroups have one"
            )

    @property
    def unit(self) -> int:
        return WARPGROUP_THREADS * self.vector

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a unit in registers."""
        return (WARPS, WARP * self.vector)

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.warpgroups)

    @property
    def whole(self) -> int:
        """How many chunks each warpgroup has that are all fresh."""
        return self.cols // (self.warpgroups * self.chunk)

    @property
    def has_tail(self) -> bool:
        return self.whole * self.warpgroups * self.chunk < self.cols

    def tail(self) -> Piece:
        """The chunk of this warpgroup after the whole ones. All of it may be stale."""
        raise NotImplementedError

    def blocks(self, rows: int) -> int:
        raise NotImplementedError

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        """Scratch of a block; `dtype` is that of x."""
        raise NotImplementedError

    def each_row(
        self, x: Ref, rows: int, scratch: Sequence[Any], body: Callable[[Row], None]
    ) -> None:
        """Runs `body` on each row of this block."""
        raise NotImplementedError

    def load_unit(self, ref: Ref, start: Any) -> jax.Array:
        """Columns ``[start, start + unit)`` of a ``(cols,)`` ref, in its own dtype."""
        layout = tiles.warps_layout(self.vector)
        return tiles.load(ref.at[pl.ds(start, self.unit)], layout, self.shape)

    def write(
        self,
        y: Ref,
        piece: Piece,
        units: Units,
        params: Sequence[Ref],
        function: Callable[..., jax.Array],
    ) -> None:
        """Stores ``function(unit, *params)`` of each unit into the ``(cols,)`` ref `y`."""
        starts = [piece.start + offset for offset in self.offsets(piece)]
        # All loads before the first store: the compiler cannot move them past it.
        columns = [[self.load_unit(p, start) for p in params] for start in starts]
        for start, unit, column in zip(starts, units, columns):
            tiles.store(y.at[pl.ds(start, self.unit)], function(unit, *column))

    def full(self, value: float) -> jax.Array:
        """A unit of one value, to start from."""
        unit = jnp.full(self.shape, value, jnp.float32)
        return plgpu.layout_cast(unit, tiles.warps_layout(self.vector))

    def offsets(self, piece: Piece) -> range:
        """Where the units of a chunk start."""
        return range(0, piece.width, self.unit)

    def replace_stale(self, piece: Piece, units: Units, value: jax.Array) -> Units:
        return [
            jnp.where(self._is_fresh(piece, offset), v, value)
            for offset, v in zip(self.offsets(piece), units)
        ]

    def part_sizes(self) -> jax.Array | float:
        """How many columns each warp of this warpgroup has that are not stale."""
        whole = self.whole * self.chunk / WARPS
        if not self.has_tail:
            return whole
        tail, layout = self.tail(), tiles.warps_layout(self.vector)
        fresh = [self._is_fresh(tail, offset) for offset in self.offsets(tail)]
        return sum((tiles.count_fresh(mask, layout) for mask in fresh), whole)

    def _is_fresh(self, piece: Piece, offset: int) -> jax.Array:
        return tiles.column_in_warps(self.shape) >= piece.fresh - piece.start - offset


@dataclasses.dataclass(frozen=True)
class ReloadedRow(Stream):
    """One row for each block."""

    def blocks(self, rows: int) -> int:
        return rows

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        del dtype
        return self.exchange.scratch(stats)

    def each_row(
        self, x: Ref, rows: int, scratch: Sequence[Any], body: Callable[[Row], None]
    ) -> None:
        del rows
        body(_Reloaded(self, x, lax.axis_index(BLOCK), scratch))

    def piece(self, j: Any) -> Piece:
        return Piece((j * self.warpgroups + lax.axis_index(WARPGROUP)) * self.chunk, self.chunk)

    def tail(self) -> Piece:
        done = self.whole * self.warpgroups * self.chunk
        width = -(-(self.cols - done) // (self.warpgroups * self.unit)) * self.unit
        fresh = done + lax.axis_index(WARPGROUP) * width
        return Piece(jnp.minimum(fresh, self.cols - width), width, fresh)


@dataclasses.dataclass(frozen=True)
class _Reloaded(Row):
    stream: ReloadedRow
    x: Ref
    index: Any
    scratch: Sequence[Any]

    def fold[T](
        self,
        first: Callable[[Units], T],
        step: Callable[[T, Units], T],
        neutral: Callable[[T], jax.Array],
    ) -> T:
        s = self.stream
        carry = first(self._load(s.piece(0)))
        carry = lax.fori_loop(1, s.whole, lambda j, c: step(c, self._load(s.piece(j))), carry)
        if not s.has_tail:
            return carry
        units = s.replace_stale(s.tail(), self._load(s.tail()), neutral(carry))
        return step(carry, units)

    def write(self, y: Ref, params: Sequence[Ref], function: Callable[..., jax.Array]) -> None:
        # Backwards: what was read last is the likeliest to be in the L1 cache.
        s = self.stream

        def one(piece: Piece) -> None:
            s.write(y.at[self.index], piece, self._load(piece), params, function)

        if s.has_tail:
            one(s.tail())
        pl.loop(0, s.whole)(lambda j: one(s.piece(s.whole - 1 - j)))

    def gather(self, *stats: Stat) -> list[jax.Array]:
        return self.stream.exchange.gather(self.scratch, *stats)

    def _load(self, piece: Piece) -> Units:
        s = self.stream
        row = self.x.at[self.index]
        raw = [s.load_unit(row, piece.start + offset) for offset in s.offsets(piece)]
        return [v.astype(jnp.float32) for v in raw]


@dataclasses.dataclass(frozen=True)
class RingRow(Stream):
    """Rows of a block in turn: block ``b`` of `grid` does rows ``b, b + grid, ...``

    Each warpgroup has a ring of `slots` chunks in shared memory. It is filled in this order: all
    chunks of the row for the first pass; for the second pass once more those that the ring could
    not keep (they come from the L2 cache); then the next row. A slot is refilled as soon as the
    chunk in it is not needed any more.
    """

    slots: int = 4
    grid: int = 132

    @property
    def pieces(self) -> int:
        return self.whole + self.has_tail

    @property
    def again(self) -> int:
        """Chunks of a row that are fetched a second time: the first ones."""
        return max(0, self.pieces - self.slots)

    @property
    def fetches(self) -> int:
        return self.pieces + self.again

    def blocks(self, rows: int) -> int:
        return min(rows, self.grid)

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        count = self.warpgroups * self.slots
        return [
            *self.exchange.scratch(stats, turns=2),
            plgpu.SMEM((count, self.chunk), dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=count),
        ]

    def each_row(
        self, x: Ref, rows: int, scratch: Sequence[Any], body: Callable[[Row], None]
    ) -> None:
        block = lax.axis_index(BLOCK)
        blocks = self.blocks(rows)
        count = lax.div(rows - block + blocks - 1, blocks)
        for number in range(self.slots):
            self.fetch(x, scratch, count, jnp.int32(number))
        pl.loop(0, count)(
            lambda k: body(_Ringed(self, x, block + k * blocks, scratch, turn=k, count=count))
        )

    def fetch(self, x: Ref, scratch: Sequence[Any], count: Any, number: Any) -> None:
        """Starts the copy of fetch `number` of this block, if its `count` rows have that many."""

        @pl.when(number < count * self.fetches)
        def _() -> None:
            *_, ring, barriers = scratch
            turn, place = lax.div(number, self.fetches), lax.rem(number, self.fetches)
            row = lax.axis_index(BLOCK) + turn * lax.axis_size(BLOCK)
            slot = self.slot(number)
            source = x.at[row, pl.ds(self.piece(place).start, self.chunk)]
            plgpu.copy_gmem_to_smem(
                source,
                ring.at[slot],
                barriers.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one bulk copy of any length
            )

    def slot(self, number: Any) -> Any:
        return lax.axis_index(WARPGROUP) * self.slots + lax.rem(number, self.slots)

    def piece(self, place: Any) -> Piece:
        """The chunk that is fetched at `place` in a row's order of fetches."""
        j = jnp.where(place < self.pieces, place, place - self.pieces) if self.again else place
        fresh = (j * self.warpgroups + lax.axis_index(WARPGROUP)) * self.chunk
        start = jnp.minimum(fresh, self.cols - self.chunk) if self.has_tail else fresh
        return Piece(start, self.chunk)

    def tail(self) -> Piece:
        fresh = (self.whole * self.warpgroups + lax.axis_index(WARPGROUP)) * self.chunk
        return dataclasses.replace(self.piece(self.whole), fresh=fresh)


@dataclasses.dataclass(frozen=True)
class _Ringed(Row):
    stream: RingRow
    x: Ref
    index: Any
    scratch: Sequence[Any]
    turn: Any
    count: Any

    def fold[T](
        self,
        first: Callable[[Units], T],
        step: Callable[[T, Units], T],
        neutral: Callable[[T], jax.Array],
    ) -> T:
        s = self.stream

        def one(j: Any, carry: T) -> T:
            return step(carry, self._take(j))

        def one_and_release(j: Any, carry: T) -> T:
            carry = one(j, carry)
            self._release(j)
            return carry

        carry = first(self._take(0))
        if s.again:
            self._release(0)
        carry = lax.fori_loop(1, s.again, one_and_release, carry)
        carry = lax.fori_loop(max(s.again, 1), s.whole, one, carry)
        if not s.has_tail:
            return carry
        units = s.replace_stale(s.tail(), self._take(s.whole), neutral(carry))
        return step(carry, units)

    def write(self, y: Ref, params: Sequence[Ref], function: Callable[..., jax.Array]) -> None:
        s = self.stream

        def one(place: Any, units: Units) -> None:
            s.write(y.at[self.index], s.piece(place), units, params, function)
            self._release(place)

        pl.loop(s.again, s.pieces)(lambda place: one(place, self._load(place)))
        if s.again:
            pl.loop(s.pieces, s.fetches)(lambda place: one(place, self._take(place)))

    def gather(self, *stats: Stat) -> list[jax.Array]:
        # Two turns of scratch: a warpgroup may be one row ahead of another that still reads.
        exchange = self.stream.exchange
        return exchange.gather(self.scratch[:2], *stats, turn=lax.rem(self.turn, 2))

    def _number(self, place: Any) -> Any:
        return self.turn * self.stream.fetches + place

    def _take(self, place: Any) -> Units:
        """Waits for a fetch and loads it."""
        plgpu.barrier_wait(self.scratch[-1].at[self.stream.slot(self._number(place))])
        return self._load(place)

    def _load(self, place: Any) -> Units:
        s = self.stream
        slot = self.scratch[-2].at[s.slot(self._number(place))]
        raw = [s.load_unit(slot, offset) for offset in s.offsets(s.piece(place))]
        return [v.astype(jnp.float32) for v in raw]

    def _release(self, place: Any) -> None:
        """Lets the slot of a fetch be filled again, once the whole warpgroup has read it."""
        s = self.stream
        plgpu.commit_smem()
        s.fetch(self.x, self.scratch, self.count, self._number(place) + s.slots)
