"""What a block takes of the rows, and a warpgroup of the columns of a row.

A warpgroup owns a *slice* of the columns: a number of *chunks*, each one vector for each of its
threads. Where the slices leave a rest of the row, each slice has one chunk more, its *tail*. Tails
end with the row at the latest, so their first columns may belong to another chunk too: reductions
skip those (they are *stale*), and their results, which are the same in both chunks, are stored
twice.

Of unaligned rows, a row is its window (`windows`): the columns of other rows in it are skipped too,
and not stored.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.edges import load_each, store_each, store_inside
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    Layout,
    Ref,
    flat_index,
    load,
    store,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global
from jaxnorm_kernels.mosaic.rows.windows import Window, tail_vector


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one block: every n-th step of a group of rows, which n blocks share.

    Of all steps of a group, the last one overlaps the one before it where the rows do not divide.

    Attributes:
      rows: of a group.
      height: rows of a step.
      blocks: that share a group.
      place: of this block among them.
      group: that it works on; None where there is one alone.
    """

    rows: int
    height: int
    blocks: int
    place: Any
    group: Any = None

    @classmethod
    def of(
        cls,
        block: Any,
        *,
        rows: int,
        groups: int,
        blocks: int,
        height: int = 1,
        window: Window | None = None,
    ) -> "Share":
        """That of block number `block`; `rows` of all groups, `blocks` of each.

        With windows, that of the rows of its class.
        """
        if window is not None:
            classes = window.period
            return cls(rows // classes, height, blocks // classes, window.place(block))
        if groups == 1:
            return cls(rows, height, blocks, block)
        place, group = lax.rem(block, blocks), lax.div(block, blocks)
        return cls(rows // groups, height, blocks, place, group)

    def count(self) -> Any:
        """Steps of this block."""
        steps = -(-self.rows // self.height)
        return lax.div(steps - self.place + self.blocks - 1, self.blocks)

    def row(self, k: Any) -> Any:
        """The row of step `k`, of one row each."""
        return self._of_all(self._step(k))

    def first_row(self, k: Any) -> Any:
        """The first row of step `k`."""
        start = jnp.minimum(self._step(k) * self.height, self.rows - self.height)
        return self._of_all(start)

    @property
    def has_stale_rows(self) -> bool:
        """Whether a step has rows that belong to another one too."""
        return self.rows % self.height != 0

    def is_new(self, row: Any, k: Any) -> Any:
        """Whether a row of step `k` is in no step before it."""
        return row >= self._of_all(self._step(k) * self.height)

    def param(self, ref: Ref) -> Ref:
        """The ``(cols,)`` of a parameter of all rows or, one for each, of groups."""
        return ref if len(ref.shape) == 1 else ref.at[self.group]

    def _step(self, k: Any) -> Any:
        """Step `k` of this block, counted in the group."""
        return self.place + k * self.blocks

    def _of_all(self, row: Any) -> Any:
        """A row of the group, counted in all rows."""
        return row if self.group is None else self.group * self.rows + row


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Columns ``[start, start + width)``; those before `fresh` belong to another chunk too.

    `stage_start` is where they lie in shared memory, counted from the start of the slice. Of a
    window, an `edge` may hold columns of other rows.
    """

    start: Any
    width: int
    stage_start: int
    fresh: Any = None
    edge: bool = False


@dataclasses.dataclass(frozen=True)
class Slice:
    """The columns of one warpgroup.

    Attributes:
      cols: of the row, or of its window.
      slices: of the row: the warpgroups that share it.
      chunk: columns of a chunk.
      index: of this slice.
      window: of unaligned rows.
    """

    cols: int
    slices: int
    chunk: int
    index: Any = 0
    window: Window | None = None

    def __post_init__(self) -> None:
        """Refuses rows that are too short."""
        if not self.chunks:
            raise ValueError(f"{self} needs rows of {self.slices * self.chunk} columns")

    @property
    def chunks(self) -> int:
        """Chunks of the slice, without the tail."""
        return self.cols // (self.slices * self.chunk)

    @property
    def has_tail(self) -> bool:
        """Whether the chunks leave columns over."""
        return self.cols % (self.slices * self.chunk) != 0

    @property
    def tail_width(self) -> int:
        """Columns of the tail: of a window, with vectors that may be narrower."""
        rest = self.cols % (self.slices * self.chunk)
        if self.window is None or not rest:
            return self.chunk
        vector, threads = self.chunk // WARPGROUP_THREADS, self.slices * WARPGROUP_THREADS
        return tail_vector(rest, vector, threads) * WARPGROUP_THREADS

    @property
    def width(self) -> int:
        """Columns of the slice, with the tail."""
        return self.chunks * self.chunk + self.has_tail * self.tail_width

    def runs(self) -> list[Chunk]:
        """The columns as few chunks of any width: what is copied at once."""
        width = self.chunks * self.chunk
        body = Chunk(self.index * width, width, 0)
        if not self.has_tail:
            return [body]
        fresh = self.slices * width + self.index * self.tail_width
        start = jnp.minimum(fresh, self.cols - self.tail_width)
        return [body, Chunk(start, self.tail_width, width, fresh)]

    def cut(self) -> list[Chunk]:
        """The columns in chunks that fill the warpgroup once."""
        body, *tail = self.runs()
        starts = range(0, body.width, self.chunk)
        chunks = [Chunk(body.start + at, self.chunk, at) for at in starts] + tail
        if self.window is None:
            return chunks
        edges = {0, len(starts) - 1, len(chunks) - 1}
        return [dataclasses.replace(c, edge=at in edges) for at, c in enumerate(chunks)]

    def columns(self, run: Chunk) -> Any:
        """Where a run lies in a row of an array, or of its view as the window's."""
        start = run.start if self.window is None else self.window.start() + run.start
        return pl.ds(start, run.width)

    def load_param(
        self, ref: Ref, chunk: Chunk, layout: Layout, shape: tuple[int, ...]
    ) -> jax.Array:
        """A chunk of a ``(cols,)`` ref."""
        if self.window is None:
            return load(ref.at[pl.ds(chunk.start, chunk.width)], layout, shape)
        return load_each(ref, chunk.start - self.window.before(), shape, layout)

    def store(self, ref: Ref, row: Any, chunk: Chunk, value: jax.Array, layout: Layout) -> None:
        """Stores a chunk of a row, but for what belongs to other rows."""
        if self.window is None or not chunk.edge:
            store_global(ref.at[row, self.columns(chunk)], value, layout)
            return
        start, first = self.window.start() + chunk.start, chunk.start - self.window.before()
        store_inside(ref.at[row], start, value, first, self.window.cols, layout)

    def store_sum(
        self, ref: Ref, block: Any, chunk: Chunk, value: jax.Array, layout: Layout
    ) -> None:
        """Stores a chunk of what a block has added up, in a ``(blocks, cols)`` ref."""
        if self.window is None:
            store(ref.at[block, pl.ds(chunk.start, chunk.width)], value)
        else:
            store_each(ref.at[block], chunk.start - self.window.before(), value, layout)

    def skip_others(self, term: jax.Array, chunk: Chunk) -> jax.Array:
        """`term`, and 0 where a column is stale or of another row."""
        if not chunk.edge or self.window is None:
            return skip_stale(term, chunk)
        before, column = self.window.before(), index_of(term)
        first = before if chunk.fresh is None else jnp.maximum(before, chunk.fresh)
        end = before + self.window.cols
        own = (column >= first - chunk.start) & (column < end - chunk.start)
        return jnp.where(own, term, jnp.float32(0))


def skip_stale(term: jax.Array, chunk: Chunk) -> jax.Array:
    """`term`, and 0 where another chunk has the same column."""
    if chunk.fresh is None:
        return term
    stale = index_of(term) < chunk.fresh - chunk.start
    return jnp.where(stale, jnp.float32(0), term)


def index_of(term: jax.Array) -> jax.Array:
    """`flat_index` of a chunk, whose elements are one vector for each thread."""
    return flat_index(term.shape, warps_layout(term.size // WARPGROUP_THREADS))
