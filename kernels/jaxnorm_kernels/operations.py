"""The table of operations: the arrays that each operation takes, returns and saves.

A softmax takes logits, z = logits_scale * x + logits_bias::

    softmax          y = exp(z) / sum(exp(z))
    log_softmax      y = z - log(sum(exp(z)))

A loss takes a label for each row, masks, and logits z = logits_scale * x. If the logits have a cap
c, they are z = c * tanh(logits_scale * x / c)::

    cross_entropy           y = logsumexp(z) - sum(targets * z) + z_loss * logsumexp(z)^2
                            targets = (1 - a) * one_hot(label) + a / cols    a = label_smoothing
    log_prob_and_entropy    y = log(p[label])    entropy = -sum(p log(p))    p = softmax(z)
    log_probs_and_entropy   y_i = log(p[candidate_i]) for k candidates    entropy as above

A divergence takes the logits of a student and of a teacher. The teacher's logits are constants::

    kl_divergence           y = sum(p log(p / q))    p = softmax(teacher's z)    q = softmax(z)
                            reversed: y = sum(q log(q / p))

A residual may be added before or after a norm, in the same operation::

    norm             y = norm(x)
    add_norm         h = x + residual          y = norm(h)
    norm_add         y = residual + norm(x)
    norm_add_norm    h = residual + norm(x)    y = norm(h)

x may be scaled before the residual is added and the sum is normalised (LayerScale, adaLN-zero)::

    scaled_add_norm  h = residual + branch_scale * x        y = norm(h)

After the norm of an attention head, its pairs of columns may be rotated (RoPE)::

    norm_rope        y = rotation(norm(x), cos, sin)

The norm's result or the norm's input may be multiplied by an activated gate::

    norm_gated       y = norm(x) * activation(gate)       or y = norm(x * activation(gate))

If a plain norm has an activation, y = activation(norm(x)). This is a static option of the operation
"norm" and not an operation of its own.

An operation has three passes: forward, tangent and backward. The tangent pass is linear in the
tangents of the operands, and the backward pass in the cotangents of the results. Each of these two
linear functions is the transpose of the other::

    pass    takes                      returns
    fwd     operands                   results, statistics
    tan     residuals, tangents        results, statistics (their tangents)
    bwd     residuals, cotangents      gradients of operands
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

Op = Literal[
    "softmax",
    "log_softmax",
    "cross_entropy",
    "log_prob_and_entropy",
    "log_probs_and_entropy",
    "kl_divergence",
    "norm",
    "add_norm",
    "norm_add",
    "norm_add_norm",
    "scaled_add_norm",
    "norm_rope",
    "norm_gated",
]
Family = Literal["softmax", "loss", "norm"]

#: The kind of an operand or a result. It determines the shape:
#:
#: * An "array" has x's shape.
#: * A "mask" or a "logits_bias" broadcasts to x's shape.
#: * A "stat" (statistic) has one number for each row.
#: * A "label" has one number or boolean for each row, too, but no gradient.
#: * A "candidate" has several labels for each row, along an additional last axis.
#: * A parameter ("scale", "bias" or "branch_scale") has the normalised axes.
#: * A "table" (cos or sin of a rotation) has one number for each pair of columns, and broadcasts to
#:   the other axes.
Kind = Literal[
    "array",
    "mask",
    "logits_bias",
    "stat",
    "label",
    "candidate",
    "scale",
    "bias",
    "branch_scale",
    "table",
]

PARAMETERS: tuple[Kind, ...] = ("scale", "bias", "branch_scale")
#: The kinds of operands that have gradients and are broadcast to x's shape. An element of such a
#: gradient is a sum over the elements of x that use the same element of the operand.
SHARED: tuple[Kind, ...] = (*PARAMETERS, "logits_bias", "table")
#: The kinds of operands that are constants: they have no tangents and no gradients.
CONSTANTS: tuple[Kind, ...] = ("mask", "label", "candidate")

#: The kind of each operand.
OPERANDS: dict[str, Kind] = {
    "x": "array",
    "teacher_logits": "array",
    "residual": "array",
    "gate": "array",
    "scale": "scale",
    "bias": "bias",
    "next_scale": "scale",
    "branch_scale": "branch_scale",
    "mask": "mask",
    "logits_bias": "logits_bias",
    "labels": "label",
    "candidates": "candidate",
    "positions": "label",
    "logits_scale": "label",
    "cos": "table",
    "sin": "table",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, as an entry of the table `OPERATIONS`.

    Attributes:
      family: the family of operations: softmaxes, losses or norms.
      operands: names of the arrays that the forward pass takes, in the order in which JAX's
        primitive takes them. These are optional: scale, bias, next_scale, mask, positions,
        logits_bias and logits_scale. All other operands are required.
      results: a dict that maps the name of each array that the forward pass returns to its kind. y
        is the output. h is the sum that is normalised.
      statistics: names of the row statistics that the forward pass returns for the derivative. mean
        is present only in a LayerNorm that saves its input.
      saves: two names: the name of the array that is saved with save="output", and the name of the
        array that is saved with save="input". The derivative recomputes other arrays from the saved
        array.
      starts_from_x: True if the derivative takes x in addition to the saved array. This is the case
        in operations that normalise x, or multiply it by branch_scale, before they add the
        residual.
      also_saved: names of other operands and results that are saved for the derivative.
      constants: names of operands that are treated as constants. They have no tangent, although
        other operands of the same kind may have one.
      through_h: names of the operands whose gradients depend on h's cotangent. A plain norm has no
        h, but its backward pass may take an extra cotangent of x under the name h.
      norms: the norms in a call. "first" is the norm of x before the residual is added. "last" is
        the norm whose result is y.
      derivative: the name of the operation whose tangent and backward pass this operation uses;
        None if this operation has its own. If the name is set, y is the sum of a residual and the
        other operation's result, so the gradient of the residual is the cotangent of y.
      has_kernels: False if only the xla implementation has the operation.
      out_name: the name of y for `jax.checkpoint` policies, or None. If the derivative starts from
        h, h has this name, too.
      statistics_name: the name of the statistics for `jax.checkpoint` policies, or None.
    """

    family: Family
    operands: tuple[str, ...]
    results: Mapping[str, Kind]
    saves: tuple[str, str]
    also_saved: tuple[str, ...]
    constants: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    starts_from_x: bool = False
    through_h: tuple[str, ...] = ()
    norms: tuple[Literal["first", "last"], ...] = ()
    derivative: Op | None = None
    has_kernels: bool = True
    out_name: str | None = None
    statistics_name: str | None = None

    @functools.cached_property
    def y_is_sum(self) -> bool:
        """True if y is the sum of the residual and a norm. y then has the residual's dtype."""
        return "residual" in self.operands and "h" not in self.results

    @property
    def may_add_dh(self) -> bool:
        """True if the operation is a plain norm.

        The backward pass of a plain norm may take an extra cotangent of x, under the name h.
        """
        return bool(self.through_h) and "h" not in self.results

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the operands that can have a tangent."""
        names = (name for name in self.operands if name not in self.constants)
        return tuple(name for name in names if OPERANDS[name] not in CONSTANTS)


_SOFTMAX = Operation(
    family="softmax",
    operands=("x", "mask", "logits_bias", "logits_scale"),
    results={"y": "array"},
    saves=("y", "y"),
    also_saved=("mask", "logits_scale"),
    out_name="jaxnorm_softmax_out",
)

_NORM = Operation(
    family="norm",
    operands=("x", "scale", "bias"),
    results={"y": "array"},
    saves=("y", "x"),
    also_saved=("scale", "bias"),
    statistics=("rstd", "mean"),
    through_h=("x",),
    norms=("last",),
    out_name="jaxnorm_out",
    statistics_name="jaxnorm_rstd",
)

_LOSS = Operation(
    family="loss",
    operands=("x", "labels", "mask", "positions", "logits_scale"),
    results={"y": "stat"},
    saves=("x", "x"),
    # positions is not saved. The derivative recognises masked positions by log_sum = -inf.
    also_saved=("labels", "mask", "logits_scale"),
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
        also_saved=("labels", "mask", "logits_scale", "entropy"),
    ),
    "log_probs_and_entropy": dataclasses.replace(
        _LOSS,
        operands=("x", "candidates", "mask", "positions", "logits_scale"),
        results={"y": "candidate", "entropy": "stat"},
        also_saved=("candidates", "mask", "logits_scale", "entropy"),
        has_kernels=False,
    ),
    "kl_divergence": dataclasses.replace(
        _LOSS,
        operands=("x", "teacher_logits", "mask", "positions", "logits_scale"),
        also_saved=("teacher_logits", "mask", "logits_scale", "y"),
        constants=("teacher_logits",),
        statistics=("max", "log_sum", "teacher_max", "teacher_log_sum"),
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
        also_saved=("scale",),
        statistics=("rstd",),
        through_h=(),  # in this operation, the sum is the result y, and there is no h
        norms=("first",),
        derivative="norm",
    ),
    "norm_add_norm": dataclasses.replace(
        _NORM,
        operands=("x", "residual", "scale", "next_scale"),
        results={"y": "array", "h": "array"},
        saves=("y", "h"),
        also_saved=("scale", "next_scale"),
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
        also_saved=("scale", "bias", "branch_scale"),
        starts_from_x=True,
        through_h=("x", "residual", "branch_scale"),
    ),
    "norm_rope": dataclasses.replace(
        _NORM,
        operands=("x", "scale", "cos", "sin"),
        also_saved=("scale", "cos", "sin"),
        statistics=("rstd",),
        through_h=(),
    ),
    "norm_gated": dataclasses.replace(
        _NORM,
        operands=("x", "gate", "scale"),
        saves=("x", "x"),  # the gradient of the gate cannot be computed from y
        also_saved=("gate", "scale"),
        statistics=("rstd",),
        through_h=(),
    ),
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A public function of the library.

    Attributes:
      op: the operation that the function runs by default.
      subtract_mean: True if the function is a LayerNorm.
      gated: the operation that the function runs if the call has ``gate=``. The gate scales x
        before x is added to the residual. None if the function has no argument ``gate``.
      several: the operation that the function runs if the call has several labels for each
        position. None if the function takes only one label.
    """

    op: Op
    subtract_mean: bool = False
    gated: Op | None = None
    several: Op | None = None

    @property
    def ops(self) -> tuple[Op, ...]:
        """All operations that the function may run."""
        return tuple(op for op in (self.op, self.gated, self.several) if op is not None)


FUNCTIONS: dict[str, Function] = {
    "softmax": Function("softmax"),
    "log_softmax": Function("log_softmax"),
    "softmax_cross_entropy_with_integer_labels": Function("cross_entropy"),
    "log_prob_and_entropy": Function("log_prob_and_entropy", several="log_probs_and_entropy"),
    "kl_divergence": Function("kl_divergence"),
    "layer_norm": Function("norm", subtract_mean=True),
    "rms_norm": Function("norm"),
    "add_layer_norm": Function("add_norm", subtract_mean=True, gated="scaled_add_norm"),
    "add_rms_norm": Function("add_norm", gated="scaled_add_norm"),
    "rms_norm_add": Function("norm_add"),
    "rms_norm_add_rms_norm": Function("norm_add_norm"),
    "rms_norm_rope": Function("norm_rope"),
    "rms_norm_gated": Function("norm_gated"),
}
