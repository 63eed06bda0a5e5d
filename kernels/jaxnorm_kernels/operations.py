"""What each operation takes, returns and keeps: the table from which all else is derived.

A softmax takes logits, z = logits_scale x + logits_bias::

    softmax          y = exp(z) / sum(exp(z))
    log_softmax      y = z - log(sum(exp(z)))

A loss takes logits, z = softcap tanh(logits_scale x / softcap), a label of each row, and masks::

    cross_entropy           y = logsumexp(z) - sum(targets z) + z_loss logsumexp(z)^2
                            targets = (1 - label_smoothing) one_hot(label) + label_smoothing / cols
    log_prob_and_entropy    y = log(p[label])    entropy = -sum(p log(p))    p = softmax(z)

A norm is fused with the residual addition beside it::

    norm             y = norm(x)
    add_norm         h = x + residual          y = norm(h)
    norm_add         y = residual + norm(x)
    norm_add_norm    h = residual + norm(x)    y = norm(h)

Or with one that scales what it adds (LayerScale, adaLN-zero)::

    scaled_add_norm  h = residual + branch_scale x        y = norm(h)

Or with the rotation of a head's pairs of columns after it (RoPE)::

    norm_rope        y = rotation(norm(x), cos, sin)

A plain norm may have an activation after it, y = activation(norm(x)): a static option, not an
operation. Or with a gate, after it or before it::

    norm_gated       y = norm(x) activation(gate)       or y = norm(x activation(gate))

An operation has three passes. ``tan`` and ``bwd`` are linear in what follows the residuals, and
each other's transpose::

    pass    takes                      returns
    fwd     operands                   results, statistics
    tan     residuals, tangents        results, statistics (their tangents)
    bwd     residuals, cotangents      gradients of operands
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Op = Literal[
    "softmax",
    "log_softmax",
    "cross_entropy",
    "log_prob_and_entropy",
    "norm",
    "add_norm",
    "norm_add",
    "norm_add_norm",
    "scaled_add_norm",
    "norm_rope",
    "norm_gated",
]
Family = Literal["softmax", "loss", "norm"]

#: What an operand or a result of a call is: an array of x's shape; a mask or a bias of logits, each
#: broadcast to it; a statistic or a label of each row, over axes that are not normalised; a
#: parameter, over those that are; a table of a rotation, over pairs of columns, and broadcast to
#: the axes that are not normalised.
Kind = Literal[
    "array",
    "mask",
    "logits_bias",
    "stat",
    "label",
    "scale",
    "bias",
    "branch_scale",
    "table",
]

PARAMETERS: tuple[Kind, ...] = ("scale", "bias", "branch_scale")
#: Whose gradients are sums over those elements of x that share one of theirs.
SHARED: tuple[Kind, ...] = (*PARAMETERS, "logits_bias", "table")
#: Booleans and integers, which have no tangents.
CONSTANTS: tuple[Kind, ...] = ("mask", "label")

#: The kind of each operand.
OPERANDS: dict[str, Kind] = {
    "x": "array",
    "residual": "array",
    "gate": "array",
    "scale": "scale",
    "bias": "bias",
    "next_scale": "scale",
    "branch_scale": "branch_scale",
    "mask": "mask",
    "logits_bias": "logits_bias",
    "labels": "label",
    "positions": "label",
    "cos": "table",
    "sin": "table",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An entry of the table.

    Attributes:
      operands: names of the arrays that the forward takes, in the order in which functions of the
        package bind them; a call may lack any but x, residual and labels.
      results: names and kinds of those that it returns. y is the output, h the sum that the second
        step of a call normalises.
      statistics: names of the numbers of each row that it returns for the derivative. mean is there
        where a LayerNorm keeps its input.
      saves: what the derivative starts from, with save="output" and with save="input".
      starts_from_x: the derivative takes x beside it: that of the norm before the sum, or of its
        scale.
      keeps: operands that the derivative takes, too, and results beside y and h.
      through_h: operands whose gradients h's cotangent is part of. A plain norm has no h, but may
        be given another cotangent of x, which stands in its place.
      norms: of a call's norms, those that there are: the one of x before a sum ("first"), and the
        one that makes y ("last").
      derivative: whose tangent and backward are its own, but for the residual's; None for its own.
      has_kernels: False for one that is plain JAX's alone, whatever the device.
      out_name, statistics_name: names of y, and of the statistics, for policies of
        `jax.checkpoint`; h has y's where the derivative starts from it.
    """

    family: Family
    operands: tuple[str, ...]
    results: Mapping[str, Kind]
    saves: tuple[str, str]
    keeps: tuple[str, ...]
    statistics: tuple[str, ...] = ()
    starts_from_x: bool = False
    through_h: tuple[str, ...] = ()
    norms: tuple[Literal["first", "last"], ...] = ()
    derivative: Op | None = None
    has_kernels: bool = True
    out_name: str | None = None
    statistics_name: str | None = None

    @property
    def y_is_sum(self) -> bool:
        """Whether y has the residual in it, and its dtype."""
        return "residual" in self.operands and "h" not in self.results

    @property
    def may_add_dh(self) -> bool:
        """Whether a call has no h, but its backward may be given its cotangent: a plain norm."""
        return bool(self.through_h) and "h" not in self.results

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the operands that can have a tangent."""
        return tuple(name for name in self.operands if OPERANDS[name] not in CONSTANTS)


_SOFTMAX = Operation(
    family="softmax",
    operands=("x", "mask", "logits_bias"),
    results={"y": "array"},
    saves=("y", "y"),
    keeps=("mask",),
    out_name="jaxnorm_softmax_out",
)

_NORM = Operation(
    family="norm",
    operands=("x", "scale", "bias"),
    results={"y": "array"},
    saves=("y", "x"),
    keeps=("scale", "bias"),
    statistics=("rstd", "mean"),
    through_h=("x",),
    norms=("last",),
    out_name="jaxnorm_out",
    statistics_name="jaxnorm_rstd",
)

_LOSS = Operation(
    family="loss",
    operands=("x", "labels", "mask", "positions"),
    results={"y": "stat"},
    saves=("x", "x"),
    keeps=("labels", "mask"),  # The statistics tell which rows have an entry.
    statistics=("max", "log_sum"),
    statistics_name="jaxnorm_lse",
)

OPERATIONS: dict[Op, Operation] = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "cross_entropy": _LOSS,
    "log_prob_and_entropy": dataclasses.replace(
        _LOSS,
        results={"y": "stat", "entropy": "stat"},
        keeps=("labels", "mask", "entropy"),
    ),
    "norm": _NORM,
    "add_norm": dataclasses.replace(
        _NORM,
        operands=("x", "residual", "scale", "bias"),
        results={"y": "array", "h": "array"},
        saves=("y", "h"),
        through_h=("x", "residual"),
    ),
    "norm_add": dataclasses.replace(
        _NORM,
        operands=("x", "residual", "scale"),
        saves=("x", "x"),
        keeps=("scale",),
        statistics=("rstd",),
        through_h=(),  # y has the sum; h is none of its own
        norms=("first",),
        derivative="norm",
    ),
    "norm_add_norm": dataclasses.replace(
        _NORM,
        operands=("x", "residual", "scale", "next_scale"),
        results={"y": "array", "h": "array"},
        saves=("y", "h"),
        keeps=("scale", "next_scale"),
        statistics=("rstd", "next_rstd"),
        starts_from_x=True,
        through_h=("x", "residual", "scale"),
        norms=("first", "last"),
    ),
    "scaled_add_norm": dataclasses.replace(
        _NORM,
        operands=("x", "residual", "scale", "bias", "branch_scale"),
        results={"y": "array", "h": "array"},
        saves=("y", "h"),
        keeps=("scale", "bias", "branch_scale"),
        starts_from_x=True,
        through_h=("x", "residual", "branch_scale"),
    ),
    "norm_rope": dataclasses.replace(
        _NORM,
        operands=("x", "scale", "cos", "sin"),
        keeps=("scale", "cos", "sin"),
        statistics=("rstd",),
        through_h=(),
    ),
    "norm_gated": dataclasses.replace(
        _NORM,
        operands=("x", "gate", "scale"),
        saves=("x", "x"),  # the gate's derivative takes more than y
        keeps=("gate", "scale"),
        statistics=("rstd",),
        through_h=(),
    ),
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A public function.

    Attributes:
      op: its operation.
      subtract_mean: of a norm, whether it does.
      gated: the operation of a call with a gate of the sum, where it takes one.
    """

    op: Op
    subtract_mean: bool = False
    gated: Op | None = None

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of its operations."""
        return (self.op,) if self.gated is None else (self.op, self.gated)


FUNCTIONS: dict[str, Function] = {
    "softmax": Function("softmax"),
    "log_softmax": Function("log_softmax"),
    "softmax_cross_entropy_with_integer_labels": Function("cross_entropy"),
    "log_prob_and_entropy": Function("log_prob_and_entropy"),
    "layer_norm": Function("norm", subtract_mean=True),
    "rms_norm": Function("norm"),
    "add_layer_norm": Function("add_norm", subtract_mean=True, gated="scaled_add_norm"),
    "add_rms_norm": Function("add_norm", gated="scaled_add_norm"),
    "rms_norm_add": Function("norm_add"),
    "rms_norm_add_rms_norm": Function("norm_add_norm"),
    "rms_norm_rope": Function("norm_rope"),
    "rms_norm_gated": Function("norm_gated"),
}
