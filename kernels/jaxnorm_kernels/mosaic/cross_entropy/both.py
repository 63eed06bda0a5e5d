"""Forward and backward pass of cross-entropy in one kernel.

A block processes one row. It reduces the row as the forward pass does, then reads the row a second
time and stores its gradient as the backward pass does. The gradient may overwrite the row. If the
rows of all blocks that run at the same time fit into the L2 cache, the second read takes no memory
bandwidth. The formulas are in the modules `forward` and `backward`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.cross_entropy.backward import gradient
from jaxnorm_kernels.mosaic.cross_entropy.forward import (
    COLUMNS,
    reduction,
    sums_of,
    takes_80_registers,
)
from jaxnorm_kernels.mosaic.cross_entropy.passes import (
    LossForwardSchedule,
    Steps,
    launch_forward,
    run_unmasked,
    store_gradient,
    store_results,
    units_of,
)
from jaxnorm_kernels.mosaic.device.layouts import Ref, load
from jaxnorm_kernels.mosaic.rows.units import Unit, load_units
from jaxnorm_kernels.specs import Spec

#: Limit for the bytes of a row. An H100 has 132 SMs and 50 MB of L2 cache. If each SM processes one
#: row of this size, the rows take 40 MB.
MOST_BYTES = 304 * 1024
# Rows of more bytes than this have blocks of eight warpgroups, so that an SM has room for only one
# block. Otherwise, the rows of all blocks would not fit into the L2 cache. Times in ms for 4096
# rows of bfloat16 numbers, by the number of warpgroups per block, and for the kernels of the
# modules `forward` and `backward` together (H100):
#
#     columns    eight   four   two    forward and backward kernel
#     128256     0.86    0.99          1.05
#      50264     0.38    0.33   0.42   0.47
#      32000             0.19   0.22   0.27
_LONG_BYTES = 128 * 1024
# Shorter rows have a warpgroup for each `_SHARE_BYTES`, up to four.
_SHARE_BYTES = 12 * 1024


def choose(spec: Spec) -> LossForwardSchedule:
    """Choose the schedule of a call."""
    row = spec.cols * spec.x_dtype.itemsize
    # With eight warpgroups, an SM has 64 registers for each thread.
    most = 8 if row > _LONG_BYTES and not takes_80_registers(spec) else 4
    warpgroups = 1 << min(max(1, row // _SHARE_BYTES), most).bit_length() - 1
    return LossForwardSchedule.of(units_of(spec), COLUMNS, warpgroups)


def cross_entropy_both(
    operands: Operands,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossForwardSchedule | None = None,
) -> tuple[Results, Operands]:
    """Return the loss and the gradient of the logits x.

    `schedule` replaces the default schedule.
    """
    schedule = schedule or choose(spec)
    arrays = [operands.x, operands.labels, cotangents.y]
    if operands.positions is not None:
        arrays.append(operands.positions)
    compute = functools.partial(_row, spec, schedule)
    dx, y = launch_forward(spec, schedule, arrays, compute, results=1, sums=sums_of(spec))
    return Results(y), Operands(dx)


def _row(
    spec: Spec,
    schedule: LossForwardSchedule,
    row: Any,
    operands: Sequence[Ref],
    results: Sequence[Ref],
    gather: Callable[..., list[jax.Array]],
) -> None:
    x, labels, dy, *positions = operands
    dx, *losses = results
    steps = Steps(units_of(spec, padded=True), schedule, row)
    d = load(dy.at[row], None)
    label, reduce = reduction(spec, schedule, row, x, labels, gather)

    def unmasked() -> None:
        loss, *stats = reduce()
        store_results(row, losses, [loss])

        def write(units: Sequence[Unit], raw: Sequence[jax.Array]) -> None:
            of_unit = functools.partial(gradient, spec)
            store_gradient(units, [raw], dx, row, label, [*stats, d], of_unit, None)

        def advance(i: Any, raw: list[jax.Array]) -> list[jax.Array]:
            coming = load_units(steps.step(last - 1 - i), x, row)
            write(steps.step(last - i), raw)
            return coming

        # Start with the columns that the reduction read last: they are still in the cache.
        if rest := steps.rest():
            write(rest, load_units(rest, x, row))
        if steps.whole_steps:
            last = steps.whole_steps - 1
            raw = load_units(steps.step(last), x, row)
            write(steps.step(0), lax.fori_loop(0, last, advance, raw))

    def masked() -> None:
        store_results(row, losses, [0.0])

        def clear(units: Sequence[Unit]) -> None:
            zero = jnp.zeros(units[0].shape, jnp.float32)
            for unit in units:
                unit.store(dx, row, plgpu.layout_cast(zero, unit.layout))

        lax.fori_loop(0, steps.whole_steps, lambda i, _: clear(steps.step(i)), None)
        if rest := steps.rest():
            clear(rest)

    run_unmasked(row, positions, unmasked, masked)
