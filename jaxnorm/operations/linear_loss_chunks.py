"""The passes of a linear layer's loss or log-probabilities, computed in chunks of rows.

Each pass is one loop over chunks of rows. XLA computes its three matmuls:

    logits = x W + b          stored for the current chunk only. For a loss, their dtype is the one
                              to which x and weight promote, or the one that the caller requests.
                              16-bit logits halve the memory traffic of each pass over them, and
                              dlogits can reuse their buffer. For log-probabilities, logits are in
                              float32, because 16-bit logits z give differences an error of
                              2^-9 |z|
    dx     = dlogits W^T      written into the rows of one array
    dW    += x^T dlogits      accumulated in float32, in place, by the matmul's epilogue (cuBLAS'
                              beta = 1), since the loop's carry has no other use. The first chunk
                              precedes the loop and writes the array, which needs no zeros. A
                              single chunk writes dW in its own dtype. So does the backward pass
                              of log-probabilities, if it can hold the 16-bit dlogits of all rows

dlogits include all factors: 1 / n, a row's weight or cotangent, and `logits_scale`. The matmuls
therefore write dx and dW in their own dtypes, without another pass over them.

float16 dlogits would underflow below 6e-8. There, each row is divided by its cotangent's magnitude,
a power of two, which multiplies its row of dx in float32 and, in the gradient of weight, its row of
x.
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

# Weight's classes are padded to a multiple of this once, before the loop. Otherwise, if rows are
# not a multiple of 16 bytes, XLA would pad the operands and slice the result of every matmul.
_COLUMNS = 8

_WHOLE = Over()


def run(
    head: LinearLossCall, *arrays: jax.Array, over: Over = _WHOLE, recompute: bool = False
) -> list[jax.Array]:
    """Compute the results of a pass.

    Args:
      arrays: operands in the order of `LinearLossCall.kinds_taken`; shards if axes are split `over`
        a mesh.
      recompute: checkpoint each chunk, so that derivatives of this function save no logits either.
    """
    by_name = dict(zip(head.primals, arrays))
    dtype, _ = head.dtypes(by_name["x"].dtype, by_name["weight"].dtype)

    def gathered(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "x":
            # Inside `jax.shard_map`, the type of the gathered x must be replicated ("invarying").
            # In code that XLA's partitioner has split, types name no mesh axes.
            is_typed = {*sum(over.gathered, ())} <= jax.typeof(a).manual_axis_type.varying
            to = "invarying" if is_typed else "varying"
            return _moved(_gathered(a, over.gathered, dtype, to), over, dtype)
        return _gathered(a, over.stored, dtype, "varying") if kind == "weight" else a

    whole = [*map(gathered, head.kinds_taken, arrays)]
    lead = whole[0].shape[:-1]
    count = math.prod(lead)

    def flattened(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "mask":  # One row for all rows of x, or one for each.
            if math.prod(a.shape[:-1]) == 1:
                return launching.own_buffer(a.reshape(1, -1))
            a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
        if kind in ("row", "candidate", "mask"):
            a = launching.own_buffer(a)  # Arrays that kernels read, whole or in chunks.
        return a.reshape(count, *a.shape[len(lead) :]) if kind in OF_ROWS else a

    flat = [*map(flattened, head.kinds_taken, whole)]
    chunks = _Chunks(head, flat, over, recompute)
    directions = {"fwd": chunks.forward, "tan": chunks.tangent, "bwd": chunks.backward}

    def finished(name: str, kind: Kind, a: jax.Array) -> jax.Array:
        if kind in OF_ROWS:
            a = a.reshape(*lead, *a.shape[1:])
        if name not in by_name:
            return launching.own_buffer(a)
        # This is a gradient: each device has a partial sum over its own classes or rows.
        if kind == "x":
            a = _scattered(_moved_back(a, over), over.classes, over.gathered)
        else:
            a = _scattered(a, over.rows, over.stored if kind == "weight" else ())
        return a.astype(head.gradient_dtype(by_name[name].dtype))

    return [*map(finished, head.returns, head.kinds_returned, directions[head.direction]())]


def _gathered(
    a: jax.Array, stored: Sequence[tuple[str, ...]], dtype: np.dtype, to: str
) -> jax.Array:
    """All-gather each axis of `a` over the mesh axes that `stored` lists for it.

    If `dtype` is narrower than a's, `a` is cast to it first. `to` is an argument of
    `jax.lax.all_gather`: the result's type over these mesh axes.
    """
    for axis, names in enumerate(stored):
        if names:
            a = lax.all_gather(_narrow(a, dtype), names, axis=axis, tiled=True, to=to)
    return a


def _moved(x: jax.Array, over: Over, dtype: np.dtype) -> jax.Array:
    """Return x with whole rows, by an all-to-all over `over.moved`.

    Before it, a device has more rows, but only its shard of their features.
    """
    for axis, names in enumerate(over.moved):
        for name in names:
            x = lax.all_to_all(_narrow(x, dtype), name, axis, x.ndim - 1, tiled=True)
    return x


def _moved_back(dx: jax.Array, over: Over) -> jax.Array:
    """Undo `_moved` for the gradient of x: each device gets its shard of the features again."""
    for axis, names in reversed([*enumerate(over.moved)]):
        for name in reversed(names):
            dx = lax.all_to_all(dx, name, dx.ndim - 1, axis, tiled=True)
    return dx


def _narrow(a: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast `a` to the matmuls' dtype if that is narrower, so that devices exchange fewer bytes."""
    return a.astype(min(a.dtype, dtype, key=lambda dtype: dtype.itemsize))


def _scattered(a: jax.Array, over: tuple[str, ...], stored: Sequence[tuple[str, ...]]) -> jax.Array:
    """Sum `a` over the mesh axes in `over`.

    An axis of `a` is reduce-scattered over the mesh axes that `stored` lists for it. Over all other
    mesh axes, `a` is all-reduced.
    """
    scattered = sum(stored, ())
    for axis, names in enumerate(stored):
        if names:
            a = lax.psum_scatter(a, names, scatter_dimension=axis, tiled=True)
    return _sum_over(a, tuple(name for name in over if name not in scattered))


def reduced(
    losses: jax.Array, where: jax.Array | None, reduction: Reduction, axes: Sequence[int]
) -> jax.Array:
    """Return the sum of losses over axes; for a mean, divided by the sum of their weights."""
    total = jnp.sum(losses, axes)
    if reduction == "sum":
        return total
    weights = jnp.ones_like(losses) if where is None else where.astype(losses.dtype)
    return total * _inverse(jnp.sum(weights, axes))


Carry = dict[str, jax.Array]


class _Chunks:
    """The passes of a call on two-dimensional x and one-dimensional row arrays."""

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
        # Padding would separate the shards of a row's classes, and a mask has no padding.
        whole = not over.classes and self.mask is None
        self.padding = -self.classes % _COLUMNS if whole else 0
        self.factor = self.padded(self.weight, self.dtype)  # once, before the loop
        self.teacher = _Teacher(self, by_name) if head.has_teacher else None
        dtypes = self.logits_dtype, self.dtype
        shards = lax.axis_size(over.classes) if over.classes else 1
        # For each row, a chunk of a divergence has logits of both the student and the teacher.
        shape = self.weight.shape[0], self.classes * (1 if self.teacher is None else 2)
        self.chunk = chunk_rows(
            head.chunk, self.rows, shape, *dtypes, shards, accumulator=self.accumulator
        )
        # One matmul for each gradient of log-probabilities, whose float32 logits are larger.
        self.holds_dlogits = False
        if self.kept and head.chunk is None and not recompute and self.chunk < self.rows:
            size = rows_beside_dlogits(
                self.chunk, self.rows, self.classes, *dtypes, self.accumulator
            )
            self.holds_dlogits, self.chunk = size is not None, size or self.chunk

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
        """Bytes of the array in which several chunks accumulate weight's gradient.

        One chunk needs no such array, since its matmul writes the result. It is 0 if the result
        itself has the sum's dtype, and in float16, where the result of one chunk is scaled.
        """
        has_sum = self.head.direction != "tan" and "weight" in self.head.wrt
        dtype = self.gradient_dtype("weight", self.weight)
        if not has_sum or self.dtype.name == "float16" or dtype == self.wide:
            return 0
        return math.prod(self.weight.shape) * self.wide.itemsize

    def gradient_dtype(self, name: str, operand: jax.Array) -> np.dtype:
        """Return the dtype of a device's part of the gradient of an operand.

        As in plain JAX, bfloat16 gradients are rounded before the sum over devices. In float16,
        small ones would underflow, because no loss scale is applied yet in a forward pass.
        """
        if self.over.classes if name == "x" else self.over.rows:
            return self.dtype if self.dtype.name == "bfloat16" else self.wide
        return self.head.gradient_dtype(operand.dtype)

    def sizes(self, cotangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return each row's magnitude of the gradient of logits, and the largest one.

        The magnitude is that of the row's largest cotangent, times the scale of the logits, rounded
        down to a power of two, by which a division rounds nothing. Rows that do not count, or whose
        magnitude is 0 or not finite, get the largest one of all devices' other rows, or 1.
        """
        sizes = [jnp.abs(lax.stop_gradient(ct)) for ct in cotangents]
        sizes = [jnp.max(a, -1, initial=0) if a.ndim > 1 else a for a in sizes]
        size = functools.reduce(jnp.maximum, sizes) * self.head.logits_scale
        if self.row_scales is not None:
            size = size * self.row_scales
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
        """Return the results of all rows, and the statistics if the call returns them."""

        def step(rows: _Rows, carry: Carry) -> Carry:
            logits = self.product(rows.of_x(self.x), self.factor, self.bias)
            call = self.call(logits.shape, rows)
            results = linear_loss_call.forward(call, rows.operands(logits))
            return {name: rows.put(carry[name], a) for name, a in results.items()}

        results = self.loop(step, self.empty_results())
        return [results[name] for name in self.head.outputs]

    def empty_results(self) -> Carry:
        """Return arrays of zeros, which the loop fills with the rows' results."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.head.outputs, (self.rows,))
        if self.head.several:
            assert self.labels is not None
            shapes["y"] = self.labels.shape
        return {name: jnp.zeros(shape, self.wide) for name, shape in shapes.items()}

    def gradients(self, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the gradients of sum(cotangents * results).

        A forward pass (``fwd``) returns the losses before the gradients.
        """
        head, makes_losses = self.head, self.head.direction == "fwd"
        given = {"x": self.x, "weight": self.weight, "bias": self.bias}
        operands = {name: a for name, a in given.items() if a is not None}
        dtypes = {name: self.gradient_dtype(name, a) for name, a in operands.items()}
        sizes = shares = None
        largest = jnp.ones((), self.wide)
        if self.dtype.name == "float16":
            sizes, largest = self.sizes(cotangents)
            shares = sizes / largest  # each row's factor in the gradients of weight and bias
            cotangents = [ct / _like(sizes, ct) for ct in cotangents]
        in_one = self.chunk == self.rows or self.holds_dlogits
        weight_dtype = dtypes["weight"] if in_one and sizes is None else self.wide

        def step(rows: _Rows, carry: Carry) -> Carry:
            *y, dlogits = self.dlogits(rows, cotangents)
            results = products(rows, dlogits, carry)
            return results | ({"y": rows.put(carry["y"], y[0])} if makes_losses else {})

        def products(rows: _Rows, dlogits: jax.Array, carry: Carry) -> Carry:
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

        carry = {}
        if makes_losses:
            carry["y"] = jnp.zeros(self.rows, self.wide)
        if "x" in head.wrt:
            carry["x"] = jnp.zeros(self.x.shape, dtypes["x"])
        if self.holds_dlogits:
            dlogits = self.dlogits_of_all_rows(cotangents)
            results = products(_Rows(self, jnp.int32(0), self.rows), dlogits, carry)
        else:
            results = self.loop(step, carry, starts_sums=head.wrt != ("x",))

        def finished(name: str) -> jax.Array:
            if name in carry:
                return results[name]
            a = results.get(name)
            if a is None:  # There are no rows.
                return jnp.zeros(operands[name].shape, dtypes[name])
            a = lax.slice_in_dim(a, 0, self.classes, axis=-1)
            return (a if sizes is None else largest * a).astype(dtypes[name])

        return [finished(name) for name in (*["y"] * makes_losses, *head.wrt)]

    def dlogits(self, rows: "_Rows", cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results of a chunk, unless the call has kept them, and its dlogits."""
        logits = self.product(rows.of_x(self.x), self.factor, self.bias)
        call = self.call(logits.shape, rows)
        cotangents = [*map(rows.of, cotangents)]
        if self.kept:
            residuals = self.residuals(call.with_stats(), rows, logits)
            return [linear_loss_call.dlogits(call, residuals, cotangents, self.dtype)]
        return linear_loss_call.forward_and_dlogits(
            call, rows.operands(logits), cotangents, self.dtype, differentiable=self.recompute
        )

    def dlogits_of_all_rows(self, cotangents: Sequence[jax.Array]) -> jax.Array:
        """Return the dlogits of all rows, from a chunk's logits at a time."""

        def step(rows: _Rows, carry: Carry) -> Carry:
            return {"dlogits": rows.put(carry["dlogits"], self.dlogits(rows, cotangents)[-1])}

        shape = self.rows, self.classes + self.padding
        return self.loop(step, {"dlogits": lax.empty(shape, self.dtype)})["dlogits"]

    def tangent(self) -> list[jax.Array]:
        """Return the tangents of the rows' results, given the tangents of the operands in `wrt`."""
        along = dict(zip(self.head.wrt, self.linear))
        tx, tw, tb = (along.get(name) for name in ("x", "weight", "bias"))
        tw = None if tw is None else self.padded(tw, self.dtype)
        tb = None if tb is None else self.padded(tb, self.logits_dtype)

        def step(rows: _Rows, carry: Carry) -> Carry:
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

    def residuals(self, call: Call, rows: "_Rows", logits: jax.Array) -> Carry:
        """Return the residuals for a chunk's derivative; recompute statistics if not saved."""
        operands = rows.operands(logits)
        kept = rows.kept() if self.kept else linear_loss_call.forward(call, operands)
        return operands | kept

    def weighted(self, losses: jax.Array) -> jax.Array:
        return losses if self.where is None else weighted(losses, _like(self.where, losses))

    def scale(self) -> jax.Array:
        """Return the factor of the sum of losses: 1 for a sum, 1 / (sum of weights) for a mean."""
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
        """Pad the classes of weight, of bias or of their tangents with zeros."""
        a = a.astype(dtype)
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, self.padding)]) if self.padding else a

    def dot(self, a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: np.dtype) -> jax.Array:
        """Contract one axis of each operand. The sums are float32 (float64), rounded once."""
        axes = ((over[:1], over[1:]), ((), ()))
        wide = max(dtype, a.dtype, key=lambda dtype: dtype.itemsize)  # as `lax` requires
        result = lax.dot_general(
            a, b, axes, precision=self.head.precision, preferred_element_type=wide
        )
        return result.astype(dtype)

    def call(self, shape: tuple[int, ...], rows: "_Rows") -> Call:
        """Return the call of the cross-entropy of a chunk's logits and labels."""
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
        step: Callable[["_Rows", Carry], Carry],
        carry: Carry,
        *,
        starts_sums: bool = False,
    ) -> Carry:
        """Return the carry after `step` has processed all chunks in order.

        If `starts_sums`, `step` adds arrays to the carry of the first chunk, which therefore
        precedes the loop.
        """
        carry = {name: self.varying(name, a) for name, a in carry.items()}
        if not self.rows:
            return carry
        count = math.ceil(self.rows / self.chunk)

        def body(i: jax.Array, carry: Carry, *, in_loop: bool = True) -> Carry:
            def run(i: jax.Array, carry: Carry) -> Carry:
                return step(_Rows(self, i), carry)

            return (jax.checkpoint(run, prevent_cse=not in_loop) if self.recompute else run)(
                i, carry
            )

        first = int(starts_sums or count == 1)
        if first:
            carry = body(jnp.int32(0), carry, in_loop=False)
        return lax.fori_loop(first, count, body, carry) if first < count else carry

    def varying(self, name: str, a: jax.Array) -> jax.Array:
        """Cast the loop's initial carry to the type that `step` returns.

        Inside `jax.shard_map`, types say over which mesh axes an array varies. A carry of zeros
        varies over none.
        """
        arrays = [a for a in (self.x, self.weight, self.labels) if a is not None]
        own = (jax.typeof(a).manual_axis_type.varying for a in arrays)
        over = frozenset().union(*own)
        if name in self.head.outputs:  # these are summed over the classes already
            over -= {*self.over.classes}
        return lax.pcast(a, tuple(sorted(over)), to="varying") if over else a


class _Teacher:
    """The teacher's linear layer: the operands of a divergence that are constants."""

    def __init__(self, chunks: _Chunks, arrays: dict[str, jax.Array]):
        self.chunks, self.x, weight = chunks, arrays["teacher_x"], arrays["teacher_weight"]
        self.dtype, self.logits_dtype = chunks.head.dtypes(self.x.dtype, weight.dtype)
        self.weight, self.bias = chunks.padded(weight, self.dtype), arrays.get("teacher_bias")

    def logits(self, rows: "_Rows") -> jax.Array:
        """Return the teacher's logits for the rows of a chunk."""
        x = rows.of_x(self.x).astype(self.dtype)
        logits = self.chunks.dot(x, self.weight, (1, 0), self.logits_dtype)
        if self.bias is None:
            return logits
        return logits + self.chunks.padded(self.bias, self.logits_dtype)[None]


class _Rows:
    """The rows of a chunk.

    All chunks have the same size, without padding. If the rows are not a multiple of it, the first
    chunk overlaps the second. The shared rows do not count in the first chunk, and the second one
    overwrites what the first wrote there. Such chunks start at any row. They are copied for
    kernels, which need aligned addresses.
    """

    def __init__(self, chunks: _Chunks, index: jax.Array, size: int | None = None):
        size = size or chunks.chunk
        short = -chunks.rows % size
        self.size, self.start = size, jnp.maximum(index * size - short, 0)
        self.chunks, self.overlaps = chunks, short > 0
        own = self.of(chunks.counted) if chunks.counted is not None else None
        if self.overlaps:
            first = self.start + jnp.arange(size) < (index + 1) * size - short
            own = first if own is None else own & first
        # Rows that the next chunk also has are masked here, like rows that do not count.
        self.counted = own

    @property
    def mask(self) -> jax.Array:
        """Return the part of the mask of classes that belongs to this chunk's rows."""
        mask = self.chunks.mask
        assert mask is not None
        return mask if len(mask) == 1 else self.of(mask)

    def operands(self, logits: jax.Array) -> Carry:
        """Return the operands of the function of logits, given a chunk's logits."""
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
        """Return the saved statistics; a log_sum of -inf marks rows that do not count."""
        kept = {name: self.of(a) for name, a in self.chunks.kept.items()}
        if self.counted is not None:
            kept["log_sum"] = jnp.where(self.counted, kept["log_sum"], -jnp.inf)
        return kept

    def of(self, a: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(a, self.start, self.size)
        return launching.own_buffer(part) if self.overlaps else part

    def of_x(self, x: jax.Array) -> jax.Array:
        """Return this chunk's rows of x, with 0 in rows that do not count.

        The gradient of weight is a sum over all rows, so a NaN in an excluded row would spread.
        """
        part = self.of(x)
        return part if self.counted is None else jnp.where(self.counted[:, None], part, 0)

    def put(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        part = launching.own_buffer(part) if self.overlaps else part
        return lax.dynamic_update_slice_in_dim(whole, part, self.start, 0)


def _sum_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(a, axes) if axes else a


def _like(of_rows: jax.Array, a: jax.Array) -> jax.Array:
    """Return `rows` with axes of size 1 appended, so that it broadcasts against another array."""
    return of_rows.reshape(*of_rows.shape, *[1] * (a.ndim - of_rows.ndim))


def _inverse(total: jax.Array) -> jax.Array:
    """Return 1 / total, or 0 if total is 0, because an empty mean is 0."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
