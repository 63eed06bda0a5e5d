"""One call of linear_softmax_cross_entropy: its static part, and what its passes take and return.

    pass     takes                     returns
    fwd      primals                   the loss; with `wrt`, its gradients too ("mean", "sum" alone)
    tan      primals, tangents         the tangent of each row's loss
    bwd      primals, dloss            gradients of sum(dloss * loss)

    primals  x (..., d), weight (d, V), bias (V,), labels (...), where (...)

``tan`` and ``bwd`` are linear in what follows the primals, and each other's transpose.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jaxnorm.operations import checks
from jaxnorm_kernels.specs import Direction, Name

NAME = "linear_softmax_cross_entropy"

Reduction = Literal["mean", "sum", "none"]
Kind = Literal["x", "weight", "bias", "row", "total"]


@dataclasses.dataclass(frozen=True)
class Head:
    """The static part of a call.

    Attributes:
      wrt: which of x, weight and bias have gradients (``fwd``, ``bwd``) or tangents (``tan``).
      has_where: booleans or float weights of positions.
      dtype: of the logits of a chunk; None for that to which x and weight promote.
      precision: of the products, as ``jax.default_matmul_precision`` was when the call was made.
    """

    reduction: Reduction
    chunk: int | None
    has_bias: bool
    has_where: bool
    label_smoothing: float
    z_loss: float
    logits_scale: float
    logit_softcap: float | None
    dtype: np.dtype | None
    implementation: Name | None
    precision: str | None
    direction: Direction = "fwd"
    wrt: tuple[str, ...] = ()

    function: ClassVar[str] = NAME
    primitives: ClassVar[None] = None

    def __str__(self) -> str:
        """What a jaxpr shows."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    def with_gradients(self, wrt: Sequence[str]) -> "Head":
        """The forward of a mean or a sum that returns gradients, too."""
        return dataclasses.replace(self, wrt=tuple(wrt))

    def tangent(self, wrt: Sequence[str]) -> "Head":
        return dataclasses.replace(self, direction="tan", wrt=tuple(wrt))

    def backward(self, wrt: Sequence[str]) -> "Head":
        return dataclasses.replace(self, direction="bwd", wrt=tuple(wrt))

    def without_unused(self, used: Sequence[bool]) -> "Head":
        """Of gradients that are not used none is made: a rematerialised loss is one product."""
        if self.direction != "fwd":
            return self
        return self.with_gradients(
            [n for n, u in zip(self.result_names, used) if u and n != "loss"]
        )

    def rowwise(self) -> "Head":
        """The forward that returns the losses of rows."""
        return dataclasses.replace(self, reduction="none")

    @property
    def primals(self) -> tuple[str, ...]:
        bias, where = ["bias"] * self.has_bias, ["where"] * self.has_where
        return ("x", "weight", *bias, "labels", *where)

    @property
    def residuals(self) -> int:
        """How many operands precede those in which ``tan`` and ``bwd`` are linear: the primals."""
        return len(self.primals)

    @property
    def result_names(self) -> tuple[str, ...]:
        results = {"fwd": ("loss", *self.wrt), "tan": ("loss",), "bwd": self.wrt}
        return results[self.direction]

    @property
    def operand_names(self) -> tuple[str, ...]:
        linear = {"fwd": (), "tan": self.wrt, "bwd": ("loss",)}
        return self.primals + linear[self.direction]

    @property
    def operand_kinds(self) -> list[Kind]:
        return [*map(_kind, self.operand_names)]

    @property
    def result_kinds(self) -> list[Kind]:
        is_total = self.direction == "fwd" and self.reduction != "none"
        kinds = map(_kind, self.result_names)
        return ["total" if kind == "row" and is_total else kind for kind in kinds]

    def dtypes(self, x: np.dtype, weight: np.dtype) -> tuple[np.dtype, np.dtype]:
        """Of the factors of the products, and of the logits.

        A dtype wider than operands promote to is the logits' alone: products of what 16 bits hold
        need no wider factors.
        """
        promoted = checks.product_dtype(x, weight)
        logits = self.dtype or promoted
        return min(promoted, logits, key=lambda dtype: dtype.itemsize), logits

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
