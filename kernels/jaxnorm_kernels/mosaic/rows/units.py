"""Rows in units of 16 bytes for each thread of a warpgroup, wherever they begin.

Where rows are no multiple of 16 bytes, a row may begin between two. Its *body* is what whole units
of 16 bytes can read: from the first multiple of 16 bytes on, as many columns for every row. The few
before and behind it are read in two *edges*, units of one element for each thread, which begin or
end with the row::

    multiples of 16 bytes   |       |       |       |       |       |       |
    row                          0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    body                            0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    edges                        0 0 0 0 0                     0 0 0 0 0

There are no masked loads: what has been read before is *stale*. The last units of the body end with
it, and overlap; the edges overlap with the body. What is stale is not stored: each column is stored
once, so what is stored may take the place of what is read.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    flat_index,
    load,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, store_vectors


@dataclasses.dataclass(frozen=True)
class Unit:
    """Columns from `start` on, `vector` neighbours for each thread.

    Attributes:
      fresh: the columns that are not stale, a range; None where none is.
    """

    start: Any
    vector: int
    fresh: tuple[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the array that a warpgroup holds."""
        return (WARPS, WARP * self.vector)

    @property
    def layout(self) -> Layout:
        """Of that array."""
        return warps_layout(self.vector)

    def has(self, column: jax.Array) -> jax.Array:
        """Whether it has a column."""
        behind = self.start + WARPGROUP_THREADS * self.vector
        return jnp.logical_and(column >= self.start, column < behind)

    def is_fresh(self) -> jax.Array | None:
        """Which elements are not stale; None for all."""
        if self.fresh is None:
            return None
        first, end = self.fresh
        columns = flat_index(self.shape, self.layout)  # counted from `start`
        return jnp.logical_and(columns >= first - self.start, columns < end - self.start)

    def store(self, ref: Ref, row: Any, value: jax.Array) -> None:
        """What is fresh of it."""
        width = WARPGROUP_THREADS * self.vector
        if self.fresh is None:
            store_global(ref.at[row, pl.ds(self.start, width)], value, self.layout)
        else:
            store_vectors(ref.at[row], self.start, value, *self.fresh, self.layout)


def load_units(units: Sequence[Unit], ref: Ref, row: Any) -> list[jax.Array]:
    """Those of one vector, of a ``(rows, cols)`` ref, in its own dtype."""
    shape, layout, width = units[0].shape, units[0].layout, math.prod(units[0].shape)
    return [load(ref.at[row, pl.ds(unit.start, width)], layout, shape) for unit in units]


@dataclasses.dataclass(frozen=True)
class Units:
    """Of rows of `cols` columns, with `vector` elements for each thread.

    Attributes:
      end: columns from there on are stale.
    """

    cols: int
    vector: int
    end: int

    @classmethod
    def of(cls, cols: int, widest: int, end: int | None = None) -> "Units":
        """With the widest vector, up to `widest`, of which a body has a unit."""
        vector, end = widest, cols if end is None else end
        while vector > 1 and cls(cols, vector, end).body < WARPGROUP_THREADS * vector:
            vector //= 2
        return cls(cols, vector, end)

    @property
    def width(self) -> int:
        """Columns of a unit."""
        return WARPGROUP_THREADS * self.vector

    @property
    def has_edges(self) -> bool:
        """Whether a row ends within a vector."""
        return self.cols % self.vector != 0

    @property
    def body(self) -> int:
        """Columns of the body."""
        most = self.cols - (self.vector - 1) * self.has_edges
        return most // self.vector * self.vector

    @functools.cached_property
    def count(self) -> int:
        """Units of a body; the last one may overlap with the one before it."""
        return -(-self.body // self.width)

    @functools.cached_property
    def whole(self) -> int:
        """So many of the first units have nothing stale, whatever the row."""
        latest = (self.vector - 1) * self.has_edges
        return min(self.body, self.end - latest) // self.width

    def first(self, row: Any) -> Any:
        """The column with which the body of a row begins."""
        if not self.has_edges:
            return 0
        of_period = lax.rem(jnp.int32(row), self.vector)
        return lax.rem((self.vector - self.cols % self.vector) * of_period, self.vector)

    def unit(self, row: Any, index: Any, *, whole: bool = False) -> Unit:
        """A unit of the body; of those behind its end, one that is stale. `whole`: nothing is."""
        first = self.first(row)
        at = index * self.width
        if whole:
            return Unit(first + at, self.vector)
        start = first + jnp.minimum(at, self.body - self.width)
        return Unit(start, self.vector, (first + at, self._fresh(first + self.body)))

    def edges(self, row: Any) -> list[Unit]:
        """What is read beside the body."""
        if not self.has_edges:
            return []
        first, last = self.first(row), self.cols - WARPGROUP_THREADS
        behind = (first + self.body, min(self.cols, self.end))
        return [Unit(0, 1, (0, self._fresh(first))), Unit(last, 1, behind)]

    def _fresh(self, column: Any) -> Any:
        """The column, or the end, if that comes first."""
        return column if self.end == self.cols else jnp.minimum(column, self.end)
