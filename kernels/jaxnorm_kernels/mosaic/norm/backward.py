"""Backward passes of LayerNorm and RMSNorm, from the saved output or the saved input.

For a row of N elements, with G = scale + scale_offset, r = rstd and d = dy:

    from the output    z = y - bias,  xh = z / G,          c2 = mean(d z)
    from the input     xh = (x - mean) r,                  c2 = mean(d G xh)
    both               dx = r (d G - c1 - xh c2),          c1 = mean(d G)
                       dscale = sum_rows(d xh),            dbias = sum_rows(d)

xh is the normalised input. RMSNorm has no mean, so c1 = 0. If an activation follows the norm, the
backward pass starts from the saved input. It recomputes the activation's argument n = xh * G +
bias, and d is dy * activation'(n).

As in the forward pass, |G| has a lower limit (`Spec.scale_floor`), and the bias is rounded to y's
dtype. |xh| is clipped to sqrt(N), its mathematical bound. |y| is clipped to the largest finite
number (`Spec.y_limit`). If the row that is normalised is also used elsewhere, it has a second
cotangent, dh. The kernel adds dh to dx before dx is rounded. Each block sums dscale and dbias over
its own rows. The sums of the blocks are added outside the kernel, in a fixed order.

The public functions of this module run a backward pass. `Implementation.backward` describes their
arguments and results. The argument `schedule` replaces the default schedule. Statistics are
float32. All other arrays are 16-bit or 32-bit floats.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.gradients import add_partials
from jaxnorm_kernels.gradients import two_norms_bwd as composed_two_norms_bwd
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device.launch import present, required
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, BackwardCall, Formula
from jaxnorm_kernels.mosaic.loops.narrow_rows import (
    PipelinedNarrowRows,
    pipelined_narrow_rows_backward,
)
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows, pipelined_backward
from jaxnorm_kernels.mosaic.norm.elementwise import (
    activation_of,
    effective_bias,
    gain,
    reciprocal,
    within_limit,
)
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules.norm_backward import NormSchedule
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class NormFormula:
    """The backward pass of a norm. The equations are in the module's docstring.

    The row operands are the saved array, dy and, if present, dh, in this order. `finish` returns dx
    `copies` times, so that the kernel can store it in several dtypes.
    """

    spec: Spec
    copies: int = 1
    summed: int = 2

    @functools.cached_property
    def row_sums(self) -> int:
        return 1 + self.spec.norm.subtract_mean

    @functools.cached_property
    def column_sums(self) -> int:
        return (self.spec.norm.scale_dtype is not None) + (self.spec.norm.bias_dtype is not None)

    @functools.cached_property
    def from_output(self) -> bool:
        return self.spec.norm.saved == "output"

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Return a list with G = scale + scale_offset, 1 / G and the bias, in this order.

        Arrays that the equations of this call do not need are left out.
        """
        params = list(params)
        columns = []
        if self.spec.norm.scale_dtype is not None:
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
        return [c2, dg] if self.spec.norm.subtract_mean else [c2]

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        saved, dy, *dh = elements
        d, dg, z, reciprocal = self.elements(saved, dy, columns, stats)
        xh = self.x_hat(z, reciprocal)
        # In this form, dx takes two fused multiply-adds per element. In the form r * (d * G - c1 -
        # xh * c2), dx would take one fused multiply-add and two other operations.
        c2, *c1 = [total * (stats[0] / self.spec.cols) for total in totals]
        dx = dg * stats[0]
        if c1:
            dx = dx - c1[0]
        dx = dx - xh * c2
        if dh:
            dx = dx + dh[0]
        sums = []
        if self.spec.norm.scale_dtype is not None:
            sums.append(d * xh)
        if self.spec.norm.bias_dtype is not None:
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
        """Return d, d * G, z and 1 / G, as defined in the module's docstring.

        z is defined only if the output is saved. If the input is saved, the third value is xh
        instead. 1 / G is None if it is not needed.
        """
        columns, d = list(columns), dy
        g = columns.pop(0) if self.spec.norm.scale_dtype is not None else None
        if not self.from_output:
            rstd, *mean = stats
            xh = (saved - mean[0] if mean else saved) * rstd
            if self.spec.norm.activation is not None:
                n = xh if g is None else xh * g
                _, slope = activation_of(self.spec)(n + columns.pop(0) if columns else n)
                d = d * slope
            return d, d if g is None else d * g, xh, None
        reciprocal = None if g is None else columns.pop(0)
        y = saved if self.spec.y_limit is None else within_limit(saved, self.spec)
        z = y - columns.pop(0) if columns else y
        return d, d if g is None else d * g, z, reciprocal


_KERNELS = {PipelinedRows: pipelined_backward, PipelinedNarrowRows: pipelined_narrow_rows_backward}


def norm_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: NormSchedule | None = None
) -> Operands:
    """Compute the backward pass of a norm of x, or of h = x + residual.

    With h = x + residual, x and the operand `residual` have the same gradient, but may differ in
    dtype. If `residual` is float32, the kernel stores the gradient twice: in float32 for
    `residual`, and in x's dtype as dx. If `residual` has 16 bits, the kernel stores only the
    gradient of `residual`, and dx is converted from it. XLA fuses this conversion with the
    operations that follow.
    """
    x_dtype, dtypes = spec.x_dtype, [spec.last.x_dtype]
    if spec.op != "norm" and dtypes[0] != np.float32:
        spec = dataclasses.replace(spec, x_dtype=dtypes[0])
    if spec.x_dtype != dtypes[0]:
        dtypes.append(spec.x_dtype)
    rows = (residuals.saved, cotangents.y, cotangents.h)
    params = (residuals.scale, residuals.bias if spec.reads_bias else None)
    # Make the specs of more calls equal, so that these calls share one kernel. The formula does not
    # use `wrt`, the operands that need gradients, so `wrt` is replaced by (). In `spec.last`, the
    # operation's name is always norm, even for a call of add_norm.
    formula = NormFormula(dataclasses.replace(spec.last, wrt=()), copies=len(dtypes))
    (dh, *dx), gradients = _run(formula, rows, residuals, params, dtypes, spec, schedule, op="norm")
    if spec.op == "norm":
        return Operands(dh, **gradients)
    return Operands((dx or [dh])[0].astype(x_dtype), dh, **gradients)


def _run(
    formula: Formula,
    rows: Sequence[jax.Array | None],
    residuals: Residuals,
    params: Sequence[jax.Array | None],
    results: Sequence[np.dtype],
    spec: Spec,
    schedule: NormSchedule | None,
    names: Sequence[str] = ("scale", "bias"),
    op: str | None = None,
) -> tuple[Sequence[jax.Array], dict[str, jax.Array | None]]:
    """Run the backward kernel that computes `formula`.

    `rows` are the row operands, in the order of the formula. `params` are the parameters, and
    `names` are their names. `op` is a part of the kernel's name; by default, it is `Spec.op`.

    Returns two values. The first is a list of arrays of x's shape, such as dx, with the dtypes in
    `results`. The second is a dict that maps the name of each parameter to its gradient.
    """
    schedule = required(schedule or schedules.norm_schedule(spec), spec)
    call = BackwardCall(
        present(*rows),
        residuals.stats,
        present(*params),
        groups=spec.groups,
        blocks=schedules.persistent_blocks(spec, schedule),
        results=tuple(results),
        name=f"jaxnorm_{op or spec.op}_bwd",
    )
    outputs = _kernel(formula, call, schedule)
    dtypes = [spec.dtype(name) for name in names]
    groups = [getattr(spec.norm, f"{name}_groups", spec.groups) for name in names]
    gradients = add_partials(outputs[len(results) :], dtypes, groups)
    return outputs[: len(results)], dict(zip(names, gradients))


@functools.partial(jax.jit, static_argnames=("formula", "schedule"))
def _kernel(formula: Formula, call: BackwardCall, schedule: NormSchedule) -> tuple[jax.Array, ...]:
    """Run the kernel of a formula, inside `jax.jit`.

    Because of `jax.jit`, a program lowers equal kernels only once, even if they belong to different
    operations. For example, `norm` with an extra cotangent and `add_norm` have the same kernel.
    """
    return _KERNELS[type(schedule)](formula, call, schedule)


# -------------------------------------------------------------------------------------------------
# Backward pass of RMSNorm with a gate, which is applied after or before the norm. x and the gate
# are saved.
#
# For a row of N elements, let G = scale + scale_offset, r = rstd, a = activation(gate) and
# e = dy * G. t is the input of the norm: x, or x * a if the gate comes first. dt is the gradient of
# t:
#
#     xh = t r        dt = r (dg - xh c)      c = mean(dg xh) = r mean(dg t)
#
#     norm(x) * a     dg = e a     dx = dt       dgate = e * xh * activation'(gate)
#                                  dscale = sum_rows(dy a xh)
#     norm(x * a)     dg = e       dx = dt a     dgate = dt * x * activation'(gate)
#                                  dscale = sum_rows(dy xh)
#
# The activation and its derivative are recomputed, not saved.


@dataclasses.dataclass(frozen=True)
class GatedFormula:
    """The backward pass of RMSNorm with a gate. The equations are above the class.

    The row operands are x, the gate and dy, in this order.
    """

    spec: Spec
    summed: int = 3
    row_sums: int = 1

    @property
    def column_sums(self) -> int:
        return int(self.spec.norm.scale_dtype is not None)

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Return a list with G = scale + scale_offset, or an empty list if there is no scale."""
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
        if self.spec.norm.norm_before_gate:
            results, dscale = [dt, e * xh * slope], d * a * xh
        else:
            results, dscale = [dt * a, dt * x * slope], d * xh
        return results, [dscale] * self.column_sums

    def _elements(
        self, elements: Arrays, columns: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return e, dg, t, a and activation'(gate), as defined in the equations above the class."""
        x, gate, d = elements
        a, slope = activation_of(self.spec)(gate)
        e = d * columns[0] if columns else d
        return (
            (e, e * a, x, a, slope) if self.spec.norm.norm_before_gate else (e, e, x * a, a, slope)
        )


def norm_gated_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: NormSchedule | None = None
) -> Operands:
    """Compute the backward pass of RMSNorm with a gate."""
    assert spec.norm.gate_dtype is not None
    (dx, dgate), gradients = _run(
        GatedFormula(spec),
        (residuals.saved, residuals.gate, cotangents.y),
        residuals,
        (residuals.scale,),
        [spec.x_dtype, spec.norm.gate_dtype],
        spec,
        schedule,
    )
    return Operands(dx, gate=dgate, **gradients)


# -------------------------------------------------------------------------------------------------
# Backward pass of a norm of h = residual + branch_scale * x, as in LayerScale, or with the gate of
# adaLN-zero.
#
# t is the gradient of h as `NormFormula` computes it, before rounding. It includes the cotangent of
# h, if h is a result:
#
#     dresidual = t       dx = branch_scale * t       dbranch_scale = sum_rows(t x)


@dataclasses.dataclass(frozen=True)
class ScaledSumFormula:
    """The backward pass of a norm of h = residual + branch_scale * x.

    The equations are above the class. The row operands are the saved array, dy, x and, if present,
    dh, in this order. `norm` is the formula for the norm of h.
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
        """Return branch_scale, followed by the values per column that the norm's formula uses."""
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
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: NormSchedule | None = None
) -> Operands:
    """Compute the backward pass of a norm of h = residual + branch_scale * x."""
    bias = residuals.bias if spec.norm.saved == "output" else None
    (dx, dresidual), gradients = _run(
        ScaledSumFormula(NormFormula(spec.last)),
        (residuals.saved, cotangents.y, residuals.x, cotangents.h),
        residuals,
        (residuals.branch_scale, residuals.scale, bias),
        [spec.x_dtype, spec.last.x_dtype],
        spec,
        schedule,
        ("branch_scale", "scale", "bias"),
    )
    return Operands(dx, dresidual, **gradients)


# -------------------------------------------------------------------------------------------------
# Backward pass of two RMSNorms with a residual addition between them: h = residual + norm(x), y =
# norm(h).
#
# For a row of N elements, G and r belong to the first norm, G' and r' to the second. d is dy, and
# dh the cotangent of h as a result:
#
#     first norm         xh = x r,               u = xh G
#     second norm        from the output z = y,  xh' = y / G',    c' = mean(d z)
#                        from the input          xh' = h r',      c' = mean(d G' xh')
#     gradient of h      dresidual = dh + r' (d G' - xh' c')
#     gradient of x      dx = r (dresidual G - xh c),             c = mean(dresidual u)
#                        dscale = sum_rows(dresidual xh),         dnext_scale = sum_rows(d xh')
#
# c depends on dresidual, and dresidual depends on c'. Computed from these equations, c' and c would
# need two reductions of a row, one after the other. Instead, c is computed from c' and from sums
# that do not depend on dresidual or c', so a single reduction is enough:
#
#     c = mean(dh u) + r' (mean(d G' u) - c' mean(xh' u))


@dataclasses.dataclass(frozen=True)
class TwoNormsFormula:
    """The backward pass of two norms. The equations are above the class.

    The row operands are x, the saved array, dy and, if present, dh, in this order.
    """

    spec: Spec

    @property
    def summed(self) -> int:
        return 3 + ("h" in self.spec.outputs)

    @property
    def row_sums(self) -> int:
        return self.summed

    @property
    def column_sums(self) -> int:
        return (self.spec.norm.scale_dtype is not None) + (
            self.spec.norm.next_scale_dtype is not None
        )

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Return a list of three arrays: G, G' and 1 / G', in this order.

        G is scale + scale_offset of the first norm, and G' is the same sum for the second norm. If
        a norm has no scale, its arrays are left out. If the input is saved, 1 / G' is left out.
        """
        params = list(params)
        columns = []
        if self.spec.norm.scale_dtype is not None:
            columns.append(gain(params.pop(0), self.spec.first))
        if self.spec.norm.next_scale_dtype is not None:
            g = gain(params.pop(0), self.spec.last)
            columns.append(g)
            if self.spec.norm.saved == "output":
                columns.append(reciprocal(g, self.spec.last))
        return columns

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        _, _, d, *dh = elements
        _, u, z, next_xh, dg = self._elements(elements, columns, stats)
        c = d * z if self.spec.norm.saved == "output" else dg * z
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
        has_scale = self.spec.norm.scale_dtype is not None
        dx = rstd * ((dresidual * columns[0] if has_scale else dresidual) - xh * c)
        sums = [dresidual * xh] if has_scale else []
        if self.spec.norm.next_scale_dtype is not None:
            sums.append(d * next_xh)
        return [dx, dresidual], sums

    def _elements(
        self, elements: Arrays, columns: Arrays, stats: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return xh, u, z, xh' and d * G', as defined in the equations above the class.

        z is defined only if the output is saved. If the input is saved, the third value is xh',
        like the fourth.
        """
        (x, saved, d, *_), (rstd, next_rstd), columns = elements, stats, list(columns)
        u = xh = x * rstd
        if self.spec.norm.scale_dtype is not None:
            u = xh * columns.pop(0)
        from_output = self.spec.norm.saved == "output"
        z = within_limit(saved, self.spec.last) if from_output else saved * next_rstd
        next_xh = z
        dg = d
        if self.spec.norm.next_scale_dtype is not None:
            dg = d * columns.pop(0)
            if from_output:
                next_xh = z * columns.pop(0)
        if self.spec.last.clips_x_hat:
            bound = math.sqrt(self.spec.cols)
            next_xh = jnp.clip(next_xh, -bound, bound)
        return xh, u, z, next_xh, dg


def two_norms_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: NormSchedule | None = None
) -> Operands:
    """Compute the backward pass of `norm_add_norm`, in two kernels if rows are too long for one."""
    schedule = schedule or schedules.norm_schedule(spec)
    if schedule is None:
        return composed_two_norms_bwd(norm_bwd, residuals, cotangents, spec)
    (dx, dresidual), gradients = _run(
        TwoNormsFormula(spec),
        (residuals.x, residuals.saved, cotangents.y, cotangents.h),
        residuals,
        (residuals.scale, residuals.next_scale),
        [spec.x_dtype, spec.last.x_dtype],
        spec,
        schedule,
        ("scale", "next_scale"),
    )
    return Operands(dx, dresidual, **gradients)
