"""Code that the norms' kernels share: compile-time parameters, scale and bias, and activations.

The activations are functions of `jax.nn`. The kernels compute an activation together with its
derivative, from a single sigmoid s(t) = 1 / (1 + exp(-t)). In the last column of this table, s
stands for the sigmoid in the same row of the table, s(g) or s(z):

    name          activation of g    derivative
    sigmoid       s(g)               s (1 - s)
    silu          g s(g)             s + g s (1 - s)
    gelu          g s(z)             s + g s (1 - s) z'       z = sqrt(8 / pi) (g + 0.044715 g^3)
    relu          max(g, 0)          1 if g > 0, else 0
    leaky_relu    g or 0.01 g        1 if g >= 0, else 0.01

gelu is the approximation that jax.nn uses by default: g (1 + tanh(z / 2)) / 2 = g s(z).
"""

import dataclasses
import math

import jax
import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.tiles import load_tile, rounded_like


@dataclasses.dataclass(frozen=True)
class Norm:
    """The compile-time parameters of a norm's kernel, apart from the tile sizes.

    Attributes:
      subtract_mean: True for LayerNorm, False for RMSNorm.
      epsilon: the number that is added to the mean square (or variance) under the root.
      scale_offset: the number that is added to the scale: G = scale + scale_offset.
      scale_floor: the minimum of |G|. A smaller |G| is replaced by this minimum. 0 for no minimum.
      from_output: True if the backward pass starts from the saved y, False if it starts from the
        saved input of the norm.
      x_hat_limit: the magnitude to which a backward pass from y clips x_hat; 0 for no limit.
      y_limit: the magnitude to which a backward pass from y clips y; 0 for no limit.
      activation: the name of the activation after the norm, or None.
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
    """Return the compile-time parameters of the call `spec`, which has a single norm."""
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
    """Return the number of consecutive rows of x that share a row of `parameter`.

    Return None if all rows of x share the parameter.
    """
    if parameter is None or parameter.ndim == 1:
        return None
    return spec.rows // parameter.shape[0]


@triton.jit
def of_groups(ptr, row, rows, group_rows, cols: tl.constexpr):
    """Return (pointer, offsets), with which `gain` and `effective_bias` load a parameter.

    For a parameter `(cols,)`, the offsets are None. In a parameter `(n, cols)`, each of the n rows
    is shared by `group_rows` rows of x. The offsets are then an array: for each row of the tile,
    the offset of the parameter's row that it uses. Rows beyond the last row of x use the
    parameter's last row.
    """
    if group_rows is None:
        parameter = (ptr, None)
    else:
        start = (tl.minimum(row, rows - 1) // group_rows).to(tl.int64)[:, None] * cols
        parameter = (ptr, start)
    return parameter


@triton.jit
def gain(scale, col, cols: tl.constexpr, offset: tl.constexpr, floor: tl.constexpr):
    """Return G = scale + offset for the columns of a tile, with |G| at least `floor`."""
    if scale[0] is None:
        g = 1.0
    else:
        g = _load(scale, col, cols, 1.0) + offset
        if floor > 0.0:
            g = tl.where(tl.abs(g) < floor, tl.where(g < 0.0, -floor, floor), g)
    return g


@triton.jit
def gain_and_inverse(scale, col, cols: tl.constexpr, norm: tl.constexpr):
    """Return (G, 1 / G) for the columns of a tile, where G = scale + scale_offset."""
    g = gain(scale, col, cols, norm.scale_offset, norm.scale_floor)
    if scale[0] is None:
        inverse = 1.0
    elif norm.scale_floor > 0.0:
        inverse = 1.0 / g
    else:
        # If y is float16, G may be 0, and x_hat cannot be recovered from y. Then 0 is used in place
        # of 1 / G, which makes x_hat 0.
        inverse = tl.where(g == 0.0, 0.0, 1.0 / tl.where(g == 0.0, 1.0, g))
    return g, inverse


@triton.jit
def effective_bias(bias, y_ptr, col, cols: tl.constexpr, from_output: tl.constexpr):
    """Return the bias for the columns of a tile, rounded to y's dtype if the output is saved."""
    if bias[0] is None:
        value = 0.0
    else:
        value = _load(bias, col, cols, 0.0)
        if from_output:
            value = rounded_like(value, y_ptr)
    return value


@triton.jit
def gain_and_bias(scale, bias, y_ptr, col, cols: tl.constexpr, norm: tl.constexpr):
    """Return (G, bias) for the columns of a tile. G is 1 without a scale; bias is 0 if absent."""
    g = gain(scale, col, cols, norm.scale_offset, norm.scale_floor)
    return g, effective_bias(bias, y_ptr, col, cols, norm.from_output)


@triton.jit
def _load(parameter, col, cols: tl.constexpr, other: tl.constexpr):
    """Load a parameter for the columns of a tile, and return it in float32."""
    ptr, start = parameter
    if start is not None:
        ptr += start
    value = tl.load(ptr + col, mask=col < cols, other=other, eviction_policy="evict_last")
    return value.to(tl.float32)


# ------------------------------------------------------------------------------------- activations


_GELU, _GELU_CUBE = tl.constexpr(math.sqrt(8 / math.pi)), tl.constexpr(0.044715)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The compile-time parameters of a gate.

    Attributes:
      activation: the name of the function that is applied to the gate.
      comes_first: True if the activated gate multiplies x before the norm. False if it multiplies
        the result of the norm.
    """

    activation: str
    comes_first: bool


def gate_of(spec: Spec) -> Gate | None:
    """Return the compile-time parameters of the gate of the call `spec`, or None without a gate."""
    if spec.norm.gate_dtype is None or spec.norm.activation is None:
        return None
    return Gate(spec.norm.activation, not spec.norm.norm_before_gate)


@triton.jit
def activated(g, activation: tl.constexpr):
    """Return two tiles: the activation of the elements of `g`, and its derivative."""
    if activation == "relu":
        a = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(g > 0.0, 1.0, 0.0)
    elif activation == "leaky_relu":
        slope = tl.where(g >= 0.0, 1.0, 0.01)
        a = g * slope
    elif activation == "sigmoid":
        a = tl.sigmoid(g)
        slope = a * (1.0 - a)
    elif activation == "gelu":
        square = g * g
        s = tl.sigmoid(g * (_GELU + _GELU * _GELU_CUBE * square))
        a = g * s
        slope = s + a * (1.0 - s) * (_GELU + 3.0 * _GELU * _GELU_CUBE * square)
    else:  # silu
        s = tl.sigmoid(g)
        a = g * s
        slope = s + a * (1.0 - s)
    return a, slope


@triton.jit
def gated(x, gate_ptr, tile, gate: tl.constexpr, comes_first: tl.constexpr):
    """Return `x`, multiplied by the activation of the gate if the gate applies at this point.

    A kernel calls this function twice: before the norm with `comes_first` True, and after the norm
    with `comes_first` False. The gate applies in at most one of these calls. The other call returns
    `x` unchanged.
    """
    if gate is not None and gate.comes_first == comes_first:
        a, _ = activated(load_tile(gate_ptr, tile), gate.activation)
        x *= a
    return x
