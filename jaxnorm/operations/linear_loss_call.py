"""One call of a function of linear logits: its static part, what its passes take and return.

That function, of logits and labels, is one of rows: their losses, or their log-probabilities and
entropies. A mean or a sum of losses has a ``fwd`` alone.

    pass     takes                      returns
    fwd      primals                    a mean or a sum; with `wrt`, its gradients, too
             primals                    results of rows; with `keeps`, statistics, too
    tan      primals, kept, tangents    tangents of rows' results
    bwd      primals, kept, cotangents  gradients of sum(cotangents * results)

    primals  x (..., d), weight (d, V), bias (V,), labels (...), where (...), mask (..., V)

``tan`` and ``bwd`` are linear in what follows what is kept, and each other's transpose.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jaxnorm.operations import checks
from jaxnorm.operations.loss import Function as OfLogits
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, Operation
from jaxnorm_kernels.specs import Direction, Name

Function = Literal["linear_softmax_cross_entropy", "linear_log_prob_and_entropy"]
Reduction = Literal["mean", "sum", "none"]
Kind = Literal["x", "weight", "bias", "row", "mask", "total"]

#: Of logits and labels, what each function is of a chunk's.
OF_LOGITS: dict[Function, OfLogits] = {
    "linear_softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "linear_log_prob_and_entropy": "log_prob_and_entropy",
}


@dataclasses.dataclass(frozen=True)
class Head:
    """The static part of a call.

    Attributes:
      wrt: which of x, weight and bias have gradients (``fwd``, ``bwd``) or tangents (``tan``).
      keeps: statistics are among the results of rows, and their tangents or cotangents.
      has_where: booleans or float weights of positions.
      has_mask: booleans of classes.
      dtype: that is asked for; None for that to which x and weight promote. See `dtypes`.
      precision: of the products, as ``jax.default_matmul_precision`` was when the call was made.
    """

    function: Function
    chunk: int | None
    has_bias: bool
    logits_scale: float
    logit_softcap: float | None
    implementation: Name | None
    precision: str | None
    reduction: Reduction = "none"
    has_where: bool = False
    has_mask: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: np.dtype | None = None
    direction: Direction = "fwd"
    wrt: tuple[str, ...] = ()
    keeps: bool = False

    primitives: ClassVar[None] = None

    def __str__(self) -> str:
        """What a jaxpr shows."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    @property
    def operation(self) -> Operation:
        """Of logits and labels."""
        return OPERATIONS[FUNCTIONS[OF_LOGITS[self.function]].op]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a forward returns but gradients: "y", the loss, its mean, and others."""
        return (*self.operation.results, *(self.operation.statistics if self.keeps else ()))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of what ``tan`` and ``bwd`` take of the forward.

        Of losses nothing: of a gradient alone, without them, no forward remains. Who takes the
        gradient of log-probabilities has a use for these.
        """
        operation = self.operation
        if operation.results.keys() == {"y"}:
            return ()
        results = (name for name in operation.results if name in operation.keeps)
        return (*operation.statistics, *results)

    def with_gradients(self, wrt: Sequence[str]) -> "Head":
        """The forward of a mean or a sum that returns gradients, too."""
        return dataclasses.replace(self, wrt=tuple(wrt))

    def tangent(self, wrt: Sequence[str]) -> "Head":
        return dataclasses.replace(self, direction="tan", wrt=tuple(wrt))

    def backward(self, wrt: Sequence[str]) -> "Head":
        return dataclasses.replace(self, direction="bwd", wrt=tuple(wrt))

    def without_unused(self, used: Sequence[bool]) -> "Head":
        """Of gradients that are not used none is made: a rematerialised loss is one product."""
        if self.direction != "fwd" or self.reduction == "none":
            return self
        return self.with_gradients([n for n, u in zip(self.result_names, used) if u and n != "y"])

    def rowwise(self) -> "Head":
        """The forward that returns the losses of rows."""
        return dataclasses.replace(self, reduction="none")

    def with_kept(self) -> "Head":
        """The forward of rows that returns what the derivative takes of it, too."""
        return dataclasses.replace(self, keeps=bool(self.kept))

    @property
    def primals(self) -> tuple[str, ...]:
        bias, where = ["bias"] * self.has_bias, ["where"] * self.has_where
        return ("x", "weight", *bias, "labels", *where, *["mask"] * self.has_mask)

    @property
    def residual_names(self) -> tuple[str, ...]:
        """Of the operands that precede those in which ``tan`` and ``bwd`` are linear."""
        return self.primals + self.kept

    @property
    def residuals(self) -> int:
        """How many these are."""
        return len(self.residual_names)

    @property
    def result_names(self) -> tuple[str, ...]:
        results = {"fwd": self.outputs + self.wrt, "tan": self.outputs, "bwd": self.wrt}
        return results[self.direction]

    @property
    def operand_names(self) -> tuple[str, ...]:
        if self.direction == "fwd":
            return self.primals
        return self.residual_names + (self.wrt if self.direction == "tan" else self.outputs)

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
        need no wider factors. Log-probabilities are of logits that are not rounded.
        """
        promoted = checks.product_dtype(x, weight)
        asked = self.dtype or promoted
        factors = min(promoted, asked, key=lambda dtype: dtype.itemsize)
        if self.function == "linear_log_prob_and_entropy":
            return factors, checks.arithmetic_dtype(factors)
        return factors, asked

    def gradient_dtype(self, dtype: np.dtype) -> np.dtype:
        """Of the gradient of an operand of this dtype.

        A ``fwd`` knows no loss scaling, which is in the cotangent that the gradient is multiplied
        by later: below 6e-8, float16 would have lost what that is there to save.
        """
        is_narrow = self.direction == "fwd" and dtype.name == "float16"
        return np.dtype(np.float32) if is_narrow else dtype


def _kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "bias", "mask": "mask"}
    return kinds.get(name, "row")


@dataclasses.dataclass(frozen=True)
class Over:
    """Mesh axes over which arrays of devices with shards are split.

    Attributes:
      rows, classes: the axes that split the loop's rows, and those that split its classes.
      stored: the axes of `rows` over which weight is stored in shards of d and of V. Each device
        gathers weight over them, and keeps its shard of weight's gradient.
      gathered: for each axis of the rows, the axes of `classes` over which x is stored in shards.
        Each device gathers x over them, and keeps its shard of x's gradient.
      moved: for each axis of the rows, the last axes of `rows` that split it, over which x is
        stored in shards of d. The devices exchange shards of d for shards of rows, and back.
    """

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    stored: tuple[tuple[str, ...], ...] = ()
    gathered: tuple[tuple[str, ...], ...] = ()
    moved: tuple[tuple[str, ...], ...] = ()
