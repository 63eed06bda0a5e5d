"""Pipelined tiles: asynchronous copies load the next rows while a block computes the current one.

A tile is a row, or a group of narrow rows. A block processes `tiles` tiles, one after the other.
Asynchronous copies (TMA) load the tiles into `slots` buffers in shared memory. A slot is refilled
as soon as its rows are in registers, so memory transfers continue during reductions. Column
parameters (such as a scale) are loaded once per block. The last tiles of the array are the `tail`.
Each of them has its own block, so that all multiprocessors finish at about the same time::

    rows     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 | 13 | 14      tiles = 4, tail = 3
    block       0    |    1    |     2     |  3 |  4 |  5
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device import layouts
from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    WARPGROUP,
    in_plain_order,
    release_read,
    release_used,
)
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.device.registers import load_columns, opaque
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.tiles import LoadedRow, RowTile, SplitRow, Steps, Tile


@dataclasses.dataclass(frozen=True)
class Pipelined(Tile):
    """A tile whose rows are loaded by asynchronous copies, ahead of their use.

    Attributes:
      slots: number of buffers in shared memory that each warpgroup has. A buffer contains the
        warpgroup's columns of one row (or group of narrow rows).
      tiles: number of rows (or groups of narrow rows) that a block processes.
      tail: number of rows (or groups) at the end of the array. Each of them is processed by a block
        that processes no other row (or group).
      rereads: True if a row stays in shared memory until its results are stored, and is read again
        for each use. It then occupies no registers in between.
    """

    slots: int = 2
    tiles: int = 4
    tail: int = 0
    rereads: bool = False

    def blocks(self, rows: int) -> int:
        whole = self.whole_blocks(rows)
        return whole + super().blocks(rows) - whole * self.tiles

    def whole_blocks(self, rows: int) -> int:
        """Return the number of blocks that process `tiles` rows (or groups of rows) each.

        The remaining blocks process one row (or group) each.
        """
        return max(0, super().blocks(rows) - self.tail) // self.tiles

    def first(self, rows: int) -> Any:
        """Return the index of the first row (or group of rows) that this block processes."""
        block, whole = lax.axis_index(BLOCK), self.whole_blocks(rows)
        return jnp.where(block < whole, block * self.tiles, block + whole * (self.tiles - 1))

    def first_row(self, rows: int) -> Any:
        return self.row_index(rows, self.first(rows))

    def slot_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each buffer in shared memory for a row (or group of rows).

        Each copy fills one buffer.
        """
        raise NotImplementedError

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        """Return a pair (source, target) for each copy that loads a row (or group of rows).

        The target is a buffer in shared memory. Each copy moves consecutive bytes.
        """
        raise NotImplementedError

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        """Load a row from its buffers in shared memory, in the buffers' dtype.

        Returns a list with one array for each fragment (range of columns).
        """
        raise NotImplementedError

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        count, shapes = self.warpgroups * self.slots, self.slot_shapes()
        return [
            *super().scratch(stats, dtypes),
            *[plgpu.SMEM((count, *shape), dtype) for dtype in dtypes for shape in shapes],
            plgpu.Barrier(num_arrivals=len(dtypes) * len(shapes), num_barriers=count),
        ]

    def each_row(
        self, operands: Sequence[Ref], rows: int, scratch: Sequence[Any], steps: Steps
    ) -> None:
        *_, filled = scratch
        parts = len(self.slot_shapes())
        arrays = scratch[-1 - len(operands) * parts : -1]
        in_plain_order(*arrays)
        # One list per operand, with one ref per fragment (range of columns). A ref contains the
        # fragment's columns in all slots.
        queues = [arrays[at : at + parts] for at in range(0, len(arrays), parts)]
        self.open(scratch)
        first = self.first(rows)
        count: Any = 1
        if self.tiles > 1:
            whole = lax.axis_index(BLOCK) < self.whole_blocks(rows)
            # The copies below are executed if ``k < count``. If the compiler knew that this
            # condition is true, it would remove the branch, and could then move the wait for
            # `params` above the copies. So the value of `count`, the number of tiles, is hidden
            # from the compiler.
            count = opaque(jnp.where(whole, self.tiles, 1))

        def slot(k: Any) -> Any:
            return lax.axis_index(WARPGROUP) * self.slots + lax.rem(k, self.slots)

        def index(k: Any) -> Any:
            return self.row_index(rows, first + k)

        def fill(k: Any) -> None:
            @pl.when(k < count)
            def _() -> None:
                row, at = index(k), slot(k)
                for x, queue in zip(operands, queues):
                    for source, target in self.copies(x, row, [array.at[at] for array in queue]):
                        plgpu.copy_gmem_to_smem(
                            source,
                            target,
                            filled.at[at],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # allows any row length
                        )

        def read(k: Any) -> list[tuple[jax.Array, ...]]:
            at = slot(k)
            raw = [self.read([array.at[at] for array in queue]) for queue in queues]
            return [steps.load(*fragment) for fragment in zip(*raw)]

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
            # Load column parameters before the rows, because all rows wait for them. This raises
            # the bandwidth of LayerNorm over 5120 columns from 0.92 to 0.94 of a copy's bandwidth.
            loaded = steps.params()
            start()
        shared = steps.prepare(loaded)
        self.ready()
        pl.loop(0, count)(one)


@dataclasses.dataclass(frozen=True)
class PipelinedRow(Pipelined, SplitRow):
    """A tile whose rows are loaded by asynchronous copies and shared by several warpgroups."""

    @functools.cached_property
    def exchange(self) -> Gather:
        return Gather(self.warpgroups, self.cluster, slots=2)

    def slot_shapes(self) -> list[tuple[int, ...]]:
        # Each fragment (column range) has its own buffer, because Mosaic can load a slice of a
        # buffer's columns only if the slice's width divides the width of the buffer.
        part = self.partition()
        bodies = [part.unit] * part.units if self.apart else [part.body_width]
        return [(width,) for width in [*bodies, *[part.unit] * part.has_tail]]

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        return [(x.at[index, p.columns()], slot) for p, slot in zip(self.fragments(), slots)]

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        shapes = [self.shape(p.width) for p in self.fragments()]
        return [layouts.load(slot, self.layout, s) for slot, s in zip(slots, shapes)]


@dataclasses.dataclass(frozen=True)
class PipelinedTile(Pipelined, RowTile):
    """A tile that processes groups of narrow rows, which asynchronous copies load."""

    def slot_shapes(self) -> list[tuple[int, ...]]:
        return [(self.height, self.cols)]

    def copies(self, x: Ref, index: Any, slots: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        return [(x.at[index], slot) for slot in slots]

    def read(self, slots: Sequence[Ref]) -> list[jax.Array]:
        (slot,) = slots
        return [load_columns(slot, p.start, p.width, self.layout) for p in self.fragments()]
