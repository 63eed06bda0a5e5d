"""Backward passes of softmaxes, with rows in registers, in the tiles of the forward pass.

All inputs of a row are loaded at once. A block processes the rows that it holds and ends, unless it
sums the gradient of a bias (`BiasSums`). Passes with sums over all rows run in `pipelined` and
`narrow_rows`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK, split
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS, Ref
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, Formula
from jaxnorm_kernels.mosaic.loops.forward import ForwardRefs, run, store_stats
from jaxnorm_kernels.mosaic.rows.exchange import RowSums
from jaxnorm_kernels.mosaic.rows.logits import row_of_x
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, RowTile, SplitRow, Tile, WarpgroupRow
from jaxnorm_kernels.specs import Shared

# -------------------------------------------------------------------------------------------------
# The gradient of a softmax's bias: the sum of dz over the rows of x that share a row of the bias.
#
# A block processes those rows one after the other, holds the sum in registers and stores it once.
# If many rows of x share few rows of the bias, several blocks share the work of one row. Their sums
# are float32, and XLA adds them. XLA also adds the rows of such a sum if all rows of a tile share
# one row of the bias.


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How blocks share the rows of x, and the sums that they store.

    Attributes:
      shared: how the bias, which has all columns, is broadcast over the rows.
      dtype: the dtype of the bias's gradient.
      splits: the number of blocks that share the rows of x with one row of the bias.
    """

    tile: Tile
    shared: Shared
    dtype: np.dtype
    splits: int

    @property
    def blocks(self) -> int:
        """The blocks of the grid."""
        return self.splits * self._tiles.rows

    @property
    def output(self) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of the sums that blocks store: a row for each row of a block's tile."""
        rows = self.blocks * self.tile.rows
        whole = rows == self.shared.rows
        return (rows, self.tile.cols), self.dtype if whole else np.dtype(np.float32)

    def run(self, target: Ref, step: Callable[[Any, Any], Fragments]) -> None:
        """Add ``step(row, number of earlier tiles)`` over the block's tiles, and store the sum."""
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
        """Return the gradient of the bias, ``(n, cols)``, from the sums of the blocks."""
        if len(sums) > self.shared.rows:
            sums = sums.reshape(self.splits, self.shared.rows, -1, self.tile.cols).sum((0, 2))
        return sums.astype(self.dtype)

    @property
    def _tiles(self) -> Shared:
        """`shared` for tiles instead of rows. All rows of a tile are in one run."""
        if self.tile.rows == 1:
            return self.shared
        *outer, (size, has_axis) = self.shared.segments
        return Shared((*outer, (size // self.tile.rows, has_axis)), self.shared.has_columns)


#: Loads the elements of a block's rows, in float32. For each fragment of a row, the result has one
#: array per row operand of the formula.
Read = Callable[[Tile, Any, Sequence[Ref]], list[Sequence[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class InRegisters:
    """Parameters of `in_registers_backward`.

    Attributes:
      vector: the number of neighbouring elements that one thread loads and stores at once.
      warpgroups: the number of warpgroups per block; they share a row.
      threads: the number of threads that share a row: some of a warp, or all 128 of each warpgroup.
      rows: the number of rows per block; above one only if threads of a single warp share a row.
      cluster: the number of blocks that share a row.
      splits: the number of blocks, or clusters, that share the rows of x with one row of a bias
        (`BiasSums`).
      apart: True if each unit of a row is a separate fragment (`Tile`).
    """

    vector: int
    warpgroups: int = 1
    threads: int = WARPGROUP_THREADS
    rows: int = 1
    cluster: int = 1
    splits: int = 1
    apart: bool = False

    def tile(self, cols: int) -> Tile:
        """Return how a block holds rows of this many columns."""
        vector = self.vector
        apart: dict[str, Any] = {"apart": self.apart}
        if self.warpgroups * self.cluster > 1:
            return SplitRow(cols, vector, self.warpgroups, self.cluster, **apart)
        if self.threads == WARPGROUP_THREADS and self.rows == 1:
            return WarpgroupRow(cols, vector, **apart)
        return RowTile(cols, vector, self.threads, self.rows, **apart)


def in_registers_backward(
    formula: Formula,
    operands: Arrays,
    read: Read,
    tile: Tile,
    *,
    rows: int,
    results: Sequence[np.dtype],
    name: str,
    row_values: int = 0,
    sums: BiasSums | None = None,
) -> tuple[jax.Array, ...]:
    """Run a formula that has no parameters and statistics. Return its row results and its sums.

    Args:
      row_values: the number of the formula's row sums that are also results, ``(rows,)`` in
        float32.
      sums: how to compute the formula's column sum, which is then the last result.
    """
    exchange = RowSums(tile.warpgroups, tile.cluster, formula.row_sums, in_lanes=True)
    is_split = isinstance(tile, SplitRow)

    def body(placed: Tile, refs: ForwardRefs) -> None:
        sum_refs, scratch = split(refs.scratch, int(sums is not None))

        def step(row: Any, k: Any = 0) -> Fragments:
            """Store the results for a tile's rows, and return the terms of the column sum."""
            elements = read(placed, row, refs.operands)
            terms = [formula.terms(v[: formula.summed], (), ()) for v in elements]
            totals = [placed.sum(term) for term in zip(*terms)]
            if is_split:
                if sums is None:
                    exchange.ready()
                exchange.publish(scratch, totals, k)
                totals = exchange.collect(scratch, k)
            finished = []
            for v in elements:
                broadcast = [placed.broadcast(total, v[0]) for total in totals]
                finished.append(formula.finish(v, (), (), broadcast))
            for ref, values in zip(refs.results, zip(*(results for results, _ in finished))):
                placed.store(ref, row, values)
            if refs.stats:
                store_stats(refs.stats, row, totals)
            return [term for _, of_fragment in finished for term in of_fragment]

        exchange.open(scratch)
        if sums is None:
            step(placed.row_index(rows))
            return
        if is_split:
            exchange.ready()
        sums.run(sum_refs[0], step)

    of_rows, others = run(
        body,
        tile,
        rows,
        operands=operands,
        results=results,
        stats=row_values,
        others=[] if sums is None else [sums.output],
        scratch=exchange.scratch() if is_split else [],
        blocks=None if sums is None else sums.blocks,
        name=name,
    )
    return (*of_rows, *others)
