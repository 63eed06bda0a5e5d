"""The mean of a row, and the sum of squares about it.

The variance is never E[x^2] - E[x]^2, which cancels. Rows in registers are reduced twice. Where
parts of a row are reduced apart, part p of size n_p has its own mean and its own sum of squares
about it, M_p, and (Chan, Golub, LeVeque 1979)

    mean = sum(n_p mean_p) / n      sum((x - mean)^2) = sum(M_p + n_p (mean_p - mean)^2)

A part that is streamed is reduced once, about a pivot c, the mean of its first chunk:

    mean_p = c + sum(x - c) / n_p   M_p = sum((x - c)^2) - n_p (mean_p - c)^2

The pivot lies among the data, so what cancels is no more than (chunks of the row) * M_p.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.layouts import WARPS
from jaxnorm_kernels.mosaic.forward.streams import Row, Stream, Units
from jaxnorm_kernels.mosaic.forward.tiles import Pieces, SplitRow, Stat, Tile
from jaxnorm_kernels.specs import Spec

#: Shows the values of each part of a row to all of them: `Exchange.gather`.
Gather = Callable[..., list[jax.Array]]


def row_statistics(
    tile: Tile,
    read: Callable[[], Pieces],
    scratch: Sequence[Any],
    spec: Spec,
    turn: Any,
    nth: int,
) -> tuple[Stat, Stat | None]:
    """r and the mean of a row in registers; `nth` of the norms of this turn's row."""
    size = tile.part_sizes() if isinstance(tile, SplitRow) else float(spec.cols)
    mean = tile.sum(read()) / size if spec.subtract_mean else None
    centred = read() if mean is None else [v - tile.spread(mean, v) for v in read()]
    square = tile.sum([jnp.square(v) for v in centred])
    if isinstance(tile, SplitRow):
        gather = functools.partial(tile.gather, scratch, turn=turn, nth=nth)
        mean, square = _merge(gather, size, mean, square, spec)
    return lax.rsqrt(square / spec.cols + spec.epsilon), mean


def streamed_moments(stream: Stream, row: Row, spec: Spec) -> tuple[Stat | None, Stat]:
    """The mean and the sum of squares about it, of a row that is read once."""

    def spread(pivot: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(pivot, stream.shape, (0,))

    def first(units: Units) -> tuple[jax.Array, ...]:
        if not spec.subtract_mean:
            return step((stream.full(0),), units)
        pivot = jnp.sum(sum(units[1:], units[0]), axis=1) / (stream.chunk / WARPS)
        return step((stream.full(0), stream.full(0), pivot), units)

    def step(carry: tuple[jax.Array, ...], units: Units) -> tuple[jax.Array, ...]:
        square, *rest = carry
        if rest:
            linear, pivot = rest
            units = [v - spread(pivot) for v in units]
            rest = [sum(units, linear), pivot]
        return sum((jnp.square(v) for v in units), square), *rest

    def neutral(carry: tuple[jax.Array, ...]) -> jax.Array:
        return spread(carry[-1]) if spec.subtract_mean else jnp.float32(0)

    square, *rest = row.fold(first, step, neutral)
    square = jnp.sum(square, axis=1)
    if not spec.subtract_mean:
        return _merge(row.gather, 0.0, None, square, spec)
    linear, pivot = rest
    linear, size = jnp.sum(linear, axis=1), stream.part_sizes()
    shift = linear / size
    return _merge(row.gather, size, pivot + shift, square - linear * shift, spec)


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
