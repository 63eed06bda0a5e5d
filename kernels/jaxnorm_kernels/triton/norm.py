"""Forward passes of LayerNorm and RMSNorm, and of those that a residual is added to, as calls."""

from typing import Any

import jax
import numpy as np

from jaxnorm_kernels.specs import Spec, Stats
from jaxnorm_kernels.triton import norm_forward as kernels
from jaxnorm_kernels.triton import norm_parameters
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.norm_parameters import group_rows
from jaxnorm_kernels.triton.schedule import Schedule


def norm_fwd(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, Stats]:
    """Returns y `(rows, cols)` in ``y_dtype`` and the statistics.

    Args:
      x: `(rows, cols)`.
      scale, bias: `(cols,)`, or `(n, cols)` for groups of rows.
    """
    y, *stats = _call(spec, schedule, x, scale, bias=bias)
    return y, tuple(stats)


def add_norm_fwd(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array | None, Stats]:
    """Returns y in ``y_dtype``, h = x + residual in ``residual_dtype`` and the statistics.

    Args:
      x, residual: `(rows, cols)`.
      scale, bias: `(cols,)`, or `(n, cols)` for groups of rows.
    """
    y, h, *stats = _call(spec, schedule, x, scale, residual=residual, bias=bias)
    # The kernels write h in any case: rows too wide for registers are read back.
    return y, h if spec.returns_h else None, tuple(stats)


def norm_add_fwd(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, Stats]:
    """Returns y = residual + norm(x) in ``residual_dtype`` and the statistics.

    Args:
      x, residual: `(rows, cols)`.
      scale: `(cols,)`, or `(n, cols)` for groups of rows.
    """
    y, *stats = _call(spec, schedule, x, scale, residual=residual)
    return y, tuple(stats)


def norm_add_norm_fwd(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None,
    next_scale: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array | None, Stats]:
    """Returns y = norm(h), h = residual + norm(x) and the statistics of both norms.

    Args:
      x, residual: `(rows, cols)`.
      scale, next_scale: of the first norm and of the second, `(cols,)` or `(n, cols)`.
    """
    y, h, *stats = _call(spec, schedule, x, scale, residual=residual, next_scale=next_scale)
    # The kernels write h in any case: rows too wide for registers are read back.
    return y, h if spec.returns_h else None, tuple(stats)


def _call(
    spec: Spec,
    schedule: Schedule | None,
    x: jax.Array,
    scale: jax.Array | None,
    *,
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
    next_scale: jax.Array | None = None,
) -> list[jax.Array]:
    """y, h where there is one, and the statistics."""
    schedule = schedule or schedules.choose(spec)
    kernel, options = kernels.norm_fwd_in_registers, dict[str, Any]()
    if schedule.is_looped(spec):
        kernel = kernels.norm_fwd_looped
    elif schedule.stages > 1 and spec.op in ("norm", "add_norm") and spec.groups == 1:
        kernel = kernels.norm_fwd_persistent
        options = {"grid": schedule.persistent_grid(spec)[1:], "stages": schedule.stages}
    stat = jax.ShapeDtypeStruct((spec.rows,), np.float32) if spec.want_stats else None
    # Of two norms the first keeps x and has neither mean, floor nor bias: the second one decides.
    norm = spec.first if spec.op == "norm_add" else spec.last
    y_dtype = spec.residual_dtype if spec.op == "norm_add" else spec.y_dtype
    h = jax.ShapeDtypeStruct(x.shape, spec.residual_dtype) if spec.normalises_h else None
    kind = "layer_norm" if spec.subtract_mean else "rms_norm"
    return schedule.launch(
        kernel,
        spec,
        name=f"jaxnorm_{spec.op.replace('norm', kind)}_fwd",
        outputs={
            "y_ptr": jax.ShapeDtypeStruct(x.shape, y_dtype),
            "h_ptr": h,
            "rstd_ptr": stat,
            "mean_ptr": stat if norm.returns_mean else None,
            "next_rstd_ptr": stat if spec.op == "norm_add_norm" else None,
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
