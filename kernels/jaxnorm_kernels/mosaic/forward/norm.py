"""LayerNorm and RMSNorm. LayerNorm subtracts the mean, RMSNorm has mean = 0:

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias

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
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import WARPGROUP, launch
from jaxnorm_kernels.mosaic.device.layouts import WARPS, Ref, store
from jaxnorm_kernels.mosaic.forward import schedule as schedules
from jaxnorm_kernels.mosaic.forward.schedule import Schedule
from jaxnorm_kernels.mosaic.forward.streams import Row, Stream, Units
from jaxnorm_kernels.mosaic.forward.tiles import SplitRow, Stat, Tile
from jaxnorm_kernels.specs import Spec, Stats

Gather = Callable[..., list[jax.Array]]
Read = Callable[[], list[jax.Array]]


def norm_fwd(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, Stats]:
    schedule = schedule or schedules.choose(spec)
    rows = schedule.rows_of(spec)
    params = _present(scale, bias)
    count = len(params)  # What traces the body keeps it: it may hold no traced array.
    stats = 1 + spec.returns_mean if spec.want_stats else 0
    if isinstance(rows, Tile):
        normalise = _in_registers(rows, spec, schedule.params_first)
    else:
        normalise = _streamed(rows, spec)

    def body(x_ref: Ref, *refs: Ref) -> None:
        param_refs, y_ref, refs = refs[:count], refs[count], refs[count + 1 :]
        normalise(x_ref, param_refs, y_ref, refs[:stats], refs[stats:])

    y, *kept = launch(
        body,
        [x, *params],
        name=f"jaxnorm_{'layer' if spec.subtract_mean else 'rms'}_norm_fwd",
        outputs=[(x.shape, spec.y_dtype), *[((spec.rows,), spec.compute_dtype)] * stats],
        blocks=rows.blocks(spec.rows),
        cluster=rows.cluster,
        warpgroups=rows.warpgroups,
        scratch=rows.scratch(3, spec.x_dtype),
        auto_barriers=schedule.auto_barriers,
    )
    return y, tuple(kept)


def _in_registers(tile: Tile, spec: Spec, params_first: bool) -> Callable[..., None]:
    def normalise(
        x_ref: Ref,
        param_refs: Sequence[Ref],
        y_ref: Ref,
        stat_refs: Sequence[Ref],
        scratch: Sequence[Any],
    ) -> None:
        def load() -> list[list[jax.Array]]:
            return [tile.load_param(p) for p in param_refs]

        def columns_of(params: list[list[jax.Array]]) -> list[list[jax.Array]]:
            """Of each piece of a row."""
            return [_columns(piece, spec) for piece in zip(*params)] or [[]] * len(tile.pieces())

        def one_row(row: Any, turn: Any, read: Read, held: list[list[jax.Array]] | None) -> None:
            rstd, mean = _row_statistics(tile, turn, read, scratch, spec)
            y = [
                _output(v, tile.spread(rstd, v), _spread(tile, mean, v), columns, spec)
                for v, columns in zip(read(), held or columns_of(load()))
            ]
            tile.store(y_ref, row, y)
            _store_stats(stat_refs, row, rstd, mean)

        if params_first:
            tile.each_row(x_ref, spec.rows, scratch, one_row, load, columns_of)
        else:
            tile.each_row(x_ref, spec.rows, scratch, one_row)

    return normalise


def _streamed(stream: Stream, spec: Spec) -> Callable[..., None]:
    def normalise(
        x_ref: Ref,
        param_refs: Sequence[Ref],
        y_ref: Ref,
        stat_refs: Sequence[Ref],
        scratch: Sequence[Any],
    ) -> None:
        row = Row(stream, x_ref, scratch)
        mean, square = _streamed_moments(stream, row, spec)
        rstd = lax.rsqrt(square / spec.cols + spec.epsilon)
        row.write(
            y_ref,
            param_refs,
            lambda x, *params: _output(x, rstd, mean, _columns(params, spec), spec),
        )
        _store_stats(stat_refs, row.index, rstd, mean)

    return normalise


def _row_statistics(
    tile: Tile, turn: Any, read: Read, scratch: Sequence[Any], spec: Spec
) -> tuple[Stat, Stat | None]:
    """r and the mean of a row in registers."""
    size = tile.part_sizes() if isinstance(tile, SplitRow) else float(spec.cols)
    mean = tile.sum(read()) / size if spec.subtract_mean else None
    centred = read() if mean is None else [v - tile.spread(mean, v) for v in read()]
    square = tile.sum([jnp.square(v) for v in centred])
    if isinstance(tile, SplitRow):
        gather = functools.partial(tile.gather, scratch, turn=turn)
        mean, square = _merge(gather, size, mean, square, spec)
    return lax.rsqrt(square / spec.cols + spec.epsilon), mean


def _streamed_moments(stream: Stream, row: Row, spec: Spec) -> tuple[Stat | None, Stat]:
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


def _output(
    x: jax.Array, rstd: Stat, mean: Stat | None, columns: Sequence[jax.Array], spec: Spec
) -> jax.Array:
    """y; `columns` is what `_columns` gives for the columns of x."""
    rest = list(columns)
    y = (x if mean is None else x - mean) * rstd
    if spec.scale_dtype is not None:
        y = y * rest.pop(0)
    if spec.bias_dtype is not None:
        y = y + rest.pop(0)
    return y


def _columns(params: Sequence[jax.Array], spec: Spec) -> list[jax.Array]:
    """G and the bias, of the scale and bias, as far as there are any."""
    rest = list(params)
    columns = []
    if spec.scale_dtype is not None:
        columns.append(_gain(rest.pop(0), spec))
    if spec.bias_dtype is not None:
        columns.append(_effective_bias(rest.pop(0), spec))
    return columns


def _gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """G in float32, raised to `Spec.scale_floor` where its magnitude is below that."""
    g = scale.astype(jnp.float32)
    if spec.scale_offset:
        g = g + spec.scale_offset
    floor = spec.scale_floor
    return g if floor is None else jnp.where(jnp.abs(g) < floor, jnp.where(g < 0, -floor, floor), g)


def _effective_bias(bias: jax.Array, spec: Spec) -> jax.Array:
    """bias in float32; rounded to y's dtype where the output is saved."""
    if spec.saved == "output":
        bias = bias.astype(spec.y_dtype)
    return bias.astype(jnp.float32)


def _store_stats(refs: Sequence[Ref], row: Any, rstd: Stat, mean: Stat | None) -> None:
    """Stores as many of the statistics as there are refs; every warpgroup has all of them."""

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, stat in zip(refs, _present(rstd, mean)):
            store(ref.at[row], stat)


def _present(*arrays: jax.Array | None) -> list[jax.Array]:
    return [a for a in arrays if a is not None]


def _spread(tile: Tile, stat: Stat | None, like: jax.Array) -> jax.Array | None:
    return None if stat is None else tile.spread(stat, like)
