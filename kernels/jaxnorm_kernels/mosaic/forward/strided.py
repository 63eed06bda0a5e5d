"""Softmax, log_softmax, LayerNorm and RMSNorm of ``(outer, cols, inner)`` over the middle axis.

The equations are those of `forward.softmax` and `forward.norm`, the same merging of parts included;
a part is what a warp has of the columns. Instead of rows, blocks hold strips: see `rows.strips`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic import elementwise
from jaxnorm_kernels.mosaic.device.launch import found, launch
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.elementwise import LOWEST, norm_columns, norm_output
from jaxnorm_kernels.mosaic.rows.shares import Chunk
from jaxnorm_kernels.mosaic.rows.strip_exchange import Parts, StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Stat, Strip, Strips
from jaxnorm_kernels.mosaic.strided import strips_of
from jaxnorm_kernels.specs import Spec, Stats

_F32 = np.dtype(np.float32)


def softmax_fwd(x: jax.Array, spec: Spec, *, strips: Strips | None = None) -> jax.Array:
    """y ``(outer, cols, inner)``, of softmax or log_softmax.

    Args:
      x: ``(outer, cols, inner)``; 16 or 32 bits.
      spec: with ``spec.inner`` above 1.
      strips: how blocks share the array; by default, what `strided.strips_of` says.
    """
    strips = found(strips or strips_of(spec), spec)
    exchange = StripExchange(strips, stats=2)
    exp = elementwise.exp(is_wide=spec.y_dtype.itemsize > 2)

    def merge(parts: Parts) -> list[Stat]:
        m = parts.max(lambda part_m, part_s: part_m)
        return [m, parts.sum(lambda part_m, part_s: part_s * exp(part_m - m))]

    def body(x_ref: Ref, y_ref: Ref, *scratch: Any) -> None:
        held, exchanged = scratch[:2], scratch[2:]

        def finish(strip: Strip) -> None:
            x = strip.reader(0)
            part_m = strip.max(x, LOWEST)
            along_m = strip.along(part_m)
            (part_s,) = strip.sum(lambda chunk: [exp(x(chunk) - along_m)])
            m, s = exchange(exchanged, merge, [part_m, part_s], strip.step)
            along_m = strip.along(m)
            if spec.op == "log_softmax":
                log_s = strip.along(jnp.log(s))
                strip.each_chunk(lambda c: strip.store(y_ref, c, x(c) - along_m - log_s))
            else:
                r = strip.along(1 / s)
                strip.each_chunk(lambda c: strip.store(y_ref, c, exp(x(c) - along_m) * r))

        exchange.open()
        strips.each([x_ref], held, finish, exchange.ready)

    (y,) = launch(
        body,
        [x],
        name=f"jaxnorm_{spec.op}_strided_fwd",
        outputs=[(x.shape, spec.y_dtype)],
        blocks=strips.blocks,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[*strips.scratch([x.dtype]), *exchange.scratch()],
        auto_barriers=False,
    )
    return y


def norm_fwd(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    strips: Strips | None = None,
) -> tuple[jax.Array, Stats]:
    """y ``(outer, cols, inner)``; and the statistics, each ``(outer * inner,)`` in float32.

    Args:
      scale, bias: ``(cols,)``; None where there is none. For the others see `softmax_fwd`.
    """
    strips = found(strips or strips_of(spec), spec)
    exchange = StripExchange(strips, stats=3)
    params = [p for p in (scale, bias) if p is not None]
    # What traces the body keeps the count: it may hold no traced array.
    param_count = len(params)
    stats = 1 + spec.returns_mean if spec.want_stats else 0

    def merge_squares(parts: Parts) -> list[Stat]:
        return [parts.sum(lambda part_square: part_square)]

    def merge_moments(parts: Parts) -> list[Any]:
        """The mean, the sum of squares about it, and of how many columns."""
        total = parts.sum(lambda part_mean, part_square, n: n * part_mean)
        size = (
            parts.count * parts.stats[2]
            if isinstance(parts.stats[2], float)
            else parts.sum(lambda m, s, n: n)
        )
        mean = total / size
        square = parts.sum(
            lambda part_mean, part_square, n: part_square + n * jnp.square(part_mean - mean)
        )
        return [mean, square, size]

    def body(x_ref: Ref, *refs: Any) -> None:
        param_refs, refs = refs[:param_count], refs[param_count:]
        y_ref, stat_refs, scratch = refs[0], refs[1 : 1 + stats], refs[1 + stats :]
        held, exchanged = scratch[:2], scratch[2:]

        def finish(strip: Strip) -> None:
            x = strip.reader(0)
            if spec.subtract_mean:
                size = strip.sizes()
                part_mean = strip.sum(lambda c: [x(c)])[0] / size
                along = strip.along(part_mean)
                (part_square,) = strip.sum(lambda c: [jnp.square(x(c) - along)])
                parts = [part_mean, part_square, size]
                mean, square, _ = exchange(exchanged, merge_moments, parts, strip.step)
            else:
                part_squares = strip.sum(lambda c: [jnp.square(x(c))])
                mean = None
                (square,) = exchange(exchanged, merge_squares, part_squares, strip.step)
            rstd = lax.rsqrt(square / spec.cols + spec.epsilon)
            along_rstd = strip.along(rstd)
            along_mean = None if mean is None else strip.along(mean)

            def write(chunk: Chunk) -> None:
                columns = norm_columns([strip.param(p, chunk) for p in param_refs], spec)
                columns = [strip.of_columns(column) for column in columns]
                y = norm_output(x(chunk), along_rstd, along_mean, columns, spec)
                strip.store(y_ref, chunk, y)

            strip.each_chunk(write)
            for ref, stat in zip(stat_refs, (rstd, mean)):
                strip.store_stat(ref, stat)

        exchange.open()
        strips.each([x_ref], held, finish, exchange.ready)

    y, *statistics = launch(
        body,
        [x, *params],
        name=f"jaxnorm_{'layer' if spec.subtract_mean else 'rms'}_norm_strided_fwd",
        outputs=[(x.shape, spec.y_dtype), *[((strips.outer, strips.inner), _F32)] * stats],
        blocks=strips.blocks,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[*strips.scratch([x.dtype]), *exchange.scratch()],
        auto_barriers=False,
    )
    return y, tuple(stat.reshape(spec.rows) for stat in statistics)
