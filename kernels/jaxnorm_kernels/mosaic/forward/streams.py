"""Rows that do not stay in registers: a block reads each row twice, chunk by chunk.

The first pass folds the chunks of a row into statistics, the second writes the output. It finds the
row in the L1 or L2 cache, as far as that holds it.

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

from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Ref,
    column_in_warps,
    load,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, widen
from jaxnorm_kernels.mosaic.forward import tiles
from jaxnorm_kernels.mosaic.forward.exchange import Exchange
from jaxnorm_kernels.mosaic.forward.tiles import Piece, Stat

Units = list[jax.Array]


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
    def cluster(self) -> int:
        """Blocks that share a row."""
        return 1

    @property
    def whole(self) -> int:
        """How many chunks each warpgroup has that are all fresh."""
        return self.cols // (self.warpgroups * self.chunk)

    @property
    def has_tail(self) -> bool:
        return self.whole * self.warpgroups * self.chunk < self.cols

    def piece(self, j: Any) -> Piece:
        return Piece((j * self.warpgroups + lax.axis_index(WARPGROUP)) * self.chunk, self.chunk)

    def tail(self) -> Piece:
        """The chunk of this warpgroup after the whole ones. All of it may be stale."""
        done = self.whole * self.warpgroups * self.chunk
        width = -(-(self.cols - done) // (self.warpgroups * self.unit)) * self.unit
        fresh = done + lax.axis_index(WARPGROUP) * width
        return Piece(jnp.minimum(fresh, self.cols - width), width, fresh)

    def blocks(self, rows: int) -> int:
        return rows

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        """Scratch of a block."""
        del dtypes
        return self.exchange.scratch(stats)

    def load_unit(self, ref: Ref, start: Any) -> jax.Array:
        """Columns ``[start, start + unit)`` of a ``(cols,)`` ref, in its own dtype."""
        return load(ref.at[pl.ds(start, self.unit)], warps_layout(self.vector), self.shape)

    def full(self, value: float) -> jax.Array:
        """A unit of one value, to start from."""
        unit = jnp.full(self.shape, value, jnp.float32)
        return plgpu.layout_cast(unit, warps_layout(self.vector))

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
        tail, layout = self.tail(), warps_layout(self.vector)
        fresh = [self._is_fresh(tail, offset) for offset in self.offsets(tail)]
        return sum((tiles.count_fresh(mask, layout) for mask in fresh), whole)

    def _is_fresh(self, piece: Piece, offset: int) -> jax.Array:
        return column_in_warps(self.shape) >= piece.fresh - piece.start - offset


@dataclasses.dataclass(frozen=True)
class Row:
    """The row of this block, in the hands of one warpgroup."""

    stream: Stream
    x: Ref
    scratch: Sequence[Any]

    @property
    def index(self) -> Any:
        return lax.axis_index(BLOCK)

    def fold[T](
        self,
        first: Callable[[Units], T],
        step: Callable[[T, Units], T],
        neutral: Callable[[T], jax.Array],
    ) -> T:
        """First pass: `first` takes the first chunk, `step` each of the others, in float32.

        Stale columns hold ``neutral(carry)``.
        """
        s = self.stream
        carry = first(self._load(s.piece(0)))
        carry = lax.fori_loop(1, s.whole, lambda j, c: step(c, self._load(s.piece(j))), carry)
        if not s.has_tail:
            return carry
        units = s.replace_stale(s.tail(), self._load(s.tail()), neutral(carry))
        return step(carry, units)

    def write(self, y: Ref, params: Sequence[Ref], function: Callable[..., jax.Array]) -> None:
        """Second pass: stores ``function(x, *params)`` of each unit; `x` is in float32."""
        # Backwards: what was read last is the likeliest to be in the L1 cache.
        s = self.stream

        def one(piece: Piece) -> None:
            units = self._load(piece)
            starts = [piece.start + offset for offset in s.offsets(piece)]
            # All loads before the first store: the compiler cannot move them past it.
            columns = [[s.load_unit(p, start) for p in params] for start in starts]
            for start, unit, column in zip(starts, units, columns):
                there = y.at[self.index, pl.ds(start, s.unit)]
                store_global(there, function(unit, *column), warps_layout(s.vector))

        if s.has_tail:
            one(s.tail())
        pl.loop(0, s.whole)(lambda j: one(s.piece(s.whole - 1 - j)))

    def gather(self, *stats: Stat) -> list[jax.Array]:
        """See `Exchange.gather`."""
        return self.stream.exchange.gather(self.scratch, *stats)

    def _load(self, piece: Piece) -> Units:
        s, row = self.stream, self.x.at[self.index]
        raw = [s.load_unit(row, piece.start + offset) for offset in s.offsets(piece)]
        return [widen(v, warps_layout(s.vector)) for v in raw]
