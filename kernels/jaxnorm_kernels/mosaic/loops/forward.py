"""The common part of all forward kernels: how operands and results are passed, and the launch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import WARPGROUP, launch, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, store
from jaxnorm_kernels.mosaic.rows.tiles import Stat, Tile

_F32 = np.dtype(np.float32)


class ForwardRefs(NamedTuple):
    """The refs that a forward kernel's body gets.

    Attributes:
      operands, results: arrays ``(rows, cols)``.
      params: parameters, ``(cols,)``, or ``(groups, cols)`` if each group of rows has its own
        parameters.
      stats: float32 arrays ``(rows,)``, statistics that the kernel stores.
      scratch: shared memory and barriers of the block.
    """

    operands: Sequence[Ref]
    params: Sequence[Ref]
    results: Sequence[Ref]
    stats: Sequence[Ref]
    scratch: Sequence[Any]


def run(
    body: Callable[[Tile, ForwardRefs], None],
    tile: Tile,
    rows: int,
    *,
    operands: Sequence[jax.Array],
    results: Sequence[np.dtype],
    params: Sequence[jax.Array] = (),
    stats: int = 0,
    exchanged: int = 0,
    name: str,
    others: Sequence[tuple[tuple[int, ...], np.dtype]] = (),
    scratch: Sequence[Any] | None = None,
    blocks: int | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a forward kernel.

    Returns two lists. The first list has the results, with shape ``(rows, cols)``. The second list
    has the statistics, with shape ``(rows,)``, and after them the outputs in `others`.

    Args:
      body: the kernel's body, ``body(tile, refs)``.
      tile: how a block distributes its rows over threads.
      rows: number of rows.
      operands: arrays ``(rows, cols)``.
      results: dtypes of the results.
      params: parameters of columns (see `ForwardRefs`).
      stats: number of statistics per row.
      exchanged: maximum number of values per row that warps exchange at a time.
      name: the kernel's name, without the prefix ``jaxnorm_``.
      others: shapes and dtypes of outputs that are neither results nor statistics. The body gets
        their refs at the beginning of `ForwardRefs.scratch`.
      scratch: shared memory and barriers. By default, the tile determines them.
      blocks: number of blocks. By default, the tile determines it.
    """
    # JAX caches the traced body, so the body must not refer to the traced operands. It may use only
    # the number of operands of each kind.
    counts = (len(operands), len(params), len(results), stats)

    def kernel(*refs: Ref) -> None:
        body(tile.with_indices(), ForwardRefs(*split(refs, *counts)))

    shape = operands[0].shape
    if scratch is None:
        scratch = tile.scratch(exchanged, [operand.dtype for operand in operands])
    outputs = launch(
        kernel,
        [*operands, *params],
        name=f"jaxnorm_{name}",
        outputs=[*((shape, dtype) for dtype in results), *[((rows,), _F32)] * stats, *others],
        blocks=blocks or tile.blocks(rows),
        cluster=tile.cluster,
        warpgroups=tile.warpgroups,
        scratch=scratch,
    )
    return list(outputs[: len(results)]), list(outputs[len(results) :])


def param_of_group(param: Ref, rows: int, index: Callable[[], Any]) -> Ref:
    """Return the ``(cols,)`` part of a parameter that applies to a row's group of rows.

    `param` is ``(groups, cols)``. If it is ``(cols,)``, there are no groups, and `param` itself is
    returned. `rows` is the number of rows of the array. ``index()`` returns the index of the row,
    or a slice of rows that belong to the same group.
    """
    if len(param.shape) == 1:
        return param
    row = index()
    first = jnp.int32(getattr(row, "start", row))
    return param.at[lax.div(first, jnp.int32(rows // param.shape[0]))]


def store_stats(refs: Sequence[Ref], row: Any, stats: Sequence[Stat]) -> None:
    """Store row statistics. Only the first warpgroup stores, because all have the same values."""

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, stat in zip(refs, stats):
            store(ref.at[row], stat)
