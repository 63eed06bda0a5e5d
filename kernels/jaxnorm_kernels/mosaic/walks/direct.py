"""Backward passes over unaligned rows that are short, or in no periods (`windows`).

They start anywhere in memory, so that the copy engine cannot take them. As in `ring`, persistent
blocks carry their column sums. But each thread reads its elements into registers, some
rows ahead of the one that it works on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    WARPS,
    Ref,
    load,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.rows.exchange import RowSums
from jaxnorm_kernels.mosaic.rows.pieces import Piece, Slice
from jaxnorm_kernels.mosaic.rows.shares import Share
from jaxnorm_kernels.mosaic.walks.formulas import Formula, Refs, RowOperands, prepare


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
    operands: RowOperands,
    *,
    schedule: Direct,
    blocks: int,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results, then for each column sum its partial sums, one row for each block.

    `blocks` are those of a group of rows.
    """
    (rows, cols), groups = operands.shape, operands.groups
    layout = warps_layout(schedule.vector)
    sums = RowSums(schedule.warpgroups, values=formula.row_sums)
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*arguments: Ref) -> None:
        refs = Refs.of(arguments, sizes, len(results), formula.column_sums)
        block, warpgroup = lax.axis_index(BLOCK), lax.axis_index(WARPGROUP)
        pieces = schedule.slice(cols, warpgroup).pieces()
        share = Share.of(block, rows=rows, groups=groups, blocks=blocks)
        count = share.count()

        def read(ref: Ref, piece: Piece) -> jax.Array:
            """The columns of a piece of a ``(cols,)`` ref."""
            return load(ref.at[piece.columns()], layout, shape(piece))

        def read_row(k: Any) -> tuple[list[Any], list[jax.Array]]:
            """What the sums need of a row, and its statistics."""
            row = share.row(jnp.minimum(k, count - 1))
            summed = refs.rows[: formula.summed]
            elements = [[read(ref.at[row], piece) for ref in summed] for piece in pieces]
            return elements, [ref[row] for ref in refs.stats]

        def read_rest(k: Any) -> list[Any]:
            """What only `finish` needs of a row: no registers hold it for the rows ahead."""
            others = refs.rows[formula.summed :]
            return [[read(ref.at[share.row(k)], piece) for ref in others] for piece in pieces]

        def step(k: Any, carry: Any) -> Any:
            (now, *coming), carried = carry
            coming = [*coming, read_row(k + schedule.ahead)]
            summed, row_stats = now
            rest = read_rest(k)
            args = [
                ([widen(v, layout) for v in elements], columns, row_stats)
                for elements, columns in zip(summed, of_columns)
            ]
            terms = [
                [piece.skip_stale(term) for term in formula.terms(*a)]
                for a, piece in zip(args, pieces)
            ]
            parts = [[jnp.sum(v, axis=1) for v in same] for same in zip(*terms)]
            sums.publish(refs.scratch, [sum(same[1:], same[0]) for same in parts], k)
            totals = sums.collect(refs.scratch, k)
            added: list[jax.Array] = []
            for (elements, *a), more, piece in zip(args, rest, pieces):
                elements = [*elements, *(widen(v, layout) for v in more)]
                values, column_terms = formula.finish(elements, *a, totals)
                for ref, value in zip(refs.results, values):
                    piece.store(ref, share.row(k), value, layout)
                added += column_terms
            return coming, [a + b for a, b in zip(carried, added)]

        queue = [read_row(jnp.int32(k)) for k in range(schedule.ahead)]
        params = [share.param(ref) for ref in refs.params]
        of_columns = [prepare(formula, [read(ref, p) for ref in params]) for p in pieces]
        carried = [
            plgpu.layout_cast(jnp.zeros(shape(piece), jnp.float32), layout)
            for piece in pieces
            for _ in range(formula.column_sums)
        ]
        _, carried = lax.fori_loop(0, count, step, (queue, carried))
        for j, ref in enumerate(refs.partials):
            for piece, value in zip(pieces, carried[j :: formula.column_sums]):
                piece.store_sum(ref, block, value, layout)

    def shape(piece: Piece) -> tuple[int, int]:
        return (WARPS, piece.width // WARPS)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[
            *[((rows, cols), dtype) for dtype in results],
            *[((groups * blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        blocks=groups * blocks,
        warpgroups=schedule.warpgroups,
        scratch=sums.scratch(),
        auto_barriers=False,
    )
