"""The static description of a call of a linear loss, and the arrays of its passes.

A linear loss computes the logits ``x @ weight + bias``, and from these the results of each row. The
results are a loss; a divergence; a log-probability and an entropy; or the results of the function
that the user passes to `linear_loss`. Losses may be reduced to their mean or sum. A call has up to
three passes, forward (``fwd``), tangent (``tan``) and backward (``bwd``)::

    pass     reduction    takes                       returns
    fwd      mean, sum    primals                     the mean or sum, and gradients
    fwd      none         primals                     results of rows; if `keeps`, also statistics
    tan      none         residuals, tangents         tangents of the results of rows
    bwd      none         residuals, cotangents       gradients of sum(cotangents * results)

`keeps`, `wrt` and `kept` are attributes of `LinearLossCall`. Gradients are with respect to the
operands in `wrt`. The residuals are the primals, followed by the forward results in `kept`. The
tangent pass is linear in the tangents, and the backward pass is linear in the cotangents. Each of
the two passes is the transpose of the other.

A call has these primals, in this order; only `x` and `weight` are in every call::

    `x` (..., d)
    `weight` (d, V)
    `bias` (V,)
    `where` (...)                 mask or weights of positions
    the operands of the `Program`, such as `labels`

The logits are computed in chunks of rows, and a `Program` computes a chunk's results.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr  # type: ignore[attr-defined]

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks
from jaxnorm.operations.loss import Function as OfLogits
from jaxnorm.primitives import row_operations
from jaxnorm_kernels.specs import Direction

Function = Literal[
    "linear_softmax_cross_entropy",
    "linear_log_prob_and_entropy",
    "linear_kl_divergence",
    "jaxnorm.linear_loss",
]
Reduction = Literal["mean", "sum", "none"]
#: Maps each linear loss to the loss of logits that is computed from each chunk's logits.
OF_LOGITS: dict[Function, OfLogits] = {
    "linear_softmax_cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "linear_log_prob_and_entropy": "log_prob_and_entropy",
    "linear_kl_divergence": "kl_divergence",
}
#: The kind of an operand or a result. The first axes of a "row" array are the row axes (the axes of
#: x except the last one). The last axis of a "columns" array indexes the classes. A "mask" has the
#: row axes and an axis of classes. All rows use the same "shared" array. A "total" is a mean or a
#: sum.
Kind = Literal["x", "weight", "columns", "row", "mask", "shared", "total"]
#: The kinds of arrays whose first axes are the row axes.
OF_ROWS: tuple[Kind, ...] = ("x", "row", "mask")
_KINDS: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "columns", "mask": "mask"}
_KINDS |= {"teacher_weight": "columns", "teacher_bias": "columns"}


@dataclasses.dataclass(frozen=True)
class Program:
    """The computation of the results of a position from its logits.

    There are three cases:

    * `loss` alone: the results are those of a jaxnorm loss. The operands of this loss are operands
      of the linear loss, with the same names. For a divergence, the linear loss has, instead of the
      teacher's logits, the constants `teacher_x` (..., e), `teacher_weight` (e, V) and maybe
      `teacher_bias` (V,).
    * `after` alone: a traced function. Its operands are the logits, then `row0`, `row1`, ... (each
      with the axes of the rows) and `shared0`, `shared1`, ... (the same for all rows).
    * All three: a traced function that uses the logits only as the operand of a jaxnorm loss.
      `before` computes the other operands of the loss, from the rows and the shared arrays. `after`
      takes the results of the loss in place of the logits.

    Attributes:
      loss: the forward call of a loss of the logits of one position, or None.
      before, after: traced functions of one position, or None.
    """

    loss: Call | None = None
    before: ClosedJaxpr | None = None
    after: ClosedJaxpr | None = None

    def __repr__(self) -> str:
        return str(self.loss if self.after is None else self.after)

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """A dict from names to types: the results of one position."""
        if self.after is not None:
            return {f"y{i}": type_ for i, type_ in enumerate(self.after.out_avals)}
        assert self.loss is not None
        return _types(self.loss)

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        """A dict from names to types: results and statistics of `loss`; empty if `after` is set."""
        return {} if self.loss is None or self.after is not None else _types(self.loss.with_stats())


def _types(call: Call) -> dict[str, Any]:
    shapes = map(call.view.shape_of, call.kinds_returned)
    types = map(jax.ShapeDtypeStruct, shapes, call.dtypes_returned)
    return dict(zip(call.returns, types))


@dataclasses.dataclass(frozen=True)
class LinearLossCall:
    """The static description of one pass of a linear loss.

    Attributes:
      function: name of the public function.
      program: the computation of the results from the logits.
      primals: the names of the operands of the forward pass; the first are x and weight.
      differentiable: the names of the operands that may have tangents.
      chunk: the public function's argument: the number of rows in a chunk, or None.
      dtypes: the dtype of the matmul's operands, and the dtype of the logits.
      teacher: the dtype of the operands of the teacher's matmul; None without a teacher.
      precision: the value that ``jax.default_matmul_precision`` had when the user called the
        function.
      reduction: the public function's argument.
      wrt: names of operands. A ``fwd`` or ``bwd`` pass returns their gradients, and a ``tan`` pass
        takes their tangents.
      keeps: True if the outputs also include the row statistics.
    """

    function: Function
    program: Program
    primals: tuple[str, ...]
    differentiable: tuple[str, ...]
    chunk: int | None
    dtypes: tuple[np.dtype, np.dtype]
    precision: str | None
    teacher: np.dtype | None = None
    reduction: Reduction = "none"
    direction: Direction = "fwd"
    wrt: tuple[str, ...] = ()
    keeps: bool = False

    @property
    def primitives(self) -> str:
        return self.function.removeprefix("jaxnorm.")

    def __str__(self) -> str:
        """Return a short description of the call, which printed jaxprs show."""
        text = self.reduction if self.direction == "fwd" else self.direction
        return f"({text} chunk={self.chunk} wrt={','.join(self.wrt)})"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the call's results other than gradients.

        In a tangent or backward pass, integers and booleans, which have no tangents, are left out.
        """
        if self.keeps:
            return (*self.program.statistics,)
        types = self.program.results.items()
        return tuple(n for n, a in types if self.direction == "fwd" or is_inexact(a))

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
        names, loss = self.program.statistics, self.program.loss
        if loss is None or len(loss.returns) == 1:
            return ()
        return tuple(
            n for n in names if n not in loss.returns or n in loss.spec.operation.also_saved
        )

    def tangent(self, wrt: Sequence[str]) -> Self:
        return dataclasses.replace(self, direction="tan", wrt=tuple(wrt))

    def backward(self, wrt: Sequence[str]) -> Self:
        return dataclasses.replace(self, direction="bwd", wrt=tuple(wrt))

    def with_gradients(self, wrt: Sequence[str]) -> Self:
        """Return the forward pass that also returns gradients with respect to the operands `wrt`.

        This call must be a forward pass that returns a mean or a sum.
        """
        return dataclasses.replace(self, wrt=tuple(wrt))

    def without_unused(self, used: Sequence[bool]) -> Self:
        """Return the call without unused gradients, so that their matmuls are not computed.

        `used` has a bool for each result: True if the program uses the result.
        """
        if self.direction != "fwd" or self.reduction == "none":
            return self
        return self.with_gradients([n for n, u in zip(self.returns, used) if u and n in self.wrt])

    @property
    def residuals(self) -> int:
        """Number of residuals: the first operands of the tangent and backward passes."""
        return len(self.primals + self.kept)

    @property
    def returns(self) -> tuple[str, ...]:
        results = {"fwd": self.outputs + self.wrt, "tan": self.outputs, "bwd": self.wrt}
        return results[self.direction]

    @property
    def takes(self) -> tuple[str, ...]:
        if self.direction == "fwd":
            return self.primals
        linear = self.wrt if self.direction == "tan" else self.outputs
        return self.primals + self.kept + linear

    @property
    def kinds_taken(self) -> list[Kind]:
        return [*map(kind, self.takes)]

    @property
    def kinds_returned(self) -> list[Kind]:
        is_total = self.direction == "fwd" and self.reduction != "none"
        totals = {*self.outputs} if is_total else ()
        return ["total" if name in totals else kind(name) for name in self.returns]

    def gradient_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the gradient of an operand that has the dtype `dtype`.

        The gradient usually has the dtype of its operand. For a mean or a sum, the forward pass
        already computes the gradients, for a cotangent of 1. The backward pass multiplies them by
        the cotangent, which includes the loss scale. Before this multiplication, small gradients
        would underflow in float16 (below 6e-8). So the forward pass returns the gradients of
        float16 operands in float32.
        """
        is_narrow = self.direction == "fwd" and dtype.name == "float16"
        return np.dtype(np.float32) if is_narrow else dtype


def kind(name: str) -> Kind:
    """Return the kind of an operand or a result."""
    return "shared" if name.startswith("shared") else _KINDS.get(name, "row")


def is_inexact(a: Any) -> bool:
    """Return True if an array or a type has an inexact dtype, which may be differentiated."""
    return bool(jax.numpy.issubdtype(a.dtype, jax.numpy.inexact))


def matmul_dtypes(
    function: Function, asked: np.dtype | None, x: np.dtype, weight: np.dtype
) -> tuple[np.dtype, np.dtype]:
    """Return the dtype of the matmul's operands, and the dtype of the logits.

    `x` and `weight` are the dtypes of these arrays, and promote to a common dtype. `asked` is the
    dtype that the user requested, or None. If `asked` has fewer bits than the common dtype, the
    operands are cast to `asked`. If it has more bits, they are cast to the common dtype, because
    more bits would not make the matmul more accurate.

    The logits of a cross-entropy have the requested dtype (by default, the common dtype). The
    logits of the other functions are not rounded: they have the dtype in which the matmul
    accumulates.
    """
    promoted = checks.product_dtype(x, weight)
    asked = asked or promoted
    factors = min(promoted, asked, key=lambda dtype: dtype.itemsize)
    is_rounded = function == "linear_softmax_cross_entropy"
    return factors, asked if is_rounded else checks.arithmetic_dtype(factors)


class Over(NamedTuple):
    """The names of the mesh axes over which the arrays of a linear loss are sharded.

    In the loop, arrays may be sharded differently from the user's arrays. Before the loop, x and
    weight are gathered or exchanged between devices. After the loop, the gradients of x and weight
    are returned to the original shardings.

    Attributes:
      rows: mesh axes over which the rows are sharded in the loop.
      classes: mesh axes over which the classes are sharded in the loop.
      moves: a dict from the kind of an array that must be resharded before the loop to a list of
        resharding steps. A step is a tuple ``(axis, names, is_exchange)``. Usually, the axis `axis`
        is all-gathered over the mesh axes `names`. If `is_exchange` is True, the step is an
        all-to-all: devices exchange their shards of the last axis for shards of the axis `axis`.
        Each device then has fewer rows, but all columns of these rows.
    """

    rows: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    moves: Mapping[str, Sequence[tuple[int, tuple[str, ...], bool]]] = MappingProxyType({})


def scale(
    weights: jax.Array, reduction: str, axes: Sequence[int], over: tuple[str, ...] = ()
) -> jax.Array:
    """Return the factor that turns the sum of the weighted losses over `axes` into the result.

    For a sum, it is 1. For a mean, it is 1 / (sum of weights), or 0 if the weights add up to 0.
    `over` are the mesh axes over which the weights are sharded.
    """
    if reduction == "sum":
        return jnp.ones((), weights.dtype)
    total = sum_over(jnp.sum(weights, axes), over)
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


def sum_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum of the devices' arrays over the mesh axes `axes`; without any, return `a`."""
    return jax.lax.psum(a, axes) if axes else a


# ------------------------------------------------------------------------ the loss of a chunk


def loss_of_rows(loss: Call, shape: tuple[int, ...], mask: int, **changes: Any) -> Call:
    """Return the call of a loss on a chunk's logits.

    Args:
      loss: the call of the loss on one position's logits.
      shape: shape ``(rows, classes)`` of the chunk's logits.
      mask: number of rows of the mask of classes, if the loss has one: 1 or ``shape[0]``.
      changes: fields of the call or its spec to replace (see `Call.replaced`).
    """
    of_mask = (mask, shape[1]) if loss.spec.logits.has_mask else ()
    view = RowView.of(shape, (1,), mask=of_mask, candidates=loss.view.candidates)
    return loss.with_view(view).replaced(**changes)


def bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Bind the primitive of the pass; if the classes are sharded, run plain JAX instead."""
    if not call.spec.cols_over:
        return row_operations.bind(call, *arrays)
    if call.spec.direction == "fwd":
        return _forward_on_shards(call, *arrays)
    return call.xla(*[a for a in arrays if a is not None])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_on_shards(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Run the forward pass in plain JAX on one device's shard of the classes.

    This function has its own JVP rule, because it uses `jax.lax.pmax`, which has no derivative.
    """
    return call.xla(*[a for a in arrays if a is not None])


@_forward_on_shards.defjvp
def _(call: Call, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    whole = call.with_stats()
    outputs = dict(zip(whole.returns, _forward_on_shards(whole, *primals)))
    arrays = dict(zip(call.primals, primals)) | outputs
    arrays["saved"] = arrays["x"]
    tangent = whole.tangent(("x",))
    residuals = [arrays[name] for name in tangent.residual_names]
    along = dict(zip(tangent.returns, tangent.xla(*residuals, tangents[0])))
    return [outputs[name] for name in call.returns], [along[name] for name in call.returns]


# Limits for the number of rows of a chunk.
#
# Small chunks are slow, because each chunk loads and stores dW, the float32 gradient of weight.
# With 4096 rows in a chunk, this adds 5 % to the time of the matmul that computes dW. With 2048
# rows it adds 14 %, and with 1024 rows 49 % (H100, bfloat16).
#
# Large chunks need more memory for their logits. After the last chunk, the logits are freed, and
# only then is dW copied to an array in weight's dtype. Logits that are no larger than this copy do
# not raise the peak memory. The logits have the shape (rows, classes), and the copy has the shape
# (d, classes). So if the logits and the copy have the same dtype, chunks of up to d rows do not
# raise the peak memory.
_LEAST, _MOST = 512, 2048
_BYTES = 2**30
# A matmul's tile has this number of rows. A chunk's number of rows is rounded up to a multiple of
# it.
_TILE = 128


def chunks_of(
    chunk: int | None,
    rows: int,
    weight: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype],
    *,
    shards: int = 1,
    copies: int = 1,
    accumulator: int = 0,
    may_hold: bool = True,
) -> tuple[int, bool]:
    """Return the number of rows of a chunk, and True if the dlogits of all rows are stored.

    dlogits are the gradients of the logits. They overwrite the logits if both have the same dtype.
    If the number of rows of a chunk does not divide the number of all rows, the first two chunks
    overlap.

    In the following rules, the accumulator is the array in which several chunks accumulate weight's
    gradient. The number of rows of a chunk is given by the first rule that applies:

    1. `chunk`, if the user requested a number.
    2. All rows, if their logits and dlogits are no larger than the accumulator, because a single
       chunk needs no accumulator. With 8192 rows, d = 4096 and 128256 classes, one chunk takes 36.6
       ms and 2.14 GB, and two chunks take 40.8 ms and 2.20 GB (H100).
    3. max(2048, d), if the logits of this number of rows take at most 1 GiB. If a logit has twice
       the bytes of an element of the matmuls' operands, d is replaced by d / 2. Larger chunks take
       more memory. Smaller chunks take more time: each chunk loads and stores the accumulator.
    4. The largest number of rows whose logits take at most 1 GiB, but at least 512.

    With rule 3 or 4, a call whose dlogits cannot overwrite the logits may store the dlogits of all
    rows. It then needs no accumulator, and takes one matmul for dx and one for dW. It does so only
    if all dlogits and one chunk's logits take no more memory than the alternative: the accumulator,
    and the logits and dlogits of one chunk. If they take more, chunks of half as many rows are
    tried, because their logits take less memory.

    Storing all dlogits is faster than an accumulator even with the smaller chunks. For 8192 rows,
    d = 2048 and 128256 classes, forward and backward pass of a log-probability take 27.7 ms with
    all dlogits and chunks of 1024 rows. With an accumulator and chunks of 2048 rows, they take 29.6
    ms. With d = 4096 and chunks of 2048 rows, they take 52.0 ms with all dlogits, and 55.2 ms with
    an accumulator (H100).

    Args:
      chunk: the number of rows that the user requested, or None.
      rows: number of all rows.
      weight: shape (d, classes) of one device's shard of weight.
      dtypes: dtypes of the logits and of the matmuls' operands.
      shards: number of shards of the classes, by which the number of rows in rule 3 is multiplied.
        A device has only 1 / shards of the classes, so the memory for a chunk's logits stays the
        same. Fewer and larger chunks are faster, because devices exchange row statistics once for
        each chunk.
      copies: number of a chunk's arrays of the logits' shape and dtype, including the logits.
      accumulator: bytes of the array in which several chunks accumulate weight's gradient. It is 0
        if even a single chunk would allocate an array of this size for the gradient, because then a
        single chunk saves no memory.
      may_hold: False if the call must not store the dlogits of all rows.
    """
    if chunk is not None or not rows:
        return min(chunk or 1, max(rows, 1)), False
    (d, classes), (logits, factors) = weight, (dtype.itemsize for dtype in dtypes)
    separate = factors if dtypes[0] != dtypes[1] else 0
    of_row = copies * classes * logits
    if rows * copies * classes * (logits + separate) <= accumulator:
        return rows, False
    fitting = _BYTES // max(of_row, logits) // _TILE * _TILE
    most = min(max(fitting, _LEAST), shards * max(_MOST, d * factors // logits))
    even = math.ceil(rows / math.ceil(rows / most))
    size = min(math.ceil(even / _TILE) * _TILE, rows)
    most_memory = accumulator + size * (of_row + classes * separate)
    for held in (size, size // 2) if may_hold and accumulator and separate and size < rows else ():
        needed = rows * classes * separate + held * of_row
        if held % _TILE == 0 and held >= _LEAST and needed <= most_memory:
            return held, True
    return size, False
