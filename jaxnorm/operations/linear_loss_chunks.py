"""The passes of the linear losses, each computed in one loop over chunks of rows.

A chunk takes up to three matmuls, which XLA computes:

    logits = x @ W + b        stored for the current chunk only
    dx     = dlogits @ W^T    written into the chunk's rows of an array for all rows
    dW    += x^T @ dlogits    accumulated in float32, in place, by the matmul's epilogue (cuBLAS'
                              beta = 1), because the loop's carry has no other use

For the cross-entropy, logits have the dtype to which x and weight promote, or the dtype that the
user requests. 16-bit logits halve the memory traffic of each pass over them, and dlogits can reuse
their buffer. For log-probabilities, logits are float32: if the logits z were rounded to 16 bits,
their differences would have errors of about 2^-9 |z|.

dlogits are the gradients of the logits, in the dtype of the matmuls' operands. Their magnitude is
that of probabilities. Multiplied by small factors, they could underflow (below 6e-8 in float16,
below 1e-45 in float32). So all factors are applied elsewhere, in float32: 1 / n and `logits_scale`
multiply the results of the matmuls. The loss weight or the cotangent of a row multiplies the same
row of dx. For dW, it multiplies the same row of x before the matmul.
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
)
from jaxnorm.operations.loss import counted, weighted
from jaxnorm_kernels import launching

# Before the loop, the classes of weight are padded to a multiple of this number. Rows of 16-bit
# arrays are then a multiple of 16 bytes. Otherwise, XLA would pad the operands and slice the result
# of every matmul in the loop.
_COLUMNS = 8

_WHOLE = Over()


def run(
    head: LinearLossCall, *arrays: jax.Array, over: Over = _WHOLE, recompute: bool = False
) -> list[jax.Array]:
    """Compute the results of a pass.

    Args:
      head: the static description of the pass.
      arrays: operands in the order of `LinearLossCall.takes`; one device's shards on a mesh.
      over: the mesh axes over which the operands are sharded.
      recompute: True to apply `jax.checkpoint` to each chunk, so that JAX saves no logits if it
        differentiates this function.
    """
    by_name = dict(zip(head.primals, arrays))
    dtype, _ = head.dtypes(by_name["x"].dtype, by_name["weight"].dtype)

    def gathered(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "x":
            # Inside `jax.shard_map`, the type of the gathered x must say that it is replicated
            # ("invarying"). In code for XLA's partitioner, types have no mesh axes, so there is
            # nothing to say.
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
    chunks = _Chunks(head, flat, over, recompute)
    directions = {"fwd": chunks.forward, "tan": chunks.tangent, "bwd": chunks.backward}

    def finished(name: str, kind: Kind, a: jax.Array) -> jax.Array:
        if kind in OF_ROWS:
            a = a.reshape(*lead, *a.shape[1:])
        if name not in by_name:
            return launching.own_buffer(a)
        # `a` is a gradient, and each device has a partial sum over its shard of classes or rows.
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

    If `dtype` has fewer bits than a's dtype, `a` is cast to it first. `to` is the argument of
    `jax.lax.all_gather` that says whether the result's type varies over these mesh axes.
    """
    for axis, names in enumerate(stored):
        if names:
            a = lax.all_gather(_narrow(a, dtype), names, axis=axis, tiled=True, to=to)
    return a


def _moved(x: jax.Array, over: Over, dtype: np.dtype) -> jax.Array:
    """Exchange shards of x's columns for shards of its rows, by an all-to-all over `over.moved`.

    Afterwards, each device has fewer rows, but all of their columns.
    """
    for axis, names in enumerate(over.moved):
        for name in names:
            x = lax.all_to_all(_narrow(x, dtype), name, axis, x.ndim - 1, tiled=True)
    return x


def _moved_back(dx: jax.Array, over: Over) -> jax.Array:
    """Exchange shards of rows for shards of columns in x's gradient: the inverse of `_moved`."""
    for axis, names in reversed([*enumerate(over.moved)]):
        for name in reversed(names):
            dx = lax.all_to_all(dx, name, dx.ndim - 1, axis, tiled=True)
    return dx


def _narrow(a: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast `a` to `dtype` if that has fewer bits, so that devices exchange fewer bytes."""
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

    `where` has the weights of the losses, which are already multiplied by them. The mean is the sum
    of the losses, divided by the sum of the weights.
    """
    total = jnp.sum(losses, axes)
    if reduction == "sum":
        return total
    weights = jnp.ones_like(losses) if where is None else where.astype(losses.dtype)
    return total * _inverse(jnp.sum(weights, axes))


Carry = dict[str, jax.Array]


class _Chunks:
    """The three passes of a call. x is two-dimensional: its leading axes are flattened to rows."""

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
        self.padding = -self.classes % _COLUMNS if whole else 0
        self.factor = self.padded(self.weight, self.dtype)  # Cast and pad once, before the loop.
        self.teacher = _Teacher(self, by_name) if head.has_teacher else None
        dtypes = self.logits_dtype, self.dtype
        shards = lax.axis_size(over.classes) if over.classes else 1
        # For a divergence, each row of a chunk has the logits of both the student and the teacher.
        shape = self.weight.shape[0], self.classes * (1 if self.teacher is None else 2)
        self.chunk = chunk_rows(head.chunk, self.rows, shape, *dtypes, shards)
        # As in plain JAX, bfloat16 gradients are rounded before the sum over devices. float16
        # gradients are not, because small ones would underflow: in a forward pass, they have not
        # been multiplied by the loss scale yet.
        is_narrow = self.dtype.name == "bfloat16"
        self.summed_dtype = self.dtype if is_narrow else self.wide

    # --------------------------------------------------------------------------------- passes

    def forward(self) -> list[jax.Array]:
        head = self.head
        if head.reduction == "none" or not head.wrt:
            y, *rest = self.of_rows()
            return [self.weighted(y) if head.reduction == "none" else self.total(y), *rest]
        cotangents, sizes = jnp.ones(self.rows, self.wide), None
        is_weighted = self.where is not None and self.where.dtype != bool
        if is_weighted or self.row_scales is not None:
            cotangents = self.weighted(cotangents)
            sizes = self.sizes([cotangents])
        losses, *gradients = self.gradients([cotangents], self.scale(), sizes)
        return [self.total(losses), *gradients]

    def backward(self) -> list[jax.Array]:
        dy, *others = self.linear
        cotangents = [self.weighted(dy), *others]
        return self.gradients(cotangents, jnp.ones((), self.wide), self.sizes(cotangents))

    def sizes(self, cotangents: Sequence[jax.Array]) -> jax.Array:
        """Return, for each row, the magnitude of its largest cotangent, rounded to a power of two.

        Cotangents are divided by it to avoid underflow; division by a power of two is exact. If
        ``logits_scale`` has a number for each row, the magnitude is multiplied by this number
        before it is rounded. The result is 1 for rows with a weight of 0, and for rows whose
        magnitude is 0 or not finite.
        """
        sizes = [jnp.abs(lax.stop_gradient(ct)) for ct in cotangents]
        sizes = [jnp.max(a, -1, initial=0) if a.ndim > 1 else a for a in sizes]
        size = functools.reduce(jnp.maximum, sizes)
        if self.row_scales is not None:
            size = size * self.row_scales
        counts = jnp.isfinite(size) & (size > 0)
        if self.counted is not None:
            counts &= self.counted
        info = jnp.finfo(self.wide)
        size = jnp.clip(jnp.where(counts, size, 1), info.smallest_normal, info.max / 2)
        return lax.reduce_precision(size.astype(self.wide), info.nexp, mantissa_bits=0)

    def of_rows(self) -> list[jax.Array]:
        """Return the results of all rows and, if `keeps` is set in the call, the statistics."""

        def step(rows: _Rows, carry: Carry) -> Carry:
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

    def gradients(
        self, cotangents: Sequence[jax.Array], scale: jax.Array, sizes: jax.Array | None
    ) -> list[jax.Array]:
        """Return `scale` times the gradients of sum(cotangents * results).

        A forward pass also returns the losses of the rows, before the gradients. `sizes` has, for
        each row, the power of two by which its cotangents are divided in the loop (see the method
        `sizes`). None stands for 1 in all rows.
        """
        head = self.head
        weight, makes_losses = self.factor, head.direction == "fwd"
        factor = _power_of_two(head.logits_scale)
        if factor != 1:
            cotangents, scale = [ct / factor for ct in cotangents], scale * factor
        of_x = of_weight = scale
        # In the gradients of weight and bias, each row is multiplied by its share; None stands for
        # shares of 1.
        shares = None
        if sizes is not None:
            cotangents = [ct / _like(sizes, ct) for ct in cotangents]
            largest = self.largest(sizes)
            of_weight, shares = scale * largest, sizes / largest

        def step(rows: _Rows, carry: Carry) -> Carry:
            x = rows.of_x(self.x)
            logits = self.product(x, weight, self.bias)
            call = self.call(logits.shape, rows).with_stats()
            residuals, results = self.residuals(call, rows, logits), {}
            if makes_losses:
                results["y"] = rows.put(carry["y"], residuals["y"])
            dlogits = linear_loss_call.dlogits(
                call, residuals, [*map(rows.of, cotangents)], self.dtype
            )
            if "x" in head.wrt:
                dx = self.dot(dlogits, weight, (1, 1), self.wide)
                dx = of_x * (dx if sizes is None else rows.of(sizes)[:, None] * dx)
                results["x"] = rows.put(carry["x"], dx.astype(carry["x"].dtype))
            share = None if shares is None else rows.of(shares)[:, None]
            if "weight" in head.wrt:
                x = x if share is None else share * x.astype(self.wide)
                product = self.dot(x.astype(self.dtype), dlogits, (0, 0), self.wide)
                results["weight"] = carry["weight"] + product
            if "bias" in head.wrt:
                of_rows = dlogits if share is None else share * dlogits.astype(self.wide)
                results["bias"] = carry["bias"] + jnp.sum(of_rows, 0, dtype=self.wide)
            return results

        dx_dtype = self.summed_dtype if self.over.classes else head.gradient_dtype(self.x.dtype)
        empty = {
            "y": jnp.zeros(self.rows, self.wide),
            "x": jnp.zeros(self.x.shape, dx_dtype),
            "weight": jnp.zeros(self.factor.shape, self.wide),
            "bias": jnp.zeros(self.classes + self.padding, self.wide),
        }
        names = (*["y"] * makes_losses, *head.wrt)
        results = self.loop(step, {name: empty[name] for name in names})
        return [self.finished(name, results[name], of_weight) for name in names]

    def largest(self, sizes: jax.Array) -> jax.Array:
        """Return the maximum of `sizes` over the rows of all devices, without masked rows.

        The result is 1 if all rows are masked.
        """
        counts = jnp.ones_like(sizes) if self.counted is None else self.counted
        largest = jnp.max(jnp.where(counts, sizes, 0), initial=0)
        if self.over.rows:
            largest = lax.pmax(largest, self.over.rows)
        return jnp.where(largest > 0, largest, 1)

    def finished(self, name: str, gradient: jax.Array, scale: jax.Array) -> jax.Array:
        """Multiply the gradient of weight or bias by `scale`, and cast it for the sum over devices.

        Other results are returned unchanged.
        """
        if name not in ("weight", "bias"):
            return gradient
        gradient = scale * lax.slice_in_dim(gradient, 0, self.classes, axis=-1)
        return gradient.astype(self.summed_dtype) if self.over.rows else gradient

    def tangent(self) -> list[jax.Array]:
        """Compute the tangents of the rows' results from the tangents of the operands."""
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
        """Return a dict with the arrays that the derivative of a chunk's results takes.

        Statistics that the forward pass did not save are recomputed.
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
        return lax.dot_general(
            a, b, axes, precision=self.head.precision, preferred_element_type=dtype
        )

    def call(self, shape: tuple[int, ...], rows: "_Rows") -> Call:
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

    @property
    def overlaps(self) -> bool:
        return self.rows % self.chunk > 0

    def loop(self, step: Callable[["_Rows", Carry], Carry], carry: Carry) -> Carry:
        """Run the loop over the chunks, and return the carry after the last one.

        ``step(rows, carry)`` processes one chunk and returns the next carry.
        """
        carry = {name: self.varying(name, a) for name, a in carry.items()}
        if not self.rows:
            return carry
        count = math.ceil(self.rows / self.chunk)

        def body(i: jax.Array, carry: Carry) -> Carry:
            return step(_Rows(self, i), carry)

        if self.recompute:
            body = jax.checkpoint(body, prevent_cse=count == 1)
        if count == 1:
            return body(jnp.int32(0), carry)
        return lax.fori_loop(0, count, body, carry)

    def varying(self, name: str, a: jax.Array) -> jax.Array:
        """Cast an array of the loop's initial carry to the type that `step` returns.

        Inside `jax.shard_map`, a type says over which mesh axes an array varies. The initial carry,
        an array of zeros, varies over none of them.
        """
        arrays = [a for a in (self.x, self.weight, self.labels) if a is not None]
        own = (jax.typeof(a).manual_axis_type.varying for a in arrays)
        over = frozenset().union(*own)
        if name in self.head.outputs:  # `step` sums these arrays over all shards of classes.
            over -= {*self.over.classes}
        return lax.pcast(a, tuple(sorted(over)), to="varying") if over else a


class _Teacher:
    """The teacher's linear layer, whose logits a divergence takes as constants."""

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
    """The rows of one chunk, with methods that slice the arrays of the call.

    All chunks have the same number of rows, without padding. If this number does not divide the
    number of all rows, the first two chunks overlap. The rows that they share are masked in the
    first chunk, and the second chunk overwrites their results.

    With an overlap, the slices of later chunks may start at addresses that are not aligned. Kernels
    need aligned addresses, so the slices are copied.
    """

    def __init__(self, chunks: _Chunks, index: jax.Array):
        size, short = chunks.chunk, -chunks.rows % chunks.chunk
        self.size, self.start = size, jnp.maximum(index * size - short, 0)
        self.chunks = chunks
        own = self.of(chunks.counted) if chunks.counted is not None else None
        if chunks.overlaps:
            first = self.start + jnp.arange(size) < (index + 1) * size - short
            own = first if own is None else own & first
        # A mask: False for rows that the user masks, and for rows that the next chunk has, too.
        # None if there are no such rows.
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
        return launching.own_buffer(part) if self.chunks.overlaps else part

    def of_x(self, x: jax.Array) -> jax.Array:
        """Return this chunk's rows of x, with zeros in masked rows.

        The gradient of weight is a sum over all rows, so a NaN in a masked row would spread to it.
        """
        part = self.of(x)
        return part if self.counted is None else jnp.where(self.counted[:, None], part, 0)

    def put(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        part = launching.own_buffer(part) if self.chunks.overlaps else part
        return lax.dynamic_update_slice_in_dim(whole, part, self.start, 0)


def _sum_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(a, axes) if axes else a


def _like(of_rows: jax.Array, a: jax.Array) -> jax.Array:
    """Append axes of size 1 to `of_rows`, so that it broadcasts against `a`."""
    return of_rows.reshape(*of_rows.shape, *[1] * (a.ndim - of_rows.ndim))


def _power_of_two(scale: float) -> float:
    """Return the largest power of two that is at most `scale`; multiplying by it is exact.

    The result is limited to 2^-100 ... 2^100, so that numbers near 1 stay finite if they are
    multiplied or divided by it.
    """
    _, exponent = math.frexp(scale)
    return 2.0 ** max(-100, min(exponent - 1, 100))


def _inverse(total: jax.Array) -> jax.Array:
    """Return 1 / total, or 0 if total is 0: the mean of no rows is defined as 0."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
