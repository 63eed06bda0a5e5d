"""What a norm is compiled for, and G and the bias of its columns."""

import dataclasses
import math

import jax
import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.tiles import rounded_like


@dataclasses.dataclass(frozen=True)
class Norm:
    """What a kernel is compiled for, beside how rows are cut. A limit or a floor of 0 is none.

    Attributes:
      subtract_mean: LayerNorm, not RMSNorm.
      epsilon: added to the mean square.
      scale_offset: G = scale + scale_offset.
      scale_floor: that G is raised to in magnitude.
      from_output: the backward starts from y, not from x.
      x_hat_limit, y_limit: that such a backward clips these to.
      activation: after the norm; None for none.
    """

    subtract_mean: bool
    epsilon: float
    scale_offset: float
    scale_floor: float
    from_output: bool
    x_hat_limit: float
    y_limit: float
    activation: str | None


def of(spec: Spec) -> Norm:
    """That of a call with one norm."""
    return Norm(
        subtract_mean=spec.norm.subtract_mean,
        epsilon=spec.norm.epsilon,
        scale_offset=spec.norm.scale_offset,
        scale_floor=spec.scale_floor or 0.0,
        from_output=spec.norm.saved == "output",
        x_hat_limit=math.sqrt(spec.cols) if spec.clips_x_hat else 0.0,
        y_limit=spec.y_limit or 0.0,
        activation=spec.norm.activation,
    )


def group_rows(parameter: jax.Array | None, spec: Spec) -> int | None:
    """Rows that share a row of a parameter `(n, cols)`; None for one `(cols,)`, and for none."""
    if parameter is None or parameter.ndim == 1:
        return None
    return spec.rows // parameter.shape[0]


@triton.jit
def of_groups(ptr, row, rows, group_rows, cols: tl.constexpr):
    """A parameter, and where that of each row begins: None for one `(cols,)`, which all share.

    Of `(n, cols)`, `group_rows` rows share each of n. Rows beyond the last have its.
    """
    if group_rows is None:
        parameter = (ptr, None)
    else:
        start = (tl.minimum(row, rows - 1) // group_rows).to(tl.int64)[:, None] * cols
        parameter = (ptr, start)
    return parameter


@triton.jit
def gain(scale, col, cols: tl.constexpr, offset: tl.constexpr, floor: tl.constexpr):
    """G = scale + offset for the columns of a tile, raised to `floor` (0 for none) in magnitude."""
    if scale[0] is None:
        g = 1.0
    else:
        g = _load(scale, col, cols, 1.0) + offset
        if floor > 0.0:
            g = tl.where(tl.abs(g) < floor, tl.where(g < 0.0, -floor, floor), g)
    return g


@triton.jit
def gain_and_inverse(scale, col, cols: tl.constexpr, norm: tl.constexpr):
    """G and 1 / G for the columns of a tile."""
    g = gain(scale, col, cols, norm.scale_offset, norm.scale_floor)
    if scale[0] is None:
        inverse = 1.0
    elif norm.scale_floor > 0.0:
        inverse = 1.0 / g
    else:  # float16: y holds nothing of xh where G is 0
        inverse = tl.where(g == 0.0, 0.0, 1.0 / tl.where(g == 0.0, 1.0, g))
    return g, inverse


@triton.jit
def effective_bias(bias, y_ptr, col, cols: tl.constexpr, from_output: tl.constexpr):
    """The bias for the columns of a tile, rounded to y's dtype where the output is saved."""
    if bias[0] is None:
        value = 0.0
    else:
        value = _load(bias, col, cols, 0.0)
        if from_output:
            value = rounded_like(value, y_ptr)
    return value


@triton.jit
def gain_and_bias(scale, bias, y_ptr, col, cols: tl.constexpr, norm: tl.constexpr):
    """G and the bias of the columns of a tile. No scale is G = 1, no bias is 0."""
    g = gain(scale, col, cols, norm.scale_offset, norm.scale_floor)
    return g, effective_bias(bias, y_ptr, col, cols, norm.from_output)


@triton.jit
def _load(parameter, col, cols: tl.constexpr, other: tl.constexpr):
    """A parameter in float32 for the columns of a tile."""
    ptr, start = parameter
    if start is not None:
        ptr += start
    value = tl.load(ptr + col, mask=col < cols, other=other, eviction_policy="evict_last")
    return value.to(tl.float32)
