"""Unaligned rows, which are no multiple of 16 bytes, read and written by 16 bytes all the same.

Where rows are no multiple of 16 bytes, a row begins somewhere between two of these, and `period`
rows further another one begins at the same place. These rows are of one *class*. Seen as
``(rows / period, period * cols)`` the array has rows that are multiples of 16 bytes, and each class
has its columns of them. A block takes rows of one class, and of each its *window*: the multiples of
16 bytes that have a part of the row::

    multiples of 16 bytes   |       |       |       |       |       |       |
    rows                    0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2
    window of row 1                 |- - - - - - - - - - - -|

So all that lies in a block's registers lies alike for all its rows. What a window has of other rows
takes no part in reductions, and is not stored. Windows are as wide for all classes, and within the
array: some begin or end 16 bytes further from their row.

They are often a little wider than whole units of a block, for rows are often a little shorter. Then
the last unit, the tail, has narrower vectors.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, Layout, flat_index


@dataclasses.dataclass(frozen=True)
class Window:
    """Of rows of `cols` elements, the windows; `step` elements of the narrowest array are 16 bytes.

    Block b takes rows of class ``b % period``.
    """

    cols: int
    step: int

    @property
    def period(self) -> int:
        """How many classes there are."""
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

    def placed(self) -> "PlacedWindow":
        """This, in a kernel's body, with this block's place in it."""
        return PlacedWindow(self.cols, self.step, self._class(), self.start(), self.before())

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
        """Of a block, among those of its class."""
        return lax.div(block, self.period)

    def view(self, array: jax.Array) -> jax.Array:
        """``(rows, cols)`` -> ``(rows / period, period * cols)``."""
        return array.reshape(self.shape(len(array)))

    def shape(self, rows: int) -> tuple[int, int]:
        """Of the view."""
        return rows // self.period, self.period * self.cols

    def _class(self) -> jax.Array:
        return lax.rem(lax.axis_index(BLOCK), self.period)

    def _row_start(self) -> jax.Array:
        return self._class() * self.cols


@dataclasses.dataclass(frozen=True)
class PlacedWindow(Window):
    """With what each load and store asks for, so that a kernel has it once and not once for each.

    A compiler would find out that it is the same; but each operation costs time before that.
    """

    of_block: jax.Array
    first: jax.Array
    rest: jax.Array
    known: Mapping[tuple[int, ...], jax.Array] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def with_places(self, known: Mapping[tuple[int, ...], jax.Array]) -> "PlacedWindow":
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

    def _class(self) -> jax.Array:
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


def window_of(rows: int, cols: int, dtypes: Sequence[np.dtype]) -> Window | None:
    """For rows in arrays of these dtypes; None where each is whole multiples of 16 bytes.

    None, too, where the rows are not whole periods.
    """
    window = Window(cols, VECTOR_BYTES // min(dtype.itemsize for dtype in dtypes))
    return None if window.period == 1 or rows % window.period else window
