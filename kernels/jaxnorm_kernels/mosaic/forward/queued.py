"""Rows in registers that wait for their turn in shared memory: tiles fed by the copy engine.

A block takes `tiles` rows, or groups of rows, one after the other. Asynchronous copies (TMA) queue
them in shared memory, `slots` of them; a slot is filled again as soon as its rows are in registers.
So memory stays busy through the reductions of a row, and what belongs to the columns stays in
registers from row to row. The last blocks, which take the `tail`, take one each, so that all
multiprocessors end at about the same time::

    rows     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 | 13 | 14      tiles = 4, tail = 3
    block       0    |    1    |     2     |  3 |  4 |  5
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import layouts
from jaxnorm_kernels.mosaic.device.barriers import in_plain_order, release_read, release_used
from jaxnorm_kernels.mosaic.device.launch import WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.device.registers import opaque
from jaxnorm_kernels.mosaic.rows.exchange import Exchange
from jaxnorm_kernels.mosaic.rows.split_row import SplitRow
from jaxnorm_kernels.mosaic.rows.tiles import LoadedRow, Piece, RowTile, Steps, Tile


@dataclasses.dataclass(frozen=True)
class Queue(Tile):
    """What makes a queued tile of a tile. Each warpgroup has a queue for what it holds of a row.

    With `rereads`, a row stays in shared memory until it is done, and holds no registers meanwhile.
    """

    slots: int = 2
    tiles: int = 4
    tail: int = 0
    rereads: bool = False

    def blocks_of(self, rows: int) -> int:
        whole = self.whole_blocks(rows)
        return whole + super().blocks_of(rows) - whole * self.tiles

    def whole_blocks(self, rows: int) -> int:
        """The blocks that take all their tiles. They come first; each of the others takes one."""
        return max(0, super().blocks_of(rows) - self.tail) // self.tiles

    def first(self, rows: int) -> Any:
        """The first that this block takes, of all rows or groups of them."""
        block, whole = self.own_block(), self.whole_blocks(rows)
        return jnp.where(block < whole, block * self.tiles, block + whole * (self.tiles - 1))

    def first_row(self, rows: int) -> Any:
        return self.row_index(rows, self.first(rows))

    def slot_shape(self, width: int) -> tuple[int, ...]:
        """Shape in shared memory of a piece of `width` columns."""
        raise NotImplementedError

    def widths(self) -> list[int]:
        """Those of `pieces`, which are the same in each warpgroup."""
        raise NotImplementedError

    def copies(self, x: Ref, index: Any, piece: Piece, slot: Ref) -> list[tuple[Ref, Ref]]:
        """The copies, each of consecutive bytes, that bring a piece of a row into its slot."""
        raise NotImplementedError

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        count = self.warpgroups * self.slots
        widths = self.widths()
        copies = len(dtypes) * len(widths) * (self.rows if len(widths) > 1 else 1)
        return [
            *super().scratch(stats, dtypes),
            # A piece has an array of its own: Mosaic reads a slice of columns only where its width
            # divides the row.
            *[plgpu.SMEM((count, *self.slot_shape(width)), d) for d in dtypes for width in widths],
            plgpu.Barrier(num_arrivals=copies, num_barriers=count),
        ]

    def each_row(
        self, operands: Sequence[Ref], rows: int, scratch: Sequence[Any], steps: Steps
    ) -> None:
        pieces = self.pieces()
        *_, filled = scratch
        arrays = scratch[-1 - len(operands) * len(pieces) : -1]
        in_plain_order(*arrays)
        queues = [arrays[k :: len(pieces)] for k in range(len(pieces))]  # of each piece
        self.open(scratch)
        rows = self.own_rows(rows)
        first = self.first(rows)
        count: Any = 1
        if self.tiles > 1:
            whole = self.own_block() < self.whole_blocks(rows)
            # Of a copy that starts in any case, the compiler moves ahead what waits for `params`.
            count = opaque(jnp.where(whole, self.tiles, 1))

        def slot(k: Any) -> Any:
            return lax.axis_index(WARPGROUP) * self.slots + lax.rem(k, self.slots)

        def index(k: Any) -> Any:
            return self.row_index(rows, first + k)

        def fill(k: Any) -> None:
            @pl.when(k < count)
            def _() -> None:
                for p, queue in zip(pieces, queues):
                    for x, q in zip(operands, queue):
                        for source, target in self.copies(x, index(k), p, q.at[slot(k)]):
                            plgpu.copy_gmem_to_smem(
                                source,
                                target,
                                filled.at[slot(k)],
                                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # of any length
                            )

        def read(k: Any) -> list[tuple[jax.Array, ...]]:
            return [
                steps.load(*[layouts.load(q.at[slot(k)], self.layout_of(s), s) for q in queue])
                for s, queue in zip([self.shape(p.width) for p in pieces], queues)
            ]

        def refill(k: Any, release: Callable[[], None]) -> None:
            if self.tiles > self.slots:
                release()
                fill(k + self.slots)

        def one(k: Any) -> None:
            plgpu.barrier_wait(filled.at[slot(k)])
            if self.rereads:
                steps.finish(LoadedRow(index(k), k, lambda: read(k)), shared)
                refill(k, release_used)
            else:
                loaded = read(k)
                refill(k, release_read)
                steps.finish(LoadedRow(index(k), k, lambda: loaded), shared)

        def start() -> None:
            for k in range(self.slots):
                fill(jnp.int32(k))

        if self.tiles == 1:
            start()
            loaded = steps.params()
        else:
            # What all rows wait for comes first: 0.94 of a copy for 0.92 (LayerNorm, 5120 columns).
            loaded = steps.params()
            start()
        shared = steps.prepare(loaded)
        self.ready()
        pl.loop(0, count)(one)


@dataclasses.dataclass(frozen=True)
class QueuedRow(Queue, SplitRow):
    """A `SplitRow` at a time."""

    @property
    def exchange(self) -> Exchange:
        return dataclasses.replace(super().exchange, stages=2)

    def slot_shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def widths(self) -> list[int]:
        whole = self.cluster * self.split * self.body == self.cols
        bodies = [self.unit] * (self.body // self.unit) if self.apart else [self.body]
        return bodies if whole else [*bodies, self.tail_width]

    def copies(self, x: Ref, index: Any, piece: Piece, slot: Ref) -> list[tuple[Ref, Ref]]:
        return [(self.part(x, index, piece), slot)]


@dataclasses.dataclass(frozen=True)
class QueuedTile(Queue, RowTile):
    """A `RowTile` at a time."""

    def slot_shape(self, width: int) -> tuple[int, ...]:
        return (self.height, width)

    def widths(self) -> list[int]:
        return [p.width for p in self.pieces()]

    def copies(self, x: Ref, index: Any, piece: Piece, slot: Ref) -> list[tuple[Ref, Ref]]:
        if piece.width == self.cols:
            return [(x.at[index], slot)]
        columns = pl.ds(piece.start, piece.width)
        return [(x.at[index.start + row, columns], slot.at[row]) for row in range(self.height)]
