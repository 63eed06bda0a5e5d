"""The mean of a row, and the sum of squares about it.

The variance is never E[x^2] - E[x]^2, which cancels. Rows in registers are reduced twice. Where
parts of a row are reduced apart, part p of size n_p has its own mean and its own sum of squares
about it, M_p, and (Chan, Golub, LeVeque 1979)

    mean = sum(n_p mean_p) / n      sum((x - mean)^2) = sum(M_p + n_p (mean_p - mean)^2)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.rows.tiles import Pieces, SplitRow, Stat, Tile
from jaxnorm_kernels.specs import Spec

#: Shows the values of each part of a row to all of them: `Exchange.gather`.
Gather = Callable[..., list[jax.Array]]


def row_statistics(
    tile: Tile,
    read: Callable[[], Pieces],
    scratch: Sequence[Any],
    spec: Spec,
    step: Any,
    nth: int,
) -> tuple[Stat, Stat | None]:
    """r and the mean of a row in registers; `nth` of the norms of this step's row."""
    size = tile.part_sizes() if isinstance(tile, SplitRow) else float(spec.cols)
    mean = tile.sum(read()) / size if spec.subtract_mean else None
    centred = read() if mean is None else [v - tile.broadcast(mean, v) for v in read()]
    square = tile.sum([jnp.square(v) for v in centred])
    if isinstance(tile, SplitRow):
        gather = functools.partial(tile.gather, scratch, step=step, nth=nth)
        mean, square = _merge(gather, size, mean, square, spec)
    return lax.rsqrt(square / spec.cols + spec.epsilon), mean


def _merge(
    gather: Gather, size: jax.Array | float, mean: Stat | None, square: Stat, spec: Spec
) -> tuple[Stat | None, Stat]:
    """The mean of a row and the sum of squares about it, of those of its parts."""
    if mean is None:
        (part_square,) = gather(square)
        return None, jnp.sum(part_square)
    if isinstance(size, float):
        part_mean, part_square = gather(mean, square)
    else:
        part_mean, part_square, size = gather(mean, square, size)
    mean = jnp.sum(size * part_mean) / spec.cols
    return mean, jnp.sum(part_square + size * jnp.square(part_mean - mean))
