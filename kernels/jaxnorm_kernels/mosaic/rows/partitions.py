"""Which columns of a row a warpgroup has, in fragments.

A warpgroup owns a *partition* of the columns. It advances in *units*, one vector for each thread of
a row. There are no masked loads or stores on this backend, so a row that is no multiple of all its
partitions' units is held in two *fragments*: a body of whole units, and a tail, one unit that ends
with the row at the latest. The first columns of the tail may be in another fragment too:
reductions skip them (they are *stale*), and they are stored twice with the same value.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    Layout,
    Ref,
    flat_index,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Columns ``[start, start + width)`` of a row; those before `fresh` are stale.

    Attributes:
      stage_start: where they lie in shared memory, counted from the start of the partition.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None

    def columns(self) -> Any:
        """Where it lies in a row of an array."""
        return pl.ds(self.start, self.width)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout) -> None:
        """Stores it in a row."""
        store_global(ref.at[row, self.columns()], value, layout)

    def skip_stale(self, term: jax.Array) -> jax.Array:
        """`term` in `warps_layout`, and 0 where another fragment has the same column."""
        if self.fresh is None:
            return term
        column = flat_index(term.shape, warps_layout(term.size // WARPGROUP_THREADS))
        return jnp.where(column < self.fresh - self.start, jnp.float32(0), term)


@dataclasses.dataclass(frozen=True)
class Partition:
    """The columns of one warpgroup, or of the threads of a warp that hold a row.

    Attributes:
      cols: of the row.
      slices: of the row: the warpgroups that share it.
      unit: columns that the threads of a slice read at once.
      index: of this slice.
    """

    cols: int
    slices: int
    unit: int
    index: Any = 0

    def __post_init__(self) -> None:
        """Refuses rows that are too short."""
        if not self.units:
            raise ValueError(f"{self} holds rows of {self.slices * self.unit} columns and more")

    @property
    def units(self) -> int:
        """Of the body."""
        return self.cols // (self.slices * self.unit)

    @property
    def body_width(self) -> int:
        """Columns of the body."""
        return self.units * self.unit

    @property
    def has_tail(self) -> bool:
        """Whether the bodies leave columns over."""
        return self.cols % (self.slices * self.unit) != 0

    @property
    def width(self) -> int:
        """Columns of the slice, with the tail."""
        return self.body_width + self.has_tail * self.unit

    def body(self) -> Fragment:
        """The bodies of the slices lie side by side."""
        return Fragment(self.index * self.body_width, self.body_width)

    def tail(self) -> list[Fragment]:
        """The tails share what the bodies leave of the row; none where they leave nothing."""
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.unit
        start = self.cols - self.unit
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        return [Fragment(start, self.unit, self.body_width, fresh)]

    def fragments(self) -> list[Fragment]:
        """As few as there are: what is copied at once."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """A body in fragments of a unit each."""
        starts = range(0, body.width, self.unit)
        return [Fragment(body.start + at, self.unit, at) for at in starts]
