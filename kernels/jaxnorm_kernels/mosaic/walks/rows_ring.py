"""Backward passes over narrow rows: a warp holds whole rows, a stage of the ring many.

As in `ring`, a persistent block carries its column sums in registers while the copy engine (TMA)
keeps a ring of shared memory filled. Rows lie side by side in memory, so that a stage is one copy
of each input. No sum leaves its warp, until the end: then the warps' column sums meet in shared
memory.

The last stage of all overlaps the one before it where the rows do not divide; its first rows are
*stale*: they are written twice, and count once.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.barriers import in_plain_order, warpgroup_barrier
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch, split
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    Layout,
    Ref,
    columns_layout,
    load,
    store,
    widen,
)
from jaxnorm_kernels.mosaic.device.registers import load_columns
from jaxnorm_kernels.mosaic.rows.pieces import Piece
from jaxnorm_kernels.mosaic.rows.shares import Share
from jaxnorm_kernels.mosaic.rows.tiles import RowTile
from jaxnorm_kernels.mosaic.walks.formulas import Arrays, Formula, Refs, RowOperands, prepare
from jaxnorm_kernels.mosaic.walks.stages import Stages

# Rows of column sums whose loads are under way together, at the end of a block.
_ADDED_AT_A_TIME = 8


@dataclasses.dataclass(frozen=True)
class RowsRing:
    """Parameters of the kernel.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      threads: of a warp, that share a row.
      rows: of a stage, a multiple of `height`.
      stages: of the ring.
      blocks_per_sm: that fit a multiprocessor at the same time.
    """

    vector: int
    threads: int = WARP
    rows: int = 4
    stages: int = 4
    blocks_per_sm: int = 3

    @property
    def height(self) -> int:
        """Rows that the warpgroup holds at a time."""
        return WARPGROUP_THREADS // self.threads

    def tile(self, cols: int) -> RowTile:
        """How it holds them."""
        return RowTile(cols, self.vector, threads=self.threads, height=self.height)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What a block, which is a warpgroup, does with its rows, tile by tile.

    Attributes:
      tops: first rows of the tiles of a stage.
      stages, held: the ring, and ``(stages, rows, columns)`` of each row operand.
      shared: for each piece of a row its columns of all rows of a tile, to add up.
      columns: what the formula needs of the parameters, for each piece.
    """

    formula: Formula
    tile: RowTile
    tops: Sequence[int]
    refs: Refs
    stages: Stages
    held: Sequence[Ref]
    share: Share
    shared: Sequence[Ref]
    columns: Sequence[Arrays]

    def run(self, block: Any) -> None:
        """Each step in turn; then the column sums of the block are written."""
        carried = self.no_sums()
        start = (self.statistics(jnp.int32(0)), carried)
        _, carried = lax.fori_loop(0, self.stages.steps, self.step, start)
        for j, target in enumerate(self.refs.partials):
            for ref, value in zip(self.shared, carried[j :: self.formula.column_sums]):
                store(ref, value)
            warpgroup_barrier()
            layout = columns_layout(self.tile.vector, self.tile.threads)
            for piece, ref in zip(self.tile.pieces(), self.shared):
                store(target.at[block, piece.columns()], sum_of_rows(ref, layout))
            warpgroup_barrier()

    def step(self, k: Any, carry: Any) -> Any:
        """The row results of step `k` and, with it, the column sums; then its stage is free."""
        stats, carried = carry
        # The next rows' statistics have all of this stage's work to arrive.
        ahead = self.statistics(jnp.minimum(k + 1, self.stages.steps - 1))
        at = self.stages.wait(k)
        for top, of_tile in zip(self.tops, stats):
            carried = self.finish_tile(k, at, top, of_tile, carried)
        self.stages.refill(k)
        return ahead, carried

    def statistics(self, k: Any) -> list[list[jax.Array]]:
        """Those of the rows of step `k`, for each tile."""
        first, layout = self.share.first_row(k), self.tile.layout.reduce(1)
        return [
            [load(ref.at[pl.ds(first + top, self.tile.height)], layout) for ref in self.refs.stats]
            for top in self.tops
        ]

    def finish_tile(
        self, k: Any, at: Any, top: int, stats: Arrays, carried: Arrays
    ) -> list[jax.Array]:
        """Reduces the rows of a tile, stores their results, and adds to the column sums."""
        tile, formula = self.tile, self.formula
        summed = self.read(at, top, self.held[: formula.summed])
        of_rows = [[tile.broadcast(stat, v) for stat in stats] for v, *_ in summed]
        of_columns = [
            [lax.broadcast_in_dim(c, v.shape, (1,)) for c in columns]
            for columns, (v, *_) in zip(self.columns, summed)
        ]
        pieces = list(zip(summed, of_columns, of_rows))
        totals = [tile.sum(term) for term in zip(*(formula.terms(*piece) for piece in pieces))]
        first, added, results = self.share.first_row(k), [], []
        rest = self.read(at, top, self.held[formula.summed :])
        for (elements, columns, of_row), others in zip(pieces, rest):
            broadcast = [tile.broadcast(total, elements[0]) for total in totals]
            values, terms = formula.finish([*elements, *others], columns, of_row, broadcast)
            results.append(values)
            added += [self.skip_stale(term, k, first + top) for term in terms]
        for ref, of_pieces in zip(self.refs.results, zip(*results)):
            tile.store(ref, pl.ds(first + top, tile.height), of_pieces)
        return [a + b for a, b in zip(carried, added)]

    def read(self, at: Any, top: int, held: Sequence[Ref]) -> list[list[jax.Array]]:
        """For each piece of a tile, its elements of some of the operands, in float32."""
        layout, rows = self.tile.layout, pl.ds(top, self.tile.height)

        def elements(ref: Ref, piece: Piece) -> jax.Array:
            loaded = load_columns(ref.at[at, rows], piece.start, piece.width, layout)
            return widen(loaded, layout)

        return [[elements(ref, piece) for ref in held] for piece in self.tile.pieces()]

    def skip_stale(self, term: jax.Array, k: Any, first: Any) -> jax.Array:
        """`term`, and 0 in the rows that are in a step before `k`, too."""
        if not self.share.has_stale_rows:
            return term
        row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
        return jnp.where(self.share.is_new(row, k), term, jnp.float32(0))

    def no_sums(self) -> list[jax.Array]:
        """0 for each column sum of each piece."""
        tile = self.tile
        return [
            plgpu.layout_cast(jnp.zeros(tile.shape(piece.width), jnp.float32), tile.layout)
            for piece in tile.pieces()
            for _ in range(self.formula.column_sums)
        ]


def sum_of_rows(ref: Ref, layout: Layout) -> jax.Array:
    """The sums over the rows of a ``(height, n)`` ref in shared memory, for each of its columns."""
    height, _ = ref.shape
    together = min(height, _ADDED_AT_A_TIME)

    def add(i: Any, total: jax.Array) -> jax.Array:
        first = i * together
        parts = [load(ref.at[first + row], layout) for row in range(together)]
        return functools.reduce(jnp.add, parts, total)

    zeros = plgpu.layout_cast(jnp.zeros(ref.shape[1:], jnp.float32), layout)
    return lax.fori_loop(0, height // together, add, zeros)


def rows_ring_backward(
    formula: Formula,
    operands: RowOperands,
    *,
    schedule: RowsRing,
    blocks: int,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results, then for each column sum its partial sums, one row for each block.

    `blocks` are those of a group of rows.
    """
    ring, (rows, cols), groups = schedule, operands.shape, operands.groups
    if ring.rows % ring.height or rows // groups < ring.rows:
        raise ValueError(f"{ring} needs k * {ring.height} rows, not {rows // groups}")
    tile = ring.tile(cols)
    pieces = tile.pieces()
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*arguments: Ref) -> None:
        refs = Refs.of(arguments, sizes, len(results), formula.column_sums)
        held, shared, (full,) = split(refs.scratch, len(refs.rows), len(pieces))
        in_plain_order(*held, *shared)
        block = lax.axis_index(BLOCK)
        share = Share.of(block, rows=rows, groups=groups, blocks=blocks, height=ring.rows)

        def copies(k: Any, at: Any) -> Iterable[tuple[Ref, Ref]]:
            step = pl.ds(share.first_row(k), ring.rows)
            return ((source.at[step], stages.at[at]) for source, stages in zip(refs.rows, held))

        stages = Stages(ring.stages, share.count(), full, copies)
        stages.start()
        params = [share.param(ref) for ref in refs.params]
        layout = columns_layout(ring.vector, ring.threads)
        columns = [
            prepare(formula, [load(ref.at[piece.columns()], layout) for ref in params])
            for piece in pieces
        ]
        tops = range(0, ring.rows, ring.height)
        _Kernel(formula, tile, tops, refs, stages, held, share, shared, columns).run(block)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[
            *[((rows, cols), dtype) for dtype in results],
            *[((groups * blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        blocks=groups * blocks,
        scratch=[
            *[plgpu.SMEM((ring.stages, ring.rows, cols), v.dtype) for v in operands.rows],
            *[plgpu.SMEM((ring.height, piece.width), jnp.float32) for piece in pieces],
            plgpu.Barrier(num_arrivals=len(operands.rows), num_barriers=ring.stages),
        ],
        auto_barriers=False,
    )
