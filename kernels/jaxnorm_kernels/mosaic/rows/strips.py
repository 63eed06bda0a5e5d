"""How an array that is normalised over an axis that is not its last is cut into strips: GroupNorm.

Of ``(outer, cols, inner)`` with the middle axis normalised, a *strip* is all columns of one outer
index by `width` neighbouring inner elements: wide enough to use whole sectors of memory. A block
holds a strip, or the blocks of a cluster where the columns are many. The copy engine (TMA) brings
it to shared memory once, in the dtype that it has, and each pass over it reads it from there, so
that a thread needs registers for a few of its elements alone. The first pass begins with what has
arrived, in *parts*.

Each warpgroup owns a slice of the columns (see `pieces`), in units of one vector for each thread,
``(4, columns of a warp, width)``: the lanes of a warp run along the width, then along the columns.
Inner elements that are normalised together are a *group* (see `strip_groups`). Strips overlap where
the width does not divide the inner axis: the last one ends with it, and its first elements, which
are *stale*, are stored twice with the same value. Where groups do not divide the width, each strip
overlaps the next one, and stores those alone that are whole in it and in no strip before: its
*own*.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPS,
    Layout,
    columns_layout,
    strip_layout,
)
from jaxnorm_kernels.mosaic.rows.pieces import Piece, Slice

#: The copy engine takes boxes of up to so many elements along each axis.
BOX = 256
# Parts of a warpgroup's columns that are waited for one by one, at most: 88 us where one takes 97,
# and 4 take 90 (GroupNorm with silu, 8x128x128x128 bfloat16, forward and backward; H100).
_PARTS = 2


@dataclasses.dataclass(frozen=True)
class Strips:
    """How an array is cut into strips, and a strip into parts.

    Attributes:
      outer, cols, inner: the array's shape.
      vector: neighbouring elements that one thread reads and writes at once.
      threads: of a warp, whose vectors lie side by side: the width of a strip.
      warpgroups: of a block.
      cluster: blocks that share a strip.
      group: neighbouring inner elements that are normalised together.
    """

    outer: int
    cols: int
    inner: int
    vector: int
    threads: int
    warpgroups: int = 1
    cluster: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        """Refuses sizes that do not fit together."""
        if not 2 <= self.threads < WARP:
            # A layout of one thread, or of a unit with a column for each warp, is not inferred.
            raise ValueError(f"{self} needs 2 to {WARP // 2} threads")
        if self.width > self.inner:
            raise ValueError(f"{self} needs an inner axis of {self.width} elements or more")
        if not self.pitch or self.inner % self.group:
            raise ValueError(f"{self} needs groups that divide the inner axis, and fit the width")
        self.slice()  # raises where the columns are too few

    @property
    def width(self) -> int:
        """Inner elements of a strip."""
        return self.threads * self.vector

    @property
    def holds_groups(self) -> bool:
        """Whether groups are a power of 2 and divide the width."""
        return not self.group & (self.group - 1) and self.width % self.group == 0

    @property
    def pitch(self) -> int:
        """Inner elements from a strip to the next: whole groups, and whole vectors."""
        return self.width // math.lcm(self.group, self.vector) * math.lcm(self.group, self.vector)

    @property
    def across(self) -> int:
        """Strips of each outer index."""
        return 1 + -(-(self.inner - self.width) // self.pitch)

    @property
    def count(self) -> int:
        """Strips of the array: blocks of the grid, or clusters."""
        return self.outer * self.across

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a unit in registers."""
        return WARPS, WARP // self.threads, self.width

    @property
    def layout(self) -> Layout:
        """Of a unit."""
        return strip_layout(self.vector, self.threads)

    @property
    def stat_layout(self) -> Layout:
        """Of ``(width,)``, which every warp has."""
        return columns_layout(self.vector, self.threads)

    @property
    def stats_shape(self) -> tuple[int, int]:
        """Of a statistic of each group of the array."""
        return self.outer, self.inner // self.group

    def slice(self, index: Any = 0) -> Slice:
        """The columns of a warpgroup, counted through the cluster."""
        return Slice(self.cols, self.cluster * self.warpgroups, WARPS * self.shape[1], index)

    @property
    def parts(self) -> int:
        """Of a warpgroup's columns: as many boxes each."""
        return math.gcd(_PARTS, self._box_count)

    @property
    def boxes_of_part(self) -> int:
        """Whole ones, but for the last part's."""
        return self._box_count // self.parts

    @property
    def _box_count(self) -> int:
        return sum(len(boxes_of(piece)) for piece in self.slice().pieces())

    def scratch(self, dtypes: Sequence[np.dtype]) -> list[Any]:
        """A stage for each array that is read, and barriers for the parts of each warpgroup."""
        held = (self.warpgroups, self.slice().width, self.width)
        of_warps = (self.warpgroups, WARPS * self.width)
        return [
            *[plgpu.SMEM(held, dtype) for dtype in dtypes],
            *([] if self.holds_groups else [plgpu.SMEM(of_warps, jnp.float32)]),
            plgpu.Barrier(
                num_arrivals=len(dtypes) * self.boxes_of_part,
                num_barriers=self.warpgroups * self.parts,
            ),
        ]


def boxes_of(piece: Piece) -> list[tuple[int, int]]:
    """Where what the copy engine takes at a time begins in a piece, and its columns."""
    return [(at, min(BOX, piece.width - at)) for at in range(0, piece.width, BOX)]
