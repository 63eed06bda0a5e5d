"""The static description of a call of a linear loss, and the arrays of its passes.

A linear loss computes the logits ``x @ weight + bias``, and from these one or two results for each
row: a loss, a divergence, or a log-probability and an entropy. Losses and divergences may be
reduced to their mean or sum. A call has up to three passes, forward (``fwd``), tangent (``tan``)
and backward (``bwd``)::

    pass     reduction    takes                       returns
    fwd      mean, sum    primals                     the mean or sum, and gradients of `wrt`
    fwd      none         primals                     results of rows; if `keeps`, also statistics
    tan      none         residuals, tangents         tangents of the results of rows
    bwd      none         residuals, cotangents       gradients of sum(cotangents * results)

A call has these primals, in this order; only `x` and `weight` are in every call::

    `x` (..., d)
    `weight` (d, V)
    `bias` (V,)
    `labels` (...), or (..., k) for k labels of each row
    `where` (...)                 mask or weights of positions
    `mask` (..., V)               mask of classes
    `logits_scale` (...)

Instead of `labels`, a divergence has the constants `teacher_x` (..., e), `teacher_weight` (e, V)
and `teacher_bias` (V,).

The tangent and the backward pass take residuals. These are the primals, and the forward results
that are listed in `LinearLossCall.kept`. The tangent pass is linear in the tangents, and the
backward pass is linear in the cotangents. Each of the two passes is the transpose of the other.

The logits are computed in chunks of rows. A chunk's results are computed from its logits by a
`Call` of the corresponding loss, such as the cross-entropy. If the classes are sharded, plain JAX
computes the results on the shards.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.operations import checks
from jaxnorm.operations.loss import Function as OfLogits
from jaxnorm.operations.loss import loss_call
from jaxnorm.primitives import row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, Operation
from jaxnorm_kernels.specs import Direction, Name

Function = Literal[
    "linear_softmax_cross_entropy",
    "linear_log_prob_and_entropy",
    "linear_kl_divergence",
    "linear_loss",
]
Reduction = Literal["mean", "sum", "none"]
#: Maps each linear loss to the loss of logits that is computed from each chunk's logits.
OF_LOGITS: dict[Function, OfLogits] = {
    "linear_softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "linear_log_prob_and_entropy": "log_prob_and_entropy",
    "linear_kl_divergence": "kl_divergence",
}
#: The kind of an operand or a result. A "row" array has one number per row, a "candidate" array has
#: k numbers per row, for k labels. A "total" is a mean or a sum. The kind "bias" is used for `bias`
#: and for `teacher_bias`. In `linear_loss`, a "row" array may have further axes, and all rows use a
#: "shared" array.
Kind = Literal[
    "x",
    "weight",
    "bias",
    "row",
    "candidate",
    "mask",
    "total",
    "teacher_x",
    "teacher_weight",
    "shared",
]
#: The kinds of arrays whose leading axes are the row axes (the axes of x except the last one).
OF_ROWS: tuple[Kind, ...] = ("x", "row", "candidate", "mask", "teacher_x")


@dataclasses.dataclass(frozen=True)
class LinearLossCall:
    """The static description of one pass of a linear loss.

    Attributes without a description are the public function's arguments of the same name.

    Attributes:
      function: name of the public function.
      wrt: the names of the operands (x, weight or bias) whose gradients the pass returns
        (``fwd``, ``bwd``) or whose tangents it takes (``tan``).
      keeps: True if the outputs also include the row statistics.
      has_where: True if the call has a boolean mask or float weights of positions.
      has_mask: True if the call has a mask of classes.
      has_scale: True if logits_scale is an operand with a number for each row; the attribute
        logits_scale is then 1.
      several: True if each row has several labels.
      has_teacher_bias, teacher_softcap, reverse: options of a divergence.
      dtype: the argument ``dtype``; None for the dtype to which x and weight promote. See `dtypes`.
      precision: the value that ``jax.default_matmul_precision`` had when the user called the
        function.
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
    #: True if the classes may stay sharded in the loop.
    splits_classes: ClassVar[bool] = True

    def __str__(self) -> str:
        """Return a short description of the call, which printed jaxprs show."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    @property
    def operation(self) -> Operation:
        """The operation that is applied to the logits, as the table `OPERATIONS` describes it."""
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
        """Names of a forward pass's results other than gradients.

        "y" is the loss (or log-probability or divergence) of each row, or the mean or sum.
        """
        return (*self.operation.results, *(self.operation.statistics if self.keeps else ()))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of forward results that the tangent and the backward pass take as residuals.

        For losses and divergences, there are no such results: the tangent and backward passes do
        not depend on the forward pass. So a program that needs only the gradient does not run the
        forward pass.

        For log-probabilities, results of the forward pass are residuals. This costs nothing extra,
        because a program that differentiates log-probabilities also uses their values, and so runs
        the forward pass in any case.
        """
        operation = self.operation
        if operation.results.keys() == {"y"}:
            return ()
        results = (name for name in operation.results if name in operation.keeps)
        return (*operation.statistics, *results)

    def replaced(self, **changes: Any) -> Self:
        """Return the call with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_gradients(self, wrt: Sequence[str]) -> Self:
        """Return the forward pass that also returns gradients with respect to the operands `wrt`.

        This call must be a forward pass that returns a mean or a sum.
        """
        return dataclasses.replace(self, wrt=tuple(wrt))

    def tangent(self, wrt: Sequence[str]) -> "LinearLossCall":
        return dataclasses.replace(self, direction="tan", wrt=tuple(wrt))

    def backward(self, wrt: Sequence[str]) -> "LinearLossCall":
        return dataclasses.replace(self, direction="bwd", wrt=tuple(wrt))

    def without_unused(self, used: Sequence[bool]) -> "LinearLossCall":
        """Return the call without unused gradients, so that their matmuls are not computed.

        `used` has a bool for each result: True if the program uses the result.
        """
        if self.direction != "fwd" or self.reduction == "none":
            return self
        return self.with_gradients([n for n, u in zip(self.returns, used) if u and n in self.wrt])

    def rowwise(self) -> "LinearLossCall":
        """Return the forward pass that returns the loss of each row instead of a mean or a sum."""
        return dataclasses.replace(self, reduction="none")

    def with_kept(self) -> "LinearLossCall":
        """Return the forward pass whose outputs include all arrays that are listed in `kept`."""
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
        """Names of the residuals, which are the first operands of the tangent and backward pass."""
        return self.primals + self.kept

    @property
    def residuals(self) -> int:
        """Number of arrays saved for the tangent and backward passes."""
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
        return self.kinds_of(self.takes)

    @property
    def kinds_returned(self) -> list[Kind]:
        is_total = self.direction == "fwd" and self.reduction != "none"
        totals = self.outputs if is_total else ()
        return [
            "total" if name in totals else kind
            for name, kind in zip(self.returns, self.kinds_of(self.returns))
        ]

    def kinds_of(self, names: Sequence[str]) -> list[Kind]:
        return [*map(self._kind, names)]

    def _kind(self, name: str) -> Kind:
        kinds: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "bias", "mask": "mask"}
        kinds |= {"teacher_x": "teacher_x", "teacher_weight": "teacher_weight"}
        kinds |= {"teacher_bias": "bias"}
        if self.several:
            kinds |= {"labels": "candidate", "y": "candidate"}
        return kinds.get(name, "row")

    def dtypes(self, x: np.dtype, weight: np.dtype) -> tuple[np.dtype, np.dtype]:
        """Return the dtype of the matmul's operands, and the dtype of the logits.

        `x` and `weight` are the dtypes of these arrays, and promote to a common dtype. If the user
        requested a dtype with fewer bits, the operands are cast to it. If the user requested a
        dtype with more bits, only the logits have it, because a cast of the operands to more bits
        would not make the matmul more accurate.

        The logits of a cross-entropy have the requested dtype (by default, the common dtype). The
        logits of log-probabilities and divergences are not rounded: they have the dtype in which
        the matmul accumulates.
        """
        promoted = checks.product_dtype(x, weight)
        asked = self.dtype or promoted
        factors = min(promoted, asked, key=lambda dtype: dtype.itemsize)
        if self.function != "linear_softmax_cross_entropy":
            return factors, checks.arithmetic_dtype(factors)
        return factors, asked

    def gradient_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the gradient of an operand that has the dtype `dtype`.

        The gradient has the dtype of its operand, with one exception. For a mean or a sum, the
        forward pass already computes the gradients, for a cotangent of 1. The backward pass
        multiplies them by the cotangent, which includes the loss scale. Before this multiplication,
        small gradients would underflow in float16 (below 6e-8). So the forward pass returns the
        gradients of float16 operands in float32.
        """
        is_narrow = self.direction == "fwd" and dtype.name == "float16"
        return np.dtype(np.float32) if is_narrow else dtype

    def result_dtype(self, types: dict[str, Any]) -> np.dtype:
        """Return the dtype of the arithmetic and of the results. Gradients may have other dtypes.

        `types` is a dict from names of operands to arrays or types.
        """
        dtypes: tuple[np.dtype, ...] = self.dtypes(types["x"].dtype, types["weight"].dtype)
        if self.has_teacher:
            teacher = types["teacher_x"].dtype, types["teacher_weight"].dtype
            dtypes = (*dtypes, *self.dtypes(*teacher))
        return checks.arithmetic_dtype(*dtypes)


@dataclasses.dataclass(frozen=True)
class Over:
    """The names of the mesh axes over which the arrays of a linear loss are sharded.

    The sharding of the work in the loop may differ from that of the user's arrays. Before the loop,
    x and weight are gathered or exchanged between devices; after it, their gradients are returned
    to the original sharding.

    Attributes:
      rows: mesh axes over which the rows are sharded in the loop.
      classes: mesh axes over which the classes are sharded in the loop.
      stored: two tuples of mesh axes, one for each axis of weight: d and V (the classes). The
        user's weight is sharded along d over the mesh axes in the first tuple, and along V over
        those in the second. In the loop, these mesh axes shard the rows instead. So weight is
        gathered over them before the loop, and its gradient is reduce-scattered over them after the
        loop.
      gathered: one tuple of mesh axes for each row axis of x. (The row axes are all axes of x
        except the last.) In the user's x, the mesh axes in a tuple shard its row axis. In the loop,
        they shard the classes instead. So x is gathered over them before the loop, and its gradient
        is reduce-scattered over them after the loop.
      moved: one tuple of mesh axes for each row axis of x. In the user's x, the mesh axes in a
        tuple shard d, the last axis. In the loop, they shard the tuple's row axis instead. They
        come after (inside) all other mesh axes that shard this row axis. An all-to-all before the
        loop gives each device fewer rows, but all of their d columns. Another all-to-all after the
        loop reverses this for the gradient of x.
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
    """Return the static description of the loss that is computed from a chunk's logits.

    Args:
      head: the call of the linear loss.
      shape: shape of the chunk's logits.
      dtype: dtype of the chunk's logits.
      has_positions: True if the call has a mask of positions.
      mask: shape of the mask of classes, or None.
      teacher_dtype: dtype of the teacher's logits, for a divergence.
      candidates: number of labels of each row; None if each row has one label.
    """
    of_logits = OF_LOGITS[head.function]
    names = (
        *("label_smoothing", "z_loss", "logits_scale", "has_scale", "logit_softcap"),
        *("teacher_softcap", "reverse", "implementation"),
    )
    call = loss_call(
        of_logits,
        shape,
        np.dtype(dtype),
        axis=-1,
        mask=mask,
        has_positions=has_positions,
        candidates=candidates,
        teacher_dtype=teacher_dtype,
        **{name: getattr(head, name) for name in names},
    )
    return call.replaced(function=head.function, primitives=of_logits)


def check_implementation(
    head: LinearLossCall, x: jax.Array, weight: jax.Array, teacher_dtype: np.dtype | None = None
) -> None:
    """Raise ValueError if the requested implementation does not support the logits of a chunk.

    `teacher_dtype` is the dtype of the teacher's logits, for a divergence.
    """
    if head.implementation is None:
        return
    (factors, dtype), (d, classes) = head.dtypes(x.dtype, weight.dtype), weight.shape
    columns = classes if teacher_dtype is None else 2 * classes
    rows = chunk_rows(head.chunk, x.size // max(d, 1), (d, columns), dtype, factors)
    call = call_of(
        head,
        (rows, classes),
        dtype,
        has_positions=head.has_where,
        mask=(1, classes) if head.has_mask else None,
        teacher_dtype=teacher_dtype,
        candidates=1 if head.several else None,
    )
    call.forced(head.implementation)


def forward(call: Call, operands: Arrays) -> Arrays:
    """Return a dict with the outputs of a chunk's forward pass. `operands` maps names to arrays."""
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

    The gradient has the dtype `dtype`. If the logits have the same dtype, the gradient may
    overwrite them, because they are not used afterwards.
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
    """Return the results of a chunk's forward pass, followed by the gradient of the logits.

    The gradient is the one that the function `dlogits` returns. A single kernel may compute the
    results and the gradient together, but JAX cannot differentiate this kernel. If `differentiable`
    is True, a forward and a backward pass run instead of it.
    """
    call = call.with_gradient(dtype)
    arrays = [*(operands[name] for name in call.primals), *cotangents]
    if differentiable or call.spec.cols_over:
        return call.in_two_passes(_bind, *arrays)
    return row_operations.bind(call, *arrays)


def _bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Bind the primitive of the pass; if the classes are sharded, run plain JAX instead."""
    if not call.spec.cols_over:
        return row_operations.bind(call, *arrays)
    if call.spec.direction == "fwd":
        return _forward_on_shards(call, *arrays)
    return call.xla(*[a for a in arrays if a is not None])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_on_shards(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Run the forward pass in plain JAX on one device's shard of the classes.

    The function has its own JVP rule, because `jax.lax.pmax` has no derivative.
    """
    return call.xla(*[a for a in arrays if a is not None])


@_forward_on_shards.defjvp
def _(call: Call, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    outputs = _forward_on_shards(call, *primals)
    arrays = dict(zip(call.primals, primals)) | dict(zip(call.returns, outputs))
    arrays["saved"] = arrays["x"]
    residuals = [arrays[name] for name in call.residual_names]
    return outputs, call.tangent(("x",)).xla(*residuals, tangents[0])


# Limits for the number of rows of a chunk.
#
# Small chunks are slow, because each chunk loads and stores dW, the float32 gradient of weight.
# With 4096 rows in a chunk, this adds 5 % to the time of the matmul that computes dW. With 2048
# rows it adds 14 %, and with 1024 rows 49 % (H100, bfloat16).
#
# Large chunks need more memory for their logits. After the last chunk, the logits are freed, and
# only then is dW copied to an array in weight's dtype. Logits that are no larger than this copy do
# not raise the peak memory. The logits have the shape (rows, classes), and the copy has the shape
# (d, classes). So if both have the same dtype, chunks of up to d rows do not raise the peak memory.
_LEAST, _MOST = 512, 2048
_BYTES = 2**30
# The number of rows of a matmul's tile. The number of rows of a chunk is rounded up to a multiple
# of this number.
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
    """Return the number of rows of a chunk; all chunks of a call have this number.

    If it does not divide the number of all rows, the first two chunks overlap.

    In the following rules, the accumulator is the array in which several chunks accumulate weight's
    gradient. dlogits are the gradients of the logits, which overwrite the logits if both have the
    same dtype. The number of rows of a chunk is given by the first rule that applies:

    1. `chunk`, if the user requested a number.
    2. All rows, if their logits and dlogits are no larger than the accumulator, because a single
       chunk needs no accumulator. With 8192 rows, d = 4096 and 128256 classes, one chunk takes 36.6
       ms and 2.14 GB, and two chunks take 40.8 ms and 2.20 GB (H100).
    3. max(2048, d), if the logits of so many rows take at most 1 GiB. If a logit has twice as many
       bytes as an element of the matmuls' operands, d is replaced by d / 2. Larger chunks take more
       memory. Smaller chunks take more time, because each chunk loads and stores the accumulator.
    4. The largest number of rows whose logits take at most 1 GiB, but at least 512.

    Args:
      chunk: the number of rows that the user requested, or None.
      rows: number of all rows.
      weight: shape (d, classes) of one device's shard of weight.
      logits: dtype of the logits.
      factors: dtype of the matmuls' operands.
      shards: number of shards of the classes. The number of rows in rule 3 is multiplied by it. A
        device has only 1 / shards of the classes, so the memory for a chunk's logits stays the
        same. Fewer and larger chunks are faster, because devices exchange row statistics once for
        each chunk.
      accumulator: bytes of the array in which several chunks accumulate weight's gradient. It is 0
        if even a single chunk would allocate an array of this size for the gradient, because then a
        single chunk saves no memory.
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
    chunk: int, rows: int, logits: int, dlogits: int, accumulator: int
) -> int | None:
    """Return the number of rows of a chunk in a call that stores all dlogits, or None.

    None means that the call must not store the dlogits of all rows, because they would take too
    much memory. A call that stores them needs no accumulator, and takes one matmul for dx and one
    for dW.

    The memory limit is the memory of a call that does not store all dlogits: the accumulator, and
    the logits and dlogits of one chunk of `chunk` rows. A call that stores all dlogits also needs
    the logits of one chunk. If it exceeds the limit with chunks of `chunk` rows, chunks of half as
    many rows are tried, because their logits take less memory.

    Storing all dlogits is faster than an accumulator even with the smaller chunks. For 8192 rows,
    d = 2048 and 128256 classes, forward and backward pass of a log-probability take 27.7 ms with
    all dlogits and chunks of 1024 rows. With an accumulator and chunks of 2048 rows, they take 29.6
    ms. With d = 4096 and chunks of 2048 rows, they take 52.0 ms with all dlogits, and 55.2 ms with
    an accumulator (H100).

    Args:
      chunk: number of rows of a chunk if the call does not store all dlogits.
      rows: number of all rows.
      logits, dlogits: bytes of a row of logits, and of a row of dlogits.
      accumulator: bytes of the array in which several chunks accumulate weight's gradient.
    """
    memory = accumulator + chunk * (logits + dlogits)
    for size in (chunk, chunk // 2):
        needed = rows * dlogits + size * logits
        if size % _TILE == 0 and size >= _LEAST and needed <= memory:
            return size
    return None
