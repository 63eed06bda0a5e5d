"""Tiles: how a block's rows are distributed over its threads; loads, stores and reductions.

There are three kinds of tile, for different lengths of rows. All of them have the rows in
registers::

    RowTile        a warpgroup has several rows      reductions within a warp
    WarpgroupRow   a warpgroup has one row           reductions within the warpgroup
    SplitRow       several warpgroups share a row    reductions within a warp, then a `Gather`

The module `partitions` divides the columns of a row among warpgroups, and a warpgroup's columns
into *fragments*: ranges of columns. If the number of rows is not a multiple of the rows per block,
the last block starts earlier, and its first rows are also rows of the previous block.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK, warpgroup_index
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    columns_layout,
    flat_index,
    load,
    load_arrays,
    rows_layout,
    store,
    warpgroup_layout,
    warps_layout,
)
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.partitions import Fragment, Partition

#: A value for each row: a scalar, or an array over the rows of a `RowTile`. In a `SplitRow`, it is
#: an array over the four warps of a warpgroup, until the warps have exchanged their values.
Stat = jax.Array

#: The values of a tile's rows: a list with one array for each fragment (range of columns).
Fragments = list[jax.Array]


class _Reduction(NamedTuple):
    """A reduction of each row of a tile to one value.

    Attributes:
      within: reduces an array along an axis.
      pairwise: combines two arrays, element by element.
      neutral: the number that does not change the result, such as 0 for a sum.
    """

    within: Callable[..., jax.Array]
    pairwise: Callable[[jax.Array, jax.Array], jax.Array]
    neutral: float


_MAX = _Reduction(jnp.max, jnp.maximum, -jnp.inf)
_SUM = _Reduction(jnp.sum, operator.add, 0)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Base class of all tiles. A row is represented as a list of arrays, one for each fragment.

    If `slots` is above 0, the tile is *pipelined*: a block processes several tiles one after the
    other, and asynchronous copies (TMA) load the next tiles into buffers in shared memory while the
    block computes. The last tiles of the array are the `tail`. Each of them has its own block, so
    that all multiprocessors finish at about the same time. For example, with one row per tile::

        rows     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 | 13 | 14      tiles = 4, tail = 3
        block       0    |    1    |     2     |  3 |  4 |  5

    Attributes:
      cols: number of columns of a row.
      vector: number of neighbouring elements that a thread loads at once.
      threads: number of threads that share a row, at most 32 (`RowTile`).
      rows: number of rows of the tile (`RowTile`; otherwise 1).
      warpgroups: number of warpgroups per block (`SplitRow`; otherwise 1).
      cluster: number of blocks that share a row (`SplitRow`; otherwise 1).
      slots: number of buffers in shared memory for each warpgroup. A buffer contains the
        warpgroup's columns of one tile. If `slots` is 0, the tile is not pipelined.
      tiles: number of tiles that a block processes.
      tail: number of tiles at the end of the array. Each of them is processed by a block that
        processes no other tile.
      rereads: True if a row stays in shared memory until its results are stored, and is read again
        for each use. It then occupies no registers in between.
      exchanges: number of exchanges between the warps that share a row, per row (`SplitRow`).
      apart: True if each unit (one vector per thread) is a separate fragment, so that it can be
        loaded or skipped separately.
      index: maps the shape of a fragment to precomputed column indices (see `columns`). It may be
        empty.
    """

    cols: int
    vector: int
    threads: int = WARP
    rows: int = 1
    warpgroups: int = 1
    cluster: int = 1
    slots: int = 0
    tiles: int = 1
    tail: int = 0
    rereads: bool = False
    exchanges: int = 1
    apart: bool = False
    index: Mapping[tuple[int, ...], jax.Array] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def with_indices(self) -> Self:
        """Return this tile with precomputed column indices."""
        if not self.apart:
            return self  # With only two fragments, there is little to precompute.
        shapes = dict.fromkeys(self.shape(p.width) for p in self.fragments())
        return dataclasses.replace(self, index={s: self.count_columns(s) for s in shapes})

    @property
    def unit(self) -> int:
        """Number of columns that the threads of a row load at once."""
        return WARPGROUP_THREADS * self.vector

    @property
    def layout(self) -> Layout:
        """Register layout of a fragment, which is a range of a row's columns."""
        raise NotImplementedError

    def shape(self, width: int) -> tuple[int, ...]:
        """Return the shape in registers of a fragment with `width` columns of the tile's rows."""
        raise NotImplementedError

    def blocks(self, rows: int) -> int:
        """Return the number of blocks of the grid."""
        whole = self.whole_blocks(rows)
        return whole + -(-rows // self.rows) - whole * self.tiles

    def whole_blocks(self, rows: int) -> int:
        """Return the number of blocks that process `tiles` tiles each.

        The remaining blocks process one tile each.
        """
        return max(0, -(-rows // self.rows) - self.tail) // self.tiles

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        """Return the shared memory and the barriers that a block needs.

        `stats` is the maximum number of values per row that the warps sharing a row exchange at a
        time. `dtypes` are the dtypes of the arrays that are loaded row by row.
        """
        del stats
        if not self.slots:
            return []
        count, shapes = self.warpgroups * self.slots, self.slot_shapes()
        return [
            *[plgpu.SMEM((count, *shape), dtype) for dtype in dtypes for shape in shapes],
            plgpu.Barrier(num_arrivals=len(dtypes) * len(shapes), num_barriers=count),
        ]

    def row_index(self, rows: int, group: Any = None) -> Any:
        """Return an index that selects tile number `group` from an array of `rows` rows.

        The index is the row's index if a tile is one row, or a slice if a tile has several rows
        (`RowTile`). By default, `group` is the index of this block.
        """
        return lax.axis_index(BLOCK) if group is None else group

    def first(self, rows: int) -> Any:
        """Return the number of the first tile that this block processes."""
        block, whole = lax.axis_index(BLOCK), self.whole_blocks(rows)
        if not self.slots:
            return block
        return jnp.where(block < whole, block * self.tiles, block + whole * (self.tiles - 1))

    def first_row(self, rows: int) -> Any:
        """Return the row index of the first tile: an integer, or a slice if it has several rows."""
        return self.row_index(rows, self.first(rows))

    def slot_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the buffers in shared memory for one tile. A copy fills a buffer."""
        raise NotImplementedError

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        """Return a pair (source, target) for each copy that loads a tile.

        The target is a buffer in shared memory. Each copy moves consecutive bytes.
        """
        raise NotImplementedError

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        """Load a tile from its buffers in shared memory, in the buffers' dtype.

        Returns a list with one array for each fragment (range of columns).
        """
        raise NotImplementedError

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise the barriers in `scratch`. A kernel must call this first."""

    def ready(self) -> None:
        """Wait until `scratch` can be used. Call this late, after starting the first loads."""

    @property
    def _shares(self) -> int:
        """Number of warpgroups that share a row."""
        return self.warpgroups * self.cluster

    def _index(self) -> Any:
        """Return the index of this warpgroup among the warpgroups that share a row."""
        return 0

    def partition(self, index: Any = 0) -> Partition:
        """Return the columns of a row that warpgroup number `index` processes."""
        return Partition(self.cols, self._shares, self.unit, self.vector, index)

    def fragments(self) -> list[Fragment]:
        """Return the column ranges (fragments) of a row that this warpgroup processes."""
        part = self.partition(self._index())
        tail, body = part.tail(), part.body()
        return [*(part.cut(body) if self.apart else [body]), *tail]

    def load(self, ref: Ref, row: Any) -> list[jax.Array]:
        """Load a row of a ``(rows, cols)`` ref, in the ref's dtype."""
        return [
            load(ref.at[row, p.columns()], self.layout, self.shape(p.width))
            for p in self.fragments()
        ]

    def load_param(self, ref: Ref) -> list[jax.Array]:
        """Load a ``(cols,)`` ref in the layout of a row, in the ref's dtype."""
        return [
            load(ref.at[p.columns()], self.layout, self.shape(p.width)) for p in self.fragments()
        ]

    def store(self, ref: Ref, row: Any, values: Sequence[jax.Array]) -> None:
        """Store a row in `ref`. `values` has one array for each fragment (range of columns).

        If a column is in two fragments, it is stored twice, with equal values.
        """
        for p, value in zip(self.fragments(), values):
            p.store(ref, row, value, self.layout)

    def max(self, x: Sequence[jax.Array]) -> Stat:
        """Return the maximum of each row."""
        return self._reduce(x, _MAX)

    def sum(self, x: Sequence[jax.Array]) -> Stat:
        """Return the sum of each row."""
        return self._reduce(x, _SUM)

    def broadcast(self, stat: Stat, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Broadcast one value per row to the shape of `like`.

        `like` is an array with some columns of the rows.
        """
        return lax.broadcast_in_dim(stat, like.shape, (0,)) if stat.ndim else stat

    def of_fragments(self, stat: Stat) -> Callable[[jax.Array], jax.Array]:
        """Return a function ``f(like)`` that broadcasts `stat` to the shape of `like`.

        `stat` has one value per row. `like` must have the shape of a fragment (column range). All
        fragments of a row together have at most two different shapes. `stat` is broadcast to each
        of these shapes once, before this method returns. A call of ``f`` computes nothing: it
        returns the broadcast array that has the shape of `like`.
        """
        shapes = dict.fromkeys(self.shape(p.width) for p in self.fragments())
        known = {s: self.broadcast(stat, jax.ShapeDtypeStruct(s, stat.dtype)) for s in shapes}
        return lambda like: known[like.shape]

    def columns(self, shape: tuple[int, ...]) -> jax.Array:
        """Return the column index of each element, relative to its fragment's first column."""
        return self.index[shape] if shape in self.index else self.count_columns(shape)

    def count_columns(self, shape: tuple[int, ...]) -> jax.Array:
        """Compute the result of `columns`, without the precomputed arrays in `index`."""
        return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)

    def _reduce(self, x: Sequence[jax.Array], by: _Reduction) -> Stat:
        fresh = self._skip_stale(x, by.neutral)
        if self.apart:
            fresh = _folded(fresh, by)
        return functools.reduce(by.pairwise, [by.within(v, axis=-1) for v in fresh])

    def _skip_stale(self, x: Sequence[jax.Array], neutral: float) -> list[jax.Array]:
        return [p.skip_stale(v, neutral, self._columns_of(p)) for p, v in zip(self.fragments(), x)]

    def _columns_of(self, fragment: Fragment) -> Callable[[], jax.Array]:
        return lambda: self.columns(self.shape(fragment.width))


@dataclasses.dataclass(frozen=True)
class RowTile(Tile):
    """Several rows per warpgroup. The threads of a row are in one warp."""

    def __post_init__(self) -> None:
        """Raise ValueError if the sizes do not fit together."""
        if self.threads > WARP:
            raise ValueError(f"{self} needs threads of one warp, {WARP} at most")
        step = WARPGROUP_THREADS // self.threads
        if self.rows != 1 and self.rows % step:
            raise ValueError(f"{self} needs a height of 1 or k * {step}")

    @property
    def unit(self) -> int:
        return self.threads * self.vector

    @functools.cached_property
    def layout(self) -> Layout:
        return rows_layout(self.vector, self.threads, self.rows)

    def shape(self, width: int) -> tuple[int, ...]:
        return (self.rows, width)

    def row_index(self, rows: int, group: Any = None) -> Any:
        group = lax.axis_index(BLOCK) if group is None else group
        return pl.ds(jnp.minimum(group * self.rows, rows - self.rows), self.rows)

    @property
    def widths(self) -> list[int]:
        """Number of columns in each fragment (column range)."""
        return [p.width for p in self.fragments()]

    @property
    def row_layouts(self) -> list[Layout]:
        """The register layout of each fragment of a row. A fragment is a range of columns."""
        return [self.layout for _ in self.fragments()]

    @property
    def column_layouts(self) -> list[Layout]:
        """The register layout of each fragment of a ``(cols,)`` operand, such as a scale."""
        return [columns_layout(self.vector, self.threads) for _ in self.fragments()]

    def store_param(self, ref: Ref, values: Sequence[jax.Array]) -> None:
        """Store a ``(cols,)`` array in `ref`.

        `values` has one array for each fragment (range of columns).
        """
        for p, value in zip(self.fragments(), values):
            store(ref.at[p.columns()], value)

    def load_param(self, ref: Ref) -> list[jax.Array]:
        layout = columns_layout(self.vector, self.threads)
        return [
            lax.broadcast_in_dim(
                load(ref.at[pl.ds(p.start, p.width)], layout), self.shape(p.width), (1,)
            )
            for p in self.fragments()
        ]

    def slot_shapes(self) -> list[tuple[int, ...]]:
        return [(self.rows, self.cols)]

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        return [(x.at[index], slot) for slot in slots]

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        (slot,) = slots
        return [
            load_arrays([slot], self.layout, self.shape(p.width), starts=(p.start,))[0]
            for p in self.fragments()
        ]


@dataclasses.dataclass(frozen=True)
class WarpgroupRow(Tile):
    """One row per warpgroup."""

    @functools.cached_property
    def layout(self) -> Layout:
        return warpgroup_layout(self.vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def _reduce(self, x: Sequence[jax.Array], by: _Reduction) -> Stat:
        # A reduction over the warpgroup needs barriers. So combine all units of the row into one
        # unit first, element by element, and then reduce this unit once.
        if len(x) == 1 or self.apart:
            return super()._reduce(x, by)
        body, tail = self._skip_stale(x, by.neutral)
        units = [body[start : start + self.unit] for start in range(0, body.size, self.unit)]
        return by.within(functools.reduce(by.pairwise, [*units, tail]))


def _folded(units: Sequence[jax.Array], by: _Reduction) -> list[jax.Array]:
    """Combine all arrays of the same shape into one array, element by element.

    The result is a list with one array for each shape: one for the complete units of a row, and
    another one for the row's tail if its shape is different.
    """
    shapes = dict.fromkeys(unit.shape for unit in units)
    return [functools.reduce(by.pairwise, [v for v in units if v.shape == s]) for s in shapes]


@dataclasses.dataclass(frozen=True)
class SplitRow(Tile):
    """A row that is shared by all warpgroups of a block, or of all blocks of a cluster.

    `max` and `sum` reduce only the columns of each warp; `gather` exchanges the results. Mosaic's
    own reduction over a warpgroup cannot be used. It would use the same scratch memory for all
    warpgroups of the block, which is a race. Neither Mosaic nor the interpreter reports this race
    (jax 0.11.2 and 0.12.0).
    """

    @functools.cached_property
    def layout(self) -> Layout:
        return warps_layout(self.vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (WARPS, width // WARPS)

    @functools.cached_property
    def exchange(self) -> Gather:
        stages = 2 if self.slots else min(2, self.exchanges)
        return Gather(self.warpgroups, self.cluster, stages=stages)

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        exchanged = dataclasses.replace(self.exchange, values=stats).scratch()
        return [*exchanged, *super().scratch(stats, dtypes)]

    def open(self, scratch: Sequence[Any]) -> None:
        self.exchange.open(scratch)

    def ready(self) -> None:
        self.exchange.ready()

    def _index(self) -> Any:
        return warpgroup_index(self.warpgroups, self.cluster)

    def count_columns(self, shape: tuple[int, ...]) -> jax.Array:
        return flat_index(shape, self.layout)

    def slot_shapes(self) -> list[tuple[int, ...]]:
        # Each fragment (column range) has its own buffer, because Mosaic can load a slice of a
        # buffer's columns only if the slice's width divides the width of the buffer.
        part = self.partition()
        bodies = [part.unit] * part.units if self.apart else [part.body_width]
        return [(width,) for width in [*bodies, *[part.unit] * part.has_tail]]

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        return [(x.at[index, p.columns()], slot) for p, slot in zip(self.fragments(), slots)]

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        shapes = [self.shape(p.width) for p in self.fragments()]
        return [load(slot, self.layout, s) for slot, s in zip(slots, shapes)]

    def gather(
        self, scratch: Sequence[Any], *stats: Stat, step: Any, nth: int = 0
    ) -> list[jax.Array]:
        """Exchange `stats` between all warps that share a row; see `Gather`.

        `step` is the number of rows that the block has processed before this row. `nth` is the
        number of earlier exchanges for this row.
        """
        count = step if self.exchanges == 1 else step * self.exchanges + nth
        return self.exchange(scratch, *stats, count=count)

    def part_sizes(self) -> jax.Array | float:
        """Return how many columns of the row each warp reduces.

        If two fragments contain the same column, the column is counted only once. The result is a
        float if all warps have the same number of columns, otherwise an array with one number per
        warp.
        """
        body, *tail = self.fragments()
        masks = [p.is_fresh(self._columns_of(p)) for p in tail]
        return sum(
            (count_fresh(m, self.layout) for m in masks if m is not None), body.width / WARPS
        )


def count_fresh(is_fresh: jax.Array, layout: Layout) -> jax.Array:
    """Return the number of True elements in each row of `is_fresh`, as a float32 array.

    `is_fresh` is ``(4, n)``, with one row per warp.
    """
    ones = jnp.where(is_fresh, jnp.float32(1), jnp.float32(0))
    return jnp.sum(plgpu.layout_cast(ones, layout), axis=1)
