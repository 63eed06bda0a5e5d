"""What every forward kernel has around its formulas: operands, results, and the launch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import launch, split
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.rows.tiles import Tile

_F32 = np.dtype(np.float32)


class ForwardRefs(NamedTuple):
    """What a kernel reads and writes.

    Attributes:
      operands, results: of rows: ``(rows, cols)``.
      params: of columns: ``(cols,)``, or ``(groups, cols)`` for groups of rows.
      stats: ``(rows,)`` in float32.
      scratch: of a block.
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
    exchanged: int,
    name: str,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs a kernel: its results in these dtypes, and as many statistics of rows.

    Args:
      exchanged: how many values the parts of a row exchange at a time, at most.
      name: of the kernel, without the package's.
    """
    # What traces the body keeps the counts: it may hold no traced array.
    counts = (len(operands), len(params), len(results), stats)

    def kernel(*refs: Ref) -> None:
        body(tile.placed(), ForwardRefs(*split(refs, *counts)))

    shape, window = operands[0].shape, tile.window
    view = shape if window is None else window.shape(rows)
    if window is not None:
        operands = [window.view(operand) for operand in operands]
    outputs = launch(
        kernel,
        [*operands, *params],
        name=f"jaxnorm_{name}",
        outputs=[*((view, dtype) for dtype in results), *[((rows,), _F32)] * stats],
        blocks=tile.blocks(rows),
        cluster=tile.cluster,
        warpgroups=tile.warpgroups,
        scratch=tile.scratch(exchanged, [operand.dtype for operand in operands]),
    )
    of_rows = [output.reshape(shape) for output in outputs[: len(results)]]
    return of_rows, list(outputs[len(results) :])


def of_group(param: Ref, rows: int, index: Callable[[], Any]) -> Ref:
    """The ``(cols,)`` of a parameter that belong to a row, or to all rows of a tile."""
    if len(param.shape) == 1:
        return param
    row = index()
    first = jnp.int32(getattr(row, "start", row))
    return param.at[lax.div(first, jnp.int32(rows // param.shape[0]))]
