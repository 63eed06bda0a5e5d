"""Backward passes of LayerNorm and RMSNorm from the output or from the input.

Row of N; G = scale + scale_offset, r = rstd, d = dy; c1 is LayerNorm's alone:

    from the output    z = y - bias,  xh = z / G,          c2 = mean(d z)
    from the input     xh = (x - mean) r,                  c2 = mean(d G xh)
    both               dx = r (d G - c1 - xh c2),          c1 = mean(d G)
                       dscale = sum_rows(d xh),            dbias = sum_rows(d)

With an activation after the norm, from the input, n = xh G + bias is made again, and
d = dy activation'(n).

G is floored and the bias rounded to y's dtype as in the forward, and |xh| is clipped to sqrt(N),
its true bound, |y| to the largest number (`Spec.y_limit`). dh, another cotangent of the row that is
normalised, is added to dx before that is rounded. A block adds up dscale and dbias over its own
rows; the blocks' sums are added outside, always in the same order.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device.launch import required
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, Formula, RowOperands
from jaxnorm_kernels.mosaic.loops.narrow_rows import RowsRing, rows_ring_backward
from jaxnorm_kernels.mosaic.loops.pipelined import Ring, ring_backward
from jaxnorm_kernels.mosaic.norm.activations import activation_of
from jaxnorm_kernels.mosaic.norm.elementwise import effective_bias, gain, reciprocal, within_limit
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.partials import add_partials
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class NormFormula:
    """The equations above, for elements of a row: of saved and dy, then of dh where there is one.

    dx comes out `copies` times, for results of other dtypes.
    """

    spec: Spec
    copies: int = 1
    summed: int = 2

    @functools.cached_property
    def row_sums(self) -> int:
        return 1 + self.spec.subtract_mean

    @functools.cached_property
    def column_sums(self) -> int:
        return (self.spec.scale_dtype is not None) + (self.spec.bias_dtype is not None)

    @functools.cached_property
    def from_output(self) -> bool:
        return self.spec.saved == "output"

    def columns(self, params: Arrays) -> list[jax.Array]:
        """G, 1 / G and the bias; those of them that the equations need."""
        params = list(params)
        columns = []
        if self.spec.scale_dtype is not None:
            g = gain(params.pop(0), self.spec)
            columns.append(g)
            if self.from_output:
                columns.append(reciprocal(g, self.spec))
        if self.spec.reads_bias:
            columns.append(effective_bias(params.pop(0), self.spec))
        return columns

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        saved, dy = elements
        d, dg, z, _ = self.elements(saved, dy, columns, stats)
        c2 = (d if self.from_output else dg) * z
        return [c2, dg] if self.spec.subtract_mean else [c2]

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        saved, dy, *dh = elements
        d, dg, z, reciprocal = self.elements(saved, dy, columns, stats)
        xh = self.x_hat(z, reciprocal)
        # r in each term: two fused multiply-adds, where r (d G - c1 - xh c2) has one, and two more.
        c2, *c1 = [total * (stats[0] / self.spec.cols) for total in totals]
        dx = dg * stats[0]
        if c1:
            dx = dx - c1[0]
        dx = dx - xh * c2
        if dh:
            dx = dx + dh[0]
        sums = []
        if self.spec.scale_dtype is not None:
            sums.append(d * xh)
        if self.spec.bias_dtype is not None:
            sums.append(d)
        return [dx] * self.copies, sums

    def x_hat(self, z: jax.Array, reciprocal: jax.Array | None) -> jax.Array:
        xh = z if reciprocal is None else z * reciprocal
        if self.spec.clips_x_hat:
            bound = math.sqrt(self.spec.cols)
            xh = jnp.clip(xh, -bound, bound)
        return xh

    def elements(
        self, saved: jax.Array, dy: jax.Array, columns: Arrays, stats: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """d; d G; z (from the input: xh); and 1 / G where that is needed."""
        columns, d = list(columns), dy
        g = columns.pop(0) if self.spec.scale_dtype is not None else None
        if not self.from_output:
            rstd, *mean = stats
            xh = (saved - mean[0] if mean else saved) * rstd
            if self.spec.activation is not None:
                n = xh if g is None else xh * g
                _, slope = activation_of(self.spec)(n + columns.pop(0) if columns else n)
                d = d * slope
            return d, d if g is None else d * g, xh, None
        reciprocal = None if g is None else columns.pop(0)
        y = within_limit(saved, self.spec)
        z = y - columns.pop(0) if columns else y
        return d, d if g is None else d * g, z, reciprocal


_KERNELS = {Ring: ring_backward, RowsRing: rows_ring_backward}


def norm_bwd(
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
    *,
    schedule: schedules.NormSchedule | None = None,
) -> Operands:
    """Of a norm, or of one of h; see `Implementation.backward`.

    With a residual of float32, whose gradient is what the kernel computes, it writes dx, of another
    dtype, beside it. From one of 16 bits dx is converted, as rounded, which is left to XLA and what
    it fuses that to.

    Args:
      residuals, cotangents: arrays of 16 or 32 bits; statistics of float32.
      schedule: how it runs; by default, what the table says.
    """
    if spec.op == "norm":
        (dx,), scale, bias = _backward(residuals, cotangents, [spec.x_dtype], spec, schedule)
        return Operands(dx, scale=scale, bias=bias)
    x_dtype, dtypes = spec.x_dtype, [spec.last.x_dtype]
    if dtypes[0] != np.float32:
        spec = dataclasses.replace(spec, x_dtype=dtypes[0])
    if spec.x_dtype != dtypes[0]:
        dtypes.append(spec.x_dtype)
    of_h, scale, bias = _backward(residuals, cotangents, dtypes, spec, schedule)
    return Operands(of_h[-1].astype(x_dtype), of_h[0], scale, bias)


def walk_rows(
    formula: Formula,
    operands: RowOperands,
    results: Sequence[np.dtype],
    spec: Spec,
    schedule: schedules.NormSchedule | None,
) -> tuple[jax.Array, ...]:
    """The row results in these dtypes, and the partial sums, by the kernel of the schedule."""
    schedule = required(schedule or schedules.norm_schedule(spec), spec)
    return _KERNELS[type(schedule)](
        formula,
        operands,
        schedule=schedule,
        blocks=schedules.persistent_blocks(spec, schedule),
        results=results,
        name=f"jaxnorm_{spec.op}_bwd",
    )


def _backward(
    residuals: Residuals,
    cotangents: Results,
    dtypes: Sequence[np.dtype],
    spec: Spec,
    schedule: schedules.NormSchedule | None,
) -> tuple[Sequence[jax.Array], jax.Array | None, jax.Array | None]:
    """The cotangent of what is normalised in each of `dtypes`; dscale and dbias."""
    params = [] if residuals.scale is None else [residuals.scale]
    if residuals.bias is not None and spec.reads_bias:
        params.append(residuals.bias)
    rows = [a for a in (residuals.saved, cotangents.y, cotangents.h) if a is not None]
    operands = RowOperands(rows, residuals.stats, params, spec.groups)
    formula = NormFormula(spec.last, copies=len(dtypes))
    results = walk_rows(formula, operands, dtypes, spec, schedule)
    dx, partials = results[: len(dtypes)], results[len(dtypes) :]
    groups = (spec.scale_groups, spec.bias_groups)
    dscale, dbias = add_partials(partials, (spec.scale_dtype, spec.bias_dtype), groups)
    return dx, dscale, dbias
