"""Backward passes of norms over rows of any length: one kernel for dx, one for the column sums.

The first reads each row twice, the second time from the L2 cache. The second walks down the
columns, with their sums in registers. In all, inputs are read from memory twice, which other
schedules avoid; this one asks nothing of the rows.
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

from jaxnorm_kernels.mosaic.backward.formulas import Formula, Operands, prepare, split
from jaxnorm_kernels.mosaic.backward.rows import Streamed, streamed_backward
from jaxnorm_kernels.mosaic.backward.shares import Share
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch
from jaxnorm_kernels.mosaic.device.layouts import (
    WARPGROUP_THREADS,
    Ref,
    load,
    store,
    warpgroup_layout,
)
from jaxnorm_kernels.mosaic.device.registers import widen


@dataclasses.dataclass(frozen=True)
class TwoPass:
    """Parameters of the two kernels.

    Attributes:
      rows: how the first kernel reads a row.
      vector: neighbouring elements that one thread of the second kernel reads at once.
      units: vectors of a row that it reads.
      together: rows that it reads before it uses the first.
      row_blocks: into how many blocks of rows it cuts the columns.
    """

    rows: Streamed
    vector: int
    units: int = 2
    together: int = 4
    row_blocks: int = 32


def two_pass_backward(
    formula: Formula,
    operands: Operands,
    *,
    schedule: TwoPass,
    results: Sequence[np.dtype],
    name: str,
) -> tuple[jax.Array, ...]:
    """The row results, then for each column sum its partial sums, one row for each row block."""
    values = streamed_backward(
        formula, operands, schedule=schedule.rows, results=results, name=name
    )
    if not formula.column_sums:
        return values
    return *values, *column_sums(formula, operands, schedule=schedule, name=f"{name}_columns")


def column_sums(
    formula: Formula, operands: Operands, *, schedule: TwoPass, name: str
) -> tuple[jax.Array, ...]:
    unread_operands = len(operands.rows) - formula.summed
    operands = dataclasses.replace(operands, rows=operands.rows[: formula.summed])
    (rows, cols), groups = operands.shape, operands.groups
    width = schedule.units * WARPGROUP_THREADS * schedule.vector
    if cols < width:
        raise ValueError(f"{schedule} needs rows of {width} columns")
    layout = warpgroup_layout(schedule.vector)
    across = -(-cols // width)
    row_blocks = min(-(-schedule.row_blocks // groups), rows // groups)  # of a group
    together = schedule.together
    sizes = operands.sizes  # What traces the body keeps it: it may hold no traced array.

    def body(*refs: Ref) -> None:
        row_refs, stat_refs, param_refs, partial_refs = split(refs, *sizes)
        block = lax.axis_index(BLOCK)
        # The last block of columns overlaps the one before it: it ends with the row.
        here = pl.ds(jnp.minimum(lax.rem(block, across) * width, cols - width), width)
        first = lax.div(block, across)
        share = Share.of(first, rows=rows, groups=groups, blocks=row_blocks)
        count = share.count()
        params = [load(share.param(ref).at[here], layout) for ref in param_refs]
        columns = prepare(formula, params)
        # Neither these nor the row results are used: both are the other kernel's.
        totals, unread = [jnp.float32(0)] * formula.row_sums, [jnp.float32(0)] * unread_operands

        def terms(k: Any, taken: int) -> list[list[jax.Array]]:
            """Those of `taken` rows, all read before the first is used."""
            indices = [share.row(k + u) for u in range(taken)]
            loaded = [[load(ref.at[i, here], layout) for ref in row_refs] for i in indices]
            row_stats = [[ref[i] for ref in stat_refs] for i in indices]
            return [
                formula.finish([*(widen(v, layout) for v in row), *unread], columns, s, totals)[1]
                for row, s in zip(loaded, row_stats)
            ]

        def step(taken: int, k: Any, carried: list[jax.Array]) -> list[jax.Array]:
            for row in terms(k, taken):
                carried = [a + b for a, b in zip(carried, row)]
            return carried

        zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        carried = [zero] * formula.column_sums
        whole = lax.div(count, together)
        carried = lax.fori_loop(0, whole, lambda j, c: step(together, j * together, c), carried)
        carried = lax.fori_loop(whole * together, count, lambda k, c: step(1, k, c), carried)
        for ref, value in zip(partial_refs, carried):
            store(ref.at[first, here], value)

    return launch(
        body,
        operands.arrays,
        name=name,
        outputs=[((groups * row_blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        blocks=across * groups * row_blocks,
        auto_barriers=False,
    )
