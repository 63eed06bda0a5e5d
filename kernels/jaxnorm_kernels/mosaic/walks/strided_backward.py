"""Backward passes of ``(outer, cols, inner)`` that is normalised over the middle axis.

The equations are those of an operation's `Formula`. Blocks hold strips of all arrays
that are read (see `rows.strips`) and read them twice from shared memory::

    for each strip:   sums over the columns of each warp, exchanged between the warps
                      dx; sums over the inner elements, added to those of the strips before it

The sums over inner elements are dscale and dbias, of each block; those are added up outside, always
in the same order. Where the parameters belong to inner elements and not to columns, the sums over
the columns are what dscale and dbias are of: each strip writes its own.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.barriers import warpgroup_barrier
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, store
from jaxnorm_kernels.mosaic.rows.pieces import Piece
from jaxnorm_kernels.mosaic.rows.strip import Stat, Strip, each_strip
from jaxnorm_kernels.mosaic.rows.strip_exchange import Parts, StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Strips
from jaxnorm_kernels.mosaic.walks.formulas import Formula, InnerFormula, RowOperands, prepare

_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class _ColumnSums:
    """What a block has added up for each column: ``(warpgroups, columns)`` in shared memory each.

    Each warp has columns of its own, which the strips of a block have in common.
    """

    refs: Sequence[Ref]

    def clear(self, strip: Strip) -> None:
        """Before the first strip."""

        def clear(piece: Piece) -> None:
            for ref in self.refs:
                store(self._of(ref, piece), strip.no_columns())

        strip.each_piece(clear, together=1)

    def add(self, strip: Strip, piece: Piece, terms: Sequence[jax.Array]) -> None:
        """Adds the sums over the inner elements of a piece."""
        for ref, term in zip(self.refs, terms, strict=True):
            total = self._of(ref, piece)
            store(total, strip.load_columns(total) + strip.sum_inner(term))

    def write(self, strip: Strip, partials: Sequence[Ref]) -> None:
        """After the last strip: to the block's row of each ``(blocks, cols)`` ref."""
        warpgroup_barrier()

        def write(piece: Piece) -> None:
            for ref, partial in zip(self.refs, partials, strict=True):
                target = partial.at[lax.axis_index(BLOCK), pl.ds(piece.start, piece.width)]
                store(target, strip.load_columns(self._of(ref, piece)))

        strip.each_piece(write)

    def _of(self, ref: Ref, piece: Piece) -> Ref:
        return ref.at[lax.axis_index(WARPGROUP), pl.ds(piece.stage_start, piece.width)]


def strided_backward(
    formula: Formula,
    operands: RowOperands,
    *,
    strips: Strips,
    results: Sequence[np.dtype],
    name: str,
    inner: InnerFormula | None = None,
) -> tuple[jax.Array, ...]:
    """The results like x, then for each column sum its partial sums, one row for each block.

    Args:
      operands: those of rows are ``(outer, cols, inner)``; statistics ``(rows,)``.
      results: dtypes of the results ``(outer, cols, inner)``.
      inner: the formula, where the parameters are of inner elements: ``(inner,)`` or
        ``(n, inner)``. The partial sums are then ``(outer, inner)``.
    """
    shape = (strips.outer, strips.cols, strips.inner)
    exchange = StripExchange(strips, formula.row_sums)
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.
    held = len(strips.scratch([a.dtype for a in operands.rows]))
    inner_sums = 0 if inner is None else inner.inner_sums
    sums = plgpu.SMEM((strips.warpgroups, strips.slice().width), jnp.float32)

    def body(*refs: Ref) -> None:
        row_refs, stat_refs, param_refs, refs = split(refs, *sizes)
        result_refs, inner_refs, refs = split(refs, len(results), inner_sums)
        partial_refs, refs = split(refs, formula.column_sums)
        stages, exchanged, refs = split(refs, held, len(exchange.scratch()))
        column_sums = _ColumnSums(refs)

        def finish(strip: Strip) -> None:
            of_inner = [strip.stat(ref) for ref in stat_refs]
            stats = [strip.broadcast(stat) for stat in of_inner]

            def elements(piece: Piece, count: int) -> list[jax.Array]:
                return [strip.read(k, piece) for k in range(count)]

            params: Sequence[jax.Array] = ()
            if inner is None:
                columns = strip.params(param_refs, functools.partial(prepare, formula))
            else:
                params = prepare(formula, [strip.inner_param(ref) for ref in param_refs])
                columns = strip.same_of_columns(params)

            def terms(piece: Piece) -> list[jax.Array]:
                return formula.terms(elements(piece, formula.summed), columns(piece), stats)

            of_warps = strip.sum(terms, formula.row_sums, waits=True)
            totals = exchange(exchanged, strip.step, _add_parts, of_warps)
            if inner is not None:
                gradients, totals = inner.of_inner(totals, params, of_inner)
                for ref, gradient in zip(inner_refs, gradients):
                    strip.store_inner(ref, gradient)
            wide = [strip.broadcast(strip.group_sum(total)) for total in totals]

            def write(piece: Piece) -> None:
                values, terms = formula.finish(
                    elements(piece, len(row_refs)), columns(piece), stats, wide
                )
                for ref, value in zip(result_refs, values):
                    strip.store(ref, piece, value)
                column_sums.add(strip, piece, terms)

            strip.each_piece(write)

        exchange.open(exchanged)
        first = Strip.of(strips, lax.axis_index(BLOCK), jnp.int32(0), stages)
        if formula.column_sums:
            column_sums.clear(first)
        each_strip(strips, row_refs, stages, finish, exchange.ready)
        if formula.column_sums:
            column_sums.write(first, partial_refs)

    return launch(
        body,
        [
            *operands.rows,
            *[stat.reshape(strips.stats_shape) for stat in operands.stats],
            *operands.params,
        ],
        name=name,
        outputs=[
            *[(shape, dtype) for dtype in results],
            *[((strips.outer, strips.inner), _F32)] * inner_sums,
            *[((strips.blocks, strips.cols), _F32)] * formula.column_sums,
        ],
        blocks=strips.blocks,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[
            *strips.scratch([a.dtype for a in operands.rows]),
            *exchange.scratch(),
            *[sums] * formula.column_sums,
        ],
    )


def _add_parts(parts: Parts) -> list[Stat | float]:
    return [parts.total(k) for k in range(len(parts.stats))]
