"""LayerNorm and RMSNorm.

LayerNorm subtracts the mean, RMSNorm has mean = 0:

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias       or the activation of that

With a residual; h and the y of norm_add are in its dtype, and the second norm has its own scale::

    norm             y = norm(x)
    add_norm         h = x + residual          y = norm(h)
    norm_add         y = residual + norm(x)
    norm_add_norm    h = residual + norm(x)    y = norm(h)
    scaled_add_norm  h = residual + branch_scale x        y = norm(h)

With a gate, y is rounded once::

    norm_gated       y = norm(x) activation(gate)      or y = norm(x activation(gate))

The variance is never E[x^2] - E[x]^2, which cancels. Rows in registers are reduced twice. Where
parts of a row are reduced apart, part p of size n_p has its own mean and its own sum of squares
about it, M_p, and (Chan, Golub, LeVeque 1979)

    mean = sum(n_p mean_p) / n      sum((x - mean)^2) = sum(M_p + n_p (mean_p - mean)^2)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device.launch import WARPGROUP, required
from jaxnorm_kernels.mosaic.device.layouts import Ref, store, widen
from jaxnorm_kernels.mosaic.device.registers import rounded
from jaxnorm_kernels.mosaic.norm.activations import activation_of
from jaxnorm_kernels.mosaic.norm.elementwise import norm_columns, norm_output
from jaxnorm_kernels.mosaic.norm.strided import norm_strided_fwd
from jaxnorm_kernels.mosaic.rows.split_row import SplitRow
from jaxnorm_kernels.mosaic.rows.tiles import LoadedRow, Pieces, Stat, Steps, Tile
from jaxnorm_kernels.mosaic.schedules import forward as schedules
from jaxnorm_kernels.mosaic.schedules.forward_lines import Schedule
from jaxnorm_kernels.mosaic.walks.forward import Refs, of_group, run
from jaxnorm_kernels.specs import Spec


def norm_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """See `Implementation.forward`; statistics are float32.

    Args:
      operands: of 16 or 32 bits.
      schedule: how it runs; by default, what `schedules.choose` says.
    """
    if spec.inner > 1:
        return norm_strided_fwd(operands, spec)
    schedule = required(schedule or schedules.choose(spec), spec)
    y_dtype = _residual_dtype(spec) if spec.op == "norm_add" else spec.y_dtype
    (y, *h), stats = run(
        _in_registers(spec, schedule.params_first),
        schedule.rows_of(spec),
        spec.rows,
        operands=_present(operands.x, operands.residual, operands.gate),
        params=_present(operands.scale, operands.bias, operands.next_scale, operands.branch_scale),
        results=[y_dtype, _residual_dtype(spec)] if spec.returns_h else [y_dtype],
        stats=sum(1 + norm.returns_mean for norm in spec.norms) if spec.want_stats else 0,
        exchanged=3,
        auto_barriers=schedule.auto_barriers,
        name=spec.op.replace("norm", "layer_norm" if spec.subtract_mean else "rms_norm") + "_fwd",
    )
    return Results(y, h[0] if h else None, tuple(stats))


def _residual_dtype(spec: Spec) -> np.dtype:
    if spec.residual_dtype is None:
        raise ValueError(f"{spec.op} needs a residual, and {spec} has none")
    return spec.residual_dtype


def _in_registers(spec: Spec, params_first: bool) -> Callable[[Tile, Refs], None]:
    norms = spec.norms

    def body(tile: Tile, refs: Refs) -> None:
        def add(x: jax.Array, residual: jax.Array) -> jax.Array:
            return x + widen(residual, tile.layout_of(x.shape))

        def gated(v: jax.Array, gate: jax.Array) -> jax.Array:
            a, _ = activation_of(spec)(widen(gate, tile.layout_of(gate.shape)))
            return v * a

        def load(x: jax.Array, *residual: jax.Array) -> tuple[jax.Array, ...]:
            """The row to reduce; then h, or a residual or a gate that comes later."""
            x = widen(x, tile.layout_of(x.shape))
            if spec.op == "norm_gated" and not spec.norm_before_gate:
                return (gated(x, *residual),)
            if spec.op != "add_norm":
                return x, *residual
            h = rounded(add(x, *residual), _residual_dtype(spec))
            return widen(h, tile.layout_of(h.shape)), h

        def columns_of(params: list[list[jax.Array]], norm: Spec | None) -> list[list[jax.Array]]:
            """Of each piece of a row; None for the scale of x."""
            if norm is None:
                return [[p.astype(jnp.float32) for p in piece] for piece in zip(*params)]
            columns = [norm_columns(piece, norm) for piece in zip(*params)]
            return columns or [[]] * len(tile.pieces())

        # Whose parameters there are, and those of each.
        steps_of: list[Spec | None] = [*norms, *[None] * (spec.branch_scale_dtype is not None)]
        param_refs = _by_step(refs.params, steps_of)

        def params(k: int, index: Callable[[], Any]) -> list[list[jax.Array]]:
            return [tile.load_param(of_group(p, spec.rows, index)) for p in param_refs[k]]

        def finish(row: LoadedRow, ready: list[list[list[jax.Array]]] | None) -> None:
            stats: list[Stat] = []

            def columns(k: int) -> list[list[jax.Array]]:
                return ready[k] if ready else columns_of(params(k, lambda: row.index), steps_of[k])

            def norm(read: Callable[[], Pieces], k: int = 0) -> Pieces:
                """Of what `read` gives, the norm `k` of this call."""
                rstd, mean = _row_statistics(tile, read, refs.scratch, norms[k], row.step, k)
                stats.extend(_present(rstd, mean)[: 1 + norms[k].returns_mean])
                return [
                    norm_output(
                        v, tile.broadcast(rstd, v), _broadcast(tile, mean, v), of_piece, norms[k]
                    )
                    for v, of_piece in zip(read(), columns(k))
                ]

            def scaled_sum() -> Pieces:
                """h = residual + branch_scale x."""
                scales = [scale for (scale,) in columns(1)]
                total = [add(x * scale, r) for (x, r), scale in zip(row.load(), scales)]
                return [rounded(v, _residual_dtype(spec)) for v in total]

            def wide(h: Pieces) -> Pieces:
                return [widen(v, tile.layout_of(v.shape)) for v in h]

            def write(result: int, values: Pieces) -> None:
                if result < len(refs.results):
                    tile.store(refs.results[result], row.index, values)

            match spec.op:
                case "norm":
                    write(0, norm(row.read))
                case "add_norm":
                    write(1, row.read(1))
                    write(0, norm(row.read))
                case "norm_add":
                    write(0, [add(*v) for v in zip(norm(row.read), row.read(1))])
                case "norm_add_norm":
                    total = [add(*v) for v in zip(norm(row.read), row.read(1))]
                    h = [rounded(v, _residual_dtype(spec)) for v in total]
                    write(1, h)
                    write(0, norm(functools.partial(wide, h), 1))
                case "scaled_add_norm":
                    h = scaled_sum()
                    write(1, h)
                    # Read again, a row holds no registers meanwhile.
                    write(0, norm(lambda: wide(scaled_sum() if tile.rereads else h)))
                case "norm_gated":
                    y = norm(row.read)
                    waits = spec.norm_before_gate
                    write(0, [gated(*v) for v in zip(y, row.read(1))] if waits else y)
            _store_stats(refs.stats, row.index, stats)

        steps = Steps(load, finish)
        if params_first:
            steps = dataclasses.replace(
                steps,
                params=lambda: [
                    params(k, lambda: tile.first_row(spec.rows)) for k in range(len(steps_of))
                ],
                prepare=lambda loaded: [columns_of(*each) for each in zip(loaded, steps_of)],
            )
        tile.each_row(refs.operands, spec.rows, refs.scratch, steps)

    return body


def _row_statistics(
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
    gather: Callable[..., list[jax.Array]],
    size: jax.Array | float,
    mean: Stat | None,
    square: Stat,
    spec: Spec,
) -> tuple[Stat | None, Stat]:
    """The mean of a row and the sum of squares about it, of those of its parts.

    `gather` shows the values of each part to all of them: see `rows.exchange.Gather`.
    """
    if mean is None:
        (part_square,) = gather(square)
        return None, jnp.sum(part_square)
    if isinstance(size, float):
        part_mean, part_square = gather(mean, square)
    else:
        part_mean, part_square, size = gather(mean, square, size)
    mean = jnp.sum(size * part_mean) / spec.cols
    return mean, jnp.sum(part_square + size * jnp.square(part_mean - mean))


def _by_step(params: Sequence[Ref], steps: Sequence[Spec | None]) -> list[list[Ref]]:
    """The parameters of each norm, and the scale of x, for which None stands."""
    rest = list(params)
    counts = [1 if n is None else len(_present(n.scale_dtype, n.bias_dtype)) for n in steps]
    return [[rest.pop(0) for _ in range(count)] for count in counts]


def _store_stats(refs: Sequence[Ref], row: Any, stats: Sequence[Stat]) -> None:
    """Stores as many of the statistics as there are refs; every warpgroup has all of them."""

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, stat in zip(refs, stats):
            store(ref.at[row], stat)


def _present[T](*values: T | None) -> list[T]:
    return [v for v in values if v is not None]


def _broadcast(tile: Tile, stat: Stat | None, like: jax.Array) -> jax.Array | None:
    return None if stat is None else tile.broadcast(stat, like)
