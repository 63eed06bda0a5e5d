"""Units of 16 bytes per thread for rows of any alignment: a body of units, and two edges.

If the length of rows is not a multiple of 16 bytes, most rows do not start at an address that is a
multiple of 16 bytes. The *body* of a row starts at the row's first element with such an address.
Threads load the body in vectors of 16 bytes. The body has the same number of columns in every row.
A row has two *edges*, which contain the few columns before and after the body. The first edge
starts where the row starts, and the second edge ends where the row ends.

A *unit* is a range of columns that the threads of a warpgroup load at once. In a unit of the body,
each thread has a vector of 16 bytes. Each edge is a unit in which a thread has only one element.
Mosaic has no masked loads, so units overlap: the last unit of the body ends with the body, and the
edges reach into the body. For example, a row of 19 elements, with four elements in 16 bytes::

    multiples of 16 bytes   |       |       |       |       |       |       |
    row                           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    body                            0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    edges                         0 0 0 0                       0 0 0 0

If two units contain the same column, the column is *stale* in one of the
two units. Reductions and stores skip stale columns. So each column is stored only once, and a
kernel may overwrite its operand.
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
    """A range of columns of a row that a warpgroup loads at once, `vector` neighbours per thread.

    Attributes:
      start: index of the first column.
      vector: number of neighbouring columns per thread.
      fresh: a pair (first, end) of column indices, or None if no column is stale. This unit stores
        the columns from `first` to `end` - 1, and adds them to sums. The other columns of the unit
        are *stale*: another unit contains them, too, or they are padding.
    """

    start: Any
    vector: int
    fresh: tuple[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape that an array of the unit's elements has in registers."""
        return (WARPS, WARP * self.vector)

    @property
    def layout(self) -> Layout:
        """Register layout of an array of the unit's elements."""
        return warps_layout(self.vector)

    def has(self, column: jax.Array) -> jax.Array:
        """Return True if `column` is a column of the unit."""
        behind = self.start + WARPGROUP_THREADS * self.vector
        return jnp.logical_and(column >= self.start, column < behind)

    def is_fresh(self) -> jax.Array | None:
        """Return a mask of the elements that are not stale, or None if no element is stale.

        An element is stale if it is padding, or if another unit also contains it and counts it in
        sums.
        """
        if self.fresh is None:
            return None
        first, end = self.fresh
        columns = flat_index(self.shape, self.layout)  # relative to the first column
        return jnp.logical_and(columns >= first - self.start, columns < end - self.start)

    def store(self, ref: Ref, row: Any, value: jax.Array) -> None:
        """Store the unit's columns in a row of `ref`, except for the stale columns.

        A stale column is stored by another unit, or it is padding.
        """
        width = WARPGROUP_THREADS * self.vector
        if self.fresh is None:
            store_global(ref.at[row, pl.ds(self.start, width)], value, self.layout)
        else:
            store_vectors(ref.at[row], self.start, value, *self.fresh, self.layout)


def load_units(units: Sequence[Unit], ref: Ref, row: Any) -> list[jax.Array]:
    """Load units from a row of a ``(rows, cols)`` ref, in the ref's dtype.

    All units must have the same `vector`.
    """
    shape, layout, width = units[0].shape, units[0].layout, math.prod(units[0].shape)
    return [load(ref.at[row, pl.ds(unit.start, width)], layout, shape) for unit in units]


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of each row of an array (see the module's docstring).

    Attributes:
      cols: number of columns of a row.
      vector: number of neighbouring columns that a thread has in a unit of the body. In an edge, a
        thread has one column.
      end: index of the first column of padding. Columns of padding are treated as stale.
    """

    cols: int
    vector: int
    end: int

    @classmethod
    def of(cls, cols: int, widest: int, end: int | None = None) -> "Units":
        """Return `Units` for rows of `cols` columns.

        A vector has `widest` elements, which must be a power of 2. A unit must fit in the body. If
        it does not, because rows are short, the number of elements of a vector is halved until the
        unit fits.
        """
        vector, end = widest, cols if end is None else end
        while vector > 1 and cls(cols, vector, end).body < WARPGROUP_THREADS * vector:
            vector //= 2
        return cls(cols, vector, end)

    @property
    def width(self) -> int:
        """Number of columns in a unit (one vector per thread)."""
        return WARPGROUP_THREADS * self.vector

    @property
    def has_edges(self) -> bool:
        """True if a row may begin or end within a vector."""
        return self.cols % self.vector != 0

    @property
    def body(self) -> int:
        """Number of columns in the body of a row, which is loaded in 16-byte vectors."""
        most = self.cols - (self.vector - 1) * self.has_edges
        return most // self.vector * self.vector

    @functools.cached_property
    def count(self) -> int:
        """Number of units (one vector per thread) in the body of a row.

        The last unit may overlap the unit before it.
        """
        return -(-self.body // self.width)

    @functools.cached_property
    def whole(self) -> int:
        """Number of units at the start of the body that have no stale columns in any row.

        A unit consists of one vector per thread. The body of a row is the part that is loaded in
        vectors of 16 bytes. A column is stale if it is also in an earlier unit, or if it is
        padding.
        """
        latest = (self.vector - 1) * self.has_edges
        return min(self.body, self.end - latest) // self.width

    def first(self, row: Any) -> Any:
        """Return the index of the column at which a row's body begins.

        It is the first column whose address is a multiple of 16 bytes.
        """
        if not self.has_edges:
            return 0
        of_period = lax.rem(jnp.int32(row), self.vector)
        return lax.rem((self.vector - self.cols % self.vector) * of_period, self.vector)

    def unit(self, row: Any, index: Any, *, whole: bool = False) -> Unit:
        """Return unit number `index` of the body of a row.

        The body of a row is the part that is loaded in vectors of 16 bytes. A column of a unit is
        *stale* if an earlier unit also contains this column, or if the column is padding. Stale
        columns are left out of sums and are not stored. If `whole` is True, the caller promises
        that the unit has no stale columns. If the index is beyond the last unit of the body, all
        columns of the returned unit are stale.
        """
        first = self.first(row)
        at = index * self.width
        if whole:
            return Unit(first + at, self.vector)
        start = first + jnp.minimum(at, self.body - self.width)
        return Unit(start, self.vector, (first + at, self._fresh(first + self.body)))

    def edges(self, row: Any) -> list[Unit]:
        """Return the two edges of a row: its first and its last unit. Aligned rows have none."""
        if not self.has_edges:
            return []
        first, last = self.first(row), self.cols - WARPGROUP_THREADS
        behind = (first + self.body, min(self.cols, self.end))
        return [Unit(0, 1, (0, self._fresh(first))), Unit(last, 1, behind)]

    def _fresh(self, column: Any) -> Any:
        """Return `column`, or `end` if that is smaller."""
        return column if self.end == self.cols else jnp.minimum(column, self.end)
