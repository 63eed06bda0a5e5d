"""Tiles of attention heads whose columns are rotated in pairs (RoPE).

A warpgroup has entire rows (heads) in registers. A row has two or three fragments: the first column
of each pair, the second column of each pair, and the columns that are not rotated. Each thread has
matching columns of the first two fragments, so it can rotate its pairs by itself. In memory, r
rotated columns are arranged in one of two ways::

                    first columns           second columns          not rotated
    half            columns 0 ... r/2-1     columns r/2 ... r-1     the rest
    interleaved     columns 0, 2, 4 ...     columns 1, 3, 5 ...     the rest

The tables of cos and sin have one row per position. Several heads share a position, but the tables
are not expanded in memory. If all rows of a tile have the same position, the table row of this
position is loaded once; otherwise a table row is loaded for each row of the tile.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.device.layouts import (
    Layout,
    Ref,
    columns_layout,
    load,
    load_arrays,
    load_wide,
    rows_layout,
    widen,
)
from jaxnorm_kernels.mosaic.device.registers import (
    join_pairs,
    load_each_row,
    split_pairs,
    store_global,
)
from jaxnorm_kernels.mosaic.rows.logits import operand_row
from jaxnorm_kernels.mosaic.rows.tiles import Fragments


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """Rows (heads) that a warpgroup processes at the same time, each in a few threads of a warp.

    The columns of a head form up to three fragments: the first columns of the pairs that are
    rotated, the second columns of these pairs, and the columns that are not rotated.

    Attributes:
      cols: number of columns of a head.
      rotated: number of leading columns that are rotated.
      interleaved: True if the columns of a pair are neighbours (see `NormOptions`).
      vector: number of neighbouring columns per thread in each of the first two fragments.
      rest: number of neighbouring columns per thread in the third fragment, which is not rotated.
      threads: number of neighbouring threads that share a row.
      rows: number of rows of the tile.
    """

    cols: int
    rotated: int
    interleaved: bool
    vector: int
    rest: int
    threads: int
    rows: int

    @property
    def pairs(self) -> int:
        """Number of pairs in a head."""
        return self.rotated // 2

    @property
    def widths(self) -> list[int]:
        """Number of columns in each fragment of a head.

        The fragments are the first columns of all pairs, the second columns of all pairs, and the
        columns that are not rotated. If all columns are rotated, the list has only two numbers.
        """
        rest = self.cols - self.rotated
        return [self.pairs, self.pairs, *[rest] * bool(rest)]

    @property
    def row_layouts(self) -> list[Layout]:
        """Register layout of each fragment, for an array of rows."""
        return [self.rows_layout(v) for v in self._vectors]

    @property
    def column_layouts(self) -> list[Layout]:
        """Register layout of each fragment, for a ``(cols,)`` operand."""
        return [self.columns_layout(v) for v in self._vectors]

    @property
    def _vectors(self) -> list[int]:
        return [self.vector, self.vector, self.rest][: len(self.widths)]

    def rows_layout(self, vector: int) -> Layout:
        """Return the layout of an array of rows, with `vector` neighbouring columns per thread."""
        return rows_layout(vector, self.threads, self.rows)

    def columns_layout(self, vector: int) -> Layout:
        """Return the layout of a ``(cols,)`` operand, with `vector` columns per thread."""
        return columns_layout(vector, self.threads)

    @property
    def stat_layout(self) -> Layout:
        """Register layout of an array with one number per row."""
        return self.rows_layout(self.vector).reduce(1)

    def load(self, ref: Ref, rows: Any) -> Fragments:
        """Load rows of a ``(rows, cols)`` ref.

        Returns a list with one array for each fragment (see the class's docstring).
        """
        ranges = self._ranges(self.rows_layout)
        loaded = [load(ref.at[rows, columns], layout) for columns, layout in ranges]
        return self._split(loaded, self.rows_layout)

    def load_shared(self, ref: Ref, at: tuple[Any, int]) -> Fragments:
        """Load the tile's rows from shared memory, in float32.

        Returns a list with one array for each fragment (see the class's docstring). The ref has the
        shape ``(stages, rows, cols)``. `at` is the position of the tile's first row in the ref: a
        pair (index of the stage, index of the row within the stage).
        """
        if not self.interleaved:
            starts, half = (0, self.pairs), self.rows_layout(self.vector)
            fragments = load_wide([ref], half, (self.rows, self.pairs), at, starts)
            if self.rotated < self.cols:
                rest, layout = (self.rows, self.cols - self.rotated), self.rows_layout(self.rest)
                fragments += load_wide([ref], layout, rest, at, (self.rotated,))
            return fragments
        stage, top = at
        of_tile = ref.at[stage, pl.ds(top, self.rows)]
        loaded = [
            load_arrays([of_tile], layout, (self.rows, c.size), starts=(c.start,))[0]
            for c, layout in self._ranges(self.rows_layout)
        ]
        fragments = self._split(loaded, self.rows_layout)
        return [widen(v, layout) for v, layout in zip(fragments, self.row_layouts)]

    def load_param(self, ref: Ref) -> Fragments:
        """Load a ``(cols,)`` ref that all rows share.

        Returns a list with one array for each fragment (see the class's docstring).
        """
        ranges = self._ranges(self.columns_layout)
        return self._split([load(ref.at[c], layout) for c, layout in ranges], self.columns_layout)

    def expand(self, columns: jax.Array) -> jax.Array:
        """Broadcast columns of a ``(cols,)`` operand to all rows of the tile."""
        return lax.broadcast_in_dim(columns, (self.rows, *columns.shape), (1,))

    def load_tables(self, refs: Sequence[Ref], shared: Shared, first: Any) -> list[jax.Array]:
        """Load cos and sin for each pair of each row of a tile, in float32.

        `refs` are the tables of cos and sin. `first` is the index of the tile's first row in x.
        `shared` describes which table row each row of x uses.
        """
        if not self.has_one_position(shared):
            layout, shape = self.rows_layout(self.vector), (self.rows, self.pairs)
            return load_each_row(refs, operand_row, shared, first, layout, shape)
        row = operand_row(shared, jnp.int32(first))
        rows, layout = [ref.at[row] for ref in refs], self.columns_layout(self.vector)
        return [self.expand(of_row) for of_row in load_wide(rows, layout, (self.pairs,))]

    def has_one_position(self, shared: Shared) -> bool:
        """Return True if, in each tile, all rows use the same row of a table."""
        if shared.rows == 1:
            return True
        size, has_each = shared.segments[-1]
        return not has_each and size % self.rows == 0

    def store(self, ref: Ref, rows: Any, fragments: Sequence[jax.Array]) -> None:
        """Store rows in `ref`, a ``(rows, cols)`` array in global memory.

        `fragments` is a list with one array for each fragment (see the class's docstring). The
        values are rounded to the dtype of `ref`.
        """
        values = self._join([v.astype(ref.dtype) for v in fragments], self.rows_layout)
        for (columns, layout), value in zip(self._ranges(self.rows_layout), values):
            store_global(ref.at[rows, columns], value, layout)

    def store_param(self, ref: Ref, fragments: Sequence[jax.Array]) -> None:
        """Store one value per column in `ref`, a ``(cols,)`` array in global memory.

        `fragments` is a list with one array for each fragment (see the class's docstring).
        """
        values = self._join(fragments, self.columns_layout)
        for (columns, layout), value in zip(self._ranges(self.columns_layout), values):
            store_global(ref.at[columns], value, layout)

    def sum(self, fragments: Sequence[jax.Array]) -> jax.Array:
        """Return the sum over each row.

        `fragments` is a list of arrays. For each row, all elements of all arrays are added.
        Usually, the list has one array for each fragment (see the class's docstring). It may have
        several arrays per fragment, in any order.
        """
        total, *others = [jnp.sum(v, axis=1) for v in fragments]
        for other in others:
            total = total + other
        return total

    def broadcast(self, stat: jax.Array, like: jax.Array) -> jax.Array:
        """Broadcast one number per row to the shape of `like`.

        `like` contains one fragment, for example the first columns of all pairs.
        """
        return lax.broadcast_in_dim(stat, like.shape, (0,))

    def _ranges(self, of: Callable[[int], Layout]) -> list[tuple[pl.Slice, Layout]]:
        """Return the column ranges that are loaded or stored, and their register layouts.

        If pairs are interleaved, the rotated columns are one range, otherwise two. The columns that
        are not rotated are another range. ``of(vector)`` returns the layout with `vector`
        neighbouring columns per thread.
        """
        ranges = [(pl.ds(0, self.rotated), of(2 * self.vector))]
        if not self.interleaved:
            half = of(self.vector)
            ranges = [(pl.ds(start, self.pairs), half) for start in (0, self.pairs)]
        if self.rotated < self.cols:
            ranges.append((pl.ds(self.rotated, self.cols - self.rotated), of(self.rest)))
        return ranges

    def _split(self, ranges: Fragments, of: Callable[[int], Layout]) -> Fragments:
        """Return the arrays of the fragments, given the arrays of the column ranges (`_ranges`)."""
        if not self.interleaved:
            return ranges
        pairs, *rest = ranges
        return [*split_pairs(pairs, of(2 * self.vector), of(self.vector)), *rest]

    def _join(self, fragments: Sequence[jax.Array], of: Callable[[int], Layout]) -> Fragments:
        """Return the arrays of the column ranges (`_ranges`), given the arrays of the fragments."""
        if not self.interleaved:
            return [*fragments]
        first, second, *rest = fragments
        return [join_pairs(first, second, of(self.vector), of(2 * self.vector)), *rest]


def rotated(fragments: Sequence[jax.Array], cos: jax.Array, sin: jax.Array) -> Fragments:
    """Rotate each pair (a, b) by its angle, to (a * cos - b * sin, b * cos + a * sin)."""
    a, b, *rest = fragments
    return [a * cos - b * sin, b * cos + a * sin, *rest]


def rotated_back(fragments: Sequence[jax.Array], cos: jax.Array, sin: jax.Array) -> Fragments:
    """Rotate each pair (a, b) back, to (a * cos + b * sin, b * cos - a * sin).

    This is the transpose of `rotated`.
    """
    a, b, *rest = fragments
    return [a * cos + b * sin, b * cos - a * sin, *rest]
