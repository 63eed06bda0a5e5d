"""The gradient of a softmax's bias: dz, added up over the rows of x that share a row of the bias.

A block takes those rows, one after the other, keeps the sum in registers and writes it once. Where
few rows of a bias are shared by many of x, several blocks have a part of them each and write sums
in float32, which XLA adds up. So do the rows of a tile that all share one of the bias.
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
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.rows.logits import row_of_x
from jaxnorm_kernels.mosaic.rows.tiles import Pieces, Tile
from jaxnorm_kernels.specs import Shared


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How blocks share the rows of x, and what they write.

    Attributes:
      shared: of the bias, which has all columns.
      dtype: of its gradient.
      splits: blocks for the rows of x that share one of the bias.
    """

    tile: Tile
    shared: Shared
    dtype: np.dtype
    splits: int

    @property
    def blocks(self) -> int:
        """Of the whole grid."""
        return self.splits * self._tiles.rows

    @property
    def output(self) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of the sums that blocks write, a row for each of a tile."""
        rows = self.blocks * self.tile.rows
        whole = rows == self.shared.rows
        return (rows, self.tile.cols), self.dtype if whole else np.dtype(np.float32)

    def run(self, target: Ref, step: Callable[[Any, Any], Pieces]) -> None:
        """Adds up what `step` gives of each tile of rows, and how many came before it."""
        tiles, (rows, _) = self._tiles, self.output[0]
        block = lax.axis_index(BLOCK)
        row, split = lax.rem(block, tiles.rows), lax.div(block, tiles.rows)
        each = -(-tiles.sharing // self.splits)
        first = split * each

        def add(k: Any, total: Pieces) -> Pieces:
            group = row_of_x(tiles, row, first + k)
            terms = step(self.tile.row_index(tiles.rows * tiles.sharing * self.tile.rows, group), k)
            return [a + b for a, b in zip(total, terms)]

        zeros = [
            plgpu.layout_cast(jnp.zeros(self.tile.shape(p.width), jnp.float32), self.tile.layout)
            for p in self.tile.pieces()
        ]
        count = jnp.minimum(each, tiles.sharing - first)
        total = lax.fori_loop(0, count, add, zeros)
        self.tile.store(target, self.tile.row_index(rows), total)

    def gradient(self, sums: jax.Array) -> jax.Array:
        """``(n, cols)``: that of the bias, of what blocks have written."""
        if len(sums) > self.shared.rows:
            sums = sums.reshape(self.splits, self.shared.rows, -1, self.tile.cols).sum((0, 2))
        return sums.astype(self.dtype)

    @property
    def _tiles(self) -> Shared:
        """As `shared`, of tiles of rows, which are parts of its runs."""
        if self.tile.rows == 1:
            return self.shared
        *outer, (size, has_axis) = self.shared.segments
        return Shared((*outer, (size // self.tile.rows, has_axis)), self.shared.has_columns)
