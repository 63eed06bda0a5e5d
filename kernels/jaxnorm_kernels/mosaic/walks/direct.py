"""Backward passes over unaligned rows that are short, or in no periods (`windows`).

They start anywhere in memory, so that the copy engine cannot take them. As in `ring`, persistent
blocks carry their column sums. But each thread reads its elements into registers, some
rows ahead of the one that it works on.
"""

import dataclasses
import functools
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
    Layout,
    Ref,
    load,
    warps_layout,
    widen,
)
from jaxnorm_kernels.mosaic.rows.exchange import RowSums
from jaxnorm_kernels.mosaic.rows.pieces import Piece, Slice
from jaxnorm_kernels.mosaic.rows.shares import Share
from jaxnorm_kernels.mosaic.walks.formulas import Arrays, Formula, Refs, RowOperands, prepare


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


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What a warpgroup does with its columns of the block's rows.

    Attributes:
      count: of these rows.
      pieces: the columns.
    """

    formula: Formula
    schedule: Direct
    refs: Refs
    share: Share
    count: Any
    sums: RowSums
    pieces: Sequence[Piece]

    def run(self, block: Any) -> None:
        """Each row in turn; then the column sums of the block are written."""
        refs, ahead, column_sums = self.refs, self.schedule.ahead, self.formula.column_sums
        queue = [self.read_row(jnp.int32(k)) for k in range(ahead)]
        params = [self.share.param(ref) for ref in refs.params]
        columns = [
            prepare(self.formula, [self.read(ref, p) for ref in params]) for p in self.pieces
        ]
        carried = [
            plgpu.layout_cast(jnp.zeros(_shape(piece), jnp.float32), self.layout)
            for piece in self.pieces
            for _ in range(column_sums)
        ]
        step = functools.partial(self.step, columns)
        _, carried = lax.fori_loop(0, self.count, step, (queue, carried))
        for j, ref in enumerate(refs.partials):
            for piece, value in zip(self.pieces, carried[j::column_sums]):
                piece.store_sum(ref, block, value, self.layout)

    def step(self, columns: Sequence[Arrays], k: Any, carry: Any) -> Any:
        """Row `k`, while a later one is read; `columns` for each of the pieces."""
        ((summed, stats), *coming), carried = carry
        coming = [*coming, self.read_row(k + self.schedule.ahead)]
        rest = self.read_rest(k)
        elements = [[widen(v, self.layout) for v in values] for values in summed]
        totals = self.reduce(k, elements, columns, stats)
        added: list[jax.Array] = []
        for piece, values, more, of_piece in zip(self.pieces, elements, rest, columns):
            values = [*values, *(widen(v, self.layout) for v in more)]
            results, terms = self.formula.finish(values, of_piece, stats, totals)
            for ref, result in zip(self.refs.results, results):
                piece.store(ref, self.share.row(k), result, self.layout)
            added += terms
        return coming, [a + b for a, b in zip(carried, added)]

    def reduce(
        self, k: Any, elements: Sequence[Arrays], columns: Sequence[Arrays], stats: Arrays
    ) -> list[jax.Array]:
        """The sums over row `k`, which the warps exchange."""
        terms = [
            [piece.skip_stale(term) for term in self.formula.terms(values, of_piece, stats)]
            for piece, values, of_piece in zip(self.pieces, elements, columns)
        ]
        parts = [[jnp.sum(v, axis=1) for v in same] for same in zip(*terms)]
        self.sums.publish(self.refs.scratch, [sum(same[1:], same[0]) for same in parts], k)
        return self.sums.collect(self.refs.scratch, k)

    def read(self, ref: Ref, piece: Piece) -> jax.Array:
        """The columns of a piece of a ``(cols,)`` ref."""
        return load(ref.at[piece.columns()], self.layout, _shape(piece))

    def read_row(self, k: Any) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """What the sums need of a row, and its statistics."""
        row = self.share.row(jnp.minimum(k, self.count - 1))
        summed = self.refs.rows[: self.formula.summed]
        elements = [[self.read(ref.at[row], piece) for ref in summed] for piece in self.pieces]
        return elements, [ref[row] for ref in self.refs.stats]

    def read_rest(self, k: Any) -> list[list[jax.Array]]:
        """What only `finish` needs of a row: no registers hold it for the rows ahead."""
        others = self.refs.rows[self.formula.summed :]
        row = self.share.row
        return [[self.read(ref.at[row(k)], piece) for ref in others] for piece in self.pieces]

    @property
    def layout(self) -> Layout:
        """Of a piece."""
        return warps_layout(self.schedule.vector)


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
    sums = RowSums(schedule.warpgroups, values=formula.row_sums)
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*arguments: Ref) -> None:
        refs = Refs.of(arguments, sizes, len(results), formula.column_sums)
        block, warpgroup = lax.axis_index(BLOCK), lax.axis_index(WARPGROUP)
        pieces = schedule.slice(cols, warpgroup).pieces()
        share = Share.of(block, rows=rows, groups=groups, blocks=blocks)
        _Kernel(formula, schedule, refs, share, share.count(), sums, pieces).run(block)

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


def _shape(piece: Piece) -> tuple[int, int]:
    """In registers."""
    return WARPS, piece.width // WARPS
