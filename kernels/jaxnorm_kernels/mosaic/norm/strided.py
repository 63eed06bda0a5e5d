"""LayerNorm and RMSNorm of ``(outer, cols, inner)`` over the middle axis.

Also over groups of neighbours on the inner axis (GroupNorm): what the columns of each inner element
give is then merged once more. The equations are those of `norm.forward`, and so is how parts are
merged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device.launch import required
from jaxnorm_kernels.mosaic.norm.elementwise import norm_columns, norm_output
from jaxnorm_kernels.mosaic.rows.pieces import Piece
from jaxnorm_kernels.mosaic.rows.strip import Stat, Strip
from jaxnorm_kernels.mosaic.rows.strip_exchange import Parts
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.walks.strided_forward import Gather, Refs, strided_forward
from jaxnorm_kernels.specs import Spec


def norm_strided_fwd(operands: Operands, spec: Spec) -> Results:
    """Normalise the axis cols of ``(outer, cols, inner)``; see `NormOptions.inner_params`."""
    name = "layer_norm" if spec.norm.subtract_mean else "rms_norm"
    params = [param for param in (operands.scale, operands.bias) if param is not None]
    prepare = functools.partial(norm_columns, spec=spec)
    # r G is that of an inner element where G is.
    joins = spec.norm.inner_params and spec.norm.scale_dtype is not None
    rest = spec.replaced(scale_dtype=None) if joins else spec

    def finish(strip: Strip, gather: Gather, refs: Refs) -> None:
        x = strip.reader(0)
        if spec.norm.inner_params:
            # Read first: that takes as long as the sums do.
            prepared = prepare([strip.inner_param(ref) for ref in refs.params])
            columns = strip.same_of_columns(prepared[joins:])
        else:
            columns = strip.params(refs.params, prepare)
        rstd, mean = _statistics(strip, x, gather, spec)
        wide_rstd = strip.broadcast(rstd * prepared[0] if joins else rstd)
        wide_mean = None if mean is None else strip.broadcast(mean)

        def write(piece: Piece) -> None:
            y = norm_output(x(piece), wide_rstd, wide_mean, columns(piece), rest)
            strip.store(refs.y, piece, y)

        strip.each_piece(write)
        for ref, stat in zip(refs.stats, (rstd, mean)):
            strip.store_stat(ref, stat)

    y, statistics = strided_forward(
        finish,
        operands.x,
        params,
        strips=required(strip_schedule.strips_of(spec), spec),
        y_dtype=spec.y_dtype,
        stats=1 + spec.returns_mean if spec.has_stats else 0,
        exchanged=3 if spec.norm.subtract_mean else 1,
        name=name,
    )
    return Results(y, stats=tuple(stat.reshape(spec.rows) for stat in statistics))


def _statistics(
    strip: Strip, x: Callable[[Piece], jax.Array], gather: Gather, spec: Spec
) -> tuple[Stat, Stat | None]:
    """r and the mean of each inner element, or of its group."""
    mean = None
    if spec.norm.subtract_mean:
        size = strip.sizes()
        (total,) = strip.sum(lambda piece: [x(piece)], waits=True)
        part_mean = total / size
        wide = strip.broadcast(part_mean)
        (part_square,) = strip.sum(lambda piece: [jnp.square(x(piece) - wide)])
        mean, square, _ = gather(_merge_moments, [part_mean, part_square, size])
        if strip.strips.group > 1:
            own_mean, mean = mean, strip.group_sum(mean) / strip.strips.group
            square = square + strip.strips.cols * jnp.square(own_mean - mean)
    else:
        part_squares = strip.sum(lambda piece: [jnp.square(x(piece))], waits=True)
        (square,) = gather(_add, part_squares)
    square = strip.group_sum(square)
    return lax.rsqrt(square / spec.cols + spec.norm.epsilon), mean


def _add(parts: Parts) -> list[Stat]:
    return [parts.sum(lambda part_square: part_square)]


def _merge_moments(parts: Parts) -> list[Any]:
    """The mean, the sum of squares about it, and the number of columns."""
    size = parts.total(2)
    mean = parts.sum(lambda part_mean, part_square, n: n * part_mean) / size
    square = parts.sum(
        lambda part_mean, part_square, n: part_square + n * jnp.square(part_mean - mean)
    )
    return [mean, square, size]
