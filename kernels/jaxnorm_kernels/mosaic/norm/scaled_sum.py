"""Backward pass of a norm of h = residual + branch_scale x: LayerScale, or adaLN-zero's gate.

With t the gradient of h, that of `norm.backward` with h's own cotangent, before it is rounded:

    dresidual = t       dx = branch_scale t       dbranch_scale = sum_rows(t x)
"""

import dataclasses

import jax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, RowOperands
from jaxnorm_kernels.mosaic.norm.backward import NormFormula, walk_rows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.partials import add_partials
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class ScaledSumFormula:
    """The equations above, for elements of a row: of saved, d and x, then of dh if there is one.

    `norm`: of h.
    """

    norm: NormFormula
    summed: int = 2

    @property
    def row_sums(self) -> int:
        return self.norm.row_sums

    @property
    def column_sums(self) -> int:
        return self.norm.column_sums + 1

    def columns(self, params: Arrays) -> list[jax.Array]:
        """branch_scale, then those of the norm."""
        branch_scale, *of_norm = params
        return [branch_scale, *self.norm.columns(of_norm)]

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        return self.norm.terms(elements, columns[1:], stats)

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        (saved, d, x, *dh), (branch_scale, *of_norm) = elements, columns
        (t,), sums = self.norm.finish([saved, d, *dh], of_norm, stats, totals)
        return [t * branch_scale, t], [t * x, *sums]


def scaled_sum_bwd(
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
    params = [residuals.branch_scale, residuals.scale]
    params.append(residuals.bias if spec.saved == "output" else None)
    rows = [residuals.saved, cotangents.y, residuals.x, cotangents.h]
    dx, dresidual, *partials = walk_rows(
        ScaledSumFormula(NormFormula(spec.last)),
        RowOperands(
            [a for a in rows if a is not None],
            residuals.stats,
            [p for p in params if p is not None],
            spec.groups,
        ),
        [spec.x_dtype, spec.last.x_dtype],
        spec,
        schedule,
    )
    dbranch_scale, dscale, dbias = add_partials(
        partials,
        (spec.branch_scale_dtype, spec.scale_dtype, spec.bias_dtype),
        (spec.branch_scale_groups, spec.scale_groups, spec.bias_groups),
    )
    return Operands(dx, dresidual, dscale, dbias, branch_scale=dbranch_scale)
