"""Backward passes of softmax, in which rows stay in registers: the schedule, and sums over rows.

All inputs of a row are loaded at once, in the same tiles as in the forward pass. A block processes
one tile of rows and ends. A block that computes the gradient of a bias processes several tiles
(`BiasSums`). The backward passes of norms, which sum over all rows, are in `pipelined` and
`narrow_rows`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS, Ref
from jaxnorm_kernels.mosaic.rows.logits import row_of_x
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, RowTile, SplitRow, Tile, WarpgroupRow
from jaxnorm_kernels.specs import Shared

# -------------------------------------------------------------------------------------------------
# The gradient of a softmax's bias: the sum of dz (the gradient of the logits) over all rows of x
# that use the same row of the bias.
#
# A block processes these rows one after the other, accumulates the sum in registers and stores it
# once. If many rows of x use the same row of the bias, several blocks split the work. Each of them
# stores a float32 sum, and XLA adds the sums of the blocks. If all rows of a tile use the same row
# of the bias, a block stores one sum for each row of the tile, and XLA adds them as well.


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How blocks compute the gradient of a softmax's bias.

    The bias is broadcast over the rows of x, so several rows of x use the same row of the bias. A
    row of the bias's gradient is the sum of dz over these rows of x.

    Attributes:
      tile: how a block distributes the rows of a tile over its threads.
      shared: how the bias is broadcast over the rows of x. The bias has a value for each column.
      dtype: dtype of the bias's gradient.
      splits: number of blocks that share the work for one row of the gradient.
    """

    tile: Tile
    shared: Shared
    dtype: np.dtype
    splits: int

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return self.splits * self._tiles.rows

    @property
    def output(self) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of the array of partial sums. A block stores ``tile.rows`` rows of it."""
        rows = self.blocks * self.tile.rows
        whole = rows == self.shared.rows
        return (rows, self.tile.cols), self.dtype if whole else np.dtype(np.float32)

    def run(self, target: Ref, step: Callable[[Any, Any], Fragments]) -> None:
        """Sum ``step(row, k)`` over the block's tiles, and store the sum in `target`.

        `row` is the index of the tile's row in x, or a slice if the tile has several rows. `k` is
        the number of tiles that the block has processed before this tile.
        """
        tiles, (rows, _) = self._tiles, self.output[0]
        block = lax.axis_index(BLOCK)
        row, split = lax.rem(block, tiles.rows), lax.div(block, tiles.rows)
        each = -(-tiles.sharing // self.splits)
        first = split * each

        def add(k: Any, total: Fragments) -> Fragments:
            group = row_of_x(tiles, row, first + k)
            terms = step(self.tile.row_index(tiles.rows * tiles.sharing * self.tile.rows, group), k)
            return [a + b for a, b in zip(total, terms)]

        zeros = [
            plgpu.layout_cast(jnp.zeros(self.tile.shape(p.width), jnp.float32), self.tile.layout)
            for p in self.tile.fragments()
        ]
        count = jnp.minimum(each, tiles.sharing - first)
        total = lax.fori_loop(0, count, add, zeros)
        self.tile.store(target, self.tile.row_index(rows), total)

    def gradient(self, sums: jax.Array) -> jax.Array:
        """Return the gradient of the bias, ``(n, cols)``, by adding the sums of the blocks."""
        if len(sums) > self.shared.rows:
            sums = sums.reshape(self.splits, self.shared.rows, -1, self.tile.cols).sum((0, 2))
        return sums.astype(self.dtype)

    @property
    def _tiles(self) -> Shared:
        """Like `shared`, but for tiles: how the bias is broadcast over the tiles of x."""
        if self.tile.rows == 1:
            return self.shared
        *outer, (size, has_axis) = self.shared.segments
        return Shared((*outer, (size // self.tile.rows, has_axis)), self.shared.has_columns)


@dataclasses.dataclass(frozen=True)
class InRegisters:
    """Schedule of the backward pass of softmax.

    Attributes:
      vector: number of neighbouring elements that one thread loads and stores at once.
      warpgroups: number of warpgroups (of 128 threads) per block. If there are several, they share
        one row.
      threads: number of threads that share a row: at most 32 threads of one warp, or all 128
        threads of each warpgroup.
      rows: number of rows per block. It can be above 1 only if the threads of a row are in one
        warp.
      cluster: number of blocks that share a row.
      splits: number of blocks (or clusters) that share the work for one row of a bias's gradient,
        which is a sum over rows of x (`BiasSums`).
      apart: True if each unit of a row (one vector per thread) is a separate array in registers,
        see `Tile`.
    """

    vector: int
    warpgroups: int = 1
    threads: int = WARPGROUP_THREADS
    rows: int = 1
    cluster: int = 1
    splits: int = 1
    apart: bool = False

    def tile(self, cols: int) -> Tile:
        """Return the tile: how a block distributes rows of `cols` columns over its threads."""
        kind: type[Tile] = RowTile
        if self.warpgroups * self.cluster > 1:
            kind = SplitRow
        elif self.threads == WARPGROUP_THREADS and self.rows == 1:
            kind = WarpgroupRow
        sizes = self.threads, self.rows, self.warpgroups, self.cluster
        return kind(cols, self.vector, *sizes, apart=self.apart)
