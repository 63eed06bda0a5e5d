"""Backward passes without sums over the rows, of rows in registers: in the tiles of the forward.

All inputs of a row are read at once. Each block takes as many rows as it holds, and ends. Passes
with sums over the rows run in `ring`, `rows_ring` and `direct`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxnorm_kernels.mosaic.backward.formulas import Formula, Operands, split
from jaxnorm_kernels.mosaic.device.launch import launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    Ref,
)
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.rows.row_sums import RowSums
from jaxnorm_kernels.mosaic.rows.tiles import RowTile, SplitRow, Tile, WarpgroupRow


@dataclasses.dataclass(frozen=True)
class InRegisters:
    """Parameters of `in_registers_backward`.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: of a block, which share a row.
      threads: that share a row: of a warp, or the 128 of each warpgroup.
      rows: of a block; more than one only where the threads of a warp share a row.
      cluster: blocks that share a row.
    """

    vector: int
    warpgroups: int = 1
    threads: int = WARPGROUP_THREADS
    rows: int = 1
    cluster: int = 1

    def tile(self, cols: int) -> Tile:
        if self.warpgroups * self.cluster > 1:
            return SplitRow(cols, self.vector, split=self.warpgroups, cluster=self.cluster)
        if self.threads == WARPGROUP_THREADS and self.rows == 1:
            return WarpgroupRow(cols, self.vector)
        return RowTile(cols, self.vector, threads=self.threads, height=self.rows)


def in_registers_backward(
    formula: Formula,
    operands: Operands,
    *,
    schedule: InRegisters,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results of a formula without parameters and statistics."""
    rows, cols = operands.shape
    tile = schedule.tile(cols)
    exchange = RowSums(tile.warpgroups, formula.row_sums, cluster=tile.cluster, in_lanes=True)
    is_split = isinstance(tile, SplitRow)
    operand_count = len(operands.rows)

    def body(*refs: Ref) -> None:
        row_refs, result_refs, scratch = split(refs, operand_count, len(results))
        exchange.open(scratch)
        row = tile.row_index(rows)
        loaded = [tile.load(ref, row) for ref in row_refs]
        wide = [[widen(v, tile.layout) for v in values] for values in loaded]
        elements = list(zip(*wide))  # of each piece
        terms = [formula.terms(v[: formula.summed], (), ()) for v in elements]
        totals = [tile.sum(term) for term in zip(*terms)]
        if is_split:
            exchange.ready()
            exchange.publish(scratch, totals)
            totals = exchange.collect(scratch)
        finished = []
        for v in elements:
            broadcast = [tile.broadcast(total, v[0]) for total in totals]
            finished.append(formula.finish(v, (), (), broadcast)[0])
        for ref, values in zip(result_refs, zip(*finished)):
            tile.store(ref, row, values)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[((rows, cols), dtype) for dtype in results],
        blocks=tile.blocks(rows),
        cluster=tile.cluster,
        warpgroups=tile.warpgroups,
        scratch=exchange.scratch() if is_split else (),
        auto_barriers=False,
    )
