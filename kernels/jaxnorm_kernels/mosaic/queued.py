"""Rows in registers that wait for their turn in shared memory: a tile fed by the copy engine."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.launch import BLOCK, WARPGROUP
from jaxnorm_kernels.mosaic.tiles import Ref, SplitRow, Stat, load


@dataclasses.dataclass(frozen=True)
class QueuedRow(SplitRow):
    """Rows of a block in turn, each in `split` warpgroups: block b of `grid` does b, b + grid, ...

    Asynchronous copies (TMA) queue the rows to come in shared memory, `slots` of them; a slot is
    filled again as soon as its row is in registers. So memory stays busy through the reductions of
    a row, and what belongs to the columns may stay in registers from row to row.
    """

    slots: int = 4
    grid: int = 132

    def blocks(self, rows: int) -> int:
        return min(rows, self.grid)

    def gather(self, scratch: Sequence[Any], *stats: Stat, row: Any) -> list[jax.Array]:
        # Two turns of scratch: a warpgroup may be one row ahead of another that still reads.
        turn = lax.rem(lax.div(row, lax.axis_size(BLOCK)), 2)
        return self.exchange.gather(scratch[:2], *stats, turn=turn)

    @property
    def _widths(self) -> list[int]:
        body = self.cols // (self.split * self.unit) * self.unit
        return [body] if self.split * body == self.cols else [body, self.unit]

    def scratch(self, stats: int, dtype: np.dtype) -> list[Any]:
        slots = self.split * self.slots
        return [
            *self.exchange.scratch(stats, turns=2),
            plgpu.SMEM((slots, sum(self._widths)), dtype),
            plgpu.Barrier(num_arrivals=len(self._widths), num_barriers=slots),
        ]

    def each_row(
        self,
        x: Ref,
        rows: int,
        scratch: Sequence[Any],
        body: Callable[[Any, list[jax.Array]], None],
    ) -> None:
        *_, queue, filled = scratch
        block, blocks = lax.axis_index(BLOCK), self.blocks(rows)
        count = lax.div(rows - block + blocks - 1, blocks)
        pieces = list(zip(self.pieces(), [0, *self._widths]))  # and where they lie in a slot

        def slot(k: Any) -> Any:
            return lax.axis_index(WARPGROUP) * self.slots + lax.rem(k, self.slots)

        def fill(k: Any) -> None:
            @pl.when(k < count)
            def _() -> None:
                for p, at in pieces:
                    plgpu.copy_gmem_to_smem(
                        x.at[block + k * blocks, pl.ds(p.start, p.width)],
                        queue.at[slot(k), pl.ds(at, p.width)],
                        filled.at[slot(k)],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one copy of any length
                    )

        def one(k: Any) -> None:
            plgpu.barrier_wait(filled.at[slot(k)])
            raw = [
                load(queue.at[slot(k), pl.ds(at, p.width)], self.layout, self.shape(p.width))
                for p, at in pieces
            ]
            plgpu.commit_smem()  # every warp has its part of the row: the slot may be filled again
            fill(k + self.slots)
            body(block + k * blocks, raw)

        for k in range(self.slots):
            fill(jnp.int32(k))
        pl.loop(0, count)(one)
