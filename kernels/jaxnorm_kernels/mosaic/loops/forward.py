"""The common part of forward kernels: operands, results, and the launch."""

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
    """The arguments of a forward kernel's body.

    Attributes:
      operands, results: ``(rows, cols)`` each.
      params: ``(cols,)``, or ``(groups, cols)`` for groups of rows.
      stats: ``(rows,)`` in float32.
      scratch: the scratch memory of a block.
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
    """Run a forward kernel. Return its results, with dtypes `results`, and its row statistics.

    Args:
      exchanged: the largest number of values that the parts of a row exchange at a time.
      name: the kernel's name without the prefix ``jaxnorm_``.
      others: shape and dtype of further outputs, whose refs come before those of `scratch`.
      scratch, blocks: override the scratch memory and the number of blocks of the tile.
    """
    # The traced body is cached, so it must not hold traced arrays: it uses the numbers of arrays
    # only.
    counts = (len(operands), len(params), len(results), stats)

    def kernel(*refs: Ref) -> None:
        body(tile.placed(), ForwardRefs(*split(refs, *counts)))

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


def of_group(param: Ref, rows: int, index: Callable[[], Any]) -> Ref:
    """Return the ``(cols,)`` part of a parameter that belongs to a row, or to a tile's rows."""
    if len(param.shape) == 1:
        return param
    row = index()
    first = jnp.int32(getattr(row, "start", row))
    return param.at[lax.div(first, jnp.int32(rows // param.shape[0]))]


def store_stats(refs: Sequence[Ref], row: Any, stats: Sequence[Stat]) -> None:
    """Store row statistics from the first warpgroup; every warpgroup has all of them."""

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, stat in zip(refs, stats):
            store(ref.at[row], stat)
