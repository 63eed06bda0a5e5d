"""`Spec`, the static description of one pass of a call, as an implementation receives it."""

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
#: Activations that a linear layer after a norm may have.
LinearActivation = Literal["relu", "leaky_relu", "gelu", "silu"]
#: Activations that a plain norm may have after it.
NormActivation = Literal["silu", "gelu", "relu"]
Name = Literal["xla", "mosaic", "triton"]

#: dtypes that every function takes and returns.
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")

#: Row statistics that a backward pass needs, each ``(rows,)`` in the arithmetic dtype; empty unless
#: ``spec.has_stats``. A norm has ``(rstd,)`` or ``(rstd, mean)``; two norms have one rstd each. A
#: cross-entropy has ``(m, log_s)``: the maximum of a row's unmasked entries, and
#: log(sum(exp(x - m))). m + log_s is the log-sum-exp. log_s is -inf for a row without an entry, and
#: NaN for a row whose label is not one of its columns. A divergence also has both statistics of the
#: teacher's logits.
Stats = tuple[jax.Array, ...]

# The forward pass of an output-saving norm raises smaller scales to this magnitude, so that the
# backward pass can recover x_hat from y. It is small enough to vanish in any sum with ordinary
# numbers, and large enough that 1 / floor**2, which second derivatives need, is finite. float16's
# range has no such number.
_SCALE_FLOOR = {"bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-500}


@dataclasses.dataclass(frozen=True)
class Shared:
    """How rows of x map to rows of an operand that is broadcast to x: a mask, a bias or a table.

    Attributes:
      segments: (size, has_axis) for each axis of x's rows, where has_axis is True if the operand
        has that axis. Adjacent axes with equal has_axis are merged. The operand's row index runs
        over the axes that the operand has.
      has_columns: True if the operand is ``(n, cols)``, False if it is ``(n, 1)``.
    """

    segments: tuple[tuple[int, bool], ...]
    has_columns: bool

    @property
    def rows(self) -> int:
        """Number of rows of the operand."""
        return math.prod(size for size, has_axis in self.segments if has_axis)

    @property
    def sharing(self) -> int:
        """Number of rows of x that share a row of the operand."""
        return math.prod(size for size, has_axis in self.segments if not has_axis)

    @property
    def run(self) -> int:
        """Number of consecutive rows of x that use consecutive rows, or one row, of the operand."""
        return self.segments[-1][0] if self.segments else 1


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """Options of a norm.

    Attributes:
      scale_dtype, bias_dtype: dtype of each parameter and of its gradient; None where it is absent.
      residual_dtype: dtype of the residual, and of the sum (h or y).
      next_scale_dtype: dtype of the second norm's scale.
      branch_scale_dtype: dtype of the factor of x in a sum.
      gate_dtype: dtype of the gate.
      table_dtype: dtype of the tables of a rotation.
      epsilon: added to the variance (or mean square) under the root.
      subtract_mean: True for LayerNorm, False for RMSNorm.
      scale_offset: added to ``scale`` in the arithmetic dtype (1.0 for Gemma's ``1 + w``).
      saved: which array the backward pass starts from. With two norms, this applies to the second
        one; the backward pass of the first norm starts from x.
      activation: a function of `jax.nn`, with its defaults, applied to the gate or to a plain norm
        that saves its input: y = activation(norm(x)). None for y = norm(x).
      norm_before_gate: True for y = norm(x) activation(gate), False for norm(x activation(gate)).
      rotated: number of leading columns that are rotated.
      interleaved: True if a pair is columns 2i and 2i + 1, False if it is columns i and
        i + rotated / 2.
      table_rows: how rows of x map to rows of the tables.
      wide: True if the arithmetic is float64 because another array of the call is, although no
        array of this norm is.
      scale_groups, bias_groups, branch_scale_groups: 1 for a parameter ``(cols,)`` that all rows
        share; n for one of shape ``(n, cols)``, each row of which belongs to ``rows / n``
        consecutive rows.
      scattered: True if a parameter belongs to groups of rows that are not consecutive, or is
        broadcast along normalised axes.
      inner_params: True if scale and bias belong to the inner axis instead of columns. They are
        then ``(inner,)``, or ``(n, inner)`` for n groups of consecutive outer indices.
    """

    scale_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    residual_dtype: np.dtype | None = None
    next_scale_dtype: np.dtype | None = None
    branch_scale_dtype: np.dtype | None = None
    gate_dtype: np.dtype | None = None
    table_dtype: np.dtype | None = None
    epsilon: float = 0.0
    subtract_mean: bool = False
    scale_offset: float = 0.0
    saved: Save = "output"
    activation: Activation | None = None
    norm_before_gate: bool = False
    rotated: int = 0
    interleaved: bool = False
    table_rows: Shared | None = None
    wide: bool = False
    scale_groups: int = 1
    bias_groups: int = 1
    branch_scale_groups: int = 1
    scattered: bool = False
    inner_params: bool = False


@dataclasses.dataclass(frozen=True)
class LogitsOptions:
    """Options of a function of logits.

    Attributes:
      has_mask: True if the call has a mask of columns.
      mask_rows: how rows of x map to rows of the mask. None if there is no mask, or if it is
        broadcast along some of the normalised axes but not all.
      logits_scale: the factor of x; 1 if the factor is an operand.
      has_scale: True if the factor of x is an operand, with a number for each row.
    """

    has_mask: bool = False
    mask_rows: Shared | None = None
    logits_scale: float = 1.0
    has_scale: bool = False


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions(LogitsOptions):
    """Options of a softmax.

    Attributes:
      logits_bias_dtype: dtype of the bias that is added to the logits, and of its gradient. None
        for no bias, and for a backward pass that does not return its gradient.
      logits_bias_shape: shape of the bias: x's shape, with 1 for the axes along which the bias is
        broadcast.
      logits_bias_rows: as `LogitsOptions.mask_rows`, for the bias.
      masked_logit: the value that replaces a masked logit. -inf excludes the logit; the result of a
        row without unmasked logits is then 0. With a finite number, the logit takes part as a
        constant.
      causal: True if column j of a matrix's row i is included only for j <= i.
      queries: number of rows of each matrix, for ``causal``.
      queries_over: mesh axes over which the axis before ``axes`` is sharded, for ``causal``.
    """

    logits_bias_dtype: np.dtype | None = None
    logits_bias_shape: tuple[int, ...] = ()
    logits_bias_rows: Shared | None = None
    masked_logit: float = -math.inf
    causal: bool = False
    queries: int = 0
    queries_over: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LossOptions(LogitsOptions):
    """Options of a loss.

    Attributes:
      has_positions: True if the call has a mask of rows. The loss is 0 where the mask is False.
      label_smoothing, z_loss: as in the equation of a cross-entropy.
      logit_softcap: c, if the logits are c tanh(logits_scale x / c); None for no cap.
      padding: number of trailing columns that are padding and not classes; their dx is 0.
      gradient_dtype: dtype of dx, for a backward pass after which x is not needed. None for any
        other backward pass, where dx has x_dtype.
      teacher_dtype: dtype of a divergence's teacher logits; None for any other operation.
      teacher_softcap: `logit_softcap` of the teacher's logits.
      reverse: True for the divergence of the student from the teacher.
    """

    has_positions: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    padding: int = 0
    gradient_dtype: np.dtype | None = None
    teacher_dtype: np.dtype | None = None
    teacher_softcap: float | None = None
    reverse: bool = False


Options = NormOptions | SoftmaxOptions | LossOptions
OPTIONS: dict[Family, type[Options]] = {
    "norm": NormOptions,
    "softmax": SoftmaxOptions,
    "loss": LossOptions,
}
_NO_NORM, _NO_SOFTMAX, _NO_LOSS = NormOptions(), SoftmaxOptions(), LossOptions()


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static description of one pass of a call, for an implementation.

    Attributes:
      op: ``"norm"`` is LayerNorm and RMSNorm: one kernel with the switch ``subtract_mean``.
      direction: the pass: ``"fwd"`` (forward), ``"tan"`` (tangent) or ``"bwd"`` (backward).
      rows, cols: shape of the two-dimensional view; ``cols`` is the normalised length.
      x_dtype: dtype of the input; the backward pass returns dx in it.
      y_dtype: dtype of the output, such as a cross-entropy's loss, and of its cotangent dy.
      outputs: names of the forward's results and statistics that this pass includes. The forward
        pass returns them, the tangent returns their tangents, and the backward pass takes their
        cotangents. Without y, a forward pass is only a sum (the xla implementation skips the norm),
        and a backward pass starts from the cotangent of h alone. A plain norm has no h: its
        backward pass adds this cotangent to dx, and h's tangent is x's.
      options: options of the operation's family.
      wrt: names of the operands that have a tangent (``"tan"``) or a gradient (``"bwd"``). A kernel
        may also return gradients of other operands. A ``"fwd"`` of a loss with ``("x",)`` also
        takes the loss's cotangent, and returns the gradient of x.
      axes: the normalised axes of the arrays. Only the xla implementation gets other axes than the
        last one.
      moved_axis: True if the two-dimensional view needs a transpose of operands and results.
      inner: if above 1, arrays have the shape `strided`, normalised over the middle axis. Only an
        implementation whose `takes_inner` is True gets such a spec.
      inner_cols: the number of a row's `cols` elements that are adjacent on the inner axis, such as
        the channels of a group in GroupNorm. Statistics then have the shape
        ``(outer * inner / inner_cols,)``.
      cols_over: mesh axes (inside ``jax.shard_map``) over which the columns are sharded; ``cols``
        counts all shards. Only the xla implementation takes it.
      axes_over: for each of ``axes``, the mesh axes over which it is sharded, to locate a label's
        column.
    """

    op: Op
    direction: Direction
    rows: int
    cols: int
    x_dtype: np.dtype
    y_dtype: np.dtype
    outputs: tuple[str, ...]
    options: Options
    wrt: tuple[str, ...] = ()
    axes: tuple[int, ...] = (-1,)
    moved_axis: bool = False
    inner: int = 1
    inner_cols: int = 1
    cols_over: tuple[str, ...] = ()
    axes_over: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise TypeError if `options` belong to another family of operations."""
        expected = OPTIONS[self.operation.family]
        if not isinstance(self.options, expected):
            raise TypeError(f"a {self.op} has {expected.__name__}: got {self.options!r}")

    def replaced(self, **changes: Any) -> "Spec":
        """Return a spec in which these fields, of the spec or of its options, have other values."""
        own = {name: changes.pop(name) for name in _FIELDS & changes.keys()}
        if changes:
            options = own.get("options", self.options)
            own["options"] = dataclasses.replace(options, **changes)
        return dataclasses.replace(self, **own)

    @functools.cached_property
    def norm(self) -> NormOptions:
        """The options of a norm; default options if the operation is no norm."""
        return self.options if isinstance(self.options, NormOptions) else _NO_NORM

    @functools.cached_property
    def logits(self) -> LogitsOptions:
        """The options of a softmax or a loss; default options for a norm."""
        return self.options if isinstance(self.options, LogitsOptions) else _NO_SOFTMAX

    @functools.cached_property
    def softmax(self) -> SoftmaxOptions:
        """The options of a softmax; default options for any other operation."""
        return self.options if isinstance(self.options, SoftmaxOptions) else _NO_SOFTMAX

    @functools.cached_property
    def loss(self) -> LossOptions:
        """The options of a loss; default options for any other operation."""
        return self.options if isinstance(self.options, LossOptions) else _NO_LOSS

    @functools.cached_property
    def operation(self) -> Operation:
        """The operation's entry in `OPERATIONS`."""
        return OPERATIONS[self.op]

    def has(self, operand: str) -> bool:
        """Return True if the call has an operand, or a saved result, with this name."""
        match operand:
            case "x" | "labels" | "candidates" | "cos" | "sin" | "entropy" | "y":
                return True
            case "logits_scale":
                return self.logits.has_scale
            case "mask" | "positions":
                return self.logits.has_mask if operand == "mask" else self.loss.has_positions
            case _:
                return self.dtype(operand) is not None

    def dtype(self, operand: str) -> np.dtype | None:
        """Return the dtype of the float operand with this name, or None if it is absent."""
        match operand:
            case "x":
                return self.x_dtype
            case "teacher_logits":
                return self.loss.teacher_dtype
            case "cos" | "sin":
                return self.norm.table_dtype
            case "logits_bias":
                return self.softmax.logits_bias_dtype
            case _:
                dtype: np.dtype | None = getattr(self.norm, f"{operand}_dtype")
                return dtype

    @functools.cached_property
    def dx_dtype(self) -> np.dtype:
        """dtype of the gradient of x."""
        return self.loss.gradient_dtype or self.x_dtype

    @functools.cached_property
    def overwrites_x(self) -> bool:
        """True if the backward pass of a loss may write dx over x."""
        return self.loss.gradient_dtype is not None and self.loss.gradient_dtype == self.x_dtype

    @functools.cached_property
    def operand_dtypes(self) -> list[np.dtype]:
        """Dtypes of the arrays of x's shape that the forward pass reads; x comes first."""
        return self._dtypes_of_arrays(self.operation.operands)

    @functools.cached_property
    def kept_dtypes(self) -> list[np.dtype]:
        """Dtypes of the arrays of x's shape, besides the saved one, that the derivative takes."""
        x = ("x",) * (self.norm.branch_scale_dtype is not None)
        return self._dtypes_of_arrays((*x, *self.operation.keeps))

    @functools.cached_property
    def operand_waits(self) -> bool:
        """True if the array beside x is needed only once the statistics of x are known."""
        return self.norm.norm_before_gate or "first" in self.operation.norms

    def _dtypes_of_arrays(self, names: tuple[str, ...]) -> list[np.dtype]:
        dtypes = [self.dtype(name) for name in names if OPERANDS.get(name) == "array"]
        return [dtype for dtype in dtypes if dtype is not None]

    @functools.cached_property
    def classes(self) -> int:
        """Number of classes of a loss: the columns that are not padding."""
        return self.cols - self.loss.padding

    @functools.cached_property
    def strided(self) -> tuple[int, int, int]:
        """Shape ``(outer, cols, inner)`` of the arrays, for `inner` above 1."""
        return self.rows * self.inner_cols // self.inner, self.cols // self.inner_cols, self.inner

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """dtype of the arithmetic: float64 if an array of rows is float64, else float32.

        Both norms of a call use the same dtype, so that all statistics have one dtype.
        """
        arrays = (*self.operand_dtypes, self.y_dtype, self.softmax.logits_bias_dtype)
        # Compare by name: numpy treats None as float64.
        is_wide = self.norm.wide or any(d is not None and d.name == "float64" for d in arrays)
        return np.dtype(np.float64 if is_wide else np.float32)

    @functools.cached_property
    def logit_factor(self) -> float:
        """The outer factor f of a loss's logits z = f g(x): the scale of x, or a tanh's cap."""
        return (
            self.logits.logits_scale if self.loss.logit_softcap is None else self.loss.logit_softcap
        )

    @functools.cached_property
    def drops_masked(self) -> bool:
        """True if masked entries are excluded, False if they take part as a constant."""
        return self.softmax.masked_logit == -math.inf

    @functools.cached_property
    def renormalises(self) -> bool:
        """True if softmax's derivative divides by sum(y), because y is rounded to 16 bits.

        If a row is nearly one-hot, the terms of d - sum(d y) cancel, and the rounding error of y
        would remain: |d| / 512 in bfloat16.
        """
        return self.op == "softmax" and self.y_dtype.itemsize < 4

    @functools.cached_property
    def drops_entries(self) -> bool:
        """True if some entries of a softmax may be excluded."""
        return self.softmax.causal or (self.logits.has_mask and self.drops_masked)

    @functools.cached_property
    def reads_mask(self) -> bool:
        """True if the pass reads the mask. Softmax's backward pass may infer it from y = 0."""
        shows = self.direction == "bwd" and self.op == "softmax" and self.drops_masked
        return self.logits.has_mask and not shows

    @functools.cached_property
    def has_stats(self) -> bool:
        """True if the pass returns the statistics, or takes their cotangents."""
        return not set(self.statistics).isdisjoint(self.outputs)

    @functools.cached_property
    def returns_both(self) -> bool:
        """True if the pass returns a loss and its gradient, given the loss's cotangent."""
        return self.direction == "fwd" and bool(self.wrt)

    @functools.cached_property
    def returns_tables(self) -> bool:
        """True if the backward pass returns the gradients of cos or sin."""
        return self.direction == "bwd" and not {"cos", "sin"}.isdisjoint(self.wrt)

    @functools.cached_property
    def is_softmax(self) -> bool:
        """True for softmax and log_softmax."""
        return self.operation.family == "softmax"

    @functools.cached_property
    def is_norm(self) -> bool:
        """True for LayerNorm and RMSNorm, with or without fused operations."""
        return self.operation.family == "norm"

    @functools.cached_property
    def is_loss(self) -> bool:
        """True for losses, divergences and log-probabilities, which reduce each row of logits."""
        return self.operation.family == "loss"

    @functools.cached_property
    def returns_entropy(self) -> bool:
        """True if the entropy of each row is a result."""
        return "entropy" in self.operation.results

    @functools.cached_property
    def normalises_h(self) -> bool:
        """True if y is the norm of the sum h, and both are results."""
        return "h" in self.operation.results

    @functools.cached_property
    def starts_from(self) -> str:
        """Name of the operand or result that the derivative starts from."""
        from_output, from_input = self.operation.saves
        return from_output if self.norm.saved == "output" else from_input

    @functools.cached_property
    def groups(self) -> int:
        """Number of groups of rows with separate parameters."""
        return max(self.norm.scale_groups, self.norm.bias_groups, self.norm.branch_scale_groups)

    @functools.cached_property
    def scale_floor(self) -> float | None:
        """Smallest magnitude of ``scale + scale_offset`` in the arithmetic; None for no floor."""
        if self.norm.saved == "input" or self.norm.scale_dtype is None:
            return None
        return _SCALE_FLOOR.get(self.y_dtype.name)

    @functools.cached_property
    def clips_x_hat(self) -> bool:
        """True if a kernel must clip x_hat = z / G, recovered from the output, to its true bound.

        A bias adds a rounding error to z. Without a floor, G may be so small that y rounds to a few
        units of its smallest number. Otherwise, z / G is x_hat up to the rounding of y.
        """
        vanishes = self.norm.scale_dtype is not None and self.scale_floor is None
        return self.norm.saved == "output" and (self.norm.bias_dtype is not None or vanishes)

    @functools.cached_property
    def reads_bias(self) -> bool:
        """True if a norm's backward pass needs the bias, for x_hat or the activation's input."""
        has_use = self.norm.saved == "output" or self.norm.activation is not None
        return has_use and self.norm.bias_dtype is not None

    @functools.cached_property
    def y_limit(self) -> float | None:
        """The limit to which the backward pass clips a y that may have overflowed; None for none.

        float16 ends at 65504, which x_hat G may exceed. A bounded function of y, such as a tanh,
        has a cotangent of 0 there, and 0 * inf would make the mean of a whole row NaN.
        """
        grows = self.norm.scale_dtype is not None or self.norm.bias_dtype is not None
        stored = self.norm.saved == "output" and self.y_dtype.name == "float16"
        return 65504.0 if grows and stored else None

    @functools.cached_property
    def returns_mean(self) -> bool:
        """True if the statistics include the row means, as for a LayerNorm that saves its input."""
        return self.norm.subtract_mean and self.norm.saved == "input"

    @functools.cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the row statistics that the derivative takes."""
        names = self.operation.statistics
        return names if self.returns_mean else tuple(name for name in names if name != "mean")

    @functools.cached_property
    def plain(self) -> bool:
        """True if only the xla implementation has this pass."""
        takes_stats = self.direction == "bwd" and self.has_stats
        is_derivative = self.direction == "tan" or takes_stats or self.returns_tables
        return is_derivative or "y" not in self.outputs

    @functools.cached_property
    def first(self) -> "Spec":
        """The spec of the norm of x before the addition of a residual. That norm saves x."""
        changes: dict[str, Any] = {}
        if self.norm.residual_dtype is not None:
            changes["y_dtype"] = self.norm.residual_dtype  # the dtype of the first norm's cotangent
        return self._one_norm(("y",), saved="input", **changes)

    @functools.cached_property
    def last(self) -> "Spec":
        """The spec of the norm of h, or of x if nothing is added before the norm.

        If the call is no norm, it is the call itself.
        """
        if not self.is_norm:
            return self
        changes: dict[str, Any] = {}
        takes_dh = "h" in self.outputs and (self.direction == "bwd" or not self.normalises_h)
        if self.normalises_h:
            changes["x_dtype"] = self.norm.residual_dtype
        if "next_scale" in self.operation.operands:
            changes["scale_dtype"] = self.norm.next_scale_dtype
        return self._one_norm(("y", "h") if takes_dh else ("y",), **changes)

    @functools.cached_property
    def norms(self) -> list["Spec"]:
        """The specs of a call's norms, in order."""
        each = {"first": lambda: self.first, "last": lambda: self.last}
        return [each[name]() for name in self.operation.norms]

    def _one_norm(self, outputs: tuple[str, ...], **changes: Any) -> "Spec":
        """Return the spec of one of the call's norms, with the call's arithmetic."""
        norm = self.replaced(
            op="norm",
            outputs=outputs,
            options=NormOptions(
                scale_dtype=self.norm.scale_dtype,
                bias_dtype=self.norm.bias_dtype,
                epsilon=self.norm.epsilon,
                subtract_mean=self.norm.subtract_mean,
                scale_offset=self.norm.scale_offset,
                saved=self.norm.saved,
                activation=self.norm.activation if self.norm.gate_dtype is None else None,
                wide=self.compute_dtype == np.float64,
                scale_groups=self.norm.scale_groups,
                bias_groups=self.norm.bias_groups,
                scattered=self.norm.scattered,
                inner_params=self.norm.inner_params,
            ),
            **changes,
        )
        return norm.replaced(outputs=(*outputs, *norm.statistics)) if self.has_stats else norm


_FIELDS = {field.name for field in dataclasses.fields(Spec)}
