"""Everything static about one call of an implementation."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np

from jaxnorm_kernels.operations import OPERANDS, OPERATIONS, Family, Op, Operation

Direction = Literal["fwd", "tan", "bwd"]
Save = Literal["output", "input"]
Activation = Literal["silu", "gelu", "relu", "leaky_relu", "sigmoid"]
#: Those that a plain norm may have after it.
NormActivation = Literal["silu", "gelu", "relu"]
Name = Literal["xla", "mosaic", "triton"]

#: dtypes that every function takes and returns.
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")

#: Row statistics that a norm's backward needs: ``(rstd,)`` or ``(rstd, mean)``, each ``(rows,)``
#: in the arithmetic dtype; empty where ``spec.want_stats`` is False. Of two norms, each one's rstd.
#: Of a cross-entropy ``(m, log_s)``, the maximum of what a row keeps and log(sum(exp(x - m))); the
#: log-sum-exp is their sum. log_s is -inf, the logarithm of nothing, for a row without an entry,
#: and NaN for one whose label is none of its columns.
Stats = tuple[jax.Array, ...]

# Below this magnitude a scale is raised to it in the forward of an output-saving norm, so that y
# still carries x_hat for the backward. Small enough to vanish in any sum with ordinary numbers;
# large enough that 1 / floor**2, which second derivatives need, is finite. float16 has no such
# room.
_SCALE_FLOOR = {"bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-500}


@dataclasses.dataclass(frozen=True)
class Shared:
    """Which row of a mask or a bias belongs to a row of x, among whose rows it is broadcast.

    Attributes:
      segments: the axes of x's rows, each with its size and whether the operand has it: those that
        are neighbours and alike as one. A row's index in the operand is that along its own axes.
      has_columns: the operand is ``(n, cols)``; else ``(n, 1)``, a value for each row.
    """

    segments: tuple[tuple[int, bool], ...]
    has_columns: bool

    @property
    def rows(self) -> int:
        """Of the operand."""
        return math.prod(size for size, has_axis in self.segments if has_axis)

    @property
    def sharing(self) -> int:
        """How many rows of x have the same one."""
        return math.prod(size for size, has_axis in self.segments if not has_axis)

    @property
    def run(self) -> int:
        """Consecutive rows of x that have consecutive ones, or all the same one."""
        return self.segments[-1][0] if self.segments else 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one call of an implementation.

    Attributes:
      op: ``"norm"`` is LayerNorm and RMSNorm: one kernel with the switch ``subtract_mean``.
      direction: the pass: ``"fwd"`` (forward), ``"tan"`` (tangent) or ``"bwd"`` (backward).
      rows, cols: shape of the two-dimensional view; ``cols`` is the normalised length.
      x_dtype: dtype of the input; the backward returns dx in it.
      y_dtype: dtype of the output; the cotangent dy arrives in it. Of a cross-entropy, its loss.
      scale_dtype, bias_dtype: dtype of each parameter and of its gradient; None where it is absent.
      residual_dtype: dtype of the residual, and of h or of the sum that is returned.
      next_scale_dtype: of the second norm's scale.
      branch_scale_dtype: of what scales x before it is added.
      epsilon: added to the variance (or mean square) under the root.
      subtract_mean: True for LayerNorm, False for RMSNorm.
      scale_offset: added to ``scale`` in the arithmetic dtype (1.0 for Gemma's ``1 + w``).
      saved: which array a norm's backward starts from; of two norms, the second's (that of the
        first one starts from x).
      want_stats: the forward also returns the statistics that the backward needs, and the tangent
        their tangents.
      wide: the arithmetic is float64 although no array of rows is: that of one norm of a call with
        a residual, where another array of the call is float64.
      table_dtype: of the tables of a rotation, as the five that follow are.
      rotated: how many columns, the first ones, are rotated.
      interleaved: a pair is columns 2i and 2i + 1, and not i and i + rotated / 2.
      table_rows: where the rows find theirs in the tables.
      wants_tables: the backward also returns the gradients of cos and sin.
      gate_dtype: of the gate, as what follows is.
      norm_before_gate: y = norm(x) activation(gate), and not the norm of x activation(gate).
      activation: that of `jax.nn`, with its defaults: of the gate, or of a plain norm that keeps
        its input: y = activation(norm(x)); None for y = norm(x).
      unused: ``"y"`` or ``"h"``: a forward that has both returns None for it. Without y it is a
        sum, of which the xla implementation makes no norm; a backward then takes h's cotangent
        alone.
      stat_cotangents: the backward also takes cotangents of the statistics: second derivatives.
      adds_dh: the backward also takes dh, another cotangent of what is normalised, in its dtype,
        and adds it to that one's; a plain norm's tangent also returns dx as it is.
      has_mask: a ``where`` mask of columns comes with the call (softmaxes and cross-entropy).
      has_positions: a mask of rows comes with a cross-entropy: its loss is 0 where that is False.
      label_smoothing, z_loss: of a cross-entropy, as in its equation above.
      padding: of a cross-entropy: how many of the last columns are no classes; their dx is 0.
      overwrites_x: a loss's backward may write dx over x, which nothing reads after it.
      gradient_dtype: of a loss's dx; None for x_dtype.
      logit_softcap: c of a cross-entropy's logits c tanh(logits_scale x / c); None for none.
      logits_scale: x is multiplied by it. Of softmaxes, too.
      masked_logit: what a logit is that the mask does not keep. -inf: it takes no part, and a row
        that keeps none is 0; a finite number (of a softmax): it takes part, without a gradient.
        Softmaxes only, as the three that follow.
      logits_bias_dtype: of the bias that is then added, and of its gradient; None for no bias, and
        for a backward that does not return its gradient.
      logits_bias_shape: of the bias: that of the whole x, with 1 where it is broadcast.
      causal: column j of row i of a matrix takes part where j <= i.
      mask_rows, logits_bias_rows: where the rows find theirs in the mask and in the bias; None for
        one that is not there, or whose columns are neither all there nor all broadcast.
      queries: rows of a matrix, for ``causal``.
      axes: the normalised axes of the arrays: the last one, but for the xla implementation.
      scale_groups, bias_groups, branch_scale_groups: 1 for a parameter ``(cols,)`` of all rows; n
        for one ``(n, cols)``, each of whose rows belongs to ``rows / n`` consecutive rows.
      scattered: a parameter belongs to groups of rows that are not consecutive, or is broadcast
        along normalised axes.
      moved_axis: the two-dimensional view needs a transpose, in and out.
      inner: above 1, arrays are as `strided` says, normalised over the middle axis: for
        implementations whose `takes_inner` says so.
      inner_cols: of the `cols` elements of a row, those that are neighbours on the inner axis:
        GroupNorm's channels of a group. Statistics are then ``(outer * inner / inner_cols,)``.
      inner_params: scale and bias are ``(inner,)``, or ``(n, inner)`` for n groups of consecutive
        outer indices, and not of columns.
      cols_over: mesh axes (inside ``jax.shard_map``) that the columns are sharded over, of which
        there are ``cols`` in all; for the xla implementation alone.
      axes_over: the same for each of ``axes``: where a label's column is.
      queries_over: likewise of the axis before them, for ``causal``.
    """

    op: Op
    direction: Direction
    rows: int
    cols: int
    x_dtype: np.dtype
    y_dtype: np.dtype
    scale_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    residual_dtype: np.dtype | None = None
    next_scale_dtype: np.dtype | None = None
    branch_scale_dtype: np.dtype | None = None
    epsilon: float = 0.0
    subtract_mean: bool = False
    scale_offset: float = 0.0
    saved: Save = "output"
    want_stats: bool = False
    wide: bool = False
    table_dtype: np.dtype | None = None
    rotated: int = 0
    interleaved: bool = False
    table_rows: Shared | None = None
    wants_tables: bool = False
    gate_dtype: np.dtype | None = None
    norm_before_gate: bool = False
    activation: Activation | None = None
    unused: Literal["y", "h"] | None = None
    stat_cotangents: bool = False
    adds_dh: bool = False
    has_mask: bool = False
    has_positions: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    padding: int = 0
    overwrites_x: bool = False
    gradient_dtype: np.dtype | None = None
    logit_softcap: float | None = None
    logits_scale: float = 1.0
    masked_logit: float = -math.inf
    logits_bias_dtype: np.dtype | None = None
    logits_bias_shape: tuple[int, ...] = ()
    causal: bool = False
    mask_rows: Shared | None = None
    logits_bias_rows: Shared | None = None
    queries: int = 0
    axes: tuple[int, ...] = (-1,)
    scale_groups: int = 1
    bias_groups: int = 1
    branch_scale_groups: int = 1
    scattered: bool = False
    moved_axis: bool = False
    inner: int = 1
    inner_cols: int = 1
    inner_params: bool = False
    cols_over: tuple[str, ...] = ()
    axes_over: tuple[tuple[str, ...], ...] = ()
    queries_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what only calls of another family say."""
        for name, default in _OF_OTHERS[self.operation.family].items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"a {self.op} has no {name}: got {getattr(self, name)!r}; expected {default!r}"
                )

    @functools.cached_property
    def operation(self) -> Operation:
        """The entry of the table of operations."""
        return OPERATIONS[self.op]

    def has(self, operand: str) -> bool:
        """Whether the call has this operand of its operation, or result that it keeps."""
        match operand:
            case "x" | "labels" | "cos" | "sin" | "entropy":
                return True
            case "mask" | "positions":
                return self.has_mask if operand == "mask" else self.has_positions
            case _:
                return getattr(self, f"{operand}_dtype") is not None

    @functools.cached_property
    def dx_dtype(self) -> np.dtype:
        """dtype of the gradient of x."""
        return self.gradient_dtype or self.x_dtype

    @functools.cached_property
    def operand_dtypes(self) -> list[np.dtype]:
        """Of the arrays of x's shape that the forward reads: of x, and of what is beside it."""
        return self._dtypes_of_arrays(self.operation.operands)

    @functools.cached_property
    def kept_dtypes(self) -> list[np.dtype]:
        """Of those that the derivative takes beside what is saved: each has a gradient."""
        x = ("x",) * (self.branch_scale_dtype is not None)
        return self._dtypes_of_arrays((*x, *self.operation.keeps))

    @functools.cached_property
    def operand_waits(self) -> bool:
        """Whether what is beside x is used after the norm of x, whose statistics it waits for."""
        return self.norm_before_gate or "first" in self.operation.norms

    def _dtypes_of_arrays(self, names: tuple[str, ...]) -> list[np.dtype]:
        arrays = [name for name in names if OPERANDS[name] == "array" and self.has(name)]
        return [getattr(self, f"{name}_dtype") for name in arrays]

    @functools.cached_property
    def classes(self) -> int:
        """Of a cross-entropy."""
        return self.cols - self.padding

    @functools.cached_property
    def strided(self) -> tuple[int, int, int]:
        """Shape ``(outer, cols, inner)`` of the arrays, for `inner` above 1."""
        return self.rows * self.inner_cols // self.inner, self.cols // self.inner_cols, self.inner

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """dtype of the arithmetic: float64 where an array of rows is float64, else float32.

        Of both norms of a call, whichever the array belongs to: its statistics are of one dtype.
        """
        arrays = (*self.operand_dtypes, self.y_dtype, self.logits_bias_dtype)
        # By name: numpy takes None for float64.
        is_wide = self.wide or any(d is not None and d.name == "float64" for d in arrays)
        return np.dtype(np.float64 if is_wide else np.float32)

    @functools.cached_property
    def logit_factor(self) -> float:
        """What a cross-entropy's logits are a multiple of: of x, or of a tanh by the cap."""
        return self.logits_scale if self.logit_softcap is None else self.logit_softcap

    @functools.cached_property
    def drops_masked(self) -> bool:
        """Whether what a mask does not keep takes no part."""
        return self.masked_logit == -math.inf

    @functools.cached_property
    def renormalises(self) -> bool:
        """True if softmax's derivative divides by sum(y), because y is rounded to 16 bits.

        Where a row is nearly one-hot, the terms of d - sum(d y) cancel, and the rounding of y would
        remain: |d| / 512 in bfloat16.
        """
        return self.op == "softmax" and self.y_dtype.itemsize < 4

    @functools.cached_property
    def drops_entries(self) -> bool:
        """True if some entries of a softmax may take no part."""
        return self.causal or (self.has_mask and self.drops_masked)

    @functools.cached_property
    def reads_mask(self) -> bool:
        """softmax's backward needs none where y is 0 for what is not kept."""
        shows = self.direction == "bwd" and self.op == "softmax" and self.drops_masked
        return self.has_mask and not shows

    @functools.cached_property
    def returns_h(self) -> bool:
        """Whether the sum h is a result."""
        return self.normalises_h and self.unused != "h"

    @functools.cached_property
    def is_softmax(self) -> bool:
        """Whether it is softmax or log_softmax."""
        return self.operation.family == "softmax"

    @functools.cached_property
    def is_norm(self) -> bool:
        """Whether it is LayerNorm or RMSNorm, alone or with a residual."""
        return self.operation.family == "norm"

    @functools.cached_property
    def is_loss(self) -> bool:
        """Whether it has labels."""
        return self.operation.family == "loss"

    @functools.cached_property
    def returns_entropy(self) -> bool:
        """Whether the entropy of each row is a result."""
        return "entropy" in self.operation.results

    @functools.cached_property
    def normalises_h(self) -> bool:
        """Whether y is the norm of the sum h, which is returned too."""
        return "h" in self.operation.results

    @functools.cached_property
    def starts_from(self) -> str:
        """Name of the operand or result that the derivative starts from."""
        from_output, from_input = self.operation.saves
        return from_output if self.saved == "output" else from_input

    @functools.cached_property
    def groups(self) -> int:
        """Of rows, each with parameters of its own."""
        return max(self.scale_groups, self.bias_groups, self.branch_scale_groups)

    @functools.cached_property
    def scale_floor(self) -> float | None:
        """Smallest magnitude of ``scale + scale_offset`` in the arithmetic; None for no floor."""
        if self.saved == "input" or self.scale_dtype is None:
            return None
        return _SCALE_FLOOR.get(self.y_dtype.name)

    @functools.cached_property
    def clips_x_hat(self) -> bool:
        """Whether a kernel must hold x_hat = z / G, recovered from the output, to its true bound.

        A bias adds its rounding to z, and without a floor G may be so small that y rounds to a few
        units of its smallest number. Else z / G is x_hat but for y's rounding.
        """
        vanishes = self.scale_dtype is not None and self.scale_floor is None
        return self.saved == "output" and (self.bias_dtype is not None or vanishes)

    @functools.cached_property
    def reads_bias(self) -> bool:
        """Whether a norm's backward takes the bias: to find x_hat, or what was activated."""
        has_use = self.saved == "output" or self.activation is not None
        return has_use and self.bias_dtype is not None

    @functools.cached_property
    def y_limit(self) -> float | None:
        """The largest y that is stored: a backward takes it for one that overflowed; None for y.

        float16 ends at 65504, which x_hat G may exceed. What is bounded, such as a tanh, has a
        cotangent of 0 there, and 0 inf would be NaN in the mean of a whole row.
        """
        grows = self.scale_dtype is not None or self.bias_dtype is not None
        stored = self.saved == "output" and self.y_dtype.name == "float16"
        return 65504.0 if grows and stored else None

    @functools.cached_property
    def returns_mean(self) -> bool:
        """Whether the norm's statistics include the row means (a saved-input LayerNorm)."""
        return self.subtract_mean and self.saved == "input"

    @functools.cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the row statistics that the derivative takes."""
        names = self.operation.statistics
        return names if self.returns_mean else tuple(name for name in names if name != "mean")

    @functools.cached_property
    def plain(self) -> bool:
        """Whether the xla implementation alone has this pass: no kernel is asked for it."""
        is_derivative = self.direction == "tan" or self.stat_cotangents or self.wants_tables
        return is_derivative or self.unused == "y"

    @functools.cached_property
    def first(self) -> "Spec":
        """The norm of x, before the addition of a residual: it keeps x."""
        changes: dict[str, Any] = {}
        if self.residual_dtype is not None:
            changes["y_dtype"] = self.residual_dtype  # that of its cotangent
        return self._one_norm(saved="input", adds_dh=False, **changes)

    @functools.cached_property
    def last(self) -> "Spec":
        """The norm of h, or of x where nothing is added before it; of no norm, the call itself."""
        if not self.is_norm:
            return self
        changes: dict[str, Any] = {}
        if self.normalises_h:
            changes["x_dtype"] = self.residual_dtype
        if "next_scale" in self.operation.operands:
            changes["scale_dtype"] = self.next_scale_dtype
        return self._one_norm(**changes)

    @functools.cached_property
    def norms(self) -> list["Spec"]:
        """The norms of a call, in their order."""
        each = {"first": lambda: self.first, "last": lambda: self.last}
        return [each[name]() for name in self.operation.norms]

    def _one_norm(self, **changes: Any) -> "Spec":
        """Of the call's norms, in the call's arithmetic."""
        others = (*_ROTATION, *_BRANCH, *(_GATE if self.gate_dtype is not None else ()))
        changes.update((name, _DEFAULTS[name]) for name in others)
        return dataclasses.replace(
            self,
            op="norm",
            residual_dtype=None,
            next_scale_dtype=None,
            wide=self.compute_dtype == np.float64,
            **changes,
        )


# Fields that not all families have; of the others they are what a Spec has by default. One class
# for all: schedules and refusals ask each call the same questions, such as whether it has a scale.
_PARAMETERS = ("scale_dtype", "bias_dtype", "residual_dtype", "next_scale_dtype")
_STATISTICS = ("want_stats", "stat_cotangents")
_ROTATION = ("table_dtype", "rotated", "interleaved", "table_rows", "wants_tables")
_GATE = ("gate_dtype", "norm_before_gate", "activation")
_BRANCH = ("branch_scale_dtype", "branch_scale_groups")
_MASK = ("has_mask", "mask_rows")
_FIELDS: dict[Family, tuple[str, ...]] = {
    "norm": (
        *_PARAMETERS,
        *_STATISTICS,
        *_ROTATION,
        *_GATE,
        *_BRANCH,
        *("epsilon", "subtract_mean", "scale_offset", "saved", "wide", "unused", "adds_dh"),
        *("scale_groups", "bias_groups", "scattered", "inner_params"),
    ),
    "softmax": (
        *_MASK,
        *("masked_logit", "logits_scale", "causal", "queries", "queries_over"),
        *("logits_bias_dtype", "logits_bias_shape", "logits_bias_rows"),
    ),
    "loss": (
        *_MASK,
        *_STATISTICS,
        *("has_positions", "label_smoothing", "z_loss", "padding", "overwrites_x"),
        *("gradient_dtype", "logits_scale", "logit_softcap"),
    ),
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Spec)}
_OF_OTHERS = {
    family: {n: _DEFAULTS[n] for names in _FIELDS.values() for n in names if n not in fields}
    for family, fields in _FIELDS.items()
}
