"""Backward passes over rows that the copy engine cannot take: they start anywhere in memory.

As in `ring`, persistent blocks carry their column sums. But here each thread reads its own elements
into registers, some rows ahead of the one that it works on.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.backward.formulas import Arrays, Formula, prepare, split
from jaxnorm_kernels.mosaic.backward.row_sums import RowSums
from jaxnorm_kernels.mosaic.backward.slices import Chunk, Slice, skip_stale
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    WARPS,
    Ref,
    load,
    store,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, widen


@dataclasses.dataclass(frozen=True)
class Direct:
    """Parameters of the kernel.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: of a block. They share a row.
      ahead: rows that are being read while one is worked on.
      blocks_per_sm: that fit a multiprocessor at the same time.
    """

    vector: int
    warpgroups: int = 1
    ahead: int = 1
    blocks_per_sm: int = 2

    def slice(self, cols: int, index: Any = 0) -> Slice:
        """The columns of warpgroup `index`."""
        return Slice(cols, self.warpgroups, WARPGROUP_THREADS * self.vector, index)


def direct_backward(
    formula: Formula,
    saved: jax.Array,
    dy: jax.Array,
    stats: Arrays,
    params: Arrays,
    *,
    schedule: Direct,
    blocks: int,
    dx_dtype: np.dtype,
    name: str,
) -> tuple[jax.Array, ...]:
    """dx, then for each column sum of the formula its partial sums, one row for each block."""
    rows, cols = saved.shape
    layout = warps_layout(schedule.vector)
    sums = RowSums(schedule.warpgroups, formula.row_sums)
    sizes = len(stats), len(params)  # What traces the body keeps it: it may hold no traced array.

    def body(saved_ref: Ref, dy_ref: Ref, *refs: Ref) -> None:
        stat_refs, param_refs, refs = split(refs, *sizes)
        (dx_ref,), partial_refs, exchanged = split(refs, 1, formula.column_sums)
        block, warpgroup = lax.axis_index(BLOCK), lax.axis_index(WARPGROUP)
        runs = schedule.slice(cols, warpgroup).runs()
        count = lax.div(rows - block + blocks - 1, blocks)  # rows of this block

        def read(ref: Ref, run: Chunk) -> jax.Array:
            """The run's columns of a ``(cols,)`` ref."""
            here = pl.ds(run.start, run.width)
            return load(ref.at[here], layout, shape(run))

        def read_row(k: Any) -> tuple[list[Any], list[jax.Array]]:
            row = block + jnp.minimum(k, count - 1) * blocks
            elements = [[read(ref.at[row], run) for ref in (saved_ref, dy_ref)] for run in runs]
            return elements, [ref[row] for ref in stat_refs]

        def step(k: Any, carry: Any) -> Any:
            (now, *coming), carried = carry
            coming = [*coming, read_row(k + schedule.ahead)]
            elements, row_stats = now
            args = [
                (*(widen(v, layout) for v in pair), columns, row_stats)
                for pair, columns in zip(elements, given)
            ]
            terms = [
                [skip_stale(term, run) for term in formula.terms(*a)] for a, run in zip(args, runs)
            ]
            parts = [[jnp.sum(v, axis=1) for v in same] for same in zip(*terms)]
            sums.publish(exchanged, [sum(same[1:], same[0]) for same in parts], k)
            totals = sums.collect(exchanged, k)
            added: list[jax.Array] = []
            for a, run in zip(args, runs):
                dx, more = formula.finish(*a, totals)
                there = dx_ref.at[block + k * blocks, pl.ds(run.start, run.width)]
                store_global(there, dx, layout)
                added += more
            return coming, [a + b for a, b in zip(carried, added)]

        queue = [read_row(jnp.int32(k)) for k in range(schedule.ahead)]
        given = [prepare(formula, [read(ref, run) for ref in param_refs]) for run in runs]
        carried = [
            plgpu.layout_cast(jnp.zeros(shape(run), jnp.float32), layout)
            for run in runs
            for _ in range(formula.column_sums)
        ]
        _, carried = lax.fori_loop(0, count, step, (queue, carried))
        for j, ref in enumerate(partial_refs):
            for run, value in zip(runs, carried[j :: formula.column_sums]):
                store(ref.at[block, pl.ds(run.start, run.width)], value)

    def shape(run: Chunk) -> tuple[int, int]:
        return (WARPS, run.width // WARPS)

    return launch(
        body,
        [saved, dy, *stats, *params],
        name=name,
        outputs=[
            ((rows, cols), dx_dtype),
            *[((blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        blocks=blocks,
        warpgroups=schedule.warpgroups,
        scratch=sums.scratch(),
        auto_barriers=False,
    )
