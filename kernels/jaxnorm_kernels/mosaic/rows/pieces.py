"""Which columns of a row a warpgroup has, in pieces.

A warpgroup owns a *slice* of the columns. It advances in *units*, one vector for each thread of a
row. There are no masked loads or stores on this backend, so a row that is no multiple of all its
slices' units is held in two *pieces*: a body of whole units, and a tail, one unit that ends with
the row at the latest. The first columns of the tail may be in another piece too: reductions skip
them (they are *stale*), and they are stored twice with the same value.

Of unaligned rows, a row is its window (`windows`). The columns of other rows in it, which lie at
its *edges*, are skipped too, and not stored.
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
from jaxnorm_kernels.mosaic.device.registers import store_global, store_inside
from jaxnorm_kernels.mosaic.rows.windows import Window, tail_vector


@dataclasses.dataclass(frozen=True)
class Piece:
    """Columns ``[start, start + width)`` of a row; those before `fresh` are stale.

    Attributes:
      stage_start: where they lie in shared memory, counted from the start of the slice.
      edge: it may hold columns of other rows, of a window.
      window: of unaligned rows, in which `start` counts.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None
    edge: bool = False
    window: Window | None = None

    def columns(self) -> Any:
        """Where it lies in a row of an array, or of its view as the window's."""
        start = self.start if self.window is None else self.window.start() + self.start
        return pl.ds(start, self.width)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout) -> None:
        """Stores it in a row, but for what belongs to other rows."""
        if self.window is None or not self.edge:
            store_global(ref.at[row, self.columns()], value, layout)
            return
        start, first = self.window.start() + self.start, self.start - self.window.before()
        places = self.window.places(value.shape, layout)
        store_inside(ref.at[row], start, value, first, self.window.cols, places, layout)

    def skip_stale(self, term: jax.Array) -> jax.Array:
        """`term` in `warps_layout`, and 0 where another piece has the same column."""
        if self.fresh is None:
            return term
        column = flat_index(term.shape, warps_layout(term.size // WARPGROUP_THREADS))
        return jnp.where(column < self.fresh - self.start, jnp.float32(0), term)


@dataclasses.dataclass(frozen=True)
class Slice:
    """The columns of one warpgroup, or of the threads of a warp that hold a row.

    Attributes:
      cols: of the row, or of its window.
      slices: of the row: the warpgroups that share it.
      unit: columns that the threads of a slice read at once.
      index: of this slice.
      window: of unaligned rows.
    """

    cols: int
    slices: int
    unit: int
    index: Any = 0
    window: Window | None = None

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
    def tail_width(self) -> int:
        """Columns of a tail: of a window, with vectors that may be narrower."""
        rest = self.cols % (self.slices * self.unit)
        if self.window is None or not rest:
            return self.unit
        vector, threads = self.unit // WARPGROUP_THREADS, self.slices * WARPGROUP_THREADS
        return tail_vector(rest, vector, threads) * WARPGROUP_THREADS

    @property
    def width(self) -> int:
        """Columns of the slice, with the tail."""
        return self.body_width + self.has_tail * self.tail_width

    def body(self) -> Piece:
        """The bodies of the slices lie side by side."""
        return Piece(self.index * self.body_width, self.body_width, window=self.window)

    def tail(self) -> list[Piece]:
        """The tails share what the bodies leave of the row; none where they leave nothing."""
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.tail_width
        start = self.cols - self.tail_width
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        edge = self.window is not None
        return [Piece(start, self.tail_width, self.body_width, fresh, edge, self.window)]

    def pieces(self) -> list[Piece]:
        """As few as there are: what is copied at once."""
        return [self.body(), *self.tail()]

    def cut(self, body: Piece) -> list[Piece]:
        """A body in pieces of a unit each."""
        starts = range(0, body.width, self.unit)
        edges = set() if self.window is None else {0, starts[-1]}
        return [
            Piece(body.start + at, self.unit, at, edge=at in edges, window=self.window)
            for at in starts
        ]
