"""Backward passes of cross-entropy and of the label's log-probability with the entropy.

x is a row of V logits, j the index of a column, and l the label. [j = l] is 1 if j equals l, else
0. The forward pass saves x and the statistics m = max(x) and log(s). The probabilities are p =
exp(x - m - log(s)). a is the label smoothing and b the factor of the z-loss.

If d is the cotangent of the loss:

    dx = d (p - targets + 2 b lse p)      lse = m + log(s)      targets = (1 - a) [j = l] + a / V

If d is the cotangent of the log-probability, e the cotangent of the entropy, and H the entropy:

    dx = d ([j = l] - p) - e p (log(p) + H)

With a logits scale or a softcap, the logits are f * g(x), where the module `logits` defines the
factor f and the function g. In the equations, f * (g(x) - m) then replaces x - m. dx becomes the
gradient of f * g(x), from which the gradient of x is computed.

Each element of dx depends only on the same element of x and on the row's statistics and cotangents.
So a block needs only a part of a row, and dx may overwrite x. If the row's position is masked, the
forward pass saves log(s) = -inf, and dx is 0. If the label is not a class, log(s) and dx are NaN.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.forward import read_label, units_of
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, finite, g, probability, times_slope
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch
from jaxnorm_kernels.mosaic.device.layouts import Ref, flat_index, load, widen
from jaxnorm_kernels.mosaic.rows.units import Unit, load_units
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class LossBackwardSchedule:
    """How the rows of a loss's backward pass are split into blocks of one warpgroup (128 threads).

    Attributes:
      units: number of units per block. A unit consists of one vector of at most 16 bytes per thread
        (`Unit`). Over 32768 columns of bfloat16, four units reach 0.98 of a copy's bandwidth and
        two reach 0.97; with a softcap, 0.90 and 0.86 (H200). With more units, a block takes so many
        registers that fewer blocks run on an SM.
    """

    units: int = 4

    def parts(self, spec: Spec) -> int:
        """Return the number of blocks per row."""
        return -(-units_of(spec, padded=True).count // self.units)


def cross_entropy_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: LossBackwardSchedule | None = None,
) -> Operands:
    """Return the gradient of the logits x. `schedule` replaces the default schedule."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    schedule = schedule or LossBackwardSchedule()
    of_rows = units_of(spec, padded=True)
    parts, units = schedule.parts(spec), min(schedule.units, of_rows.count)
    of_one_row = [*residuals.stats, cotangents.y]
    if spec.returns_entropy:
        of_one_row += [residuals.entropy, cotangents.entropy]

    def body(x: Ref, labels: Ref, *refs: Ref) -> None:
        of_row, (dx,) = refs[: len(of_one_row)], refs[len(of_one_row) :] or (x,)
        block = lax.axis_index(BLOCK)
        row, part = lax.div(block, parts), lax.rem(block, parts)

        def write(of_block: Sequence[Unit]) -> None:
            # Start the loads of the logits first, so that the loads of the row's statistics and
            # cotangents overlap them.
            raw = load_units(of_block, x, row)
            label = read_label(labels, row)
            numbers = [load(ref.at[row], None) for ref in of_row]
            has_entry = numbers[1] != -jnp.inf

            shape, layout = of_block[0].shape, of_block[0].layout
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            columns = flat_index(shape, layout)  # relative to the unit's first column
            have_label = [unit.has(label) for unit in of_block]
            for unit, value, has_label in zip(of_block, raw, have_label):
                of_unit = widen(value, layout), unit, columns, label, has_label, numbers, spec
                gradient = functools.partial(_gradient, *of_unit)
                unit.store(dx, row, lax.cond(has_entry, gradient, lambda: zero))

        write([of_rows.unit(row, part * units + k) for k in range(units)])
        if of_rows.has_edges:
            pl.when(part == 0)(lambda: write(of_rows.edges(row)))

    (dx,) = launch(
        body,
        [residuals.saved, residuals.labels, *of_one_row],
        name=f"jaxnorm_{spec.op}_bwd",
        outputs=[] if spec.overwrites_x else [((spec.rows, spec.cols), spec.dx_dtype)],
        overwritten=int(spec.overwrites_x),
        blocks=spec.rows * parts,
    )
    return Operands(dx)


def _gradient(
    x: jax.Array,
    unit: Unit,
    columns: jax.Array,
    label: jax.Array,
    has_label: jax.Array,
    numbers: Sequence[jax.Array],
    spec: Spec,
) -> jax.Array:
    """Return dx in float32 for one unit (one vector per thread) of an unmasked row."""
    top, log_sum, d, *of_entropy = numbers
    g_x = g(x, spec)
    p, log_p, base = probability(g_x - top, log_sum, spec)
    if of_entropy:
        entropy, e = of_entropy
        of_log = (e * base) * finite(log_p)
        dz, of_label = -p * ((d + e * entropy) + of_log), d
    else:
        of_label = -(1 - spec.loss.label_smoothing) * d
        of_p = d
        if spec.loss.z_loss:
            of_p = (1 + 2 * spec.loss.z_loss * (f_times(top, spec) + log_sum)) * d
        dz = p * of_p
        if spec.loss.label_smoothing:
            dz = dz - (spec.loss.label_smoothing / spec.classes) * d

    def with_label() -> jax.Array:
        return jnp.where(columns == label - unit.start, dz + of_label, dz)

    # Compare columns with the label's column only if the unit contains that column, which is rare.
    dx = times_slope(lax.cond(has_label, with_label, lambda: dz), g_x, spec)
    if not spec.loss.padding:
        return dx
    return jnp.where(columns < spec.classes - unit.start, dx, 0.0)
