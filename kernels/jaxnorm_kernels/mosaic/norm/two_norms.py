"""Backward pass of two RMSNorms with a residual between them: h = residual + norm(x), y = norm(h).

Row of N; G and r of the first norm, G' and r' of the second; d = dy, and dh is h's own cotangent:

    first norm         xh = x r,               u = xh G
    second norm        from the output z = y,  xh' = y / G',    c' = mean(d z)
                       from the input          xh' = h r',      c' = mean(d G' xh')
    of h, in all       dresidual = dh + r' (d G' - xh' c')
    of x               dx = r (dresidual G - xh c),             c = mean(dresidual u)
                       dscale = sum_rows(dresidual xh),         dnext_scale = sum_rows(d xh')

dresidual needs c', and c needs dresidual. So that a row is reduced once, c is put together from
sums that need neither:

    c = mean(dh u) + r' (mean(d G' u) - c' mean(xh' u))
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxnorm_kernels import composed
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, RowOperands
from jaxnorm_kernels.mosaic.loops.narrow_rows import RowsRing, rows_ring_backward
from jaxnorm_kernels.mosaic.loops.pipelined import Ring, ring_backward
from jaxnorm_kernels.mosaic.norm.backward import norm_bwd
from jaxnorm_kernels.mosaic.norm.elementwise import gain, reciprocal, within_limit
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.partials import add_partials
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class TwoNormsFormula:
    """The equations above, for elements of a row: of x, saved and d, then of dh if there is one."""

    spec: Spec

    @property
    def summed(self) -> int:
        return 3 + self.spec.adds_dh

    @property
    def row_sums(self) -> int:
        return 3 + self.spec.adds_dh

    @property
    def column_sums(self) -> int:
        return (self.spec.scale_dtype is not None) + (self.spec.next_scale_dtype is not None)

    def columns(self, params: Arrays) -> list[jax.Array]:
        """G; G' and, from the output, 1 / G'."""
        params = list(params)
        columns = []
        if self.spec.scale_dtype is not None:
            columns.append(gain(params.pop(0), self.spec.first))
        if self.spec.next_scale_dtype is not None:
            g = gain(params.pop(0), self.spec.last)
            columns.append(g)
            if self.spec.saved == "output":
                columns.append(reciprocal(g, self.spec.last))
        return columns

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        _, _, d, *dh = elements
        _, u, z, next_xh, dg = self._elements(elements, columns, stats)
        c = d * z if self.spec.saved == "output" else dg * z
        return [c, dg * u, next_xh * u, *(each * u for each in dh)]

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        _, _, d, *dh = elements
        xh, _, _, next_xh, dg = self._elements(elements, columns, stats)
        rstd, next_rstd = stats
        next_c, of_dg, of_next_xh, *of_dh = [total / self.spec.cols for total in totals]
        c = next_rstd * (of_dg - next_c * of_next_xh)
        dresidual = next_rstd * (dg - next_xh * next_c)
        if dh:
            c, dresidual = c + of_dh[0], dresidual + dh[0]
        has_scale = self.spec.scale_dtype is not None
        dx = rstd * ((dresidual * columns[0] if has_scale else dresidual) - xh * c)
        sums = [dresidual * xh] if has_scale else []
        if self.spec.next_scale_dtype is not None:
            sums.append(d * next_xh)
        return [dx, dresidual], sums

    def _elements(
        self, elements: Arrays, columns: Arrays, stats: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """xh, u, z (from the input: xh'), xh' and d G'."""
        (x, saved, d, *_), (rstd, next_rstd), columns = elements, stats, list(columns)
        u = xh = x * rstd
        if self.spec.scale_dtype is not None:
            u = xh * columns.pop(0)
        from_output = self.spec.saved == "output"
        z = within_limit(saved, self.spec.last) if from_output else saved * next_rstd
        next_xh = z
        dg = d
        if self.spec.next_scale_dtype is not None:
            dg = d * columns.pop(0)
            if from_output:
                next_xh = z * columns.pop(0)
        if self.spec.last.clips_x_hat:
            bound = math.sqrt(self.spec.cols)
            next_xh = jnp.clip(next_xh, -bound, bound)
        return xh, u, z, next_xh, dg


def two_norms_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: Ring | RowsRing | None = None,
) -> Operands:
    """Of norm_add_norm; in two kernels where no ring takes the rows.

    Args:
      residuals, cotangents: arrays of 16 or 32 bits; statistics of float32.
      schedule: how it runs; by default, what the table says.
    """
    schedule = schedule or schedules.norm_schedule(spec)
    if schedule is None:
        return composed.two_norms_bwd(norm_bwd, residuals, cotangents, spec)
    arrays = (residuals.x, residuals.saved, cotangents.y, cotangents.h)
    rows = [a for a in arrays if a is not None]
    params = [p for p in (residuals.scale, residuals.next_scale) if p is not None]
    residual_dtype = spec.last.x_dtype
    dx, dresidual, *partials = (
        rows_ring_backward if isinstance(schedule, RowsRing) else ring_backward
    )(
        TwoNormsFormula(spec),
        RowOperands(rows, residuals.stats, params, spec.groups),
        schedule=schedule,
        blocks=schedules.persistent_blocks(spec, schedule),
        results=[spec.x_dtype, residual_dtype],
        name="jaxnorm_rms_norm_add_rms_norm_bwd",
    )
    dscale, dnext_scale = add_partials(
        partials, (spec.scale_dtype, spec.next_scale_dtype), (spec.groups, spec.groups)
    )
    return Operands(dx, dresidual, dscale, next_scale=dnext_scale)
