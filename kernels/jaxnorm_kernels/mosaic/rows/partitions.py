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
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    flat_index,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A range of columns ``[start, start + width)`` of a row.

    Attributes:
      start: index of the first column.
      width: number of columns.
      stage_start: position of the first column in shared memory, relative to the partition's start.
      fresh: index of the first column that this fragment adds to sums. The columns before it are
        *stale*: another fragment has them, too, and adds them. If `fresh` is None, no column is
        stale.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None

    def columns(self) -> Any:
        """Return the slice of these columns, as an index into a row."""
        return pl.ds(self.start, self.width)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout) -> None:
        """Store the values of these columns in a row of `ref`."""
        store_global(ref.at[row, self.columns()], value, layout)

    def is_stale(self) -> jax.Array | None:
        """Return a mask of the stale columns, in `warps_layout`, or None if no column is stale.

        A column is stale if another fragment contains it, too, and adds it to sums. So it must be
        left out of sums over this fragment.
        """
        if self.fresh is None:
            return None
        shape, layout = (WARPS, self.width // WARPS), warps_layout(self.width // WARPGROUP_THREADS)
        column = flat_index(shape, layout)
        return column < self.fresh - self.start


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition of a row: the range of its columns that one warpgroup processes.

    A warpgroup loads a unit at a time, which consists of one vector per thread. If a warpgroup
    processes several rows at the same time, a partition is an entire row. A unit of this row then
    has one vector for each thread that shares the row.

    Attributes:
      cols: number of columns of the row.
      slices: number of partitions of the row, one for each warpgroup that shares it.
      unit: number of columns of a unit.
      index: index of this partition.
    """

    cols: int
    slices: int
    unit: int
    index: Any = 0

    @functools.cached_property
    def units(self) -> int:
        """Number of complete units (one vector per thread) in the partition.

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
        return Fragment(self.index * self.body_width, self.body_width)

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
        return [Fragment(start, self.unit, self.body_width, fresh)]

    def fragments(self) -> list[Fragment]:
        """Return the partition as column ranges: the body, and the tail if there is one."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """Split a column range into fragments of one unit each. A unit is one vector per thread."""
        starts = range(0, body.width, self.unit)
        return [Fragment(body.start + at, self.unit, at) for at in starts]
