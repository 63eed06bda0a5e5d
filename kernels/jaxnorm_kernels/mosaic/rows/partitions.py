"""Which columns of a row a warpgroup has, in fragments.

A warpgroup owns a *partition* of the columns. It advances in *units*, one vector for each thread of
a row. There are no masked loads or stores on this backend, so a row that is no multiple of all its
partitions' units is held in two *fragments*: a body of whole units, and a tail, one unit that ends
with the row at the latest. The first columns of the tail may be in another fragment too:
reductions skip them (they are *stale*), and they are stored twice with the same value.

An unaligned row is held as its window (`AlignmentView`). The columns of other rows in it, which lie
at its *edges*, are skipped too, and not stored.
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
# single phase, so that all its rows share one register layout. Of each row it holds the *window*:
# the 16-byte words that have a part of the row::
#
#     multiples of 16 bytes   |       |       |       |       |       |       |
#     rows                    0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2
#     window of row 1                 |- - - - - - - - - - - -|
#
# The columns of other rows in a window take no part in reductions and are not stored. Windows have
# the same width in all phases and lie within the array: some begin or end 16 bytes further from
# their row. They are often a little wider than whole units of a block; then the last unit, the
# tail, has narrower vectors.


@dataclasses.dataclass(frozen=True)
class AlignmentView:
    """Of rows of `cols` elements, the windows; `step` elements of the narrowest array are 16 bytes.

    Block b takes rows of phase ``b % period``.
    """

    cols: int
    step: int

    @property
    def period(self) -> int:
        """Number of phases."""
        return self.step // math.gcd(self.cols, self.step)

    @property
    def width(self) -> int:
        """Columns of a window."""
        starts = [q * self.cols % self.step for q in range(self.period)]
        return max(-(-(start + self.cols) // self.step) for start in starts) * self.step

    @property
    def edge(self) -> int:
        """The first so many columns of a window, or the last, may be those of other rows."""
        return 2 * self.step

    def placed(self) -> "PlacedView":
        """This, in a kernel's body, with this block's place in it."""
        return PlacedView(self.cols, self.step, self._phase(), self.start(), self.before())

    def start(self) -> jax.Array:
        """Where this block's windows begin, in a row of the view."""
        end = self.period * self.cols - self.width
        return jnp.minimum(lax.div(self._row_start(), self.step) * self.step, end)

    def before(self) -> jax.Array:
        """Columns of the window before the row: the row's first one."""
        return self._row_start() - self.start()

    def places(self, shape: tuple[int, ...], layout: Layout) -> jax.Array:
        """`flat_index` of what is loaded, or stored, in this shape and layout."""
        return flat_index(shape, layout)

    def place(self, block: Any) -> Any:
        """Of a block, among those of its phase."""
        return lax.div(block, self.period)

    def view(self, array: jax.Array) -> jax.Array:
        """``(rows, cols)`` -> ``(rows / period, period * cols)``."""
        return array.reshape(self.shape(len(array)))

    def shape(self, rows: int) -> tuple[int, int]:
        """Of the view."""
        return rows // self.period, self.period * self.cols

    def _phase(self) -> jax.Array:
        return lax.rem(lax.axis_index(BLOCK), self.period)

    def _row_start(self) -> jax.Array:
        return self._phase() * self.cols


@dataclasses.dataclass(frozen=True)
class PlacedView(AlignmentView):
    """With what each load and store asks for, so that a kernel has it once and not once for each.

    A compiler would find out that it is the same; but each operation costs time before that.
    """

    of_block: jax.Array
    first: jax.Array
    rest: jax.Array
    known: Mapping[tuple[int, ...], jax.Array] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def with_places(self, known: Mapping[tuple[int, ...], jax.Array]) -> "PlacedView":
        """This, with `places` of these shapes, each of which has one layout in a kernel."""
        return dataclasses.replace(self, known=known)

    def places(self, shape: tuple[int, ...], layout: Layout) -> jax.Array:
        """As computed."""
        return self.known[shape] if shape in self.known else flat_index(shape, layout)

    def start(self) -> jax.Array:
        """As computed."""
        return self.first

    def before(self) -> jax.Array:
        """As computed."""
        return self.rest

    def _phase(self) -> jax.Array:
        return self.of_block


def tail_vector(rest: int, vector: int, threads: int) -> int:
    """Elements for each of so many threads, up to `vector`, to hold a rest of the row."""
    return min(vector, 1 << (-(-rest // threads) - 1).bit_length())


def widest_vector(cols: int, vector: int, threads: int) -> int:
    """`vector`, or half of it where threads then hold a tenth less, or all of them something."""

    def held(vector: int) -> int:
        whole, rest = divmod(cols, threads * vector)
        return whole * vector + (tail_vector(rest, vector, threads) if rest else 0)

    half = vector // 2
    return half if cols < threads * vector or held(vector) > held(half) * 1.1 else vector


def alignment_view(rows: int, cols: int, dtypes: Sequence[np.dtype]) -> AlignmentView | None:
    """For rows in arrays of these dtypes; None where each is whole multiples of 16 bytes.

    None, too, where the rows are not whole periods.
    """
    window = AlignmentView(cols, VECTOR_BYTES // min(dtype.itemsize for dtype in dtypes))
    return None if window.period == 1 or rows % window.period else window


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Columns ``[start, start + width)`` of a row; those before `fresh` are stale.

    Attributes:
      stage_start: where they lie in shared memory, counted from the start of the partition.
      edge: it may hold columns of other rows, of a window.
      window: of unaligned rows, in which `start` counts.
    """

    start: Any
    width: int
    stage_start: int = 0
    fresh: Any = None
    edge: bool = False
    window: AlignmentView | None = None

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
        """`term` in `warps_layout`, and 0 where another fragment has the same column."""
        if self.fresh is None:
            return term
        column = flat_index(term.shape, warps_layout(term.size // WARPGROUP_THREADS))
        return jnp.where(column < self.fresh - self.start, jnp.float32(0), term)


@dataclasses.dataclass(frozen=True)
class Partition:
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
    window: AlignmentView | None = None

    def __post_init__(self) -> None:
        """Refuses rows that are too short."""
        if not self.units:
            raise ValueError(f"{self} holds rows of {self.slices * self.unit} columns and more")

    @functools.cached_property
    def units(self) -> int:
        """Of the body."""
        return self.cols // (self.slices * self.unit)

    @functools.cached_property
    def body_width(self) -> int:
        """Columns of the body."""
        return self.units * self.unit

    @functools.cached_property
    def has_tail(self) -> bool:
        """Whether the bodies leave columns over."""
        return self.cols % (self.slices * self.unit) != 0

    @functools.cached_property
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

    def body(self) -> Fragment:
        """The bodies of the slices lie side by side."""
        return Fragment(self.index * self.body_width, self.body_width, window=self.window)

    def tail(self) -> list[Fragment]:
        """The tails share what the bodies leave of the row; none where they leave nothing."""
        if not self.has_tail:
            return []
        fresh = self.slices * self.body_width + self.index * self.tail_width
        start = self.cols - self.tail_width
        start = min(fresh, start) if isinstance(fresh, int) else jnp.minimum(fresh, start)
        edge = self.window is not None
        return [Fragment(start, self.tail_width, self.body_width, fresh, edge, self.window)]

    def fragments(self) -> list[Fragment]:
        """As few as there are: what is copied at once."""
        return [self.body(), *self.tail()]

    def cut(self, body: Fragment) -> list[Fragment]:
        """A body in fragments of a unit each."""
        starts = range(0, body.width, self.unit)
        edges = set() if self.window is None else {0, starts[-1]}
        return [
            Fragment(body.start + at, self.unit, at, edge=at in edges, window=self.window)
            for at in starts
        ]
