"""Forward passes of softmax and log_softmax of z = scale * x + bias.

With m = max(z) over the unmasked elements of a row:

    softmax      y = exp(z - m) / sum(exp(z - m))       0 if masked
    log_softmax  y = z - m - log(sum(exp(z - m)))       -inf if masked

If several warps share a row, each of them reduces a part of the row. Part p has the maximum m_p,
and the sum s_p = sum(exp(z - m_p)) over its elements. These maxima and sums are merged:

    m = max(m_p)        sum(exp(z - m)) = sum(s_p exp(m_p - m))
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.launch import present, required
from jaxnorm_kernels.mosaic.device.layouts import Ref, widen
from jaxnorm_kernels.mosaic.loops.each_row import LoadedRow, Steps, each_row
from jaxnorm_kernels.mosaic.loops.forward import ForwardRefs, run
from jaxnorm_kernels.mosaic.rows.logits import (
    LogitRows,
    depends_on_index,
    each_fragment,
    first_row,
    scaled_logits,
)
from jaxnorm_kernels.mosaic.rows.tiles import SplitRow, Tile
from jaxnorm_kernels.mosaic.schedules import forward as schedules
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Spec

Exp = Callable[[jax.Array], jax.Array]


def softmax_fwd(operands: Operands, spec: Spec, *, schedule: TileSchedule | None = None) -> Results:
    """Run the forward pass of softmax or log_softmax. `schedule` replaces the default schedule."""
    schedule = required(schedule or schedules.choose(spec), spec)
    (y,), _ = run(
        _in_registers(spec),
        schedule.rows_of(spec),
        spec.rows,
        operands=present(operands.x, operands.mask, operands.logits_bias),
        results=[spec.y_dtype],
        exchanged=2 + spec.logits.has_mask,
        name=f"{spec.op}_fwd",
    )
    return Results(y)


def _in_registers(spec: Spec) -> Callable[[Tile, ForwardRefs], None]:
    exp = numerics.exp(is_wide=spec.y_dtype.itemsize > 2)
    dropped = -jnp.inf if spec.op == "log_softmax" else 0.0

    def body(tile: Tile, refs: ForwardRefs) -> None:
        (y_ref,) = refs.results

        def load(x: jax.Array) -> tuple[jax.Array]:
            return (scaled_logits(widen(x, tile.layout), spec),)

        def finish(row: LoadedRow, logits: LogitRows | None) -> None:
            each = each_fragment if logits is None else logits.each

            read = row.read
            highest = read()
            may_be_empty = spec.logits.has_mask and spec.drops_masked
            if logits is not None and may_be_empty:
                # Raise unmasked elements to at least the finite number `numerics.LOWEST`. After
                # this, a maximum of -inf means that the entire row is masked.
                highest = [
                    jnp.where(keep, jnp.maximum(v, numerics.LOWEST), -jnp.inf)
                    for keep, v in zip(logits.keep(), highest)
                ]
            top = tile.max(highest)
            part_m = m = jnp.maximum(top, numerics.LOWEST)
            of_fragments = tile.of_fragments(m)
            e = each(lambda v: exp(v - of_fragments(v)), read())
            s = tile.sum(e)
            counts = [jnp.where(top == -jnp.inf, 0.0, 1.0)] if may_be_empty else []
            if isinstance(tile, SplitRow):
                m, s, *counts = tile.gather(refs.scratch, m, s, *counts, step=row.step)
                m, s = _merge(m, s, exp)
                counts = [jnp.max(count) for count in counts]
            for count in counts:  # The count is 0 if the entire row is masked, otherwise 1.
                s = jnp.where(count > 0, s, 1.0)
            if spec.op == "log_softmax":
                y = [v - tile.broadcast(m, v) - tile.broadcast(jnp.log(s), v) for v in read()]
            elif not isinstance(tile, SplitRow):
                y = each(lambda v: v * tile.broadcast(1 / s, v), e)
            elif len(e) == 1 and not tile.rereads:
                # This warp has computed e = exp(z - m_p) with the maximum m_p of its part of the
                # row. Rescale e: exp(z - m) = exp(z - m_p) exp(m_p - m).
                r = exp(part_m - m) * (1 / s)
                y = [v * tile.broadcast(r, v) for v in e]
            else:
                # Compute exp(z - m) again instead of rescaling e. A column may be in two fragments
                # (ranges of columns), which two warps process with different maxima m_p. Rescaled
                # results could then differ in the last bit.
                y = each(lambda v: exp(v - m) * (1 / s), read())
            if logits is not None and logits.drops:
                y = [jnp.where(keep, v, dropped) for keep, v in zip(logits.keep(again=True), y)]
            tile.store(y_ref, row.index, y)

        if not depends_on_index(spec):
            each_row(tile, refs.operands, spec.rows, refs.scratch, Steps(load, finish))
            return
        tile.open(refs.scratch)
        x, *rest = refs.operands
        mask = rest[0] if spec.logits.has_mask else None
        logits = LogitRows(tile, spec, first_row(tile, spec), mask)
        z = _load(logits, x, *rest[spec.logits.has_mask :])
        tile.ready()
        finish(LoadedRow(logits.row, 0, lambda: [(v,) for v in z]), logits)

    return body


def _load(logits: LogitRows, x: Ref, bias: Ref | None = None) -> list[jax.Array]:
    """Load z = scale * x + bias, with `SoftmaxOptions.masked_logit` in place of masked elements."""
    spec, layout = logits.spec, logits.tile.layout
    z = [scaled_logits(widen(v, layout), spec) for v in logits.load(x)]
    if bias is not None and spec.softmax.logits_bias_rows is not None:
        added = logits.load_shared(bias, spec.softmax.logits_bias_rows)
        z = [v + b for v, b in zip(z, added)]
    if not logits.masks:
        return z
    return [jnp.where(keep, v, spec.softmax.masked_logit) for keep, v in zip(logits.keep(), z)]


def _merge(part_m: jax.Array, part_s: jax.Array, exp: Exp) -> tuple[jax.Array, jax.Array]:
    m = jnp.max(part_m)
    return m, jnp.sum(part_s * exp(part_m - m))
