"""Activations of a gate or a norm, as in `jax.nn`, and their derivatives, from one sigmoid.

    sigmoid       s(g)              s (1 - s)
    silu          g s(g)            s + g s (1 - s)
    gelu          g s(z)            s + g s (1 - s) z'           z = sqrt(8 / pi) (g + 0.044715 g^3)
    relu          max(g, 0)         1 for g > 0, else 0
    leaky_relu    g or 0.01 g       1 for g >= 0, else 0.01

gelu is the tanh approximation, since (1 + tanh(v)) / 2 = s(2 v).
"""

import dataclasses
import math

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.tiles import load_tile

_GELU, _GELU_CUBE = tl.constexpr(math.sqrt(8 / math.pi)), tl.constexpr(0.044715)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The compile-time parameters of a gate.

    Attributes:
      activation: the name of its activation.
      comes_first: True if the gate is a factor of x, False if it is a factor of x's norm.
    """

    activation: str
    comes_first: bool


def of(spec: Spec) -> Gate | None:
    """Return the gate of a call, or None."""
    if spec.norm.gate_dtype is None or spec.norm.activation is None:
        return None
    return Gate(spec.norm.activation, not spec.norm.norm_before_gate)


@triton.jit
def activated(g, activation: tl.constexpr):
    """Return the activation of a tile, and its derivative."""
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
    """Multiply `x` by the activation of the gate, if there is one and it comes at this place."""
    if gate is not None and gate.comes_first == comes_first:
        a, _ = activated(load_tile(gate_ptr, tile), gate.activation)
        x *= a
    return x
