"""Backward passes without sums over the rows: each block takes its rows and is gone.

    Held       rows in registers, in the tiles of the forward; all inputs are read at once
    Streamed   rows too long for that, read chunk by chunk, twice: once more from the L2 cache

The rows that a ring of shared memory suits better run in `ring`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.backward.formulas import Formula, Operands, split
from jaxnorm_kernels.mosaic.backward.row_sums import RowSums
from jaxnorm_kernels.mosaic.backward.shares import Share
from jaxnorm_kernels.mosaic.backward.slices import Chunk, skip_stale
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    WARPS,
    Ref,
    load,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.registers import store_global, widen
from jaxnorm_kernels.mosaic.forward.tiles import RowTile, SplitRow, Tile, WarpgroupRow


@dataclasses.dataclass(frozen=True)
class Held:
    """Parameters of `held_backward`.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: of a block, which share a row.
      threads: that share a row: of a warp, or the 128 of each warpgroup.
      rows: of a block; more than one only where the threads of a warp share a row.
      cluster: blocks that share a row.
    """

    vector: int
    warpgroups: int = 1
    threads: int = WARPGROUP_THREADS
    rows: int = 1
    cluster: int = 1

    def tile(self, cols: int) -> Tile:
        if self.warpgroups * self.cluster > 1:
            return SplitRow(cols, self.vector, split=self.warpgroups, cluster=self.cluster)
        if self.threads == WARPGROUP_THREADS and self.rows == 1:
            return WarpgroupRow(cols, self.vector)
        return RowTile(cols, self.vector, threads=self.threads, height=self.rows)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Parameters of `streamed_backward`.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: that share a row.
      units: vectors of each input that a thread reads before it uses the first.
    """

    vector: int
    warpgroups: int = 4
    units: int = 4


def held_backward(
    formula: Formula,
    operands: Operands,
    *,
    schedule: Held,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results of a formula without parameters and statistics."""
    rows, cols = operands.shape
    tile = schedule.tile(cols)
    exchange = RowSums(tile.warpgroups, formula.row_sums, cluster=tile.cluster, in_lanes=True)
    is_split = isinstance(tile, SplitRow)
    operand_count = len(operands.rows)

    def body(*refs: Ref) -> None:
        row_refs, result_refs, scratch = split(refs, operand_count, len(results))
        exchange.open(scratch)
        row = tile.row_index(rows)
        loaded = [tile.load(ref, row) for ref in row_refs]
        wide = [[widen(v, tile.layout) for v in values] for values in loaded]
        elements = list(zip(*wide))  # of each piece
        terms = [formula.terms(v[: formula.summed], (), ()) for v in elements]
        totals = [tile.sum(term) for term in zip(*terms)]
        if is_split:
            exchange.ready()
            exchange.publish(scratch, totals)
            totals = exchange.collect(scratch)
        finished = []
        for v in elements:
            spread = [tile.spread(total, v[0]) for total in totals]
            finished.append(formula.finish(v, (), (), spread)[0])
        for ref, values in zip(result_refs, zip(*finished)):
            tile.store(ref, row, values)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[((rows, cols), dtype) for dtype in results],
        blocks=tile.blocks(rows),
        cluster=tile.cluster,
        warpgroups=tile.warpgroups,
        scratch=exchange.scratch() if is_split else (),
        auto_barriers=False,
    )


def streamed_backward(
    formula: Formula,
    operands: Operands,
    *,
    schedule: Streamed,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results, from two passes over each row."""
    (rows, cols), groups = operands.shape, operands.groups
    warpgroups, unit = schedule.warpgroups, WARPGROUP_THREADS * schedule.vector
    width = schedule.units * unit
    whole = cols // (warpgroups * width)  # chunks of each warpgroup; then there may be a rest
    rest = cols - whole * warpgroups * width
    rest_width = -(-rest // (warpgroups * unit)) * unit
    if not whole:
        raise ValueError(f"{schedule} needs rows of {warpgroups * width} columns")
    layout, shape = warps_layout(schedule.vector), (WARPS, unit // WARPS)
    exchange = RowSums(warpgroups, formula.row_sums)
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*refs: Ref) -> None:
        row_refs, stat_refs, param_refs, refs = split(refs, *sizes)
        result_refs, scratch = split(refs, len(results))
        row = lax.axis_index(BLOCK)
        share = Share.of(row, rows=rows, groups=groups, blocks=rows // groups)
        row_stats = [ref[row] for ref in stat_refs]
        warpgroup = lax.axis_index(WARPGROUP)

        def chunk(j: Any) -> list[Chunk]:
            start = (j * warpgroups + warpgroup) * width
            return [Chunk(start + at, unit, at) for at in range(0, width, unit)]

        def last_chunk() -> list[Chunk]:
            fresh = whole * warpgroups * width + warpgroup * rest_width
            start = jnp.minimum(fresh, cols - rest_width)
            return [Chunk(start + at, unit, at, fresh) for at in range(0, rest_width, unit)]

        def read(units: Sequence[Chunk], inputs: Sequence[Ref]) -> list[Any]:
            """Of each unit its elements, and what belongs to its columns and its row."""
            here = [pl.ds(unit.start, unit.width) for unit in units]
            refs = [ref.at[row] for ref in inputs] + [share.param(ref) for ref in param_refs]
            loaded = [[load(ref.at[at], layout, shape) for ref in refs] for at in here]
            wide = [[widen(v, layout) for v in unit] for unit in loaded]
            n = len(inputs)
            return [(unit[:n], formula.columns(unit[n:]), row_stats) for unit in wide]

        def add(units: Sequence[Chunk], carried: Sequence[jax.Array]) -> list[jax.Array]:
            carried = list(carried)
            for unit, args in zip(units, read(units, row_refs[: formula.summed])):
                terms = [skip_stale(term, unit) for term in formula.terms(*args)]
                carried = [a + b for a, b in zip(carried, terms)]
            return carried

        def write(units: Sequence[Chunk], totals: Sequence[jax.Array]) -> None:
            for unit, args in zip(units, read(units, row_refs)):
                values, _ = formula.finish(*args, totals)
                for ref, value in zip(result_refs, values):
                    store_global(ref.at[row, pl.ds(unit.start, unit.width)], value, layout)

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        sums = [zero] * formula.row_sums
        sums = lax.fori_loop(0, whole, lambda j, carried: add(chunk(j), carried), sums)
        if rest:
            sums = add(last_chunk(), sums)
        sums = [jnp.sum(v, axis=1) for v in sums]
        exchange.publish(scratch, sums)
        totals = exchange.collect(scratch)
        # Backwards: what was read last is the nearest.
        if rest:
            write(last_chunk(), totals)

        @pl.loop(0, whole)
        def _(j: Any) -> None:
            write(chunk(whole - 1 - j), totals)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[((rows, cols), dtype) for dtype in results],
        blocks=rows,
        warpgroups=warpgroups,
        scratch=exchange.scratch(),
        auto_barriers=False,
    )
