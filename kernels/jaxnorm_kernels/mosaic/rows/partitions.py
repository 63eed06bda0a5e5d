"""Partitions of a row: which columns each warpgroup has in registers, in one or two fragments.

If several warpgroups share a row, each processes a *partition* of the row's columns. A warpgroup
loads a *unit* at a time: one vector for each thread. Often, the row cannot be divided into
partitions that all have the same number of complete units. Each partition then has two *fragments*,
which are ranges of columns: a body of complete units, and a tail of one unit. Mosaic has no masked
loads or stores, so a tail must end at or before the end of the row, and its first columns may
overlap another fragment. Such columns are *stale*: reductions skip them, and they are stored twice
with the same value.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.layouts import (
    WARPS,
    Layout,
    Ref,
    flat_index,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, store_vectors


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A range of columns ``[start, start + width)`` of a row: one array in registers.

    Attributes:
      start: index of the first column.
      width: number of columns.
      vector: number of neighbouring columns per thread, if the threads of a warpgroup or of several
        warpgroups share a row.
      stage_start: position of the first column in shared memory, relative to the partition's start.
      fresh: None if no column is stale. Otherwise, a pair of column indices (first, end): this
        fragment adds the columns from `first` to `end` - 1 to sums. Its other columns are *stale*:
        they are padding, or another fragment adds them. Stale columns are not stored. There is one
        exception: an `end` of None stands for the end of the fragment, and stale columns are then
        stored, too, with the same value.
    """

    start: Any
    width: int
    vector: int = 1
    stage_start: int = 0
    fresh: tuple[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the fragment in registers, if the threads of a warpgroup share the row."""
        return (WARPS, self.width // WARPS)

    @property
    def layout(self) -> Layout:
        """Register layout of the fragment, if the threads of a warpgroup share the row."""
        return warps_layout(self.vector)

    def columns(self) -> Any:
        """Return the slice of these columns, as an index into a row."""
        return pl.ds(self.start, self.width)

    def has(self, column: jax.Array) -> jax.Array:
        """Return a traced bool: True if the fragment contains column number `column`."""
        behind = self.start + self.width
        return jnp.logical_and(column >= self.start, column < behind)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout | None = None) -> None:
        """Store the values of these columns in a row of `ref`; see `fresh`."""
        layout = layout or self.layout
        if self.fresh is None or self.fresh[1] is None:
            store_global(ref.at[row, self.columns()], value, layout)
        else:
            store_vectors(ref.at[row], self.start, value, *self.fresh, layout)

    def is_fresh(self, columns: Callable[[], jax.Array] | None = None) -> jax.Array | None:
        """Return a mask of the elements that are not stale, or None if no element is stale.

        ``columns()`` returns the index of each element's column, relative to the first column.
        """
        if self.fresh is None:
            return None
        first, end = self.fresh
        column = flat_index(self.shape, self.layout) if columns is None else columns()
        mask = column >= first - self.start
        return mask if end is None else jnp.logical_and(mask, column < end - self.start)

    def skip_stale(
        self, value: jax.Array, neutral: float, columns: Callable[[], jax.Array] | None = None
    ) -> jax.Array:
        """Return `value` with the number `neutral` in stale columns."""
        is_fresh = self.is_fresh(columns)
        return value if is_fresh is None else jnp.where(is_fresh, value, jnp.float32(neutral))


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition of a row: the range of its columns that one warpgroup processes.

    A warpgroup loads one unit at a time: one vector per thread. If a warpgroup processes several
    rows at the same time, a partition is an entire row, and a unit has one vector for each thread
    that shares the row.

    Attributes:
      cols: number of columns of the row.
      slices: number of partitions of the row, one for each warpgroup that shares it.
      unit: number of columns of a unit.
      vector: number of neighbouring columns per thread in a unit.
      index: index of this partition.
    """

    cols: int
    slices: int
    unit: int
    vector: int = 1
    index: Any = 0

    @functools.cached_property
    def units(self) -> int:
        """Number of complete units (one vector per thread) in each partition.

        Raises ValueError if the row is too short for one unit per partition.
        """
        units = self.cols // (self.slices * self.unit)
        if not units:
            raise ValueError(f"{self} holds rows of {self.slices * self.unit} columns and more")
        return units

    @functools.cached_property
    def body_width(self) -> int:
        """Number of columns in the body. The body consists of the partition's complete units."""
        return self.units * self.unit

    @functools.cached_property
    def has_tail(self) -> bool:
        """True if some columns of the row are in no complete unit of any partition."""
        return self.cols % (self.slices * self.unit) != 0

    @property
    def width(self) -> int:
        """Number of columns in this partition, including the tail.

        The tail may contain columns that other partitions contain, too.
        """
        return self.body_width + self.has_tail * self.unit

    def body(self) -> Fragment:
        """Return the body: the columns of the complete units.

        The bodies of all partitions are adjacent.
        """
        return Fragment(self.index * self.body_width, self.body_width, self.vector)

    def tail(self) -> list[Fragment]:
        """Return a list with the tail of this partition, or an empty list if there are no tails.

        There are no tails if the complete units of all partitions cover the row. Otherwise, each
        partition has a tail. The tails together contain the columns that no complete unit contains.
        """
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.unit
        start = self.cols - self.unit
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        return [Fragment(start, self.unit, self.vector, self.body_width, (fresh, None))]

    def fragments(self) -> list[Fragment]:
        """Return the partition as column ranges: the body, and the tail if there is one."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """Split a column range into fragments of one unit each. A unit is one vector per thread."""
        starts = range(0, body.width, self.unit)
        return [Fragment(body.start + at, self.unit, self.vector, at) for at in starts]
