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

from jaxnorm_kernels.mosaic.backward.formulas import Arrays, Formula, prepare, split
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
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.forward.tiles import Piece, RowTile


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
    saved: jax.Array,
    dy: jax.Array,
    stats: Arrays,
    params: Arrays,
    *,
    schedule: RowsRing,
    blocks: int,
    dx_dtype: np.dtype,
    name: str,
) -> tuple[jax.Array, ...]:
    """dx, then for each column sum of the formula its partial sums, one row for each block."""
    ring, (rows, cols) = schedule, saved.shape
    height = ring.height
    if ring.rows % height or rows < ring.rows:
        raise ValueError(f"{ring} needs k * {height} rows, and {rows} rows are given")
    tile = RowTile(cols, ring.vector, threads=ring.threads, height=height)
    column_layout = columns_layout(ring.vector, ring.threads)
    groups = range(0, ring.rows, height)
    # A piece of rows has its own array in shared memory: Mosaic reads a slice of columns only where
    # its width divides the row. So rows of two pieces are copied one by one.
    pieces = tile.pieces()
    copies = 2 if len(pieces) == 1 else 2 * len(pieces) * ring.rows
    tiles = -(-rows // ring.rows)
    sizes = len(stats), len(params)  # What traces the body keeps it: it may hold no traced array.

    def body(saved_ref: Ref, dy_ref: Ref, *refs: Ref) -> None:
        stat_refs, param_refs, refs = split(refs, *sizes)
        dx_ref, partial_refs, scratch = refs[0], refs[1 : 1 + formula.column_sums], refs[1:]
        scratch = scratch[formula.column_sums :]
        saved_ring, dy_ring, shared, scratch = split(scratch, *[len(pieces)] * 3)
        (full,) = scratch
        in_plain_order(*saved_ring, *dy_ring, *shared)
        block = lax.axis_index(BLOCK)
        count = lax.div(tiles - block + blocks - 1, blocks)  # stages of this block

        def first_row(k: Any) -> Any:
            return jnp.minimum((block + k * blocks) * ring.rows, rows - ring.rows)

        def fill(k: Any) -> None:
            at = lax.rem(k, ring.stages)
            first = first_row(k)
            for source, targets in ((saved_ref, saved_ring), (dy_ref, dy_ring)):
                if len(pieces) == 1:
                    copy(source.at[pl.ds(first, ring.rows)], targets[0].at[at], full.at[at])
                    continue
                for row in range(ring.rows):
                    for p, target in zip(pieces, targets):
                        copy(source.at[first + row, here(p)], target.at[at, row], full.at[at])

        for k in range(ring.stages):
            pl.when(k < count)(functools.partial(fill, jnp.int32(k)))
        columns = [
            prepare(formula, [load(ref.at[here(p)], column_layout) for ref in param_refs])
            for p in pieces
        ]

        def statistics(k: Any) -> list[list[jax.Array]]:
            """Those of the rows of a stage, for each group of rows."""
            first, layout = first_row(k), tile.layout.reduce(1)
            return [
                [load(ref.at[pl.ds(first + group, height)], layout) for ref in stat_refs]
                for group in groups
            ]

        def step(k: Any, carry: Any) -> Any:
            now, carried = carry
            # The next rows' statistics have all of this stage's work to arrive.
            ahead = statistics(jnp.minimum(k + 1, count - 1))
            at = lax.rem(k, ring.stages)
            plgpu.barrier_wait(full.at[at])
            for group, row_stats in zip(groups, now):
                carried = one_group(k, at, group, row_stats, carried)
            release_used()
            pl.when(k + ring.stages < count)(functools.partial(fill, k + ring.stages))
            return ahead, carried

        def one_group(
            k: Any, at: Any, group: int, row_stats: Arrays, carried: Arrays
        ) -> list[jax.Array]:
            def read(refs: Sequence[Ref]) -> list[jax.Array]:
                loaded = [load(ref.at[at, pl.ds(group, height)], tile.layout) for ref in refs]
                return [widen(v, tile.layout) for v in loaded]

            x, d = read(saved_ring), read(dy_ring)
            spread = [[tile.spread(stat, v) for stat in row_stats] for v in x]
            given = [
                [lax.broadcast_in_dim(c, v.shape, (1,)) for c in own] for own, v in zip(columns, x)
            ]
            elements = list(zip(x, d, given, spread))
            totals = [tile.sum(term) for term in zip(*(formula.terms(*e) for e in elements))]
            first, added, dx = first_row(k), [], []
            for e in elements:
                v, terms = formula.finish(*e, [tile.spread(total, e[0]) for total in totals])
                dx.append(v)
                added += [skip_stale_rows(term, k, first + group) for term in terms]
            tile.store(dx_ref, pl.ds(first + group, height), dx)
            return [a + b for a, b in zip(carried, added)]

        def skip_stale_rows(term: jax.Array, k: Any, first: Any) -> jax.Array:
            if rows % ring.rows == 0:
                return term
            row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
            return jnp.where(row >= (block + k * blocks) * ring.rows, term, jnp.float32(0))

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
                parts = [load(ref.at[row], column_layout) for row in range(height)]
                store(target.at[block, here(p)], functools.reduce(jnp.add, parts))
            warpgroup_barrier()

    return launch(
        body,
        [saved, dy, *stats, *params],
        name=name,
        outputs=[
            ((rows, cols), dx_dtype),
            *[((blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        blocks=blocks,
        scratch=[
            *[plgpu.SMEM((ring.stages, ring.rows, p.width), saved.dtype) for p in pieces],
            *[plgpu.SMEM((ring.stages, ring.rows, p.width), dy.dtype) for p in pieces],
            *[plgpu.SMEM((height, p.width), jnp.float32) for p in pieces],
            plgpu.Barrier(num_arrivals=copies, num_barriers=ring.stages),
        ],
        auto_barriers=False,
    )


def copy(source: Ref, target: Ref, barrier: Ref) -> None:
    mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=mode)


def here(piece: Piece) -> Any:
    return pl.ds(piece.start, piece.width)
