"""Partitions of a row: the columns that each warpgroup holds, in fragments.

A warpgroup owns a *partition* of the columns. It advances in *units*: one vector for each thread of
a row. Mosaic has no masked loads or stores. So if a row is not a multiple of all its partitions'
units, it is held in two *fragments*: a body of whole units, and a tail of one unit that ends at or
before the end of the row. The first columns of the tail may overlap another fragment. Such columns
are *stale*: reductions skip them, and they are stored twice with the same value.

An unaligned row is held as its window (`AlignmentView`). The columns of other rows at the *edges*
of the window are skipped as well, and not stored.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK
from jaxnorm_kernels.mosaic.device.layouts import (
    VECTOR_BYTES,
    WARPGROUP_THREADS,
    Layout,
    Ref,
    flat_index,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, store_inside

# -------------------------------------------------------------------------------------------------
# 16-byte loads and stores for rows whose length is not a multiple of 16 bytes.
#
# Such rows start at changing offsets within a 16-byte word; the offsets repeat every `period` rows.
# Rows with the same offset form a *phase*. Viewed as ``(rows / period, period * cols)``, the array
# has aligned rows, and each phase occupies a fixed range of columns. A block processes rows of a
# single phase, so that all its rows share one register layout. It holds the *window* of each row,
# which consists of the 16-byte words that contain a part of the row::
#
#     multiples of 16 bytes   |       |       |       |       |       |       |
#     rows                    0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2
#     window of row 1                 |- - - - - - - - - - - -|
#
# Columns of other rows in a window are excluded from reductions and not stored. Windows have the
# same width in all phases and stay within the array, so some begin or end 16 bytes further from
# their row. Often a window is slightly wider than a multiple of a block's units. The last unit, the
# tail, then has narrower vectors.


@dataclasses.dataclass(frozen=True)
class AlignmentView:
    """The windows of rows of `cols` elements; `step` elements of the narrowest array are 16 bytes.

    Block b processes rows of phase ``b % period``.
    """

    cols: int
    step: int

    @property
    def period(self) -> int:
        """The number of phases."""
        return self.step // math.gcd(self.cols, self.step)

    @property
    def width(self) -> int:
        """The columns of a window."""
        starts = [q * self.cols % self.step for q in range(self.period)]
        return max(-(-(start + self.cols) // self.step) for start in starts) * self.step

    @property
    def edge(self) -> int:
        """The number of columns at either end of a window that may belong to other rows."""
        return 2 * self.step

    def placed(self) -> "PlacedView":
        """Return this view with the current block's position, computed once in a kernel."""
        return PlacedView(self.cols, self.step, self._phase(), self.start(), self.before())

    def start(self) -> jax.Array:
        """Return where this block's windows begin in a row of the view."""
        end = self.period * self.cols - self.width
        return jnp.minimum(lax.div(self._row_start(), self.step) * self.step, end)

    def before(self) -> jax.Array:
        """Return how many columns of the window precede the row."""
        return self._row_start() - self.start()

    def places(self, shape: tuple[int, ...], layout: Layout) -> jax.Array:
        """Return `flat_index` for loads and stores of this shape and layout."""
        return flat_index(shape, layout)

    def place(self, block: Any) -> Any:
        """Return the index of a block among the blocks of its phase."""
        return lax.div(block, self.period)

    def view(self, array: jax.Array) -> jax.Array:
        """View ``(rows, cols)`` as ``(rows / period, period * cols)``."""
        return array.reshape(self.shape(len(array)))

    def shape(self, rows: int) -> tuple[int, int]:
        """Return the shape of the view."""
        return rows // self.period, self.period * self.cols

    def _phase(self) -> jax.Array:
        return lax.rem(lax.axis_index(BLOCK), self.period)

    def _row_start(self) -> jax.Array:
        return self._phase() * self.cols


@dataclasses.dataclass(frozen=True)
class PlacedView(AlignmentView):
    """A view whose positions are computed once per kernel, not once for each load and store.

    A compiler would merge repeated computations, but tracing and lowering them takes time.
    """

    of_block: jax.Array
    first: jax.Array
    rest: jax.Array
    known: Mapping[tuple[int, ...], jax.Array] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def with_places(self, known: Mapping[tuple[int, ...], jax.Array]) -> "PlacedView":
        """Return this view with known `places` for these shapes.

        In a kernel, arrays of one shape have one layout.
        """
        return dataclasses.replace(self, known=known)

    def places(self, shape: tuple[int, ...], layout: Layout) -> jax.Array:
        """Return the precomputed places, if there are any."""
        return self.known[shape] if shape in self.known else flat_index(shape, layout)

    def start(self) -> jax.Array:
        """Return the precomputed start."""
        return self.first

    def before(self) -> jax.Array:
        """Return the precomputed offset."""
        return self.rest

    def _phase(self) -> jax.Array:
        return self.of_block


def tail_vector(rest: int, vector: int, threads: int) -> int:
    """Return the elements per thread, at most `vector`, that hold the rest of a row."""
    return min(vector, 1 << (-(-rest // threads) - 1).bit_length())


def widest_vector(cols: int, vector: int, threads: int) -> int:
    """Return `vector`, or half of it if threads then hold a tenth less or fewer are idle."""

    def held(vector: int) -> int:
        whole, rest = divmod(cols, threads * vector)
        return whole * vector + (tail_vector(rest, vector, threads) if rest else 0)

    half = vector // 2
    return half if cols < threads * vector or held(vector) > held(half) * 1.1 else vector


def alignment_view(rows: int, cols: int, dtypes: Sequence[np.dtype]) -> AlignmentView | None:
    """Return the alignment view for rows in arrays of these dtypes.

    None if all rows are multiples of 16 bytes, or if the number of rows is not a multiple of the
    period.
    """
    window = AlignmentView(cols, VECTOR_BYTES // min(dtype.itemsize for dtype in dtypes))
    return None if window.period == 1 or rows % window.period else window


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Columns ``[start, start + width)`` of a row; columns before `fresh` are stale.

    Attributes:
      stage_start: the position in shared memory, relative to the start of the partition.
      edge: the fragment may contain columns of other rows (in a window).
      window: the view of unaligned rows; `start` is then relative to the window.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None
    edge: bool = False
    window: AlignmentView | None = None

    def columns(self) -> Any:
        """Return the index of the columns in a row of the array, or of the alignment view."""
        start = self.start if self.window is None else self.window.start() + self.start
        return pl.ds(start, self.width)

    def store(self, ref: Ref, row: Any, value: jax.Array, layout: Layout) -> None:
        """Store the fragment in a row, without columns of other rows."""
        if self.window is None or not self.edge:
            store_global(ref.at[row, self.columns()], value, layout)
            return
        start, first = self.window.start() + self.start, self.start - self.window.before()
        places = self.window.places(value.shape, layout)
        store_inside(ref.at[row], start, value, first, self.window.cols, places, layout)

    def skip_stale(self, term: jax.Array) -> jax.Array:
        """Return `term` in `warps_layout`, with 0 in columns that another fragment also holds."""
        if self.fresh is None:
            return term
        column = flat_index(term.shape, warps_layout(term.size // WARPGROUP_THREADS))
        return jnp.where(column < self.fresh - self.start, jnp.float32(0), term)


@dataclasses.dataclass(frozen=True)
class Partition:
    """The columns of one warpgroup, or of the threads of a warp that hold a row.

    Attributes:
      cols: columns of the row, or of its window.
      slices: the warpgroups that share the row.
      unit: columns that the threads of a slice load at once.
      index: the index of this slice.
      window: the view of unaligned rows.
    """

    cols: int
    slices: int
    unit: int
    index: Any = 0
    window: AlignmentView | None = None

    def __post_init__(self) -> None:
        """Refuse rows that are too short."""
        if not self.units:
            raise ValueError(f"{self} holds rows of {self.slices * self.unit} columns and more")

    @functools.cached_property
    def units(self) -> int:
        """The units of the body."""
        return self.cols // (self.slices * self.unit)

    @functools.cached_property
    def body_width(self) -> int:
        """The columns of the body."""
        return self.units * self.unit

    @functools.cached_property
    def has_tail(self) -> bool:
        """True if the bodies do not cover the whole row."""
        return self.cols % (self.slices * self.unit) != 0

    @functools.cached_property
    def tail_width(self) -> int:
        """The columns of a tail. The tail of a window may have narrower vectors."""
        rest = self.cols % (self.slices * self.unit)
        if self.window is None or not rest:
            return self.unit
        vector, threads = self.unit // WARPGROUP_THREADS, self.slices * WARPGROUP_THREADS
        return tail_vector(rest, vector, threads) * WARPGROUP_THREADS

    @property
    def width(self) -> int:
        """The columns of the slice, including the tail."""
        return self.body_width + self.has_tail * self.tail_width

    def body(self) -> Fragment:
        """Return the body. The bodies of all slices are adjacent."""
        return Fragment(self.index * self.body_width, self.body_width, window=self.window)

    def tail(self) -> list[Fragment]:
        """Return the tail, or an empty list; the tails of all slices share the rest of the row."""
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.tail_width
        start = self.cols - self.tail_width
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        edge = self.window is not None
        return [Fragment(start, self.tail_width, self.body_width, fresh, edge, self.window)]

    def fragments(self) -> list[Fragment]:
        """Return the body and the tail: as few fragments as possible, for copies."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """Split a body into fragments of a unit each."""
        starts = range(0, body.width, self.unit)
        edges = set() if self.window is None else {0, starts[-1]}
        return [
            Fragment(body.start + at, self.unit, at, edge=at in edges, window=self.window)
            for at in starts
        ]
