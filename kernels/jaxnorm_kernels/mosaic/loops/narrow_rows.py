"""Pipelined backward passes over narrow rows: each warp processes entire rows.

As in the module `pipelined`, a block is persistent: it processes many rows, and accumulates its
column sums in registers. Asynchronous copies (TMA) fill a ring of buffers in shared memory, called
stages. Here, a stage contains many rows. They are adjacent in memory, so one copy per input fills a
stage. Sums along a row need no exchange between warps. At the end, the column sums of all warps are
added in shared memory.

If the number of rows is not a multiple of the rows per stage, the last stage overlaps the previous
one. The rows that are in both stages are called *stale* in the last stage. Their results are stored
twice, but the column sums leave them out the second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    in_plain_order,
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
    store,
)
from jaxnorm_kernels.mosaic.loops.formulas import (
    Arrays,
    BackwardCall,
    BackwardRefs,
    Formula,
    prepare,
)
from jaxnorm_kernels.mosaic.loops.pipelined import Share, Stages
from jaxnorm_kernels.mosaic.rows.heads import HeadTile
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, RowTile

# Number of partial sums of a column that a thread loads at once. For each column, a block has one
# partial sum per row of a tile: partial sum i is the sum over row i of every tile. After the last
# tile, the block adds up the partial sums of each column.
_ADDED_AT_A_TIME = 8

#: The position of a row in the ring of pipeline stages in shared memory: a pair (index of the
#: stage, index of the row within the stage).
RowIndex = tuple[Any, int]


class TileWork(NamedTuple):
    """The functions that a kernel calls for each tile.

    A tile consists of neighbouring rows that a warpgroup processes at the same time.

    Attributes:
      finish: ``finish(held, at, statistics, early)`` computes one tile. `held` are the operands'
        buffers in shared memory, ``(stages, rows, cols)``. `at` is the position of the tile's first
        row in these buffers (a `RowIndex`). The arguments `statistics` and `early` are the values
        that the functions ``statistics(first)`` and ``early(first)`` have returned for this tile.
        `finish` returns a pair: the values of each result, and the terms of the column sums. The
        terms of the first fragment (range of columns) come first.
      statistics: ``statistics(first)`` loads the statistics of a tile from global memory. It is
        called one pipeline step before the statistics are used. `first` is the index of the tile's
        first row in the array.
      early: ``early(first)`` loads other data of the tile from global memory. It is called before
        the wait for the tile's rows, which are being copied to shared memory.
    """

    finish: Callable[[Sequence[Ref], RowIndex, Any, Any], tuple[Sequence[Fragments], Fragments]]
    statistics: Callable[[Any], Any] = lambda first: None
    early: Callable[[Any], Any] = lambda first: None


@dataclasses.dataclass(frozen=True)
class _NarrowRowsKernel:
    """The loop over the rows of a block. The block has one warpgroup (128 threads).

    Attributes:
      work: the functions that are called for each tile.
      tile: how the warpgroup distributes the rows of a tile over its threads.
      tops: for each tile of a stage, the index of its first row within the stage.
      refs: the kernel's operands and results.
      stages: the ring of stages.
      held: the ring's memory for each row operand, ``(stages, rows, cols)``.
      share: which rows the block processes.
      shared: refs in shared memory, one for each fragment (range of columns). They are used only
        after the loop. During the loop, the partial sums of a fragment are in registers, in an
        array ``(rows of a tile, columns)``. After the loop, this array is stored in the fragment's
        ref, and the rows of the ref are added.
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
        """Process all steps of the block, then add up and store its column sums."""
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
        """Store the results of step `k`, update the column sums, and refill the step's buffer."""
        statistics, carried = carry
        # Load the statistics of the next step now, so that they arrive during the current step.
        following = self.statistics(jnp.minimum(k + 1, self.stages.steps - 1))
        first = self.share.first_row(k)
        early = [self.work.early(first + top) for top in self.tops]
        at = self.stages.wait(k)
        for top, *loaded in zip(self.tops, statistics, early):
            results, terms = self.work.finish(self.held, (at, top), *loaded)
            added = [self.skip_stale(term, k, first + top) for term in terms]
            for ref, parts in zip(self.refs.results, results):
                self.tile.store(ref, pl.ds(first + top, self.tile.rows), parts)
            carried = [a + b for a, b in zip(carried, added)]
        self.stages.refill(k)
        return following, carried

    def statistics(self, k: Any) -> list[Any]:
        """Load the statistics of the rows of step `k`, for each tile."""
        first = self.share.first_row(k)
        return [self.work.statistics(first + top) for top in self.tops]

    def skip_stale(self, term: jax.Array, k: Any, first: Any) -> jax.Array:
        """Return `term` with its stale rows replaced by 0, so that no row is added twice.

        `term` is added to the column sums in step `k`. Row i of `term` belongs to row ``first + i``
        of the array. A row is stale if it also belongs to the previous step of its group (see
        `Share`), which adds it.
        """
        if not self.share.has_stale_rows:
            return term
        row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
        return jnp.where(self.share.is_new(row, k), term, jnp.float32(0))


def _sum_of_rows(ref: Ref, layout: Layout) -> jax.Array:
    """Return the sum over the rows, ``(n,)``, of a ``(height, n)`` ref in shared memory."""
    height, _ = ref.shape
    together = min(height, _ADDED_AT_A_TIME)

    def add(i: Any, total: jax.Array) -> jax.Array:
        starts = [row * ref.shape[1] for row in range(together)]
        parts = load_wide([ref], layout, ref.shape[1:], (i * together,), starts)
        return functools.reduce(jnp.add, parts, total)

    zeros = plgpu.layout_cast(jnp.zeros(ref.shape[1:], jnp.float32), layout)
    return lax.fori_loop(0, height // together, add, zeros)


def narrow_rows_backward(
    start: Callable[[BackwardRefs, Share], TileWork],
    call: BackwardCall,
    *,
    tile: RowTile | HeadTile,
    rows: int,
    stages: int,
    column_sums: int,
) -> tuple[jax.Array, ...]:
    """Run a pipelined kernel over narrow rows, and return the results of `BackwardCall.launch`.

    Args:
      start: a function that returns the `TileWork` of a block. It may also load data, such as
        parameters. It is called after the block has started its first copies, so that these loads
        run at the same time as the copies.
      call: the operands, the dtypes of the results, and the numbers of groups and blocks.
      tile: how a warpgroup distributes rows over its threads.
      rows: number of rows per stage.
      stages: number of stages.
      column_sums: number of column sums.
    """
    (all_rows, cols), groups, blocks = call.shape, call.groups, call.blocks
    if rows % tile.rows or all_rows // groups < rows:
        raise ValueError(f"{tile} needs stages of k * {tile.rows} rows, not {rows}")
    widths = tile.widths if column_sums else []

    def body(refs: BackwardRefs) -> None:
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

    return call.launch(
        body,
        column_sums=column_sums,
        scratch=[
            *[plgpu.SMEM((stages, rows, cols), v.dtype) for v in call.rows],
            *[plgpu.SMEM((tile.rows, width), jnp.float32) for width in widths],
            plgpu.Barrier(num_arrivals=len(call.rows), num_barriers=stages),
        ],
    )


@dataclasses.dataclass(frozen=True)
class PipelinedNarrowRows:
    """Schedule of `pipelined_narrow_rows_backward`.

    Attributes:
      vector: number of neighbouring elements that one thread loads and stores at once.
      threads: number of threads that share a row, at most the 32 threads of a warp.
      rows: number of rows per stage, a multiple of `height`.
      stages: number of stages, which are buffers in shared memory. Asynchronous copies fill the
        stages in turn.
      blocks_per_sm: number of blocks that fit on an SM at the same time.
    """

    vector: int
    threads: int = WARP
    rows: int = 4
    stages: int = 4
    blocks_per_sm: int = 3

    @property
    def height(self) -> int:
        """Number of rows that a warpgroup processes at the same time."""
        return WARPGROUP_THREADS // self.threads

    def tile(self, cols: int) -> RowTile:
        """Return the tile: how a warpgroup distributes `height` rows over its threads."""
        return RowTile(cols, self.vector, threads=self.threads, rows=self.height)


def pipelined_narrow_rows_backward(
    formula: Formula, call: BackwardCall, schedule: PipelinedNarrowRows
) -> tuple[jax.Array, ...]:
    """Run `narrow_rows_backward` with the computation that `formula` defines."""
    tile = schedule.tile(call.shape[1])
    fragments, layout = tile.fragments(), tile.layout

    def read(held: Sequence[Ref], at: RowIndex) -> list[list[jax.Array]]:
        """Load a tile's rows in float32, from the operands' buffers `held`.

        Returns one list per fragment (range of columns). Each list contains one array per operand.
        """
        return [load_wide(held, layout, (tile.rows, f.width), at, (f.start,)) for f in fragments]

    def finish(
        columns: Sequence[Arrays], held: Sequence[Ref], at: RowIndex, stats: Arrays, _: None
    ) -> tuple[Sequence[Fragments], Fragments]:
        summed = read(held[: formula.summed], at)
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
        rest = read(held[formula.summed :], at)
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
        call,
        tile=tile,
        rows=schedule.rows,
        stages=schedule.stages,
        column_sums=formula.column_sums,
    )
