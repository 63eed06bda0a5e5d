"""Cross-entropy of a row and its gradient, in one kernel.

A block processes one row: it reduces the row as the forward pass does, and then reads it again and
stores the gradient, possibly over the row, as the backward pass does. If the rows of all blocks
that run at the same time fit in the L2 cache, the second read takes no memory bandwidth. The
formulas are those of the modules `forward` and `backward`.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.cross_entropy.backward import store_gradient
from jaxnorm_kernels.mosaic.cross_entropy.forward import (
    LossForwardSchedule,
    RowShare,
    reduce_row,
    store_results,
    sums_of,
    takes_80_registers,
    units_at_a_time,
    units_of,
)
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch
from jaxnorm_kernels.mosaic.device.layouts import Ref, load
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.units import load_units
from jaxnorm_kernels.specs import Spec

#: Longest rows in bytes: 132 of them, one for each multiprocessor of an H100, take 40 of the 50 MB
#: of its L2 cache.
MOST_BYTES = 304 * 1024
# Rows longer than this have blocks of eight warpgroups, which fill a multiprocessor. With fewer,
# the rows of all blocks exceed the cache. 4096 rows of bfloat16 take, in ms (H100):
#
#     columns   eight warpgroups   four   two    forward and backward kernel
#     128256    0.86               0.99          1.05
#      50264    0.38               0.33   0.42   0.47
#      32000                       0.19   0.22   0.27
_LONG_BYTES = 128 * 1024
_SHARE_BYTES = 12 * 1024  # of a row, for each warpgroup


def choose(spec: Spec) -> LossForwardSchedule:
    """Return the schedule of a call."""
    row = spec.cols * spec.x_dtype.itemsize
    # Eight warpgroups have 64 registers for each thread.
    most = 8 if row > _LONG_BYTES and not takes_80_registers(spec) else 4
    warpgroups = 1 << min(max(1, row // _SHARE_BYTES), most).bit_length() - 1
    return LossForwardSchedule(units_at_a_time(spec, warpgroups), warpgroups)


def cross_entropy_both(
    operands: Operands,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossForwardSchedule | None = None,
) -> tuple[Results, Operands]:
    """Return the loss, and the gradient of x. `schedule` overrides `choose`."""
    schedule = schedule or choose(spec)
    gather = Gather(schedule.warpgroups, values=sums_of(spec))
    scratch_types = gather.scratch()
    arrays = [operands.x, operands.labels, cotangents.y]
    if operands.positions is not None:
        arrays.append(operands.positions)

    def body(x: Ref, labels: Ref, dy: Ref, *refs: Ref) -> None:
        first = len(arrays) - 3
        last = len(refs) - len(scratch_types)
        positions, results, scratch = refs[:first], refs[first:last], refs[last:]
        dx, loss = results if len(results) == 2 else (x, *results)
        row = lax.axis_index(BLOCK)
        share = RowShare(spec, units_of(spec, padded=True), schedule, row)
        steps, rest = share.whole_steps, share.rest()
        d = load(dy.at[row], None)

        def counted(label: jax.Array, value: jax.Array, *stats: jax.Array) -> None:
            store_results([loss], value)

            def write(units: Any, raw: Any) -> None:
                numbers = [*stats, d]
                store_gradient(units, raw, dx, row, label, numbers, spec, has_entry=True)

            def advance(i: Any, raw: list[jax.Array]) -> list[jax.Array]:
                coming = load_units(share.step(steps - 2 - i), x, row)
                write(share.step(steps - 1 - i), raw)
                return coming

            # Start with the columns that were read last, which no other row has evicted yet.
            if rest:
                write(rest, load_units(rest, x, row))
            if steps:
                raw = load_units(share.step(steps - 1), x, row)
                write(share.step(0), lax.fori_loop(0, steps - 1, advance, raw))

        def excluded() -> None:
            store_results([loss], 0.0)

            def clear(units: Any) -> None:
                zero = jnp.zeros(units[0].shape, jnp.float32)
                for unit in units:
                    unit.store(dx, row, plgpu.layout_cast(zero, unit.layout))

            lax.fori_loop(0, steps, lambda i, _: clear(share.step(i)), None)
            if rest:
                clear(rest)

        reduce_row(spec, schedule, gather, [x, labels, *positions], scratch, counted, excluded)

    logits, of_row = (spec.rows, spec.cols), ((spec.rows,), np.dtype(np.float32))
    dx, loss = launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_both",
        outputs=[of_row] if spec.overwrites_x else [(logits, spec.dx_dtype), of_row],
        overwritten=int(spec.overwrites_x),
        blocks=spec.rows,
        warpgroups=schedule.warpgroups,
        scratch=scratch_types,
    )
    return Results(loss), Operands(dx)
