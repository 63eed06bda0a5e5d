"""Forward passes of LayerNorm and RMSNorm, and of those that a residual is added to, as calls."""

from typing import Any

import jax
import numpy as np

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import norm_forward as kernels
from jaxnorm_kernels.triton import norm_parameters
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.norm_parameters import group_rows
from jaxnorm_kernels.triton.schedule import Schedule


def norm_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """See `Implementation.forward`; `schedule` stands in for the one of the table."""
    x, residual, scale, bias, next_scale, *_ = operands
    schedule = schedule or schedules.choose(spec)
    kernel, options = kernels.norm_fwd_in_registers, dict[str, Any]()
    if schedule.is_looped(spec):
        kernel = kernels.norm_fwd_looped
    elif schedule.stages > 1 and spec.operation.norms == ("last",) and spec.groups == 1:
        kernel = kernels.norm_fwd_persistent
        options = {"grid": schedule.persistent_grid(spec)[1:], "stages": schedule.stages}
    stat = jax.ShapeDtypeStruct((spec.rows,), np.float32) if spec.want_stats else None
    # Of two norms the first keeps x and has neither mean, floor nor bias: the second one decides.
    norm = spec.norms[-1]
    y_dtype = spec.residual_dtype if spec.operation.y_is_sum else spec.y_dtype
    h = jax.ShapeDtypeStruct(x.shape, spec.residual_dtype) if spec.normalises_h else None
    kind = "layer_norm" if spec.subtract_mean else "rms_norm"
    y, *results = schedule.launch(
        kernel,
        spec,
        name=f"jaxnorm_{spec.op.replace('norm', kind)}_fwd",
        outputs={
            "y_ptr": jax.ShapeDtypeStruct(x.shape, y_dtype),
            "h_ptr": h,
            "rstd_ptr": stat,
            "mean_ptr": stat if norm.returns_mean else None,
            "next_rstd_ptr": stat if len(spec.norms) > 1 else None,
        },
        x_ptr=x,
        residual_ptr=residual,
        scale_ptr=scale,
        bias_ptr=bias,
        next_scale_ptr=next_scale,
        scale_rows=group_rows(scale, spec),
        bias_rows=group_rows(bias, spec),
        next_scale_rows=group_rows(next_scale, spec),
        op=spec.op,
        norm=norm_parameters.of(norm),
        **options,
    )
    if h is None:
        return Results(y, stats=tuple(results))
    # The kernels write h in any case: rows too wide for registers are read back.
    return Results(y, results[0] if spec.returns_h else None, tuple(results[1:]))
