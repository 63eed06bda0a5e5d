"""One call of linear_softmax_cross_entropy: its static part, and what its passes take and return.

    pass     takes                     returns
    fwd      primals                   the loss; with `wrt`, its gradients too ("mean", "sum" alone)
    tan      primals, tangents         the tangent of each row's loss
    bwd      primals, dloss            gradients of sum(dloss * loss)

    primals  x (..., d), weight (d, V), bias (V,), labels (...), positions (...)

``tan`` and ``bwd`` are linear in what follows the primals, and each other's transpose.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxnorm_kernels.specs import Name

NAME = "linear_softmax_cross_entropy"

Reduction = Literal["mean", "sum", "none"]
Kind = Literal["x", "weight", "bias", "row", "total"]


@dataclasses.dataclass(frozen=True)
class Head:
    """The static part of a call.

    Attributes:
      wrt: which of x, weight and bias have gradients (``fwd``, ``bwd``) or tangents (``tan``).
      precision: of the products, as ``jax.default_matmul_precision`` was when the call was made.
    """

    reduction: Reduction
    chunk: int | None
    has_bias: bool
    has_positions: bool
    label_smoothing: float
    z_loss: float
    implementation: Name | None
    precision: str | None
    direction: Literal["fwd", "tan", "bwd"] = "fwd"
    wrt: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What a jaxpr shows."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    def to(self, direction: Literal["fwd", "tan", "bwd"], wrt: Sequence[str]) -> "Head":
        return dataclasses.replace(self, direction=direction, wrt=tuple(wrt))

    def rowwise(self) -> "Head":
        """The forward that returns the losses of rows."""
        return dataclasses.replace(self, reduction="none")

    @property
    def primals(self) -> tuple[str, ...]:
        bias, positions = ["bias"] * self.has_bias, ["positions"] * self.has_positions
        return ("x", "weight", *bias, "labels", *positions)

    @property
    def operand_kinds(self) -> list[Kind]:
        linear: dict[str, Sequence[str]] = {"fwd": (), "tan": self.wrt, "bwd": ("dloss",)}
        return [_kind(name) for name in (*self.primals, *linear[self.direction])]

    @property
    def result_kinds(self) -> list[Kind]:
        gradients = [_kind(name) for name in self.wrt]
        if self.direction == "bwd":
            return gradients
        if self.direction == "tan" or self.reduction == "none":
            return ["row"]
        return ["total", *gradients]

    def gradient_dtype(self, dtype: np.dtype) -> np.dtype:
        """Of the gradient of an operand of this dtype.

        A ``fwd`` knows no loss scaling, which is in the cotangent that the gradient is multiplied
        by later: below 6e-8, float16 would have lost what that is there to save.
        """
        is_narrow = self.direction == "fwd" and dtype.name == "float16"
        return np.dtype(np.float32) if is_narrow else dtype


def _kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "bias"}
    return kinds.get(name, "row")


@dataclasses.dataclass(frozen=True)
class Over:
    """Mesh axes over which arrays of devices with shards are split.

    Attributes:
      rows, classes: of x and of weight.
      scattered: those of the rows' over which weight's gradient is to be split, along d and V.
    """

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    scattered: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
