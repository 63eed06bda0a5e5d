"""Softmax, log_softmax, LayerNorm and RMSNorm of ``(outer, cols, inner)`` over the middle axis.

The norms also over groups of neighbours on the inner axis (GroupNorm): what the columns of each
inner element give is then merged once more.

The equations are those of `forward.softmax` and `forward.norm`, and so is how parts are merged; a
part is what a warp has of the columns, or a block of a cluster. Blocks hold strips, not rows: see
`rows.strips`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic import elementwise, strip_schedule
from jaxnorm_kernels.mosaic.device.launch import launch, required
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.elementwise import LOWEST, norm_columns, norm_output
from jaxnorm_kernels.mosaic.rows.pieces import Piece
from jaxnorm_kernels.mosaic.rows.strip_exchange import Merge, Parts, StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Stat, Strip
from jaxnorm_kernels.specs import Spec

# Statistics of the parts of a strip -> those of the strip, and the same of several kinds.
_Gather = Callable[[Merge, Sequence[Stat | float]], list[Any]]


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What a kernel reads and writes, beside x."""

    params: Sequence[Ref]
    y: Ref
    stats: Sequence[Ref]


def softmax_fwd(operands: Operands, spec: Spec) -> Results:
    """Of softmax or log_softmax; x and y are ``(outer, cols, inner)``, of 16 or 32 bits."""
    exp = elementwise.exp(is_wide=spec.y_dtype.itemsize > 2)

    def merge(parts: Parts) -> list[Stat]:
        m = parts.max(lambda part_m, part_s: part_m)
        return [m, parts.sum(lambda part_m, part_s: part_s * exp(part_m - m))]

    def finish(strip: Strip, gather: _Gather, refs: _Refs) -> None:
        def z(piece: Piece) -> jax.Array:
            return elementwise.scaled(strip.read(0, piece), spec)

        part_m = strip.max(z, LOWEST)
        wide_m = strip.broadcast(part_m)
        (part_s,) = strip.sum(lambda piece: [exp(z(piece) - wide_m)])
        m, s = gather(merge, [part_m, part_s])
        is_log = spec.op == "log_softmax"
        m, r = strip.broadcast(m), strip.broadcast(jnp.log(s) if is_log else 1 / s)

        def y(piece: Piece) -> jax.Array:
            return z(piece) - m - r if is_log else exp(z(piece) - m) * r

        strip.each_piece(lambda piece: strip.store(refs.y, piece, y(piece)))

    return _forward(finish, operands.x, [], spec, exchanged=2, name=spec.op)


def norm_fwd(operands: Operands, spec: Spec) -> Results:
    """x and y are ``(outer, cols, inner)``; scale and bias also as `Spec.inner_params` says."""
    name = "layer_norm" if spec.subtract_mean else "rms_norm"
    params = [param for param in (operands.scale, operands.bias) if param is not None]
    prepare = functools.partial(norm_columns, spec=spec)

    def finish(strip: Strip, gather: _Gather, refs: _Refs) -> None:
        x = strip.reader(0)
        if spec.inner_params:
            # Read first: that takes as long as the sums do.
            prepared = prepare([strip.inner_param(ref) for ref in refs.params])
            columns = strip.same_of_columns(prepared)
        else:
            columns = strip.params(refs.params, prepare)
        rstd, mean = _statistics(strip, x, gather, spec)
        wide_rstd = strip.broadcast(rstd)
        wide_mean = None if mean is None else strip.broadcast(mean)

        def write(piece: Piece) -> None:
            y = norm_output(x(piece), wide_rstd, wide_mean, columns(piece), spec)
            strip.store(refs.y, piece, y)

        strip.each_piece(write)
        for ref, stat in zip(refs.stats, (rstd, mean)):
            strip.store_stat(ref, stat)

    exchanged = 3 if spec.subtract_mean else 1
    return _forward(finish, operands.x, params, spec, exchanged=exchanged, name=name)


def _statistics(
    strip: Strip, x: Callable[[Piece], jax.Array], gather: _Gather, spec: Spec
) -> tuple[Stat, Stat | None]:
    """r and the mean of each inner element, or of its group."""
    mean = None
    if spec.subtract_mean:
        size = strip.sizes()
        (total,) = strip.sum(lambda piece: [x(piece)])
        part_mean = total / size
        wide = strip.broadcast(part_mean)
        (part_square,) = strip.sum(lambda piece: [jnp.square(x(piece) - wide)])
        mean, square, _ = gather(_merge_moments, [part_mean, part_square, size])
        if strip.strips.group > 1:
            own_mean, mean = mean, strip.group_sum(mean) / strip.strips.group
            square = square + strip.strips.cols * jnp.square(own_mean - mean)
    else:
        (square,) = gather(_add, strip.sum(lambda piece: [jnp.square(x(piece))]))
    square = strip.group_sum(square)
    return lax.rsqrt(square / spec.cols + spec.epsilon), mean


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


def _forward(
    finish: Callable[[Strip, _Gather, _Refs], None],
    x: jax.Array,
    params: Sequence[jax.Array],
    spec: Spec,
    *,
    exchanged: int,
    name: str,
) -> Results:
    """Runs `finish` on each strip of x: y, and the statistics that the spec wants."""
    strips = required(strip_schedule.strips_of(spec), spec)
    exchange = StripExchange(strips, exchanged)
    stats = 1 + spec.returns_mean if spec.is_norm and spec.want_stats else 0
    # What traces the body keeps the count: it may hold no traced array.
    param_count = len(params)
    held = strips.scratch([x.dtype])

    def body(x_ref: Ref, *refs: Any) -> None:
        param_refs, (y_ref, *refs) = refs[:param_count], refs[param_count:]
        stat_refs, scratch = refs[:stats], refs[stats:]
        exchanged_refs = scratch[len(held) :]

        def one(strip: Strip) -> None:
            gather = functools.partial(exchange, exchanged_refs, strip.step)
            finish(strip, gather, _Refs(param_refs, y_ref, stat_refs))

        exchange.open()
        strips.each([x_ref], scratch[: len(held)], one, exchange.ready)

    y, *statistics = launch(
        body,
        [x, *params],
        name=f"jaxnorm_{name}_strided_fwd",
        outputs=[
            (x.shape, spec.y_dtype),
            *[(strips.stats_shape, np.dtype(np.float32))] * stats,
        ],
        blocks=strips.blocks,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[*held, *exchange.scratch()],
        auto_barriers=False,
    )
    return Results(y, stats=tuple(stat.reshape(spec.rows) for stat in statistics))
