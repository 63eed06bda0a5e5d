"""Partitions of a row: the columns that each warpgroup holds, in fragments.

A warpgroup owns a *partition* of the columns. It advances in *units*: one vector for each thread of
a row. Mosaic has no masked loads or stores. So if a row is not a multiple of all its partitions'
units, it is held in two *fragments*: a body of whole units, and a tail of one unit that ends at or
before the end of the row. The first columns of the tail may overlap another fragment. Such columns
are *stale*: reductions skip them, and they are stored twice with the same value.
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
    """Columns ``[start, start + width)`` of a row; columns before `fresh` are stale.

    Attributes:
      stage_start: the position in shared memory, relative to the start of the partition.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None

    def columns(self) -> Any:
        """Return the slice of these columns, as an index of a row."""
        return pl.ds(self.start, self.width)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout) -> None:
        """Store the fragment's values in a row of `ref`."""
        store_global(ref.at[row, self.columns()], value, layout)

    def is_stale(self) -> jax.Array | None:
        """True for columns that are stale, as an array in `warps_layout`; None if no column is."""
        if self.fresh is None:
            return None
        shape, layout = (WARPS, self.width // WARPS), warps_layout(self.width // WARPGROUP_THREADS)
        column = flat_index(shape, layout)
        return column < self.fresh - self.start


@dataclasses.dataclass(frozen=True)
class Partition:
    """The columns of a row that one warpgroup holds, or the threads of a warp.

    Attributes:
      cols: the number of columns of the row.
      slices: the number of slices of the row, one for each warpgroup that shares it.
      unit: the number of columns that the threads of a slice load at once.
      index: the index of this slice.
    """

    cols: int
    slices: int
    unit: int
    index: Any = 0

    @functools.cached_property
    def units(self) -> int:
        """The number of units in the body. Raises ValueError if the row is too short."""
        units = self.cols // (self.slices * self.unit)
        if not units:
            raise ValueError(f"{self} holds rows of {self.slices * self.unit} columns and more")
        return units

    @functools.cached_property
    def body_width(self) -> int:
        """The number of columns in the body."""
        return self.units * self.unit

    @functools.cached_property
    def has_tail(self) -> bool:
        """True if the bodies do not cover the whole row."""
        return self.cols % (self.slices * self.unit) != 0

    @property
    def width(self) -> int:
        """The number of columns in the slice, including the tail."""
        return self.body_width + self.has_tail * self.unit

    def body(self) -> Fragment:
        """Return the body. The bodies of all slices are adjacent."""
        return Fragment(self.index * self.body_width, self.body_width)

    def tail(self) -> list[Fragment]:
        """Return the tail in a list, which is empty if the bodies cover the whole row.

        The tails of all slices together hold the columns that the bodies leave over.
        """
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.unit
        start = self.cols - self.unit
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        return [Fragment(start, self.unit, self.body_width, fresh)]

    def fragments(self) -> list[Fragment]:
        """Return the body and the tail: the smallest number of fragments, used for copies."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """Split a body into fragments of a unit each."""
        starts = range(0, body.width, self.unit)
        return [Fragment(body.start + at, self.unit, at) for at in starts]
