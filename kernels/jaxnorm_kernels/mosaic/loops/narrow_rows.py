"""Pipelined backward passes over narrow rows: a warp holds whole rows, a stage many of them.

As in `pipelined`, a persistent block accumulates its column sums in registers while asynchronous
copies (TMA) fill stages of shared memory. Rows are adjacent in memory, so a stage is filled with
one copy per input. Each sum over a row stays within a warp. At the end, the column sums of all
warps are added in shared memory.

If the number of rows is not a multiple of the rows of a stage, the last stage overlaps the previous
one. The rows in both are *stale* in the last stage: they are stored twice, and count once in sums.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    in_plain_order,
    launch,
    split,
    warpgroup_barrier,
)
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    Layout,
    Ref,
    load,
    load_wide,
    load_wide_columns,
    store,
)
from jaxnorm_kernels.mosaic.loops.formulas import (
    Arrays,
    BackwardRefs,
    Formula,
    RowOperands,
    prepare,
)
from jaxnorm_kernels.mosaic.loops.pipelined import Share, Stages
from jaxnorm_kernels.mosaic.rows.heads import HeadTile
from jaxnorm_kernels.mosaic.rows.tiles import RowTile

# The number of rows of column sums that are loaded at the same time at the end of a block.
_ADDED_AT_A_TIME = 8

#: The values of a tile's rows: an array for each part (`HeadTile`) or fragment (`RowTile`).
Parts = Sequence[jax.Array]


class TileWork(NamedTuple):
    """The functions that a kernel runs on a tile of neighbouring rows.

    Attributes:
      finish: ``finish(held, top, statistics, early)`` returns the parts of each result and the
        terms of the column sums, for the tile at row `top` of a stage.
      statistics: loads the row statistics of the tile that begins at a given row. It is called one
        step before they are used.
      early: loads other data of that tile from global memory, before its stage has arrived.
    """

    finish: Callable[[Sequence[Ref], int, Any, Any], tuple[Sequence[Parts], Parts]]
    statistics: Callable[[Any], Any] = lambda first: None
    early: Callable[[Any], Any] = lambda first: None


@dataclasses.dataclass(frozen=True)
class _NarrowRowsKernel:
    """The loop over the rows of a block, which consists of one warpgroup.

    Attributes:
      tops: for each tile of a stage, its first row within the stage.
      stages, held: the pipeline, and its buffers ``(stages, rows, columns)`` for each row operand.
      shared: a buffer ``(height, columns)`` for each part, in which column sums are added.
    """

    work: TileWork
    tile: RowTile | HeadTile
    tops: Sequence[int]
    refs: BackwardRefs
    stages: Stages
    held: Sequence[Ref]
    share: Share
    shared: Sequence[Ref]

    def run(self, block: Any) -> None:
        """Process all steps, then store the column sums of the block."""
        tile, partials = self.tile, self.refs.partials
        zeros = [
            plgpu.layout_cast(jnp.zeros((tile.rows, width), jnp.float32), layout)
            for width, layout in zip(tile.widths, tile.row_layouts)
            for _ in partials
        ]
        start = (self.statistics(jnp.int32(0)), zeros)
        _, carried = lax.fori_loop(0, self.stages.steps, self.step, start)
        for j, target in enumerate(partials):
            for ref, value in zip(self.shared, carried[j :: len(partials)]):
                store(ref, value)
            warpgroup_barrier()
            totals = map(_sum_of_rows, self.shared, tile.column_layouts)
            tile.store_param(target.at[block], [*totals])
            warpgroup_barrier()

    def step(self, k: Any, carry: Any) -> Any:
        """Store the row results of step `k`, add to the column sums, and refill the stage."""
        statistics, carried = carry
        # The statistics of the next rows can arrive while this stage is processed.
        following = self.statistics(jnp.minimum(k + 1, self.stages.steps - 1))
        first = self.share.first_row(k)
        early = [self.work.early(first + top) for top in self.tops]
        at = self.stages.wait(k)
        held = [ref.at[at] for ref in self.held]
        for top, *loaded in zip(self.tops, statistics, early):
            results, terms = self.work.finish(held, top, *loaded)
            added = [self.skip_stale(term, k, first + top) for term in terms]
            for ref, parts in zip(self.refs.results, results):
                self.tile.store(ref, pl.ds(first + top, self.tile.rows), parts)
            carried = [a + b for a, b in zip(carried, added)]
        self.stages.refill(k)
        return following, carried

    def statistics(self, k: Any) -> list[Any]:
        """Load the statistics of step `k`, for each tile."""
        first = self.share.first_row(k)
        return [self.work.statistics(first + top) for top in self.tops]

    def skip_stale(self, term: jax.Array, k: Any, first: Any) -> jax.Array:
        """Return `term`, with 0 in rows of step `k` that also belong to an earlier step."""
        if not self.share.has_stale_rows:
            return term
        row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
        return jnp.where(self.share.is_new(row, k), term, jnp.float32(0))


def _sum_of_rows(ref: Ref, layout: Layout) -> jax.Array:
    """Return the sum over the rows of a ``(height, n)`` ref in shared memory: ``(n,)``."""
    height, _ = ref.shape
    together = min(height, _ADDED_AT_A_TIME)

    def add(i: Any, total: jax.Array) -> jax.Array:
        first = i * together
        parts = load_wide([ref.at[first + row] for row in range(together)], layout, ref.shape[1:])
        return functools.reduce(jnp.add, parts, total)

    zeros = plgpu.layout_cast(jnp.zeros(ref.shape[1:], jnp.float32), layout)
    return lax.fori_loop(0, height // together, add, zeros)


def narrow_rows_backward(
    start: Callable[[BackwardRefs, Share], TileWork],
    operands: RowOperands,
    *,
    tile: RowTile | HeadTile,
    rows: int,
    stages: int,
    column_sums: int,
    blocks: int,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """Return the row results, and then for each column sum an array with one row per block.

    Args:
      start: returns the `TileWork` of a block; called after the first copies have been started.
      rows, stages: the number of rows of a stage, and the number of stages.
      blocks: the number of blocks for each group of rows.
    """
    (all_rows, cols), groups = operands.shape, operands.groups
    if rows % tile.rows or all_rows // groups < rows:
        raise ValueError(f"{tile} needs stages of k * {tile.rows} rows, not {rows}")
    sizes = operands.sizes  # The traced body is cached: it must not hold traced arrays.
    widths = tile.widths if column_sums else []

    def body(*arguments: Ref) -> None:
        refs = BackwardRefs.of(arguments, sizes, len(results), column_sums)
        held, shared, (full,) = split(refs.scratch, len(refs.rows), len(widths))
        in_plain_order(*held, *shared)
        block = lax.axis_index(BLOCK)
        share = Share.of(block, rows=all_rows, groups=groups, blocks=blocks, height=rows)

        def copies(k: Any, at: Any) -> Iterable[tuple[Ref, Ref]]:
            step = pl.ds(share.first_row(k), rows)
            return ((source.at[step], stage.at[at]) for source, stage in zip(refs.rows, held))

        ring = Stages(stages, share.count(), full, copies)
        ring.start()
        work, tops = start(refs, share), range(0, rows, tile.rows)
        _NarrowRowsKernel(work, tile, tops, refs, ring, held, share, shared).run(block)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[
            *[((all_rows, cols), dtype) for dtype in results],
            *[((groups * blocks, cols), np.dtype(np.float32))] * column_sums,
        ],
        blocks=groups * blocks,
        scratch=[
            *[plgpu.SMEM((stages, rows, cols), v.dtype) for v in operands.rows],
            *[plgpu.SMEM((tile.rows, width), jnp.float32) for width in widths],
            plgpu.Barrier(num_arrivals=len(operands.rows), num_barriers=stages),
        ],
    )


@dataclasses.dataclass(frozen=True)
class PipelinedNarrowRows:
    """Parameters of the kernel for a `Formula`.

    Attributes:
      vector: the number of neighbouring elements that one thread loads and stores at once.
      threads: the number of threads of a warp that share a row.
      rows: the number of rows of a stage, a multiple of `height`.
      stages: the number of stages of the pipeline.
      blocks_per_sm: the number of blocks that fit on a multiprocessor at the same time.
    """

    vector: int
    threads: int = WARP
    rows: int = 4
    stages: int = 4
    blocks_per_sm: int = 3

    @property
    def height(self) -> int:
        """The number of rows that the warpgroup holds at a time."""
        return WARPGROUP_THREADS // self.threads

    def tile(self, cols: int) -> RowTile:
        """Return how the warpgroup holds its rows."""
        return RowTile(cols, self.vector, threads=self.threads, height=self.height)


def pipelined_narrow_rows_backward(
    formula: Formula,
    operands: RowOperands,
    *,
    schedule: PipelinedNarrowRows,
    blocks: int,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """Run `narrow_rows_backward` with a formula."""
    tile = schedule.tile(operands.shape[1])
    fragments, layout = tile.fragments(), tile.layout

    def read(held: Sequence[Ref], top: int) -> list[list[jax.Array]]:
        """Load all operands' elements, in float32, for each fragment of the tile at `top`."""
        tops = [ref.at[pl.ds(top, tile.rows)] for ref in held]
        return [load_wide_columns(tops, (f.start,), f.width, layout) for f in fragments]

    def finish(
        columns: Sequence[Arrays], held: Sequence[Ref], top: int, stats: Arrays, _: None
    ) -> tuple[Sequence[Parts], Parts]:
        summed = read(held[: formula.summed], top)
        of_rows = [[tile.broadcast(stat, v) for stat in stats] for v, *_ in summed]
        of_columns = [
            [lax.broadcast_in_dim(c, v.shape, (1,)) for c in of_fragment]
            for of_fragment, (v, *_) in zip(columns, summed)
        ]
        operands = list(zip(summed, of_columns, of_rows))
        totals = [
            tile.sum(term) for term in zip(*(formula.terms(*fragment) for fragment in operands))
        ]
        values, terms = [], []
        rest = read(held[formula.summed :], top)
        for (elements, of_fragment, of_row), others in zip(operands, rest):
            broadcast = [tile.broadcast(total, elements[0]) for total in totals]
            finished, added = formula.finish([*elements, *others], of_fragment, of_row, broadcast)
            values.append(finished)
            terms += added
        return list(zip(*values)), terms

    def start(refs: BackwardRefs, share: Share) -> TileWork:
        def statistics(first: Any) -> Arrays:
            rows = pl.ds(first, tile.rows)
            return [load(ref.at[rows], layout.reduce(1)) for ref in refs.stats]

        params = [share.param(ref) for ref in refs.params]
        columns = [
            prepare(formula, [load(ref.at[fragment.columns()], of_fragment) for ref in params])
            for fragment, of_fragment in zip(fragments, tile.column_layouts)
        ]
        return TileWork(functools.partial(finish, columns), statistics)

    return narrow_rows_backward(
        start,
        operands,
        tile=tile,
        rows=schedule.rows,
        stages=schedule.stages,
        column_sums=formula.column_sums,
        blocks=blocks,
        results=results,
        name=name,
    )
