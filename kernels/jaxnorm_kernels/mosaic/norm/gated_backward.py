"""Backward pass of RMSNorm and a gate, after it or before it, from x and the gate.

Row of N; G = scale + scale_offset, r = rstd, a = activation(gate), e = dy G. Of t = x, or x a:

    xh = t r      dt = r (dg - xh c)      c = mean(dg xh) = r mean(dg t)

    norm(x) a     dg = e a     dx = dt       dgate = e xh activation'(gate)
                               dscale = sum_rows(dy a xh)
    norm(x a)     dg = e       dx = dt a     dgate = dt x activation'(gate)
                               dscale = sum_rows(dy xh)

Nothing of the gate is kept: its activation is made again, with its derivative.
"""

import dataclasses

import jax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, RowOperands
from jaxnorm_kernels.mosaic.norm.activations import activation_of
from jaxnorm_kernels.mosaic.norm.backward import walk_rows
from jaxnorm_kernels.mosaic.norm.elementwise import gain
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.partials import add_partials
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class GatedFormula:
    """The equations above, for elements of a row: of x, of the gate and of dy."""

    spec: Spec
    summed: int = 3
    row_sums: int = 1

    @property
    def column_sums(self) -> int:
        return int(self.spec.scale_dtype is not None)

    def columns(self, params: Arrays) -> list[jax.Array]:
        """G."""
        return [gain(scale, self.spec) for scale in params]

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        _, dg, t, _, _ = self._elements(elements, columns)
        return [dg * t]

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        (x, _, d), (rstd,) = elements, stats
        e, dg, t, a, slope = self._elements(elements, columns)
        xh = t * rstd
        dt = dg * rstd - xh * (totals[0] * rstd * (rstd / self.spec.cols))
        if self.spec.norm_before_gate:
            results, dscale = [dt, e * xh * slope], d * a * xh
        else:
            results, dscale = [dt * a, dt * x * slope], d * xh
        return results, [dscale] * self.column_sums

    def _elements(
        self, elements: Arrays, columns: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """e, dg, t; a and its derivative."""
        x, gate, d = elements
        a, slope = activation_of(self.spec)(gate)
        e = d * columns[0] if columns else d
        return (e, e * a, x, a, slope) if self.spec.norm_before_gate else (e, e, x * a, a, slope)


def norm_gated_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: schedules.NormSchedule | None = None,
) -> Operands:
    """See `Implementation.backward`.

    Args:
      residuals, cotangents: arrays of 16 or 32 bits; statistics of float32.
      schedule: how it runs; by default, what the table says.
    """
    assert spec.gate_dtype is not None
    rows = [residuals.saved, residuals.gate, cotangents.y]
    params = [] if residuals.scale is None else [residuals.scale]
    dx, dgate, *partials = walk_rows(
        GatedFormula(spec),
        RowOperands(rows, residuals.stats, params, spec.groups),
        [spec.x_dtype, spec.gate_dtype],
        spec,
        schedule,
    )
    (dscale,) = add_partials(partials, (spec.scale_dtype,), (spec.scale_groups,))
    return Operands(dx, scale=dscale, gate=dgate)
