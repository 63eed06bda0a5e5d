"""Forward and backward pass of a loss in one kernel.

`cross_entropy_both` runs the kernel of cross-entropy. Its formulas are in the modules `forward` and
`backward`. The module `kl_divergence` has the kernel of the KL divergence. Both kernels use
`store_both`, which processes one row.

A block processes one row. It reduces the row, as in the forward pass. Then it reads the row a
second time and stores the gradient of the row, as in the backward pass. The gradient may overwrite
the row. If the rows of all blocks that run at the same time fit into the L2 cache, the second read
takes no memory bandwidth. In the kernel of the KL divergence, a cluster of blocks may share a row.
"""

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
    row_bytes,
    sums_of,
    takes_80_registers,
)
from jaxnorm_kernels.mosaic.cross_entropy.passes import (
    LossRow,
    LossSchedule,
    launch_forward,
    run_unmasked,
    store_gradient,
    store_results,
    units_of,
)
from jaxnorm_kernels.mosaic.device.layouts import Ref, load, power_of_2
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.mosaic.rows.units import load_units
from jaxnorm_kernels.specs import Spec

#: Maximum number of bytes of a row of x in `cross_entropy_both`. An H100 has 132 SMs and 50 MB of
#: L2 cache. If each SM processes one row of this size, the rows take 40 MB of the cache.
MOST_BYTES = 304 * 1024
# If a row has more bytes than this, a block has eight warpgroups, so that an SM has room for only
# one block. (If a thread needs 80 registers, a block has four warpgroups.) With smaller blocks, an
# SM would run several blocks at a time, and the rows of all blocks together would not fit into the
# L2 cache. The table has times in ms for 4096 rows of bfloat16 numbers (H100). The first three
# columns of times are for this kernel, with eight, four or two warpgroups per block. For
# comparison, the last column has the time of two kernels that run one after the other: the forward
# kernel of the module `forward` and the backward kernel of the module `backward`.
#
#     columns    eight   four   two    two kernels
#     128256     0.86    0.99          1.05
#      50264     0.38    0.33   0.42   0.47
#      32000             0.19   0.22   0.27
_LONG_BYTES = 128 * 1024
# For shorter rows, a block has one warpgroup for each `_SHARE_BYTES` bytes of the row. The number
# of warpgroups is rounded down to a power of 2. It is at least one and at most four.
_SHARE_BYTES = 12 * 1024


def choose(spec: Spec) -> LossSchedule:
    """Choose the schedule of a call."""
    row = row_bytes(spec)
    # With eight warpgroups, an SM has 64 registers for each thread.
    most = 8 if row > _LONG_BYTES and not takes_80_registers(spec) else 4
    warpgroups = power_of_2(max(1, min(row // _SHARE_BYTES, most)))
    return LossSchedule.of(units_of(spec), COLUMNS, warpgroups)


def cross_entropy_both(
    operands: Operands,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossSchedule | None = None,
) -> tuple[Results, Operands]:
    """Return the loss and the gradient of the logits x.

    `schedule` replaces the default schedule.
    """
    schedule = schedule or choose(spec)
    arrays = (operands.x, operands.labels, cotangents.y, operands.positions)
    dx, y = launch_forward(
        spec, schedule, operands.logits_scale, arrays, _row, results=1, sums=sums_of(spec)
    )
    return Results(y), Operands(dx)


def _row(row: LossRow, operands: Sequence[Ref], results: Sequence[Ref]) -> None:
    x, labels, dy, *positions = operands
    d = load(dy.at[row.index], None)
    label, reduce = reduction(row, x, labels)

    def loss_and_numbers() -> tuple[jax.Array, list[jax.Array]]:
        loss, *stats = reduce()
        return loss, [*stats, d]

    store_both(row, results, positions, loss_and_numbers, [x], label, gradient)


def store_both(
    row: LossRow,
    results: Sequence[Ref],
    positions: Sequence[Ref],
    reduce: Callable[[], tuple[jax.Array, Sequence[jax.Array]]],
    logits: Sequence[Ref],
    label: jax.Array | None,
    gradient: Callable[..., jax.Array],
) -> None:
    """Store the loss of a row and its gradient. Both are 0 if the row's position is masked.

    Args:
      row: the row.
      results: refs of dx and of the losses, in this order.
      positions: a list with a ref of the mask of positions. The list is empty if there is no mask.
      reduce: a function that reads the row, and calls ``row.gather``. It returns the loss, and a
        list of scalars that `gradient` needs: statistics of the row, and the cotangent of the loss.
      logits: refs of x and, for a divergence, of the teacher's logits.
      label: the row's label, or None if there are no labels.
      gradient: a function that returns dx of a unit; see `launch_backward`.
    """
    (dx, losses), index, steps = results, row.index, row.steps(padded=True)

    def unmasked() -> None:
        loss, numbers = reduce()
        store_results(index, [losses], [loss])

        def read(units: Sequence[Fragment]) -> list[list[jax.Array]]:
            return [load_units(units, ref, index) for ref in logits]

        def write(units: Sequence[Fragment], raw: Sequence[Sequence[jax.Array]]) -> None:
            store_gradient(row.scaled, units, raw, dx, index, label, numbers, gradient, None)

        def advance(i: Any, raw: list[list[jax.Array]]) -> list[list[jax.Array]]:
            coming = read(steps.step(last - 1 - i))
            write(steps.step(last - i), raw)
            return coming

        # Start with the columns that the reduction read last: they are still in the cache.
        if rest := steps.rest():
            write(rest, read(rest))
        if steps.whole_steps:
            last = steps.whole_steps - 1
            raw = read(steps.step(last))
            write(steps.step(0), lax.fori_loop(0, last, advance, raw))

    def masked() -> None:
        row.skip()
        store_results(index, [losses], [0.0])

        def clear(units: Sequence[Fragment]) -> None:
            zero = jnp.zeros(units[0].shape, jnp.float32)
            for unit in units:
                unit.store(dx, index, plgpu.layout_cast(zero, unit.layout))

        lax.fori_loop(0, steps.whole_steps, lambda i, _: clear(steps.step(i)), None)
        if rest := steps.rest():
            clear(rest)

    run_unmasked(index, positions, unmasked, masked)
