"""16-byte loads and stores for rows of any alignment: a row is split into a body and two edges.

If the length of rows is not a multiple of 16 bytes, most rows do not start at an address that is a
multiple of 16 bytes. The *body* of a row starts at the row's first element with such an address.
Threads load the body in vectors of 16 bytes. The body has the same number of columns in every row.
A row has two *edges*, which contain the few columns before and after the body. The first edge
starts where the row starts, and the second edge ends where the row ends.

A *unit* is a range of columns that the threads of a warpgroup load at once. In a unit of the body,
each thread has a vector of 16 bytes. Each edge is a unit in which a thread has only one element.
Mosaic has no masked loads, so units overlap: the last unit of the body ends with the body, and the
edges reach into the body. For example, this is a row of 19 elements, with four elements in 16
bytes, and with four threads instead of 128::

    multiples of 16 bytes   |       |       |       |       |       |       |
    row                           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    body                            0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    edges                         0 0 0 0                       0 0 0 0

If two units contain the same column, the column is *stale* in one of the two units. Reductions and
stores skip stale columns. So each column is stored only once, and a kernel may overwrite its
operand.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS, Ref, load
from jaxnorm_kernels.mosaic.rows.partitions import Fragment


def load_units(units: Sequence[Fragment], ref: Ref, row: Any) -> list[jax.Array]:
    """Load units from a row of a ``(rows, cols)`` ref, in the ref's dtype."""
    return [load(ref.at[row, unit.columns()], unit.layout, unit.shape) for unit in units]


@dataclasses.dataclass(frozen=True)
class RowFragments:
    """The units of each row of an array (see the module's docstring).

    Attributes:
      cols: number of columns of a row.
      vector: number of neighbouring columns that a thread loads for a unit of the body. For an
        edge, a thread loads one column.
      end: index of the first column of padding. Columns of padding are treated as stale.
    """

    cols: int
    vector: int
    end: int

    @classmethod
    def of(cls, cols: int, widest: int, end: int | None = None) -> "RowFragments":
        """Return `RowFragments` for rows of `cols` columns.

        A vector has `widest` columns; `widest` must be a power of 2. If rows are so short that a
        unit does not fit in the body, the vector is halved until the unit fits. By default, `end`
        is `cols`: there is no padding.
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
        """Number of columns in the body of a row. The body is loaded in 16-byte vectors."""
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

        A column is stale if it is also in an earlier unit, or if it is padding.
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

    def unit(self, row: Any, index: Any, *, whole: bool = False) -> Fragment:
        """Return unit number `index` of the body of a row.

        A column of the unit is *stale* if an earlier unit also contains this column, or if the
        column is padding. Stale columns are left out of sums and are not stored. If `whole` is
        True, the caller promises that the unit has no stale columns. If the index is beyond the
        last unit of the body, all columns of the returned unit are stale.
        """
        first = self.first(row)
        at = index * self.width
        if whole:
            return Fragment(first + at, self.width, self.vector)
        start = first + jnp.minimum(at, self.body - self.width)
        fresh = (first + at, self._fresh(first + self.body))
        return Fragment(start, self.width, self.vector, fresh=fresh)

    def edges(self, row: Any) -> list[Fragment]:
        """Return the two edges of a row: its first and its last unit. Aligned rows have none."""
        if not self.has_edges:
            return []
        first, last = self.first(row), self.cols - WARPGROUP_THREADS
        behind = (first + self.body, min(self.cols, self.end))
        return [
            Fragment(start, WARPGROUP_THREADS, fresh=fresh)
            for start, fresh in ((0, (0, self._fresh(first))), (last, behind))
        ]

    def _fresh(self, column: Any) -> Any:
        """Return `column`, or `end` if that is smaller."""
        return column if self.end == self.cols else jnp.minimum(column, self.end)
