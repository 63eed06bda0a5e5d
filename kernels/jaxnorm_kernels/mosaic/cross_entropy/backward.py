"""Backward pass of cross-entropy, and of log-probability and entropy, from the logits.

With d = dloss, and p = exp(x - m - log(s)):

    dx = d (p - targets + 2 b lse p)      lse = m + log(s)      targets = (1 - a) [j = l] + a / V

With d = dlog_prob, e = dentropy and the entropy H:

    dx = d ([j = l] - p) - e p (log(p) + H)

With a scale or a cap, the logits are f g(x), as in `logits`. The equations then give the gradient
of f g(x), and x - m stands for f (g(x) - m).

The elements do not depend on each other: each block processes a part of a row, and may store dx
over x. If a row has no entries, log(s) = -inf and dx is 0. If its label is not a class, log(s) and
dx are NaN.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

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
    """How rows are split into blocks, which have one warpgroup each.

    Attributes:
      units: the number of units per block. Over 32768 columns of bfloat16, four units reach 0.98 of
        a copy's bandwidth and two 0.97; with a cap of the logits, 0.90 and 0.86 (H200). More units
        per block take registers that other blocks of the SM need.
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
    """Return the gradient of x. `schedule` overrides the default."""
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
            # Load the logits first. The row's few other numbers (statistics, cotangents) then
            # arrive at the same time.
            raw = load_units(of_block, x, row)
            label = read_label(labels, row)
            numbers = [load(ref.at[row], None) for ref in of_row]
            store_gradient(of_block, raw, dx, row, label, numbers, spec)

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


def store_gradient(
    units: Sequence[Unit],
    raw: Sequence[jax.Array],
    dx: Ref,
    row: Any,
    label: jax.Array,
    numbers: Sequence[jax.Array],
    spec: Spec,
    *,
    has_entry: bool | None = None,
) -> None:
    """Store dx of units of a row, given their logits `raw`.

    Args:
      numbers: the row's statistics, its cotangent and, for an entropy, that and its cotangent.
      has_entry: True if the row has entries. None looks at its statistics; dx is 0 without entries.
    """
    has = numbers[1] != -jnp.inf if has_entry is None else has_entry
    shape, layout = units[0].shape, units[0].layout
    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    columns = flat_index(shape, layout)  # of a unit's elements, from its start on
    have_label = [unit.has(label) for unit in units]
    for unit, value, has_label in zip(units, raw, have_label):
        of_unit = widen(value, layout), unit, columns, label, has_label, numbers, spec
        gradient = functools.partial(_gradient, *of_unit)
        unit.store(dx, row, gradient() if has is True else lax.cond(has, gradient, lambda: zero))


def _gradient(
    x: jax.Array,
    unit: Unit,
    columns: jax.Array,
    label: jax.Array,
    has_label: jax.Array,
    numbers: Sequence[jax.Array],
    spec: Spec,
) -> jax.Array:
    """Return dx of a unit in float32, for a row that has entries."""
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

    # Only a few units contain the label, so the other units' columns are not compared with it.
    dx = times_slope(lax.cond(has_label, with_label, lambda: dz), g_x, spec)
    if not spec.loss.padding:
        return dx
    return jnp.where(columns < spec.classes - unit.start, dx, 0.0)
