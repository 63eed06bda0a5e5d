"""How the columns of a row are cut among the warpgroups that share it.

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
