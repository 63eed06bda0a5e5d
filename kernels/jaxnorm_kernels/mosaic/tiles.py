"""How a block holds rows in registers: layouts, loads, stores, reductions, and the exchange.

A *tile* says which threads hold a row. Three tiles cover the row lengths that fit in registers::

    RowTile        a warpgroup holds several rows    reductions within a warp or the warpgroup
    WarpgroupRow   a warpgroup holds a row           reductions within the warpgroup
    SplitRow       2 to 8 warpgroups hold a row      reductions within a warp, then an `Exchange`

A tile advances in units: one vector for each thread of a row. There are no masked loads or stores
on this backend, so a row that is no multiple of the unit is held in two *pieces*: a body of whole
units, and a tail, one unit that ends with the row. The first columns of the tail are in the body
too. Reductions skip them (they are *stale*), and they are stored twice with the same value. Rows
overlap in the same way: the last block starts early enough to be whole.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.launch import BLOCK, WARPGROUP, is_interpreted

WARP = 32  # threads of a warp
WARPS = 4  # warps of a warpgroup
WARPGROUP_THREADS = WARP * WARPS
VECTOR_BYTES = 16  # the widest load or store of one thread

# Pallas gives layouts and refs no public types.
Layout = Any
Ref = Any


def vector_width(cols: int, *dtypes: np.dtype | None) -> int:
    """Elements that one thread reads at once: the most that fit `VECTOR_BYTES` and divide a row.

    They must divide the row, because otherwise the rows would not start at aligned addresses.
    """
    width = VECTOR_BYTES // max(dtype.itemsize for dtype in dtypes if dtype is not None)
    while cols % width:
        width //= 2
    return width


def warpgroup_layout(vector: int) -> Layout:
    """``(n,)``: neighbouring threads of the warpgroup hold neighbouring vectors.

    What ``WG_STRIDED`` is with this vector size, but it may be reduced in parts and sliced.
    """
    unit = WARP * vector
    return _tiled((WARPS * unit,), (unit,), (vector,), warps=(-3,), lanes=(-2,))


def warps_layout(vector: int) -> Layout:
    """``(4, n)``: each warp holds a row, neighbouring lanes neighbouring vectors of it."""
    return _tiled((WARPS, WARP * vector), (vector,), warps=(-3,), lanes=(-2,))


def rows_layout(vector: int, threads: int, height: int) -> Layout:
    """``(height, n)``: `threads` neighbouring threads share a row: part of a warp, or all warps.

    A height of 1 shared within a warp: every warp, and every part of a warp, holds the same row.
    """
    unit = threads * vector
    if threads == WARPGROUP_THREADS:
        return _tiled((1, unit), (unit // WARPS,), (vector,), warps=(-3,), lanes=(-2,))
    if height == 1:
        return _tiled((1, unit), (vector,), warps=_ALL_WARPS, lanes=_parts_of_a_warp(threads))
    if threads == WARP:
        return warps_layout(vector)
    rows = WARP // threads
    return _tiled((WARPS * rows, unit), (rows, unit), (vector,), warps=(-5,), lanes=(-3, -2))


def columns_layout(vector: int, threads: int) -> Layout:
    """``(n,)``: what `rows_layout` holds of every row; the layout of its scale and bias."""
    if threads == WARPGROUP_THREADS:
        return warpgroup_layout(vector)
    lanes = _parts_of_a_warp(threads)
    return _tiled((threads * vector,), (vector,), warps=_ALL_WARPS, lanes=lanes)


def column_in_warps(shape: tuple[int, int]) -> jax.Array:
    """Column of each element of a ``(4, n)`` array whose rows lie side by side."""
    warp = lax.broadcasted_iota(jnp.int32, shape, 0)
    return warp * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)


def load(ref: Ref, layout: Layout, shape: tuple[int, ...] | None = None) -> jax.Array:
    """The elements of `ref`, as an array of `shape` (by default that of `ref`)."""
    if shape is None or shape == ref.shape:
        return plgpu.load(ref, layout=layout, optimized=False)
    # The interpreter knows no reshaped refs; Mosaic cannot reshape registers of these layouts.
    if is_interpreted():
        return plgpu.load(ref, layout=layout, optimized=False).reshape(shape)
    return plgpu.load(ref.reshape(*shape), layout=layout, optimized=False)


def store(ref: Ref, value: jax.Array) -> None:
    """Stores `value`, rounded to the dtype of `ref`."""
    value = value.astype(ref.dtype)
    if value.shape != ref.shape and is_interpreted():
        value = value.reshape(ref.shape)
    elif value.shape != ref.shape:
        ref = ref.reshape(*value.shape)
    if value.ndim and hasattr(plgpu, "store"):
        # From jax 0.12 on `ref[...] = value` refuses what is not perfectly coalesced.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


_ALL_WARPS = (plgpu.Replicated(WARPS),)


def _parts_of_a_warp(threads: int) -> tuple[Any, ...]:
    return (-2,) if threads == WARP else (plgpu.Replicated(WARP // threads), -2)


def _tiled(*tiles: tuple[int, ...], warps: tuple[Any, ...], lanes: tuple[Any, ...]) -> Layout:
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


#: A value for each row: a scalar, or an array over the rows of a `RowTile`. Of a `SplitRow`
#: it is first an array over the warps of the warpgroup, until it has been exchanged.
Stat = jax.Array


@dataclasses.dataclass(frozen=True)
class Piece:
    """Columns ``[start, start + width)`` of a row; those before `fresh` are stale."""

    start: Any
    width: int
    fresh: Any = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """What the tiles have in common. A row is a list of arrays: one for each piece."""

    cols: int
    vector: int

    @property
    def unit(self) -> int:
        return WARPGROUP_THREADS * self.vector

    @property
    def layout(self) -> Layout:
        raise NotImplementedError

    def shape(self, width: int) -> tuple[int, ...]:
        """Shape in registers of a piece of `width` columns."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 1

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return 1

    def blocks(self, rows: int) -> int:
        return -(-rows // self.rows)

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        """Scratch of a block: what it needs to exchange up to `stats` values."""
        del stats, dtype
        return []

    def row_index(self, rows: int) -> Any:
        """Index of the row, or rows, of this block into a ``(rows, ...)`` ref."""
        return lax.axis_index(BLOCK)

    def each_row(
        self,
        x: Ref,
        rows: int,
        scratch: Sequence[Any],
        body: Callable[[Any, list[jax.Array]], None],
    ) -> None:
        """Runs ``body(index, row)`` on each row, or group of rows, of this block."""
        del scratch
        row = self.row_index(rows)
        body(row, self.load(x, row))

    def pieces(self) -> list[Piece]:
        body = self.cols // self.unit * self.unit
        if body == 0:
            raise ValueError(f"{self} holds rows of {self.unit} columns and more")
        tail = [Piece(self.cols - self.unit, self.unit, fresh=body)] if body < self.cols else []
        return [Piece(0, body), *tail]

    def load(self, ref: Ref, row: Any) -> list[jax.Array]:
        """A row of a ``(rows, cols)`` ref, in its own dtype."""
        return [
            load(ref.at[row, pl.ds(p.start, p.width)], self.layout, self.shape(p.width))
            for p in self.pieces()
        ]

    def load_param(self, ref: Ref) -> list[jax.Array]:
        """A ``(cols,)`` ref, held as a row is held, in its own dtype."""
        return [
            load(ref.at[pl.ds(p.start, p.width)], self.layout, self.shape(p.width))
            for p in self.pieces()
        ]

    def store(self, ref: Ref, row: Any, values: Sequence[jax.Array]) -> None:
        for p, value in zip(self.pieces(), values):
            store(ref.at[row, pl.ds(p.start, p.width)], value)

    def max(self, x: Sequence[jax.Array]) -> Stat:
        return self._reduce(x, jnp.max, jnp.maximum, -jnp.inf)

    def sum(self, x: Sequence[jax.Array]) -> Stat:
        return self._reduce(x, jnp.sum, operator.add, 0)

    def spread(self, stat: Stat, like: jax.Array) -> jax.Array:
        """`stat` for every element of a piece."""
        return lax.broadcast_in_dim(stat, like.shape, (0,)) if stat.ndim else stat

    def columns(self, shape: tuple[int, ...]) -> jax.Array:
        """Column of each element, counted from the start of its piece."""
        return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)

    def _reduce(
        self,
        x: Sequence[jax.Array],
        within: Callable[..., jax.Array],
        pairwise: Callable[[jax.Array, jax.Array], jax.Array],
        neutral: float,
    ) -> Stat:
        kept = self._skip_stale(x, neutral)
        return functools.reduce(pairwise, [within(v, axis=-1) for v in kept])

    def _skip_stale(self, x: Sequence[jax.Array], neutral: float) -> list[jax.Array]:
        return [
            v if p.fresh is None else jnp.where(self._is_fresh(p), v, jnp.float32(neutral))
            for p, v in zip(self.pieces(), x)
        ]

    def _is_fresh(self, piece: Piece) -> jax.Array:
        return self.columns(self.shape(piece.width)) >= piece.fresh - piece.start


@dataclasses.dataclass(frozen=True)
class RowTile(Tile):
    """`height` rows in a warpgroup, each shared by `threads` threads: 2 to 32, or all 128."""

    threads: int = WARP
    height: int = WARPS

    def __post_init__(self) -> None:
        step = WARPGROUP_THREADS // self.threads
        if self.height != 1 and self.height % step:
            raise ValueError(f"{self} needs a height of 1 or k * {step}")

    @property
    def unit(self) -> int:
        return self.threads * self.vector

    @property
    def layout(self) -> Layout:
        return rows_layout(self.vector, self.threads, self.height)

    def shape(self, width: int) -> tuple[int, ...]:
        return (self.height, width)

    @property
    def rows(self) -> int:
        return self.height

    def row_index(self, rows: int) -> Any:
        first = lax.axis_index(BLOCK) * self.height
        return pl.ds(jnp.minimum(first, rows - self.height), self.height)

    def load_param(self, ref: Ref) -> list[jax.Array]:
        layout = columns_layout(self.vector, self.threads)
        return [
            lax.broadcast_in_dim(
                load(ref.at[pl.ds(p.start, p.width)], layout), self.shape(p.width), (1,)
            )
            for p in self.pieces()
        ]


@dataclasses.dataclass(frozen=True)
class WarpgroupRow(Tile):
    """A row in a warpgroup: `RowTile` with 128 threads and a height of 1, with fewer barriers."""

    @property
    def layout(self) -> Layout:
        return warpgroup_layout(self.vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def _reduce(
        self,
        x: Sequence[jax.Array],
        within: Callable[..., jax.Array],
        pairwise: Callable[[jax.Array, jax.Array], jax.Array],
        neutral: float,
    ) -> Stat:
        # A reduction over the warpgroup costs barriers: the pieces are folded into a unit first.
        if len(x) == 1:
            return within(x[0])
        body, tail = self._skip_stale(x, neutral)
        units = [body[start : start + self.unit] for start in range(0, body.size, self.unit)]
        return within(functools.reduce(pairwise, [*units, tail]))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Shows a value of each warp to every warp of a block of up to 8 warpgroups."""

    warpgroups: int

    @property
    def parts(self) -> int:
        return WARPS * self.warpgroups

    def scratch(self, stats: int, turns: int = 1) -> list[Any]:
        """Scratch for up to `stats` values in each of `turns` exchanges under way at once."""
        return [
            plgpu.SMEM((turns * stats, self.parts), jnp.float32),
            plgpu.Barrier(num_arrivals=self.warpgroups),
        ]

    def gather(self, scratch: Sequence[Any], *stats: Stat, turn: Any = 0) -> list[jax.Array]:
        """``(4,)`` values of each warpgroup -> ``(parts,)`` values, in the same order everywhere.

        Reducing those stays within a warp, because each warp holds all of them in its lanes.
        """
        shared, barrier = scratch
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        first = turn * len(stats)
        for slot, stat in enumerate(stats):
            store(shared.at[first + slot, mine], stat)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        layout = columns_layout(1, self.parts)
        return [load(shared.at[first + slot], layout) for slot in range(len(stats))]


@dataclasses.dataclass(frozen=True)
class SplitRow(Tile):
    """A row in `split` warpgroups; `max` and `sum` are those of each warp's part of it.

    Mosaic's reduction over a warpgroup would use the same scratch for all warpgroups of the block:
    a race that neither it nor the interpreter reports (jax 0.11.2 and 0.12.0).
    """

    split: int = 2

    @property
    def layout(self) -> Layout:
        return warps_layout(self.vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (WARPS, width // WARPS)

    @property
    def warpgroups(self) -> int:
        return self.split

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.split)

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        return self.exchange.scratch(stats)

    def pieces(self) -> list[Piece]:
        """The warpgroups' bodies lie side by side; their tails share what is left of the row."""
        warpgroup = lax.axis_index(WARPGROUP)
        body = self.cols // (self.split * self.unit) * self.unit
        if body == 0:
            raise ValueError(f"{self} holds rows of {self.split * self.unit} columns and more")
        if self.split * body == self.cols:
            return [Piece(warpgroup * body, body)]
        fresh = self.split * body + warpgroup * self.unit
        start = jnp.minimum(fresh, self.cols - self.unit)
        return [Piece(warpgroup * body, body), Piece(start, self.unit, fresh)]

    def columns(self, shape: tuple[int, ...]) -> jax.Array:
        return column_in_warps((shape[0], shape[1]))

    def gather(self, scratch: Sequence[Any], *stats: Stat, row: Any) -> list[jax.Array]:
        """See `Exchange.gather`."""
        del row
        return self.exchange.gather(scratch[:2], *stats)

    def part_sizes(self) -> jax.Array | float:
        """How many columns each warp has that are not stale."""
        body, *tail = self.pieces()
        return sum((count_fresh(self._is_fresh(p), self.layout) for p in tail), body.width / WARPS)


def count_fresh(is_fresh: jax.Array, layout: Layout) -> jax.Array:
    """How many columns of each warp are fresh, of a ``(4, n)`` mask."""
    ones = jnp.where(is_fresh, jnp.float32(1), jnp.float32(0))
    return jnp.sum(plgpu.layout_cast(ones, layout), axis=1)
