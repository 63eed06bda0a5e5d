"""The passes of the linear losses, each computed in chunks of rows.

A chunk takes up to three matmuls, which XLA computes:

    logits = x @ W + b        stored for the current chunk only
    dx     = dlogits @ W^T    written into the chunk's rows of an array for all rows
    dW    += x^T @ dlogits    accumulated in float32

The matmul itself adds its result to dW in place (cuBLAS' beta = 1). XLA can do this because nothing
else in the loop uses the dW of the previous chunks.

The first chunk precedes the loop and writes the array in which dW is accumulated. So this array
need not be set to zero. If there is a single chunk, there is no such array, and the matmul writes
dW in its own dtype. With several chunks, there is no such array either if the dlogits of all rows
are stored. Then dx and dW are computed by one matmul each, after the loop. This is done if it takes
no more memory than an array in which dW is accumulated, and if logits are float32 but dlogits have
16 bits. Such dlogits cannot overwrite the logits, so they are stored in a separate array in any
case.

For the cross-entropy, logits have the dtype to which x and weight promote, or the dtype that the
user requests. 16-bit logits halve the memory traffic of each pass over them, and dlogits can reuse
their buffer. For log-probabilities, logits are float32. If logits z were rounded to 16 bits, their
differences would have errors of about 2^-9 * |z|.

dlogits are the gradients of the logits, in the dtype of the matmuls' operands. They include all
factors: 1 / n, `logits_scale`, and the loss weight or the cotangent of each row. So the matmuls
write dx and dW in their own dtypes, and no other pass over dx and dW is needed.

In float16, small dlogits would underflow (below 6e-8). In this dtype, each row of dlogits is
therefore divided by a power of two, the magnitude of the row's factors. This division is undone in
float32. For dx, the row of dx is multiplied by the power of two. For dW, the row of x is multiplied
by it before the matmul.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.calls.call import Call
from jaxnorm.meshes import sharding
from jaxnorm.operations import linear_loss_call
from jaxnorm.operations.linear_loss_call import (
    OF_ROWS,
    Kind,
    LinearLossCall,
    Over,
    Reduction,
    chunk_rows,
    rows_beside_dlogits,
)
from jaxnorm.operations.loss import counted, weighted
from jaxnorm_kernels import launching

# Before the loop, the number of classes is padded to a multiple of this number. A row of 16-bit
# weights or logits then takes a multiple of 16 bytes. Otherwise, XLA would pad the operands and
# slice the result of every matmul in the loop.
COLUMNS = 8

_WHOLE = Over()


def run(
    head: LinearLossCall,
    *arrays: jax.Array,
    chunks: "type[Chunks] | None" = None,
    over: Over = _WHOLE,
    recompute: bool = False,
) -> list[jax.Array]:
    """Compute the results of a pass.

    Args:
      head: the static description of the pass.
      arrays: operands in the order of `LinearLossCall.takes`; one device's shards on a mesh.
      chunks: the class whose methods compute the passes; None for `Chunks`.
      over: the mesh axes over which the operands are sharded.
      recompute: True to apply `jax.checkpoint` to each chunk, so that JAX saves no logits if it
        differentiates this function.
    """
    by_name = dict(zip(head.primals, arrays))
    dtype, _ = head.dtypes(by_name["x"].dtype, by_name["weight"].dtype)

    def gathered(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "x":
            # Inside `jax.shard_map`, the type of the gathered x must say that x is replicated over
            # the gathered mesh axes ("invarying"). In code for XLA's partitioner, types have no
            # mesh axes, so the type stays as it is.
            is_typed = {*sum(over.gathered, ())} <= jax.typeof(a).manual_axis_type.varying
            to = "invarying" if is_typed else "varying"
            return _moved(_gathered(a, over.gathered, dtype, to), over, dtype)
        return _gathered(a, over.stored, dtype, "varying") if kind == "weight" else a

    whole = [*map(gathered, head.kinds_taken, arrays)]
    lead = whole[0].shape[:-1]
    count = math.prod(lead)

    def flattened(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "mask":  # Give the mask one row, or as many rows as x.
            if math.prod(a.shape[:-1]) == 1:
                return launching.own_buffer(a.reshape(1, -1))
            a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
        if kind in ("row", "candidate", "mask"):
            a = launching.own_buffer(a)  # Kernels read these arrays and need aligned buffers.
        return a.reshape(count, *a.shape[len(lead) :]) if kind in OF_ROWS else a

    flat = [*map(flattened, head.kinds_taken, whole)]
    passes = (chunks or Chunks)(head, flat, over, recompute)
    directions = {"fwd": passes.forward, "tan": passes.tangent, "bwd": passes.backward}

    def finished(name: str, kind: Kind, a: jax.Array) -> jax.Array:
        if kind in OF_ROWS:
            a = a.reshape(*lead, *a.shape[1:])
        if name not in by_name:
            return launching.own_buffer(a)
        # `a` is a gradient, and each device has a partial sum over its shard of classes or rows.
        if kind == "x":
            a = _scattered(_moved_back(a, over), over.classes, over.gathered)
        elif kind != "row":
            a = _scattered(a, over.rows, over.stored if kind == "weight" else ())
        return a.astype(head.gradient_dtype(by_name[name].dtype))

    return [*map(finished, head.returns, head.kinds_returned, directions[head.direction]())]


def _gathered(
    a: jax.Array, stored: Sequence[tuple[str, ...]], dtype: np.dtype, to: str
) -> jax.Array:
    """All-gather each axis of `a` over the mesh axes that `stored` lists for it.

    If `dtype` has fewer bits than a's dtype, `a` is cast to it first. `to` is the argument of
    `jax.lax.all_gather` that says whether the result's type varies over these mesh axes.
    """
    for axis, names in enumerate(stored):
        if names:
            a = lax.all_gather(_narrow(a, dtype), names, axis=axis, tiled=True, to=to)
    return a


def _moved(x: jax.Array, over: Over, dtype: np.dtype) -> jax.Array:
    """Exchange shards of x's columns for shards of its rows.

    The exchange is an all-to-all over the mesh axes in `over.moved`. Afterwards, each device has
    fewer rows, but all of their columns.
    """
    for axis, names in enumerate(over.moved):
        for name in names:
            x = lax.all_to_all(_narrow(x, dtype), name, axis, x.ndim - 1, tiled=True)
    return x


def _moved_back(dx: jax.Array, over: Over) -> jax.Array:
    """Exchange shards of the rows of x's gradient for shards of its columns.

    This undoes the exchange that the function `_moved` did for x. It is an all-to-all over the mesh
    axes in `over.moved`. Afterwards, each device has more rows, but only its shard of their
    columns.
    """
    for axis, names in reversed([*enumerate(over.moved)]):
        for name in reversed(names):
            dx = lax.all_to_all(dx, name, dx.ndim - 1, axis, tiled=True)
    return dx


def _narrow(a: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast `a` to `dtype` if `dtype` is narrower. Devices then exchange fewer bytes."""
    return a.astype(min(a.dtype, dtype, key=lambda dtype: dtype.itemsize))


def _scattered(a: jax.Array, over: tuple[str, ...], stored: Sequence[tuple[str, ...]]) -> jax.Array:
    """Sum `a` over the mesh axes in `over`.

    Each axis of `a` is reduce-scattered over the mesh axes that `stored` lists for it. Over the
    other mesh axes in `over`, `a` is all-reduced.
    """
    scattered = sum(stored, ())
    for axis, names in enumerate(stored):
        if names:
            a = lax.psum_scatter(a, names, scatter_dimension=axis, tiled=True)
    return _sum_over(a, tuple(name for name in over if name not in scattered))


def reduced(
    losses: jax.Array, where: jax.Array | None, reduction: Reduction, axes: Sequence[int]
) -> jax.Array:
    """Return the sum or the mean of `losses` over `axes`.

    `where` has a weight for each loss; None means that all weights are 1. `losses` are already
    multiplied by their weights. The mean is the sum of `losses`, divided by the sum of the weights.
    """
    total = jnp.sum(losses, axes)
    if reduction == "sum":
        return total
    weights = jnp.ones_like(losses) if where is None else where.astype(losses.dtype)
    return total * _inverse(jnp.sum(weights, axes))


Carry = dict[str, jax.Array]


class Chunks:
    """The arrays of a call, with a method for each pass: `forward`, `tangent` and `backward`.

    x is two-dimensional: its leading axes are flattened to rows.
    """

    def __init__(
        self, head: LinearLossCall, arrays: Sequence[jax.Array], over: Over, recompute: bool
    ):
        self.head, self.over, self.recompute = head, over, recompute
        given = list(arrays)
        by_name = dict(zip(head.primals, given))
        self.kept = dict(zip(head.kept, given[len(head.primals) : head.residuals]))
        self.linear = given[head.residuals :]
        self.x, self.weight, self.labels = by_name["x"], by_name["weight"], by_name.get("labels")
        self.bias, self.where = by_name.get("bias"), by_name.get("where")
        self.row_scales = by_name.get("logits_scale")
        self.mask = by_name.get("mask")
        self.counted = None if self.where is None else counted(self.where)
        self.dtype, self.logits_dtype = head.dtypes(self.x.dtype, self.weight.dtype)
        self.wide = head.result_dtype(by_name)
        self.rows, self.classes = len(self.x), self.weight.shape[1]
        # The classes are not padded in two cases. If they are sharded, the padding would be in the
        # middle of each row. If there is a mask of classes, it would have to be padded too.
        whole = not over.classes and self.mask is None
        self.padding = -self.classes % COLUMNS if whole else 0
        self.factor = self.padded(self.weight, self.dtype)  # Cast and pad once, before the loop.
        self.teacher = _Teacher(self, by_name) if head.has_teacher else None
        dtypes = self.logits_dtype, self.dtype
        shards = lax.axis_size(over.classes) if over.classes else 1
        # For a divergence, each row of a chunk has the logits of both the student and the teacher.
        shape = self.weight.shape[0], self.classes * (1 if self.teacher is None else 2)
        self.chunk = chunk_rows(
            head.chunk, self.rows, shape, *dtypes, shards, accumulator=self.accumulator
        )
        # True if the dlogits of all rows are stored. False if the dlogits of a chunk overwrite its
        # logits: they need no memory then.
        self.holds_dlogits = False
        may_hold = self.accumulator > 0 and self.logits_dtype != self.dtype
        if may_hold and head.chunk is None and not recompute and self.chunk < self.rows:
            of_teacher = 0 if self.teacher is None else self.teacher.logits_dtype.itemsize
            size = rows_beside_dlogits(
                self.chunk,
                self.rows,
                self.classes * (self.logits_dtype.itemsize + of_teacher),
                self.classes * self.dtype.itemsize,
                self.accumulator,
            )
            self.holds_dlogits, self.chunk = size is not None, size or self.chunk

    @property
    def operands(self) -> Sequence[jax.Array]:
        """The operands on which the results and the gradients depend."""
        return [a for a in (self.x, self.weight, self.labels) if a is not None]

    # --------------------------------------------------------------------------------- passes

    def forward(self) -> list[jax.Array]:
        head = self.head
        if head.reduction == "none" or not head.wrt:
            y, *rest = self.of_rows()
            return [self.weighted(y) if head.reduction == "none" else self.total(y), *rest]
        cotangents = self.scale() * self.weighted(jnp.ones(self.rows, self.wide))
        losses, *gradients = self.gradients([cotangents])
        return [self.total(losses), *gradients]

    def backward(self) -> list[jax.Array]:
        dy, *others = self.linear
        return self.gradients([self.weighted(dy), *others])

    @property
    def accumulator(self) -> int:
        """Number of additional bytes that several chunks need to accumulate weight's gradient.

        Several chunks need an array of weight's shape in the dtype of the sum. The number is the
        size of this array, or 0 if a single chunk would need the same array. A single chunk needs
        it in two cases:

        * The gradient has the dtype of the sum. Then the array becomes the gradient itself.
        * The matmuls are in float16. Then the sum is stored in the wider dtype, because it must be
          multiplied by a power of two before it is cast to the gradient's dtype.
        """
        has_sum = self.head.direction != "tan" and "weight" in self.head.wrt
        dtype = self.gradient_dtype("weight", self.weight)
        if not has_sum or self.dtype.name == "float16" or dtype == self.wide:
            return 0
        return math.prod(self.weight.shape) * self.wide.itemsize

    def gradient_dtype(self, name: str, operand: jax.Array) -> np.dtype:
        """Return the dtype of a device's part of the gradient of an operand.

        As in plain JAX, bfloat16 gradients are rounded before the sum over devices. float16
        gradients are not rounded, because small ones would underflow: the forward pass of a loss
        already computes them, before the backward pass multiplies them by the loss scale.
        """
        if self.over.classes if name == "x" else self.over.rows:
            return self.dtype if self.dtype.name == "bfloat16" else self.wide
        return self.head.gradient_dtype(operand.dtype)

    def sizes(self, cotangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return two arrays: a power of two for each row, and the largest of these powers of two.

        The cotangents of a row are divided by its power of two to avoid underflow. This division is
        exact. The power of two is the magnitude of the row's largest cotangent, multiplied by the
        magnitude of the logits' scale, and rounded to a power of two.

        Masked rows, and rows whose magnitude is 0 or not finite, have no power of two of their own.
        They get the largest power of two of all other rows, on all devices. If there are no other
        rows, they get 1.
        """
        sizes = [jnp.abs(lax.stop_gradient(ct)) for ct in cotangents]
        sizes = [jnp.max(a, -1, initial=0) if a.ndim > 1 else a for a in sizes]
        size = functools.reduce(jnp.maximum, sizes) * abs(self.head.logits_scale)
        if self.row_scales is not None:
            size = size * abs(self.row_scales)
        counts = jnp.isfinite(size) & (size > 0)
        if self.counted is not None:
            counts &= self.counted
        info = jnp.finfo(self.wide)
        size = jnp.clip(jnp.where(counts, size, 1), info.smallest_normal, info.max / 2)
        size = lax.reduce_precision(size.astype(self.wide), info.nexp, mantissa_bits=0)
        largest = jnp.max(jnp.where(counts, size, 0), initial=0)
        if self.over.rows:
            largest = lax.pmax(largest, self.over.rows)
        largest = jnp.where(largest > 0, largest, 1)
        return jnp.where(counts, size, largest), largest

    def of_rows(self) -> list[jax.Array]:
        """Return the results of all rows and, if `keeps` is set in the call, the statistics."""

        def step(rows: Rows, carry: Carry) -> Carry:
            logits = self.product(rows.of_x(self.x), self.factor, self.bias)
            call = self.call(logits.shape, rows)
            results = linear_loss_call.forward(call, rows.operands(logits))
            return {name: rows.put(carry[name], a) for name, a in results.items()}

        results = self.loop(step, self.empty_results())
        return [results[name] for name in self.head.outputs]

    def empty_results(self) -> Carry:
        """Return arrays of zeros, into which the loop writes the results of the rows."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.head.outputs, (self.rows,))
        if self.head.several:
            assert self.labels is not None
            shapes["y"] = self.labels.shape
        return {name: jnp.zeros(shape, self.wide) for name, shape in shapes.items()}

    def gradients(self, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return a list of the gradients of sum(cotangents * results).

        The call is a backward pass, or a forward pass that computes the gradients together with the
        losses. In a forward pass, the list starts with an array of the losses of all rows.
        """
        head, makes_losses = self.head, self.head.direction == "fwd"
        given = {"x": self.x, "weight": self.weight, "bias": self.bias}
        operands = {name: a for name, a in given.items() if a is not None}
        dtypes = {name: self.gradient_dtype(name, a) for name, a in operands.items()}
        sizes = shares = None
        largest = jnp.ones((), self.wide)
        if self.dtype.name == "float16":
            sizes, largest = self.sizes(cotangents)
            # The division by `sizes` must be undone in the gradients of weight and bias, which are
            # sums over rows. Since sizes = shares * largest, this is done in two steps: each row is
            # multiplied by its entry of `shares`, and the sum over the rows is multiplied by
            # `largest`.
            shares = sizes / largest
            cotangents = [ct / _like(sizes, ct) for ct in cotangents]
        in_one = self.chunk == self.rows or self.holds_dlogits
        weight_dtype = dtypes["weight"] if in_one and sizes is None else self.wide

        def step(rows: Rows, carry: Carry) -> Carry:
            *y, dlogits = self.dlogits(rows, cotangents)
            losses = {"y": rows.put(carry["y"], y[0])} if makes_losses else {}
            if self.holds_dlogits:
                return losses | {"dlogits": rows.put(carry["dlogits"], dlogits)}
            return losses | products(rows, dlogits, carry)

        def products(rows: Rows, dlogits: jax.Array, carry: Carry) -> Carry:
            x, results = rows.of_x(self.x), {}
            if "x" in head.wrt:
                dx = self.dot(
                    dlogits, self.factor, (1, 1), dtypes["x"] if sizes is None else self.wide
                )
                if sizes is not None:
                    dx = (rows.of(sizes)[:, None] * dx).astype(dtypes["x"])
                results["x"] = rows.put(carry["x"], dx)
            of_bias = dlogits
            if shares is not None:
                share = rows.of(shares)[:, None]
                x, of_bias = share * x.astype(self.wide), share * dlogits.astype(self.wide)
            sums = {}
            if "weight" in head.wrt:
                sums["weight"] = self.dot(x.astype(self.dtype), dlogits, (0, 0), weight_dtype)
            if "bias" in head.wrt:
                sums["bias"] = jnp.sum(of_bias, 0, dtype=self.wide)
            for name, part in sums.items():
                results[name] = carry[name] + part if name in carry else part
            return results

        carry = {"y": jnp.zeros(self.rows, self.wide)} if makes_losses else {}
        dx = {"x": jnp.zeros(self.x.shape, dtypes["x"])} if "x" in head.wrt else {}
        if self.holds_dlogits:
            dlogits = lax.empty((self.rows, self.classes + self.padding), self.dtype)
            results = self.loop(step, carry | {"dlogits": dlogits})
            all_rows = Rows(self, jnp.int32(0), self.rows)
            results |= products(all_rows, results.pop("dlogits"), dx)
        else:
            results = self.loop(step, carry | dx, starts_sums=head.wrt != ("x",))

        def finished(name: str) -> jax.Array:
            if name in carry | dx:
                return results[name]
            a = results.get(name)
            if a is None:  # There are no rows.
                return jnp.zeros(operands[name].shape, dtypes[name])
            a = lax.slice_in_dim(a, 0, self.classes, axis=-1)
            return (a if sizes is None else largest * a).astype(dtypes[name])

        return [finished(name) for name in (*["y"] * makes_losses, *head.wrt)]

    def dlogits(self, rows: "Rows", cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return a list whose last element is the dlogits of a chunk.

        If the call has saved results, this is the only element. Otherwise, the chunk's results
        precede it.
        """
        logits = self.product(rows.of_x(self.x), self.factor, self.bias)
        call = self.call(logits.shape, rows)
        cotangents = [*map(rows.of, cotangents)]
        if self.kept:
            residuals = self.residuals(call.with_stats(), rows, logits)
            return [linear_loss_call.dlogits(call, residuals, cotangents, self.dtype)]
        return linear_loss_call.forward_and_dlogits(
            call, rows.operands(logits), cotangents, self.dtype, differentiable=self.recompute
        )

    def tangent(self) -> list[jax.Array]:
        """Compute the tangents of the rows' results from the tangents of the operands."""
        along = dict(zip(self.head.wrt, self.linear))
        tx, tw, tb = (along.get(name) for name in ("x", "weight", "bias"))
        tw = None if tw is None else self.padded(tw, self.dtype)
        tb = None if tb is None else self.padded(tb, self.logits_dtype)

        def step(rows: Rows, carry: Carry) -> Carry:
            x = rows.of_x(self.x)
            logits = self.product(x, self.factor, self.bias)
            moves = []
            if tx is not None:
                moves.append(self.product(rows.of_x(tx), self.factor))
            if tw is not None:
                moves.append(self.product(x, tw))
            if tb is not None:
                moves.append(jnp.broadcast_to(tb, logits.shape))
            along = sharding.vary_alike([logits, sum(moves[1:], moves[0])])[1]
            call = self.call(logits.shape, rows)
            residuals = self.residuals(call.with_stats(), rows, logits)
            tangents = linear_loss_call.tangent(call, residuals, along)
            return {name: rows.put(carry[name], a) for name, a in zip(names, tangents)}

        names = self.head.outputs
        results = self.loop(step, self.empty_results())
        y, *others = (results[name] for name in names)
        return [self.weighted(y), *others]

    def residuals(self, call: Call, rows: "Rows", logits: jax.Array) -> Carry:
        """Return a dict of the residuals from which the derivative of a chunk's loss is computed.

        Results and statistics that the forward pass did not save are recomputed.
        """
        operands = rows.operands(logits)
        kept = rows.kept() if self.kept else linear_loss_call.forward(call, operands)
        return operands | kept

    def weighted(self, losses: jax.Array) -> jax.Array:
        return losses if self.where is None else weighted(losses, _like(self.where, losses))

    def scale(self) -> jax.Array:
        """Return the factor that turns the sum of the losses into the result.

        It is 1 for a sum, and 1 / (sum of weights) for a mean.
        """
        if self.head.reduction == "sum":
            return jnp.ones((), self.wide)
        if self.where is None:
            shards = lax.axis_size(self.over.rows) if self.over.rows else 1
            return jnp.asarray(1 / max(self.rows * shards, 1), self.wide)
        return _inverse(_sum_over(jnp.sum(self.where, dtype=self.wide), self.over.rows))

    def total(self, losses: jax.Array) -> jax.Array:
        return self.scale() * _sum_over(jnp.sum(self.weighted(losses)), self.over.rows)

    # ------------------------------------------------------------------------------ one chunk

    def product(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        logits = self.dot(x.astype(self.dtype), weight, (1, 0), self.logits_dtype)
        return logits if bias is None else logits + self.padded(bias, self.logits_dtype)[None]

    def padded(self, a: jax.Array, dtype: np.dtype) -> jax.Array:
        """Cast `a` to `dtype`, and pad its last axis (the classes) with zeros.

        `a` is weight, bias, the tangent of weight, or the tangent of bias.
        """
        a = a.astype(dtype)
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, self.padding)]) if self.padding else a

    def dot(self, a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: np.dtype) -> jax.Array:
        """Return the matmul of `a` and `b` over axis `over[0]` of `a` and axis `over[1]` of `b`.

        The sums are float32 (or float64) and are rounded once, to `dtype`.
        """
        axes = ((over[:1], over[1:]), ((), ()))
        wide = max(dtype, a.dtype, key=lambda dtype: dtype.itemsize)  # as `lax` requires
        result = lax.dot_general(
            a, b, axes, precision=self.head.precision, preferred_element_type=wide
        )
        return result.astype(dtype)

    def call(self, shape: tuple[int, ...], rows: "Rows") -> Call:
        """Return the static description of the loss that is computed from a chunk's logits.

        `shape` is the shape of these logits.
        """
        call = linear_loss_call.call_of(
            self.head,
            shape,
            self.logits_dtype,
            has_positions=rows.counted is not None,
            mask=None if self.mask is None else rows.mask.shape,
            teacher_dtype=None if self.teacher is None else self.teacher.logits_dtype,
            candidates=self.labels.shape[-1]
            if self.head.several and self.labels is not None
            else None,
        )
        if self.head.keeps:
            call = call.with_stats()
        changes: dict[str, Any] = {"padding": self.padding}
        if self.over.classes:
            changes |= {
                "cols": shape[1] * lax.axis_size(self.over.classes),
                "cols_over": self.over.classes,
                "axes_over": (self.over.classes,),
            }
        return call.replaced(**changes)

    # ------------------------------------------------------------------------------- the loop

    def loop(
        self,
        step: Callable[["Rows", Carry], Carry],
        carry: Carry,
        *,
        starts_sums: bool = False,
    ) -> Carry:
        """Run all chunks, and return the carry after the last one.

        ``step(rows, carry)`` processes one chunk and returns the next carry. If `starts_sums` is
        True, the carry that the first step returns has more arrays than the given one. The first
        chunk then precedes the loop, because the carry of a loop must have the same arrays in all
        iterations.
        """
        carry = {name: self.varying(name, a) for name, a in carry.items()}
        if not self.rows:
            return carry
        count = math.ceil(self.rows / self.chunk)

        def body(i: jax.Array, carry: Carry, *, in_loop: bool = True) -> Carry:
            def run(i: jax.Array, carry: Carry) -> Carry:
                return step(Rows(self, i), carry)

            return (jax.checkpoint(run, prevent_cse=not in_loop) if self.recompute else run)(
                i, carry
            )

        first = int(starts_sums or count == 1)
        if first:
            carry = body(jnp.int32(0), carry, in_loop=False)
        return lax.fori_loop(first, count, body, carry) if first < count else carry

    def varying(self, name: str, a: jax.Array) -> jax.Array:
        """Cast an array of the loop's initial carry to the type that `step` returns.

        Inside `jax.shard_map`, a type says over which mesh axes an array varies. The initial carry,
        an array of zeros, varies over none of them.
        """
        own = (jax.typeof(a).manual_axis_type.varying for a in self.operands)
        over = frozenset().union(*own)
        if name in self.head.outputs:  # `step` sums these arrays over all shards of classes.
            over -= {*self.over.classes}
        return lax.pcast(a, tuple(sorted(over)), to="varying") if over else a


class _Teacher:
    """The teacher's linear layer in a divergence. Its logits are constants."""

    def __init__(self, chunks: Chunks, arrays: dict[str, jax.Array]):
        self.chunks, self.x, weight = chunks, arrays["teacher_x"], arrays["teacher_weight"]
        self.dtype, self.logits_dtype = chunks.head.dtypes(self.x.dtype, weight.dtype)
        self.weight, self.bias = chunks.padded(weight, self.dtype), arrays.get("teacher_bias")

    def logits(self, rows: "Rows") -> jax.Array:
        """Return the teacher's logits for the rows of a chunk."""
        x = rows.of_x(self.x).astype(self.dtype)
        logits = self.chunks.dot(x, self.weight, (1, 0), self.logits_dtype)
        if self.bias is None:
            return logits
        return logits + self.chunks.padded(self.bias, self.logits_dtype)[None]


class Rows:
    """The rows of one chunk, with methods that slice the arrays of the call.

    All chunks have the same number of rows, without padding. If this number does not divide the
    number of all rows, the first two chunks overlap. The rows that they share are masked in the
    first chunk, and the second chunk overwrites their results.

    With an overlap, the slices of later chunks may start at addresses that are not aligned. Kernels
    need aligned addresses, so the slices are copied.
    """

    def __init__(self, chunks: Chunks, index: jax.Array, size: int | None = None):
        size = size or chunks.chunk
        short = -chunks.rows % size
        self.size, self.start = size, jnp.maximum(index * size - short, 0)
        self.chunks, self.overlaps = chunks, short > 0
        own = self.of(chunks.counted) if chunks.counted is not None else None
        if self.overlaps:
            places = self.start + jnp.arange(size, dtype=self.start.dtype)
            first = places < (index + 1) * size - short
            own = first if own is None else own & first
        # A mask of the chunk's rows. It is False for rows that the user masks, and for rows that
        # also belong to the next chunk. None if there cannot be such rows.
        self.counted = own

    @property
    def mask(self) -> jax.Array:
        """The mask of classes for this chunk's rows. It has one row if all rows share the mask."""
        mask = self.chunks.mask
        assert mask is not None
        return mask if len(mask) == 1 else self.of(mask)

    def operands(self, logits: jax.Array) -> Carry:
        """Return a dict with the operands of the loss that takes this chunk's logits."""
        operands = {"x": logits, "saved": logits}
        if self.chunks.labels is not None:
            name = "candidates" if self.chunks.head.several else "labels"
            operands[name] = self.of(self.chunks.labels)
        if self.chunks.teacher is not None:
            operands["teacher_logits"] = self.chunks.teacher.logits(self)
        if self.chunks.row_scales is not None:
            operands["logits_scale"] = self.of(self.chunks.row_scales)
        if self.counted is not None:
            operands["positions"] = self.counted
        if self.chunks.mask is not None:
            operands["mask"] = self.mask
        return operands

    def kept(self) -> Carry:
        """Return a dict with this chunk's rows of the saved results and statistics.

        The statistic log_sum is set to -inf in masked rows, which makes the loss ignore them.
        """
        kept = {name: self.of(a) for name, a in self.chunks.kept.items()}
        if self.counted is not None:
            kept["log_sum"] = jnp.where(self.counted, kept["log_sum"], -jnp.inf)
        return kept

    def of(self, a: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(a, self.start, self.size)
        return launching.own_buffer(part) if self.overlaps else part

    def of_x(self, x: jax.Array) -> jax.Array:
        """Return this chunk's rows of x, with zeros in masked rows.

        The gradient of weight is a sum over all rows, so a NaN in a masked row would spread to it.
        """
        return self.unmasked(self.of(x))

    def unmasked(self, part: jax.Array) -> jax.Array:
        """Return an array of this chunk's rows, with zeros in masked rows."""
        return part if self.counted is None else jnp.where(_like(self.counted, part), part, 0)

    def filled(self, part: jax.Array) -> jax.Array:
        """Return an array of this chunk's rows; masked rows become copies of an unmasked row.

        If there is no unmasked row, they become copies of the first row, with zeros for floats.
        """
        if self.counted is None:
            return part
        first = lax.argmax(self.counted, 0, jnp.int32)
        row = lax.dynamic_index_in_dim(part, first, 0)
        row = self.if_any(row) if jnp.issubdtype(part.dtype, jnp.inexact) else row
        return jnp.where(_like(self.counted, part), part, row)

    def if_any(self, a: jax.Array) -> jax.Array:
        """Return `a`, or zeros if all rows of this chunk are masked."""
        return a if self.counted is None else jnp.where(jnp.any(self.counted), a, 0)

    def put(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        part = launching.own_buffer(part) if self.overlaps else part
        return lax.dynamic_update_slice_in_dim(whole, part, self.start, 0)


def _sum_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(a, axes) if axes else a


def _like(of_rows: jax.Array, a: jax.Array) -> jax.Array:
    """Append axes of size 1 to `of_rows`, so that it broadcasts against `a`."""
    return of_rows.reshape(*of_rows.shape, *[1] * (a.ndim - of_rows.ndim))


def _inverse(total: jax.Array) -> jax.Array:
    """Return 1 / total, or 0 if total is 0: the mean of no rows is defined as 0."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
