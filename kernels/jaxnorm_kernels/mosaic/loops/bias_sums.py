"""The gradient of a softmax's bias. The bias is broadcast over the rows of x.

A row of this gradient is a sum over all rows of x that use the same row of the bias. The terms are
rows of dz, the gradient of the logits. A block processes the rows of dz one after the other,
accumulates the sum in registers, and stores the sum once. If there are many rows, several blocks
split the work. Each of them stores a float32 sum, and XLA adds the sums of the blocks. If all rows
of a tile use the same row of the bias, a block stores one sum for each row of the tile, and XLA
also adds these sums.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.device.launch import BLOCK
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.rows.logits import row_of_x
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, Tile


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
        """Return the gradient of the bias, ``(n, cols)``, given the sums that the blocks stored."""
        if len(sums) > self.shared.rows:
            sums = sums.reshape(self.splits, self.shared.rows, -1, self.tile.cols).sum((0, 2))
        return sums.astype(self.dtype)

    @property
    def _tiles(self) -> Shared:
        """Like `shared`, but it maps tiles of x, instead of rows of x, to rows of the bias."""
        if self.tile.rows == 1:
            return self.shared
        *outer, (size, has_axis) = self.shared.segments
        return Shared((*outer, (size // self.tile.rows, has_axis)), self.shared.has_columns)
