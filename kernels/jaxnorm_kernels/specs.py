"""`Spec`, the static description of one pass of a call, as an implementation receives it."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np

from jaxnorm_kernels.broadcasts import Shared as Shared
from jaxnorm_kernels.operations import OPERANDS, OPERATIONS, Family, Op, Operation

Direction = Literal["fwd", "tan", "bwd"]
Save = Literal["output", "input"]
Activation = Literal["silu", "gelu", "relu", "leaky_relu", "sigmoid"]
Name = Literal["xla", "mosaic", "triton"]

#: Names of the float dtypes that every function supports.
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")

#: Row statistics that the derivative needs: a tuple of arrays ``(rows,)`` in the arithmetic dtype.
#: It is empty if ``spec.has_stats`` is False. Otherwise:
#:
#: * A norm has ``(rstd,)`` or ``(rstd, mean)``. A call with two norms has one rstd for each norm.
#: * A loss has ``(m, log_s)``. m is the maximum of the row's unmasked logits x, log_s is
#:   log(sum(exp(x - m))), and m + log_s is the log-sum-exp. log_s is -inf if the row has no
#:   unmasked logits, or if its position is masked. In a cross-entropy, log_s is NaN if the label is
#:   not a column of the row.
#: * A divergence has m and log_s of the student's logits, then m and log_s of the teacher's logits.
Stats = tuple[jax.Array, ...]

# For each dtype of y, the lower limit ("floor") of |scale + scale_offset| in a norm that saves its
# output. Because of this limit, the backward pass can divide y by scale + scale_offset to recover
# x_hat, the normalised x. A floor must be negligible next to ordinary scales. Second derivatives
# need 1 / floor**2, so the floor must be so large that this number is finite. float16 has no entry,
# because no float16 number satisfies both conditions.
_SCALE_FLOOR = {"bfloat16": 2.0**-60, "float32": 2.0**-60, "float64": 2.0**-500}


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """Options of a norm.

    Attributes:
      scale_dtype, bias_dtype: dtype of the parameter and of its gradient; None if the parameter is
        absent.
      residual_dtype: dtype of the residual, and of the sum with the residual. This sum is either
        h = residual + x, which is then normalised, or y = residual + norm(x).
      next_scale_dtype: dtype of the second norm's scale.
      branch_scale_dtype: dtype of branch_scale, which multiplies x in h = residual + branch_scale *
        x.
      gate_dtype: dtype of the gate.
      table_dtype: dtype of cos and sin, the tables of a rotation.
      epsilon: the number that is added to the variance (or mean square) under the root.
      subtract_mean: True for LayerNorm, False for RMSNorm.
      scale_offset: the number that is added to ``scale`` in the arithmetic dtype (1.0 for Gemma's
        ``1 + w``).
      saved: the array from which the backward pass of the norm starts: "output" or "input". In an
        operation with two norms, this is the choice for the second norm. The backward pass of the
        first norm always starts from x.
      activation: the name of a function of `jax.nn`, which is called with its default options, or
        None. In a gated norm, the function is applied to the gate. In a plain norm that saves its
        input, the function is applied to the result: `y = activation(norm(x))`.
      norm_before_gate: True for y = norm(x) * activation(gate), False for y = norm(x *
        activation(gate)).
      rotated: the number of columns that are rotated. They are the first columns of a row.
      interleaved: True if a pair of rotated columns is columns 2i and 2i + 1, False if it is
        columns i and `i + rotated / 2`.
      table_rows: how rows of x map to rows of cos and sin.
      wide: True if this norm is a part of a call that computes in float64. The norm then computes
        in float64, too, even if none of its own arrays is float64.
      scale_groups, bias_groups, branch_scale_groups: the number of rows of the parameter. It is 1
        for a parameter ``(cols,)``, which all rows of x share, and n for a parameter ``(n, cols)``.
        Each of these n rows is shared by ``rows / n`` consecutive rows of x.
      scattered: True if rows of x that are not consecutive use the same row of scale, bias or
        branch_scale. Also True if one of these parameters is broadcast along a normalised axis.
      inner_params: True if x is ``(outer, cols, inner)`` (see `Spec.inner`), and scale and bias
        vary along `inner` instead of `cols`. They have the shape ``(n, inner)`` if the outer
        indices are divided into n groups of consecutive indices with separate parameters.
        Otherwise, they have the shape ``(inner,)``.
      repeated: True if all groups of rows are copies of the same rows, which are normalised with
        different parameters.
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
    repeated: bool = False


@dataclasses.dataclass(frozen=True)
class LogitsOptions:
    """Options that softmaxes and losses share.

    Attributes:
      has_mask: True if the call has a mask of columns.
      mask_rows: how rows of x map to rows of the mask. None if there is no mask. Also None for a
        mask that is broadcast along some but not all of the normalised axes, because such a mask is
        neither ``(n, cols)`` nor ``(n, 1)``.
      logits_scale: the static number by which x is multiplied; 1 if the scale is an operand.
      has_scale: True if x is multiplied by an operand that has one number for each row.
    """

    has_mask: bool = False
    mask_rows: Shared | None = None
    logits_scale: float = 1.0
    has_scale: bool = False


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions(LogitsOptions):
    """Options of a softmax.

    Attributes:
      logits_bias_dtype: dtype of the bias that is added to the logits, and of its gradient. None if
        there is no bias. Also None in a backward pass that does not return the gradient of the
        bias.
      logits_bias_shape: shape of the bias: x's shape, but 1 for the axes along which the bias is
        broadcast.
      logits_bias_rows: how rows of x map to rows of the bias. None if there is no bias. Also None
        for a bias that is broadcast along some but not all of the normalised axes, because such a
        bias is neither ``(n, cols)`` nor ``(n, 1)``.
      masked_logit: the value that replaces a masked logit. If it is -inf, masked logits are
        excluded, and the softmax of a row without other logits is 0. If it is a finite number,
        masked logits count like other logits, but have no gradient.
      causal: True for a causal softmax. The rows of x then form matrices. In row i of each matrix,
        only columns j <= i are included.
      queries: for a causal softmax, the number of rows of each matrix.
      queries_over: for a causal softmax, the mesh axes over which the rows of each matrix are
        sharded.
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
      label_smoothing, z_loss: coefficients of a cross-entropy; see the equation in `operations`.
      logit_softcap: the cap c if the logits are c * tanh(logits_scale * x / c); None for no cap.
      padding: the number of columns at the end of each row that are not classes. dx is 0 in these
        columns.
      gradient_dtype: the dtype of dx if the caller does not need x after the backward pass. A
        kernel may then write dx over x if both have the same dtype. None if the caller still needs
        x. dx then has x_dtype, and x must not be overwritten.
      teacher_dtype: dtype of a divergence's teacher logits; None for any other operation.
      teacher_softcap: the cap of the teacher's logits, as `logit_softcap`; None for no cap.
      reverse: True for KL(student || teacher), False for KL(teacher || student).
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


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static description of one pass of a call, for an implementation.

    Attributes:
      op: name of the operation. ``"norm"`` is LayerNorm or RMSNorm, depending on ``subtract_mean``.
      direction: the pass: ``"fwd"`` (forward), ``"tan"`` (tangent) or ``"bwd"`` (backward).
      rows, cols: shape of x as a two-dimensional array, in which each row is normalised.
      x_dtype: dtype of x and, by default, of its gradient dx.
      y_dtype: dtype of the output, such as a cross-entropy's loss, and of its cotangent dy.
      outputs: names of results and statistics. The forward pass returns them, the tangent pass
        returns their tangents, and the backward pass takes their cotangents. If "y" is not in
        `outputs`, the caller uses only the sum h. The forward pass of the xla implementation then
        skips the norm, and the backward pass takes only the cotangent of h. A plain norm has no sum
        h. If its `outputs` contain "h", this name stands for x: the tangent pass also returns the
        tangent of x, and the backward pass takes an extra cotangent of x and adds it to dx.
      options: options of the operation's family.
      wrt: names of the operands that have a tangent (direction ``"tan"``), or whose gradients are
        requested (direction ``"bwd"``). A kernel may also return other gradients.
      axes: the normalised axes of the arrays. Kernels always get arrays whose last axis is
        normalised, or whose middle axis is normalised if `inner` is above 1. Only the xla
        implementation gets other axes.
      moved_axis: True if operands and results must be transposed to become two-dimensional arrays.
      inner: if above 1, arrays have the shape ``(outer, cols, inner)`` (see `strided`) and are
        normalised over the middle axis. Only an implementation whose `takes_inner` returns True
        gets such a spec.
      inner_cols: if above 1, this number of adjacent inner indices is normalised together, such as
        the channels of a group in GroupNorm. A row then consists of the ``cols`` elements that have
        one outer index and these inner indices. Statistics then have the shape ``(outer * inner /
        inner_cols,)``.
      cols_over: mesh axes (inside ``jax.shard_map``) over which the columns are sharded. ``cols``
        is then the number of columns of all shards together. Only the xla implementation supports
        sharded columns.
      axes_over: for each of ``axes``, the mesh axes over which this axis is sharded. Losses use
        them to find the shard that contains the column of a label.
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
        """Raise TypeError if `options` belongs to another family of operations."""
        expected = OPTIONS[self.operation.family]
        if not isinstance(self.options, expected):
            raise TypeError(f"a {self.op} has {expected.__name__}: got {self.options!r}")

    def replaced(self, **changes: Any) -> "Spec":
        """Return a copy with changed fields: fields of the spec or fields of its options."""
        own = {name: changes.pop(name) for name in _FIELDS & changes.keys()}
        if changes:
            options = own.get("options", self.options)
            own["options"] = dataclasses.replace(options, **changes)
        return dataclasses.replace(self, **own)

    @functools.cached_property
    def norm(self) -> NormOptions:
        """The options of a norm. For another operation, TypeError is raised."""
        return self._options_of(NormOptions)

    @functools.cached_property
    def logits(self) -> LogitsOptions:
        """The options that softmaxes and losses share. For a norm, TypeError is raised."""
        return self._options_of(LogitsOptions)

    @functools.cached_property
    def softmax(self) -> SoftmaxOptions:
        """The options of a softmax. For another operation, TypeError is raised."""
        return self._options_of(SoftmaxOptions)

    @functools.cached_property
    def loss(self) -> LossOptions:
        """The options of a loss. For another operation, TypeError is raised."""
        return self._options_of(LossOptions)

    def _options_of[T](self, kind: type[T]) -> T:
        if not isinstance(self.options, kind):
            raise TypeError(f"a {self.op} has no {kind.__name__}")
        return self.options

    @functools.cached_property
    def operation(self) -> Operation:
        """The operation's entry in `OPERATIONS`."""
        return OPERATIONS[self.op]

    def has(self, operand: str) -> bool:
        """Return True if the call has the array `operand`.

        `operand` is the name of an operand of the operation, or of a saved result.
        """
        match operand:
            case "x" | "labels" | "candidates" | "cos" | "sin" | "entropy" | "y":
                return True
            case "logits_scale":
                return not self.is_norm and self.logits.has_scale
            case "mask":
                return not self.is_norm and self.logits.has_mask
            case "positions":
                return self.is_loss and self.loss.has_positions
            case _:
                return self.dtype(operand) is not None

    def dtype(self, operand: str) -> np.dtype | None:
        """Return the dtype of the float operand with this name, or None if it is absent."""
        if operand == "x":
            return self.x_dtype
        fields = {"teacher_logits": "teacher_dtype", "cos": "table_dtype", "sin": "table_dtype"}
        dtype: np.dtype | None = getattr(
            self.options, fields.get(operand, f"{operand}_dtype"), None
        )
        return dtype

    @functools.cached_property
    def dx_dtype(self) -> np.dtype:
        """The dtype of dx, the gradient of x."""
        return (self.is_loss and self.loss.gradient_dtype) or self.x_dtype

    @functools.cached_property
    def is_causal(self) -> bool:
        """True if the operation is a softmax with a causal mask."""
        return self.is_softmax and self.softmax.causal

    @functools.cached_property
    def saves_input(self) -> bool:
        """True for a norm whose derivative starts from its saved input."""
        return self.is_norm and self.norm.saved == "input"

    @functools.cached_property
    def overwrites_x(self) -> bool:
        """True if the backward pass of a loss may write dx over x."""
        return self.is_loss and self.loss.gradient_dtype == self.x_dtype

    @functools.cached_property
    def operand_dtypes(self) -> list[np.dtype]:
        """Dtypes of the operands that have x's shape. x comes first."""
        return self._dtypes_of_arrays(self.operation.operands)

    @functools.cached_property
    def also_saved_dtypes(self) -> list[np.dtype]:
        """Dtypes of the arrays that the derivative takes in addition to `Residuals.saved`.

        Only arrays that have x's shape are included.
        """
        x = ("x",) * (self.dtype("branch_scale") is not None)
        return self._dtypes_of_arrays((*x, *self.operation.also_saved))

    def _dtypes_of_arrays(self, names: tuple[str, ...]) -> list[np.dtype]:
        dtypes = [self.dtype(name) for name in names if OPERANDS.get(name) == "array"]
        return [dtype for dtype in dtypes if dtype is not None]

    @functools.cached_property
    def classes(self) -> int:
        """Number of classes of a loss: the columns that are not padding."""
        return self.cols - self.loss.padding

    @functools.cached_property
    def strided(self) -> tuple[int, int, int]:
        """The shape ``(outer, cols, inner)`` of the arrays, if `inner` is above 1."""
        return self.rows * self.inner_cols // self.inner, self.cols // self.inner_cols, self.inner

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of the arithmetic, float64 or float32.

        It is float64 if y, the bias of the logits, or an operand of x's shape is float64. Both
        norms of a call use the same dtype, so that all statistics have one dtype.
        """
        arrays = (*self.operand_dtypes, self.y_dtype, self.dtype("logits_bias"))
        # Compare names, because np.dtype("float64") == None is True.
        is_wide = (self.is_norm and self.norm.wide) or any(
            d is not None and d.name == "float64" for d in arrays
        )
        return np.dtype(np.float64 if is_wide else np.float32)

    @functools.cached_property
    def drops_masked(self) -> bool:
        """True if masked entries are excluded, False if a finite number replaces their logits."""
        return not self.is_softmax or self.softmax.masked_logit == -math.inf

    @functools.cached_property
    def renormalises(self) -> bool:
        """True if y is a softmax that is rounded to 16 bits.

        Let d be the cotangent of y. The derivative contains the difference d - sum(d * y), and for
        such a softmax, sum(d * y) is divided by sum(y). If a row of y is nearly one-hot, the two
        terms of the difference nearly cancel. Without the division, the rounding error of y would
        dominate their difference. In bfloat16, the derivative would be wrong by up to |d| / 512.
        """
        return self.op == "softmax" and self.y_dtype.itemsize < 4

    @functools.cached_property
    def reads_mask(self) -> bool:
        """True if the pass reads the mask.

        A softmax's backward pass need not read the mask if the forward pass replaces masked logits
        by -inf. Masked entries then have y = 0, and the gradient of any entry with y = 0 is 0.
        """
        shows = self.direction == "bwd" and self.op == "softmax" and self.drops_masked
        return self.has("mask") and not shows

    @functools.cached_property
    def has_stats(self) -> bool:
        """True if the statistics are in `outputs`.

        The forward pass then returns the statistics. The tangent pass (forward-mode
        differentiation) returns their tangents, and the backward pass takes their cotangents.
        """
        return not set(self.statistics).isdisjoint(self.outputs)

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
        """Name of the array that is saved for the derivative: an operand or a result."""
        from_output, from_input = self.operation.saves
        return from_input if self.saves_input else from_output

    @functools.cached_property
    def groups(self) -> int:
        """Number of groups of rows that have separate parameters."""
        if not self.is_norm:
            return 1
        return max(self.norm.scale_groups, self.norm.bias_groups, self.norm.branch_scale_groups)

    @functools.cached_property
    def scale_floor(self) -> float | None:
        """Lower limit of |scale + scale_offset|, or None. Smaller magnitudes are raised to it."""
        if self.norm.saved == "input" or self.norm.scale_dtype is None:
            return None
        return _SCALE_FLOOR.get(self.y_dtype.name)

    @functools.cached_property
    def clips_x_hat(self) -> bool:
        """True if the backward pass computes x_hat = (y - bias) / G from y, and must clip it.

        G is scale + scale_offset. The magnitude of the exact x_hat is at most sqrt(cols). The
        computed x_hat may be inaccurate and exceed this bound in two cases:

        * The norm has a bias. The rounding error of y - bias may be large compared with G.
        * |G| has no lower limit. If G is tiny, y is a small multiple of the smallest positive
          number of y's dtype, so its relative rounding error is large.

        In all other calls, x_hat is accurate up to the rounding of y.
        """
        vanishes = self.norm.scale_dtype is not None and self.scale_floor is None
        return self.norm.saved == "output" and (self.norm.bias_dtype is not None or vanishes)

    @functools.cached_property
    def reads_bias(self) -> bool:
        """True if the backward pass of a norm needs the bias.

        The bias is needed to compute x_hat (the normalised x) from y, or to recompute the input of
        an activation.
        """
        has_use = self.norm.saved == "output" or self.norm.activation is not None
        return has_use and self.norm.bias_dtype is not None

    @functools.cached_property
    def y_limit(self) -> float | None:
        """The magnitude to which the backward pass clips y; None if it does not clip y.

        The largest float16 is 65504, and x_hat * (scale + scale_offset) may exceed it, so that y is
        inf. If y is then passed to a bounded function such as tanh, the cotangent of y is 0. The
        backward pass multiplies this cotangent by y. Without the limit, the product 0 * inf would
        be NaN, and so would the mean of these products over the row.
        """
        grows = self.norm.scale_dtype is not None or self.norm.bias_dtype is not None
        stored = self.norm.saved == "output" and self.y_dtype.name == "float16"
        return 65504.0 if grows and stored else None

    @functools.cached_property
    def returns_mean(self) -> bool:
        """True if the statistics include the mean.

        The mean is a statistic only in a LayerNorm that saves its input.
        """
        return self.saves_input and self.norm.subtract_mean

    @functools.cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the row statistics that the derivative takes."""
        names = self.operation.statistics
        return names if self.returns_mean else tuple(name for name in names if name != "mean")

    @functools.cached_property
    def scale_may_overflow(self) -> bool:
        """True if the product of a finite logit and the scale of a softmax may be infinite."""
        return self.logits.has_scale or abs(self.logits.logits_scale) > 1

    @functools.cached_property
    def xla_only(self) -> bool:
        """True if only the xla implementation has this pass."""
        takes_stats = self.direction == "bwd" and self.has_stats
        is_derivative = self.direction == "tan" or takes_stats or self.returns_tables
        return is_derivative or "y" not in self.outputs

    @functools.cached_property
    def first(self) -> "Spec":
        """The spec of the norm before the residual addition. This norm always saves its input."""
        changes: dict[str, Any] = {}
        if self.norm.residual_dtype is not None:
            changes["y_dtype"] = self.norm.residual_dtype  # norm(x) has this dtype
        return self._one_norm(("y",), saved="input", **changes)

    @functools.cached_property
    def last(self) -> "Spec":
        """The spec of the norm of h, or of x if nothing is added before the norm.

        For an operation that is not a norm, return this spec itself.
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
        """The specs of a call's norms, in the order in which the forward pass computes them."""
        each = {"first": lambda: self.first, "last": lambda: self.last}
        return [each[name]() for name in self.operation.norms]

    def _one_norm(self, outputs: tuple[str, ...], **changes: Any) -> "Spec":
        """Return the spec of one of the call's norms, with the call's arithmetic dtype."""
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
