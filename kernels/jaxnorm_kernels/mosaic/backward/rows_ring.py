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
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.backward.formulas import Arrays, Formula, Operands, prepare, split
from jaxnorm_kernels.mosaic.device.barriers import in_plain_order, release_used, warpgroup_barrier
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    Ref,
    columns_layout,
    load,
    store,
)
from jaxnorm_kernels.mosaic.device.registers import load_columns, widen
from jaxnorm_kernels.mosaic.rows.shares import Share
from jaxnorm_kernels.mosaic.rows.tiles import Piece, RowTile

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


def rows_ring_backward(
    formula: Formula,
    operands: Operands,
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
    height = ring.height
    if ring.rows % height or rows // groups < ring.rows:
        raise ValueError(f"{ring} needs k * {height} rows, and {rows // groups} rows are given")
    tile = RowTile(cols, ring.vector, threads=ring.threads, height=height)
    column_layout = columns_layout(ring.vector, ring.threads)
    tops = range(0, ring.rows, height)  # of the tiles of a stage
    pieces = tile.pieces()
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*refs: Ref) -> None:
        row_refs, stat_refs, param_refs, refs = split(refs, *sizes)
        result_refs, partial_refs, scratch = split(refs, len(results), formula.column_sums)
        rings, shared, (full,) = split(scratch, len(row_refs), len(pieces))
        in_plain_order(*rings, *shared)
        block = lax.axis_index(BLOCK)
        share = Share.of(block, rows=rows, groups=groups, blocks=blocks, height=ring.rows)
        count = share.count()

        def fill(k: Any) -> None:
            at = lax.rem(k, ring.stages)
            first = share.first_row(k)
            for source, target in zip(row_refs, rings):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(first, ring.rows)],
                    target.at[at],
                    full.at[at],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # of any length
                )

        pl.loop(0, jnp.minimum(ring.stages, count))(fill)
        columns = [
            prepare(
                formula, [load(share.param(ref).at[here(p)], column_layout) for ref in param_refs]
            )
            for p in pieces
        ]

        def statistics(k: Any) -> list[list[jax.Array]]:
            """Those of the rows of a stage, for each tile."""
            first, layout = share.first_row(k), tile.layout.reduce(1)
            return [
                [load(ref.at[pl.ds(first + top, height)], layout) for ref in stat_refs]
                for top in tops
            ]

        def step(k: Any, carry: Any) -> Any:
            now, carried = carry
            # The next rows' statistics have all of this stage's work to arrive.
            ahead = statistics(jnp.minimum(k + 1, count - 1))
            at = lax.rem(k, ring.stages)
            plgpu.barrier_wait(full.at[at])
            for top, row_stats in zip(tops, now):
                carried = one_tile(k, at, top, row_stats, carried)
            release_used()
            pl.when(k + ring.stages < count)(functools.partial(fill, k + ring.stages))
            return ahead, carried

        def one_tile(
            k: Any, at: Any, top: int, row_stats: Arrays, carried: Arrays
        ) -> list[jax.Array]:
            def read(ref: Ref, piece: Piece) -> jax.Array:
                of_tile = ref.at[at, pl.ds(top, height)]
                loaded = load_columns(of_tile, piece.start, piece.width, tile.layout)
                return widen(loaded, tile.layout)

            def read_all(some: Sequence[Ref]) -> list[list[jax.Array]]:
                """Of each piece, its elements in some of the rings."""
                return [[read(ref, p) for ref in some] for p in pieces]

            summed = read_all(rings[: formula.summed])
            broadcast = [[tile.broadcast(stat, v) for stat in row_stats] for v, *_ in summed]
            given = [
                [lax.broadcast_in_dim(c, v.shape, (1,)) for c in own]
                for own, (v, *_) in zip(columns, summed)
            ]
            args = list(zip(summed, given, broadcast))
            totals = [tile.sum(term) for term in zip(*(formula.terms(*a) for a in args))]
            first, added, results_of = share.first_row(k), [], []
            for (elements, *a), rest in zip(args, read_all(rings[formula.summed :])):
                to_piece = [tile.broadcast(total, elements[0]) for total in totals]
                values, terms = formula.finish([*elements, *rest], *a, to_piece)
                results_of.append(values)
                added += [skip_stale_rows(term, k, first + top) for term in terms]
            for ref, pieces_of in zip(result_refs, zip(*results_of)):
                tile.store(ref, pl.ds(first + top, height), pieces_of)
            return [a + b for a, b in zip(carried, added)]

        def skip_stale_rows(term: jax.Array, k: Any, first: Any) -> jax.Array:
            if not share.has_stale_rows:
                return term
            row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
            return jnp.where(share.is_new(row, k), term, jnp.float32(0))

        def add_rows(ref: Ref) -> jax.Array:
            """The sums over the rows of a ``(height, n)`` ref, for each of its columns."""

            def add(i: Any, total: jax.Array) -> jax.Array:
                first = i * together
                parts = [load(ref.at[first + row], column_layout) for row in range(together)]
                return functools.reduce(jnp.add, parts, total)

            together = min(height, _ADDED_AT_A_TIME)
            zeros = plgpu.layout_cast(jnp.zeros(ref.shape[1:], jnp.float32), column_layout)
            return lax.fori_loop(0, height // together, add, zeros)

        carried = [
            plgpu.layout_cast(jnp.zeros(tile.shape(p.width), jnp.float32), tile.layout)
            for p in pieces
            for _ in range(formula.column_sums)
        ]
        start = (statistics(jnp.int32(0)), carried)
        _, carried = lax.fori_loop(0, count, step, start)
        for j, target in enumerate(partial_refs):
            for ref, value in zip(shared, carried[j :: formula.column_sums]):
                store(ref, value)
            warpgroup_barrier()
            for p, ref in zip(pieces, shared):
                store(target.at[block, here(p)], add_rows(ref))
            warpgroup_barrier()

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
            *[plgpu.SMEM((height, p.width), jnp.float32) for p in pieces],
            plgpu.Barrier(num_arrivals=len(operands.rows), num_barriers=ring.stages),
        ],
        auto_barriers=False,
    )


def here(piece: Piece) -> Any:
    """The columns of a piece."""
    return pl.ds(piece.start, piece.width)
