"""What a block takes of the rows, and a warpgroup of the columns of a row.

A warpgroup owns a *slice* of the columns: a number of *chunks*, each one vector for each of its
threads. Where the slices leave a rest of the row, each slice has one chunk more, its *tail*. Tails
end with the row at the latest, so their first columns may belong to another chunk too: reductions
skip those (they are *stale*), and their results, which are the same in both chunks, are stored
twice.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.layouts import Ref


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
    def of(cls, block: Any, *, rows: int, groups: int, blocks: int, height: int = 1) -> "Share":
        """That of block number `block`; `rows` of all groups, `blocks` of each."""
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

    `stage_start` is where they lie in shared memory, counted from the start of the slice.
    """

    start: Any
    width: int
    stage_start: int
    fresh: Any = None


@dataclasses.dataclass(frozen=True)
class Slice:
    """The columns of one warpgroup.

    Attributes:
      cols: of the row.
      slices: of the row: the warpgroups that share it.
      chunk: columns of a chunk.
      index: of this slice.
    """

    cols: int
    slices: int
    chunk: int
    index: Any = 0

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError(f"{self} needs rows of {self.slices * self.chunk} columns")

    @property
    def chunks(self) -> int:
        """Chunks of the slice, without the tail."""
        return self.cols // (self.slices * self.chunk)

    @property
    def has_tail(self) -> bool:
        return self.cols % (self.slices * self.chunk) != 0

    @property
    def width(self) -> int:
        """Columns of the slice, with the tail."""
        return (self.chunks + self.has_tail) * self.chunk

    def runs(self) -> list[Chunk]:
        """The columns as few chunks of any width: what is copied at once."""
        width = self.chunks * self.chunk
        body = Chunk(self.index * width, width, 0)
        if not self.has_tail:
            return [body]
        fresh = self.slices * width + self.index * self.chunk
        start = jnp.minimum(fresh, self.cols - self.chunk)
        return [body, Chunk(start, self.chunk, width, fresh)]

    def cut(self) -> list[Chunk]:
        """The columns in chunks that fill the warpgroup once."""
        body, *tail = self.runs()
        starts = range(0, body.width, self.chunk)
        return [Chunk(body.start + at, self.chunk, at) for at in starts] + tail


def skip_stale(term: jax.Array, chunk: Chunk) -> jax.Array:
    """`term`, and 0 where another chunk has the same column."""
    if chunk.fresh is None:
        return term
    warp, lane = (lax.broadcasted_iota(jnp.int32, term.shape, axis) for axis in (0, 1))
    stale = warp * term.shape[1] + lane < chunk.fresh - chunk.start
    return jnp.where(stale, jnp.float32(0), term)
