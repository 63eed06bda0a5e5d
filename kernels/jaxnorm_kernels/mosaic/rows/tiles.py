"""Tiles: how a block holds rows in registers, and their loads, stores and reductions.

A *tile* determines which threads hold a row. Three kinds of tile cover the row lengths that fit in
registers::

    RowTile        a warpgroup holds several rows    reductions within a warp
    WarpgroupRow   a warpgroup holds a row           reductions within the warpgroup
    SplitRow       several warpgroups hold a row     reductions within a warp, then a `Gather`

`partitions` determines which columns of a row a warpgroup holds, in which fragments. The rows of
two blocks may overlap: the last block starts early enough to have all its rows.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK, CLUSTER, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    columns_layout,
    flat_index,
    load,
    rows_layout,
    store,
    warpgroup_layout,
    warps_layout,
)
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.partitions import Fragment, Partition

#: A value for each row: a scalar, or an array over the rows of a `RowTile`. In a `SplitRow`, it is
#: an array over the warps of the warpgroup until it has been exchanged.
Stat = jax.Array

#: The values of a row: an array for each fragment.
Fragments = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class LoadedRow:
    """A row, or group of rows, that this block has loaded.

    Attributes:
      index: the index into a ``(rows, ...)`` ref.
      step: the number of rows, or groups, that the block has processed before.
      load: returns the results of `Steps.load` for each fragment.
    """

    index: Any
    step: Any
    load: Callable[[], list[tuple[jax.Array, ...]]]

    def read(self, which: int = 0) -> Fragments:
        """Return, for each fragment, one of the arrays that `Steps.load` returns."""
        return [loaded[which] for loaded in self.load()]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The functions that a forward kernel applies to each row.

    Attributes:
      load: maps elements of the row operands, each in its own dtype, to a tuple: the elements to
        reduce, in float32, and other elements that are stored or needed later.
      finish: reduces a row and stores its results. It gets a `LoadedRow` and ``prepare(params())``.
      params: loads the parameters of columns, once for all rows of a block.
      prepare: computes what depends on the loaded parameters.
    """

    load: Callable[..., tuple[jax.Array, ...]]
    finish: Callable[[LoadedRow, Any], None]
    params: Callable[[], Any] = lambda: None
    prepare: Callable[[Any], Any] = lambda loaded: loaded


@dataclasses.dataclass(frozen=True)
class Tile:
    """The common part of all tiles. A row is a list of arrays, one for each fragment.

    Attributes:
      vector: the number of elements that a thread loads at once.
      apart: True if each unit is a separate fragment, so that it can be loaded or skipped alone.
      index: precomputed column numbers for each shape of a fragment, if any.
    """

    cols: int
    vector: int
    apart: bool = dataclasses.field(default=False, kw_only=True)
    index: Mapping[tuple[int, ...], jax.Array] = dataclasses.field(
        default_factory=dict, kw_only=True, compare=False
    )

    def placed(self) -> Self:
        """Return this tile with the column numbers that its fragments share already computed."""
        if not self.apart:
            return self  # There are only one or two fragments.
        shapes = dict.fromkeys(self.shape(p.width) for p in self.fragments())
        return dataclasses.replace(self, index={s: self.count_columns(s) for s in shapes})

    @property
    def unit(self) -> int:
        """The number of columns that the threads of a row load at once."""
        return WARPGROUP_THREADS * self.vector

    @property
    def layout(self) -> Layout:
        """The layout of a fragment."""
        raise NotImplementedError

    def shape(self, width: int) -> tuple[int, ...]:
        """Return the shape in registers of a fragment of `width` columns."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """The number of rows in a block."""
        return 1

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups in a block."""
        return 1

    @property
    def cluster(self) -> int:
        """The number of blocks that share a row."""
        return 1

    @property
    def rereads(self) -> bool:
        """True if each use of a row reads it again, so that it takes no registers in between."""
        return False

    def blocks(self, rows: int) -> int:
        """Return the number of blocks of the grid."""
        return -(-rows // self.rows)

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        """Return a block's scratch memory for exchanges of `stats` values and for loaded rows."""
        del stats, dtypes
        return []

    def row_index(self, rows: int, group: Any = None) -> Any:
        """Return an index of the rows of group number `group` (default: the block's number)."""
        return lax.axis_index(BLOCK) if group is None else group

    def first_row(self, rows: int) -> Any:
        """Return the index of the first row, or group of rows, that this block processes."""
        return self.row_index(rows)

    def each_row(
        self, operands: Sequence[Ref], rows: int, scratch: Sequence[Any], steps: Steps
    ) -> None:
        """Run the steps on each row, or group of rows, that this block processes."""
        # Parameters are loaded before the row. RMSNorm over 16384 columns, f32 to bf16, then
        # reaches 1.02 of a copy's bandwidth instead of 0.94 (H200).
        shared = steps.prepare(steps.params())
        self.open(scratch)
        row = self.first_row(rows)
        raw = [self.load(operand, row) for operand in operands]
        held = [steps.load(*fragment) for fragment in zip(*raw)]
        self.ready()
        steps.finish(LoadedRow(row, 0, lambda: held), shared)

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise `scratch`; called first in the kernel."""

    def ready(self) -> None:
        """Wait until `scratch` can be used; called after the first loads have been started."""

    @property
    def _shares(self) -> int:
        """The number of warpgroups that share a row."""
        return self.warpgroups * self.cluster

    def _index(self) -> Any:
        """Return the index of this warpgroup among those that share a row."""
        return 0

    def partition(self, index: Any = 0) -> Partition:
        """Return the columns of a row that warpgroup number `index` holds."""
        return Partition(self.cols, self._shares, self.unit, index)

    def fragments(self) -> list[Fragment]:
        """Return the columns of a row that this warpgroup holds, as fragments."""
        part = self.partition(self._index())
        tail, body = part.tail(), part.body()
        return [*(part.cut(body) if self.apart else [body]), *tail]

    def load(self, ref: Ref, row: Any) -> list[jax.Array]:
        """Load a row of a ``(rows, cols)`` ref, in its own dtype."""
        return [
            load(ref.at[row, p.columns()], self.layout, self.shape(p.width))
            for p in self.fragments()
        ]

    def load_param(self, ref: Ref) -> list[jax.Array]:
        """Load a ``(cols,)`` ref in the layout of a row, in its own dtype."""
        return [
            load(ref.at[p.columns()], self.layout, self.shape(p.width)) for p in self.fragments()
        ]

    def store(self, ref: Ref, row: Any, values: Sequence[jax.Array]) -> None:
        """Store the fragments of a row in `ref`.

        Overlapping elements are stored twice, with equal values.
        """
        for p, value in zip(self.fragments(), values):
            p.store(ref, row, value, self.layout)

    def max(self, x: Sequence[jax.Array]) -> Stat:
        """Return the maximum of each row."""
        return self._reduce(x, jnp.max, jnp.maximum, -jnp.inf)

    def sum(self, x: Sequence[jax.Array]) -> Stat:
        """Return the sum of each row."""
        return self._reduce(x, jnp.sum, operator.add, 0)

    def broadcast(self, stat: Stat, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Broadcast `stat` to every element of a fragment."""
        return lax.broadcast_in_dim(stat, like.shape, (0,)) if stat.ndim else stat

    def of_fragments(self, stat: Stat) -> Callable[[jax.Array], jax.Array]:
        """Return `broadcast` of `stat` for each fragment, computed once for each shape."""
        shapes = dict.fromkeys(self.shape(p.width) for p in self.fragments())
        known = {s: self.broadcast(stat, jax.ShapeDtypeStruct(s, stat.dtype)) for s in shapes}
        return lambda like: known[like.shape]

    def columns(self, shape: tuple[int, ...]) -> jax.Array:
        """Return the column of each element, relative to the start of its fragment."""
        return self.index[shape] if shape in self.index else self.count_columns(shape)

    def count_columns(self, shape: tuple[int, ...]) -> jax.Array:
        """Compute the result of `columns`, which may have been computed before."""
        return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)

    def _reduce(
        self,
        x: Sequence[jax.Array],
        within: Callable[..., jax.Array],
        pairwise: Callable[[jax.Array, jax.Array], jax.Array],
        neutral: float,
    ) -> Stat:
        fresh = self._skip_stale(x, neutral)
        if self.apart:
            fresh = _folded(fresh, pairwise)
        return functools.reduce(pairwise, [within(v, axis=-1) for v in fresh])

    def _skip_stale(self, x: Sequence[jax.Array], neutral: float) -> list[jax.Array]:
        return [
            v if p.fresh is None else jnp.where(self._is_fresh(p), v, jnp.float32(neutral))
            for p, v in zip(self.fragments(), x)
        ]

    def _is_fresh(self, fragment: Fragment) -> jax.Array:
        return self.columns(self.shape(fragment.width)) >= fragment.fresh - fragment.start


@dataclasses.dataclass(frozen=True)
class RowTile(Tile):
    """Several rows per warpgroup (`height`), each shared by `threads` threads of a warp."""

    threads: int = WARP
    height: int = WARPS

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        if self.threads > WARP:
            raise ValueError(f"{self} needs threads of one warp, {WARP} at most")
        step = WARPGROUP_THREADS // self.threads
        if self.height != 1 and self.height % step:
            raise ValueError(f"{self} needs a height of 1 or k * {step}")

    @property
    def unit(self) -> int:
        return self.threads * self.vector

    @functools.cached_property
    def layout(self) -> Layout:
        return rows_layout(self.vector, self.threads, self.height)

    def shape(self, width: int) -> tuple[int, ...]:
        return (self.height, width)

    @property
    def rows(self) -> int:
        return self.height

    def row_index(self, rows: int, group: Any = None) -> Any:
        group = lax.axis_index(BLOCK) if group is None else group
        return pl.ds(jnp.minimum(group * self.height, rows - self.height), self.height)

    @property
    def widths(self) -> list[int]:
        """The number of columns in each fragment."""
        return [p.width for p in self.fragments()]

    @property
    def row_layouts(self) -> list[Layout]:
        """The layout of each fragment, for arrays of rows."""
        return [self.layout for _ in self.fragments()]

    @property
    def column_layouts(self) -> list[Layout]:
        """The layout of each fragment, for a ``(cols,)`` operand that all rows share."""
        return [columns_layout(self.vector, self.threads) for _ in self.fragments()]

    def store_param(self, ref: Ref, values: Sequence[jax.Array]) -> None:
        """Store a ``(cols,)`` operand that all rows share in a ref."""
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


@dataclasses.dataclass(frozen=True)
class WarpgroupRow(Tile):
    """One row per warpgroup."""

    @functools.cached_property
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
        # A reduction over the warpgroup needs barriers, so the fragments are folded into one unit
        # first.
        if len(x) == 1:
            return within(x[0])
        if self.apart:
            folded = _folded(self._skip_stale(x, neutral), pairwise)
            return functools.reduce(pairwise, [within(v) for v in folded])
        body, tail = self._skip_stale(x, neutral)
        units = [body[start : start + self.unit] for start in range(0, body.size, self.unit)]
        return within(functools.reduce(pairwise, [*units, tail]))


def _folded(
    units: Sequence[jax.Array], pairwise: Callable[[jax.Array, jax.Array], jax.Array]
) -> list[jax.Array]:
    """Fold all units of equal shape into one: the body's units, then the tail if it differs."""
    shapes = dict.fromkeys(unit.shape for unit in units)
    return [functools.reduce(pairwise, [v for v in units if v.shape == s]) for s in shapes]


@dataclasses.dataclass(frozen=True)
class SplitRow(Tile):
    """A row that `warpgroups` of a block share, or those of all `cluster` blocks of a cluster.

    Each row needs `exchanges` exchanges of statistics. `max` and `sum` reduce only the part of the
    row that a warp holds. Mosaic's own reduction over a warpgroup would use the same scratch memory
    for all warpgroups of the block. Neither Mosaic nor the interpreter reports this race (jax
    0.11.2 and 0.12.0).
    """

    warpgroups: int = 2
    cluster: int = 1
    exchanges: int = 1

    @functools.cached_property
    def layout(self) -> Layout:
        return warps_layout(self.vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (WARPS, width // WARPS)

    @functools.cached_property
    def exchange(self) -> Gather:
        return Gather(self.warpgroups, self.cluster, slots=min(2, self.exchanges))

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        return dataclasses.replace(self.exchange, values=stats).scratch()

    def open(self, scratch: Sequence[Any]) -> None:
        self.exchange.open(scratch)

    def ready(self) -> None:
        self.exchange.ready()

    def _index(self) -> Any:
        index = lax.axis_index(WARPGROUP)
        if self.cluster > 1:
            index += lax.axis_index(CLUSTER) * self.warpgroups
        return index

    def count_columns(self, shape: tuple[int, ...]) -> jax.Array:
        return flat_index(shape, self.layout)

    def gather(
        self, scratch: Sequence[Any], *stats: Stat, step: Any, nth: int = 0
    ) -> list[jax.Array]:
        """Gather `stats` in the `nth` exchange of the row that is processed in this step."""
        count = step if self.exchanges == 1 else step * self.exchanges + nth
        return self.exchange(scratch, *stats, count=count)

    def part_sizes(self) -> jax.Array | float:
        """Return the number of columns that each warp holds, without stale ones."""
        body, *tail = self.fragments()
        return sum((count_fresh(self._is_fresh(p), self.layout) for p in tail), body.width / WARPS)


def count_fresh(is_fresh: jax.Array, layout: Layout) -> jax.Array:
    """Return each warp's number of fresh columns, from a ``(4, n)`` mask."""
    ones = jnp.where(is_fresh, jnp.float32(1), jnp.float32(0))
    return jnp.sum(plgpu.layout_cast(ones, layout), axis=1)
