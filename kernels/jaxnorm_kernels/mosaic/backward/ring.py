"""Backward passes over rows that stream through a ring of shared memory.

A backward pass reads two arrays or more, reduces each row to a few sums, and reads the row again to
write dx. Here a *persistent* block takes every n-th row (or step of a few short rows). Each of its
warpgroups owns a slice of the columns and a ring of stages, which the copy engine (TMA) keeps
filled with its slice of the rows to come. The two reads of a row are both from shared memory, so
that few registers live across the exchange of row sums: the column sums (dscale, dbias), which a
thread carries through all its rows, have room. With a `lag` of 1, step k is reduced before step
k - 1 is finished, which hides the exchange::

    for step k:   wait for its stage      reduce, publish the sums of each warp    (reduce_rows)
                  read the sums of k-1    dx, column sums, refill its stage        (finish_rows)
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.backward.formulas import Arrays, Formula, Operands, prepare, split
from jaxnorm_kernels.mosaic.device.barriers import release_used
from jaxnorm_kernels.mosaic.device.launch import BLOCK, CLUSTER, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    load,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.rows.row_sums import RowSums
from jaxnorm_kernels.mosaic.rows.shares import Chunk, Share, Slice
from jaxnorm_kernels.mosaic.rows.windows import Window


@dataclasses.dataclass(frozen=True)
class Ring:
    """Parameters of the kernel.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: of a block. They share a row.
      stages: of the ring of each warpgroup; one stage holds a step's rows.
      rows: of a step. They share an exchange of sums.
      lag: steps that are reduced before the first of them is finished. Needs as many stages more.
      blocks_per_sm: that fit a multiprocessor at the same time.
      cluster: blocks that share a row, each with its own ring.
      window: of unaligned rows, what the rings hold of each.
    """

    vector: int
    warpgroups: int = 1
    stages: int = 4
    rows: int = 1
    lag: int = 0
    blocks_per_sm: int = 1
    cluster: int = 1
    window: Window | None = None

    def slice(self, cols: int, warpgroup: Any = 0) -> Slice:
        """The columns of a warpgroup, counted through the cluster."""
        chunk, window = WARPGROUP_THREADS * self.vector, self.window
        cols = cols if window is None else window.width
        return Slice(cols, self.cluster * self.warpgroups, chunk, warpgroup, window)


def ring_backward(
    formula: Formula,
    operands: Operands,
    *,
    schedule: Ring,
    blocks: int,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results, then for each column sum its partial sums, one row for each block.

    `blocks` are those of a group of rows; with a cluster, they are clusters.
    """
    ring, (rows, cols), groups = schedule, operands.shape, operands.groups
    window, view = ring.window, (rows, cols)
    if window is not None:
        view = window.shape(rows)
        operands = dataclasses.replace(operands, rows=[window.view(v) for v in operands.rows])
    if ring.stages < 1 + ring.lag or rows // groups < ring.rows:
        raise ValueError(f"{ring} holds less than {1 + ring.lag} steps, or too many rows")
    slice_ = ring.slice(cols)
    sums = RowSums(ring.warpgroups, ring.rows * formula.row_sums, 1 + ring.lag, ring.cluster)
    together = range(ring.rows)
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*refs: Ref) -> None:
        row_refs, stat_refs, param_refs, refs = split(refs, *sizes)
        result_refs, partial_refs, refs = split(refs, len(results), formula.column_sums)
        rings, (full, *exchanged) = split(refs, len(row_refs))
        sums.open(exchanged)
        block, warpgroup = lax.axis_index(BLOCK), lax.axis_index(WARPGROUP)
        rank = lax.axis_index(CLUSTER) if ring.cluster > 1 else 0
        placed = None if window is None else window.placed()
        own = ring.slice(cols, rank * ring.warpgroups + warpgroup)
        own = dataclasses.replace(own, window=placed)
        share = Share.of(
            block, rows=rows, groups=groups, blocks=blocks, height=ring.rows, window=placed
        )
        count = share.count()

        def stage(k: Any) -> Any:
            return warpgroup * ring.stages + lax.rem(k, ring.stages)

        def fill(k: Any) -> None:
            at, first = stage(k), share.first_row(k)
            for row in together:
                for run, here in zip(runs, places):
                    there = pl.ds(run.stage_start, run.width)
                    for source, target in zip(row_refs, rings):
                        plgpu.copy_gmem_to_smem(
                            source.at[first + row, here],
                            target.at[at, row, there],
                            full.at[at],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

        runs = own.runs()
        places = [own.columns(run) for run in runs]
        pl.loop(0, jnp.minimum(ring.stages, count))(fill)

        def read_param(ref: Ref, chunk: Chunk) -> jax.Array:
            return own.load_param(share.param(ref), chunk, layout(chunk.width), shape(chunk.width))

        chunks = own.cut()
        columns = [prepare(formula, [read_param(ref, c) for ref in param_refs]) for c in chunks]

        def statistics(k: Any) -> list[list[jax.Array]]:
            """Those of each row of step `k`."""
            first = share.first_row(jnp.minimum(k, count - 1))

            def number(row: int) -> Any:
                return first + row if placed is None else placed.row(first + row)

            return [[ref[number(row)] for ref in stat_refs] for row in together]

        def read(stages: Sequence[Ref], at: Any, row: int, chunk: Chunk) -> list[jax.Array]:
            here = pl.ds(chunk.stage_start, chunk.width)
            refs, width = [ref.at[at, row, here] for ref in stages], chunk.width
            of_chunk = layout(width)
            return [widen(load(ref, of_chunk, shape(width)), of_chunk) for ref in refs]

        def sum_of(terms: dict[int, jax.Array]) -> jax.Array:
            """Of each warp, from the chunks' sums for each of their widths.

            Only results name the layout: each load that did would cost Mosaic's inference.
            """
            of_widths = [plgpu.layout_cast(value, layout(width)) for width, value in terms.items()]
            return functools.reduce(operator.add, [jnp.sum(value, axis=1) for value in of_widths])

        def reduce_rows(k: Any, row_stats: list[list[jax.Array]]) -> None:
            """Publishes the rows' sums, each warp those of its columns."""
            at = stage(k)
            plgpu.barrier_wait(full.at[at])
            sums_of = range(formula.row_sums)
            totals: list[list[dict[int, jax.Array]]] = [[{} for _ in sums_of] for _ in together]
            for chunk, given in zip(chunks, columns):
                for row in together:
                    elements = read(rings[: formula.summed], at, row, chunk)
                    terms = formula.terms(elements, given, row_stats[row])
                    terms = [own.skip_others(term, chunk) for term in terms]
                    for total, term in zip(totals[row], terms):
                        width = chunk.width
                        total[width] = total[width] + term if width in total else term
            parts = [sum_of(total) for row_totals in totals for total in row_totals]
            sums.publish(exchanged, parts, k)

        def finish_rows(k: Any, row_stats: list[list[jax.Array]], carried: Arrays) -> Arrays:
            """The row results and the column sums; then the stage is filled again."""
            totals = sums.collect(exchanged, k)
            for row in together:
                carried = add_row(k, row, row_stats[row], totals, carried)
            release_used()
            pl.when(k + ring.stages < count)(functools.partial(fill, k + ring.stages))
            return carried

        def add_row(k: Any, row: int, row_stats: Arrays, totals: Arrays, carried: Arrays) -> Arrays:
            at, index, first = stage(k), share.first_row(k) + row, row * formula.row_sums
            added: list[jax.Array] = []
            for chunk, given in zip(chunks, columns):
                values, terms = formula.finish(
                    read(rings, at, row, chunk),
                    given,
                    row_stats,
                    totals[first : first + formula.row_sums],
                )
                for ref, value in zip(result_refs, values):
                    own.store(ref, index, chunk, value, layout(chunk.width))
                added += terms
            if share.has_stale_rows:
                is_new, shapes = share.is_new(index, k), dict.fromkeys(a.shape for a in added)
                masks = {shape: lax.broadcast_in_dim(is_new, shape, ()) for shape in shapes}
                added = [jnp.where(masks[a.shape], a, jnp.float32(0)) for a in added]
            return [a + b for a, b in zip(carried, added)]

        def step(k: Any, carry: Any) -> Any:
            """Reduces step `k`, finishes step ``k - lag``; reads the statistics of ``k + 1``."""
            (*before, now), carried = carry
            ahead = statistics(k + 1)
            if ring.lag:
                pl.when(k < count)(functools.partial(reduce_rows, k, now))
            else:
                reduce_rows(k, now)
            queue = [*before, now, ahead]
            return queue[1:], finish_rows(k - ring.lag, queue[0], carried)

        zeros = {
            width: plgpu.layout_cast(jnp.zeros(shape(width), jnp.float32), layout(width))
            for width in dict.fromkeys(chunk.width for chunk in chunks)
        }
        carried = [zeros[chunk.width] for chunk in chunks for _ in range(formula.column_sums)]
        queue = [statistics(jnp.int32(k)) for k in range(1 + ring.lag)]
        sums.ready()
        for k in range(ring.lag):
            pl.when(k < count)(functools.partial(reduce_rows, jnp.int32(k), queue[k]))
        _, carried = lax.fori_loop(ring.lag, count + ring.lag, step, (queue, carried))
        for j, ref in enumerate(partial_refs):
            for chunk, value in zip(chunks, carried[j :: formula.column_sums]):
                own.store_sum(ref, block, chunk, value, layout(chunk.width))

    def layout(width: int) -> Layout:
        """Of a chunk."""
        return warps_layout(width // WARPGROUP_THREADS)

    def shape(width: int) -> tuple[int, int]:
        return WARPS, width // WARPS

    stages = ring.warpgroups * ring.stages
    copies = len(operands.rows) * ring.rows * len(slice_.runs())  # of a stage
    outputs = launch(
        body,
        operands.arrays,
        name=name,
        outputs=[
            *[(view, dtype) for dtype in results],
            *[((groups * blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        blocks=groups * blocks,
        cluster=ring.cluster,
        warpgroups=ring.warpgroups,
        scratch=[
            *[plgpu.SMEM((stages, ring.rows, slice_.width), v.dtype) for v in operands.rows],
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            *sums.scratch(),
        ],
        auto_barriers=False,
    )
    of_rows = [output.reshape(rows, cols) for output in outputs[: len(results)]]
    return (*of_rows, *outputs[len(results) :])
