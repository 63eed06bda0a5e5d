"""The static description of a call of linear logits, and what its passes take and return.

The function of logits has results for each row: losses, divergences, or log-probabilities and
entropies. A mean or a sum of losses has only a ``fwd``.

    pass     takes                      returns
    fwd      primals                    a mean or a sum; with `wrt`, its gradients, too
             primals                    results of rows; with `keeps`, statistics, too
    tan      primals, kept, tangents    tangents of rows' results
    bwd      primals, kept, cotangents  gradients of sum(cotangents * results)

    primals  x (..., d), weight (d, V), bias (V,), labels (...) or (..., k), where (...),
             mask (..., V), logits_scale (...)
             of a divergence, instead of labels: teacher_x (..., e), teacher_weight (e, V) and
             teacher_bias (V,), which are constants

``tan`` and ``bwd`` are linear in tangents and cotangents, and each is the transpose of the other.

The loss of a chunk is a `Call` of the function of logits. `_bind` binds the primitive of that
function. If a mesh splits the classes, `_bind` runs plain JAX on the shards instead.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.operations import checks
from jaxnorm.operations.kl_divergence import divergence_call
from jaxnorm.operations.loss import Function as OfLogits
from jaxnorm.operations.loss import loss_call
from jaxnorm.primitives import row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, Operation
from jaxnorm_kernels.specs import Direction, Name

Function = Literal[
    "linear_softmax_cross_entropy", "linear_log_prob_and_entropy", "linear_kl_divergence"
]
Reduction = Literal["mean", "sum", "none"]
#: Kind of an operand or a result. A "row" array has one number per row, a "candidate" array k.
Kind = Literal[
    "x", "weight", "bias", "row", "candidate", "mask", "total", "teacher_x", "teacher_weight"
]
#: Kinds of arrays that have x's rows along their leading axes.
OF_ROWS: tuple[Kind, ...] = ("x", "row", "candidate", "mask", "teacher_x")

#: For each public function, the function of logits that it applies to each chunk.
OF_LOGITS: dict[Function, OfLogits | Literal["kl_divergence"]] = {
    "linear_softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "linear_log_prob_and_entropy": "log_prob_and_entropy",
    "linear_kl_divergence": "kl_divergence",
}


@dataclasses.dataclass(frozen=True)
class LinearLossCall:
    """The static part of one pass of a call.

    Attributes:
      wrt: which of x, weight and bias have gradients (``fwd``, ``bwd``) or tangents (``tan``).
      keeps: statistics are among the results of rows, and their tangents or cotangents.
      has_where: the call has booleans or float weights of positions.
      has_mask: the call has booleans of classes.
      has_scale: the call has an array of scales of the logits, one for each row; logits_scale is 1.
      several: there are several labels for each row.
      has_teacher_bias, teacher_softcap, reverse: options of a divergence.
      dtype: the user's dtype of matmuls; None for the dtype to which x and weight promote. See
        `dtypes`.
      precision: ``jax.default_matmul_precision`` when the call was made.
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
    has_scale: bool = False
    several: bool = False
    has_teacher_bias: bool = False
    teacher_softcap: float | None = None
    reverse: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: np.dtype | None = None
    direction: Direction = "fwd"
    wrt: tuple[str, ...] = ()
    keeps: bool = False

    primitives: ClassVar[None] = None

    def __str__(self) -> str:
        """Return the text that a jaxpr shows."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    @property
    def operation(self) -> Operation:
        """The operation that is applied to the logits."""
        function = FUNCTIONS[OF_LOGITS[self.function]]
        op = function.several if self.several else function.op
        assert op is not None
        return OPERATIONS[op]

    @property
    def has_teacher(self) -> bool:
        """True if the function is a divergence."""
        return "teacher_logits" in self.operation.operands

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a forward's results other than gradients. "y" is a loss, a mean or a sum."""
        return (*self.operation.results, *(self.operation.statistics if self.keeps else ()))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the forward pass's results that ``tan`` and ``bwd`` take as residuals.

        A loss has no such results, so a program that needs only its gradient runs no forward pass.
        A program that differentiates log-probabilities uses them anyway.
        """
        operation = self.operation
        if operation.results.keys() == {"y"}:
            return ()
        results = (name for name in operation.results if name in operation.keeps)
        return (*operation.statistics, *results)

    def replaced(self, **changes: Any) -> "LinearLossCall":
        """Return the call with other values of these fields."""
        return dataclasses.replace(self, **changes)

    def with_gradients(self, wrt: Sequence[str]) -> "LinearLossCall":
        """Return the forward pass of a mean or a sum that also returns gradients."""
        return dataclasses.replace(self, wrt=tuple(wrt))

    def tangent(self, wrt: Sequence[str]) -> "LinearLossCall":
        return dataclasses.replace(self, direction="tan", wrt=tuple(wrt))

    def backward(self, wrt: Sequence[str]) -> "LinearLossCall":
        return dataclasses.replace(self, direction="bwd", wrt=tuple(wrt))

    def without_unused(self, used: Sequence[bool]) -> "LinearLossCall":
        """Return the call without unused gradients: a loss without gradients is one matmul."""
        if self.direction != "fwd" or self.reduction == "none":
            return self
        return self.with_gradients([n for n, u in zip(self.returns, used) if u and n != "y"])

    def rowwise(self) -> "LinearLossCall":
        """Return the forward pass that returns each row's loss instead of their mean or sum."""
        return dataclasses.replace(self, reduction="none")

    def with_kept(self) -> "LinearLossCall":
        """Return the forward pass that also returns the residuals in `kept`."""
        return dataclasses.replace(self, keeps=bool(self.kept))

    @property
    def primals(self) -> tuple[str, ...]:
        bias, where = ["bias"] * self.has_bias, ["where"] * self.has_where
        of = ["labels"]
        if self.has_teacher:
            of = ["teacher_x", "teacher_weight", *["teacher_bias"] * self.has_teacher_bias]
        others = *["mask"] * self.has_mask, *["logits_scale"] * self.has_scale
        return ("x", "weight", *bias, *of, *where, *others)

    @property
    def residual_names(self) -> tuple[str, ...]:
        """Names of the residuals, which ``tan`` and ``bwd`` take before their linear operands."""
        return self.primals + self.kept

    @property
    def residuals(self) -> int:
        """Number of residuals."""
        return len(self.residual_names)

    @property
    def returns(self) -> tuple[str, ...]:
        results = {"fwd": self.outputs + self.wrt, "tan": self.outputs, "bwd": self.wrt}
        return results[self.direction]

    @property
    def takes(self) -> tuple[str, ...]:
        if self.direction == "fwd":
            return self.primals
        return self.residual_names + (self.wrt if self.direction == "tan" else self.outputs)

    @property
    def kinds_taken(self) -> list[Kind]:
        return [*map(self._kind, self.takes)]

    @property
    def kinds_returned(self) -> list[Kind]:
        is_total = self.direction == "fwd" and self.reduction != "none"
        kinds = map(self._kind, self.returns)
        return ["total" if kind == "row" and is_total else kind for kind in kinds]

    def _kind(self, name: str) -> Kind:
        kinds: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "bias", "mask": "mask"}
        kinds |= {"teacher_x": "teacher_x", "teacher_weight": "teacher_weight"}
        kinds |= {"teacher_bias": "bias"}
        if self.several:
            kinds |= {"labels": "candidate", "y": "candidate"}
        return kinds.get(name, "row")

    def dtypes(self, x: np.dtype, weight: np.dtype) -> tuple[np.dtype, np.dtype]:
        """Dtype of the matmuls' operands, and dtype of the logits.

        A requested dtype wider than the one to which the operands promote applies to the logits
        only, since wider operands gain no accuracy. For log-probabilities and divergences, logits
        are not rounded.
        """
        promoted = checks.product_dtype(x, weight)
        asked = self.dtype or promoted
        factors = min(promoted, asked, key=lambda dtype: dtype.itemsize)
        if self.function != "linear_softmax_cross_entropy":
            return factors, checks.arithmetic_dtype(factors)
        return factors, asked

    def gradient_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the gradient of an operand that has this dtype.

        A ``fwd`` returns float16 gradients as float32. The loss scale is part of the cotangent, by
        which they are multiplied only later. Until then, float16 would underflow below 6e-8.
        """
        is_narrow = self.direction == "fwd" and dtype.name == "float16"
        return np.dtype(np.float32) if is_narrow else dtype

    def result_dtype(self, types: dict[str, Any]) -> np.dtype:
        """Dtype of the arithmetic and the results; `types` maps names to operands or types."""
        dtypes: tuple[np.dtype, ...] = self.dtypes(types["x"].dtype, types["weight"].dtype)
        if self.has_teacher:
            teacher = types["teacher_x"].dtype, types["teacher_weight"].dtype
            dtypes = (*dtypes, *self.dtypes(*teacher))
        return checks.arithmetic_dtype(*dtypes)


@dataclasses.dataclass(frozen=True)
class Over:
    """The mesh axes over which the arrays of a call are sharded.

    Attributes:
      rows, classes: the axes that split the loop's rows, and those that split its classes.
      stored: the mesh axes among `rows` over which weight is stored in shards of d, and of V. Each
        device gathers weight over them, and keeps its shard of weight's gradient.
      gathered: for each array axis of x's rows, the mesh axes among `classes` over which x is
        stored in shards. Each device gathers x over them, and keeps its shard of x's gradient.
      moved: for each array axis of x's rows, the mesh axes over which x is stored in shards of d.
        They are the last of the mesh axes among `rows` that split this array axis in the loop. The
        devices exchange shards of d for shards of rows, and back.
    """

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    stored: tuple[tuple[str, ...], ...] = ()
    gathered: tuple[tuple[str, ...], ...] = ()
    moved: tuple[tuple[str, ...], ...] = ()


Arrays = dict[str, jax.Array]


def call_of(
    head: LinearLossCall,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    has_positions: bool,
    mask: tuple[int, ...] | None = None,
    teacher_dtype: np.dtype | None = None,
    candidates: int | None = None,
) -> Call:
    """Return the call that runs on a chunk's logits. Its errors name the public function."""
    of_logits = OF_LOGITS[head.function]
    if of_logits == "kl_divergence":
        assert teacher_dtype is not None
        call = divergence_call(
            head.function,
            shape,
            np.dtype(dtype),
            teacher_dtype,
            axis=-1,
            mask=mask,
            has_positions=has_positions,
            scale=head.logits_scale,
            has_scale=head.has_scale,
            reverse=head.reverse,
            logit_softcap=head.logit_softcap,
            teacher_logit_softcap=head.teacher_softcap,
            implementation=head.implementation,
        )
        return call.replaced(primitives=of_logits)
    call = loss_call(
        of_logits,
        shape,
        np.dtype(dtype),
        axis=-1,
        mask=mask,
        has_positions=has_positions,
        candidates=candidates,
        label_smoothing=head.label_smoothing,
        z_loss=head.z_loss,
        logits_scale=head.logits_scale,
        has_scale=head.has_scale,
        logit_softcap=head.logit_softcap,
        implementation=head.implementation,
    )
    return call.replaced(function=head.function, primitives=call.function)


def forward(call: Call, operands: Arrays) -> Arrays:
    """Return the results of a chunk, and the statistics if the call returns them."""
    results = _bind(call, *[operands.get(name) for name in call.primals])
    return dict(zip(call.returns, results))


def tangent(call: Call, residuals: Arrays, along: jax.Array) -> list[jax.Array]:
    """Return the tangents of a chunk's results, given the tangent of its logits."""
    call = call.tangent(("x",))
    return _bind(call, *[residuals[name] for name in call.residual_names], along)


def dlogits(
    call: Call, residuals: Arrays, cotangents: Sequence[jax.Array], dtype: np.dtype
) -> jax.Array:
    """Return the gradient of sum(cotangents * results) with respect to a chunk's logits.

    The gradient has `dtype`. If the logits have the same dtype, it may overwrite them, since
    nothing reads them afterwards.
    """
    outputs = call.with_stats().returns[: len(cotangents)]
    call = call.backward(("x",), outputs, gradient_dtype=dtype)
    return _bind(call, *[residuals[name] for name in call.residual_names], *cotangents)[0]


def forward_and_dlogits(
    call: Call,
    operands: Arrays,
    cotangents: Sequence[jax.Array],
    dtype: np.dtype,
    *,
    differentiable: bool,
) -> list[jax.Array]:
    """Return the results of a chunk, followed by the result of `dlogits`.

    A kernel may compute both, unless the result must be `differentiable`.
    """
    call = call.with_gradient(dtype)
    arrays = [*(operands[name] for name in call.primals), *cotangents]
    if differentiable or call.spec.cols_over:
        return call.in_two_passes(_bind, *arrays)
    return row_operations.bind(call, *arrays)


def _bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Bind the primitive of the pass, unless a mesh splits the classes."""
    if not call.spec.cols_over:
        return row_operations.bind(call, *arrays)
    if call.spec.direction == "fwd":
        return _forward_on_shards(call, *arrays)
    return call.xla(*[a for a in arrays if a is not None])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_on_shards(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Run the forward pass on shards of classes, with a rule for its tangent.

    The rule is needed because `jax.lax.pmax` has no derivative.
    """
    return call.xla(*[a for a in arrays if a is not None])


@_forward_on_shards.defjvp
def _(call: Call, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    outputs = _forward_on_shards(call, *primals)
    arrays = dict(zip(call.primals, primals)) | dict(zip(call.returns, outputs))
    arrays["saved"] = arrays["x"]
    residuals = [arrays[name] for name in call.residual_names]
    return outputs, call.tangent(("x",)).xla(*residuals, tangents[0])


# Rows of a chunk. With smaller chunks, dW is loaded and stored more often than its matmul can hide:
# chunks of 4096, 2048 and 1024 rows take 1.05, 1.14 and 1.49 times the matmul's own time (H100,
# bfloat16). A chunk's logits are freed before dW is cast to its own dtype, so a chunk of d rows
# does not raise the peak.
_LEAST, _MOST = 512, 2048
_BYTES = 2**30
# A tile of a matmul has 128 rows.
_TILE = 128


def chunk_rows(
    chunk: int | None,
    rows: int,
    weight: tuple[int, ...],
    logits: np.dtype,
    factors: np.dtype,
    shards: int = 1,
    *,
    accumulator: int = 0,
) -> int:
    """Return the number of rows of each chunk; the first chunk may overlap the second.

    =================================  ============================================================
    rows                               reason
    =================================  ============================================================
    `chunk`                            the user's choice
    all, if their logits (and dlogits  One chunk needs no accumulator. Of 8192 x 4096 x 128256, it
    of another dtype) are no larger    takes 36.6 ms and 2.14 GB, two chunks take 40.8 ms and
    than the accumulator               2.20 GB (H100).
    most of 2048 and d                 The time to load and store dW, see above
    those of 1 GiB, at least 512       The logits' memory
    =================================  ============================================================

    Args:
      weight: shape (d, classes) of weight.
      logits, factors: dtypes of a chunk's logits, and of the matmuls' operands.
      shards: number of shards of the classes, one of which is `weight`. Devices exchange statistics
        in each chunk. With `shards` times the rows, a device's logits of a chunk are no larger, and
        there are fewer exchanges.
      accumulator: bytes of the array in which several chunks accumulate weight's gradient; 0 if
        they need none.
    """
    if chunk is not None or not rows:
        return min(chunk or 1, max(rows, 1))
    d, classes = weight
    of_logit = logits.itemsize + (factors.itemsize if factors != logits else 0)
    if rows * classes * of_logit <= accumulator:
        return rows
    fitting = _BYTES // (max(classes, 1) * logits.itemsize) // _TILE * _TILE
    as_weight = d * factors.itemsize // logits.itemsize
    most = min(max(fitting, _LEAST), shards * max(_MOST, as_weight))
    even = math.ceil(rows / math.ceil(rows / most))
    return min(math.ceil(even / _TILE) * _TILE, rows)


def rows_beside_dlogits(
    chunk: int,
    rows: int,
    classes: int,
    logits: np.dtype,
    factors: np.dtype,
    accumulator: int,
) -> int | None:
    """Return the rows of a chunk beside the dlogits of all rows, or None.

    The dlogits of all rows need no accumulator, and dx and dW take one matmul each. None if this
    takes more memory than `chunk`, even with half the rows. With chunks of 1024 rows, 8192 x 2048 x
    128256 takes 27.7 ms for 29.6, and with chunks of 2048, 8192 x 4096 x 128256 takes 52.0 ms for
    55.2 (H100, forward and backward pass).
    """
    memory = accumulator + chunk * classes * (logits.itemsize + factors.itemsize)
    for size in (chunk, chunk // 2):
        needed = classes * (rows * factors.itemsize + size * logits.itemsize)
        if size % _TILE == 0 and size >= _LEAST and needed <= memory:
            return size
    return None
