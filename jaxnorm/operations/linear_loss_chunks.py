"""The loss of linear logits, or log-probabilities, chunk by chunk: what a call's passes compute.

One loop over chunks of rows makes all of a pass. Its three products are XLA's:

    logits = x W + b          which is all that a chunk keeps: those of a loss in the dtype to which
                              x and weight promote, or another that is asked for. Of 16 bits they
                              are half as much to read in each of the passes over them, and dlogits,
                              of that dtype, can take their place. Those of log-probabilities are
                              the sums in float32: by 16 bits their differences err by 2^-9 |z|
    dx     = dlogits W^T      into the rows of one array
    dW    += x^T dlogits      in float32: a product whose epilogue adds what was there, in place
                              (cuBLAS' beta = 1), since the sum is the only use of what the loop
                              carries

dlogits are in the products' dtype and of the size of probabilities. All other factors are applied
in float32, because float16 would lose what is below 6e-8, and float32 what is below 1e-45. 1 / n
and `logits_scale` multiply the products. A row's weight or cotangent multiplies its row of dx and,
in weight's gradient, its row of x.
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
from jaxnorm.operations import checks, linear_loss_call
from jaxnorm.operations.linear_loss_call import Kind, LinearLossCall, Over, Reduction, chunk_rows
from jaxnorm.operations.loss import counted, weighted
from jaxnorm_kernels import launching

# Classes are padded to a multiple of this, with weight once: XLA pads the operands of each product
# of a chunk, and cuts its result, where rows are no multiple of 16 bytes.
_COLUMNS = 8

_WHOLE = Over()


def run(
    head: LinearLossCall, *arrays: jax.Array, over: Over = _WHOLE, recompute: bool = False
) -> list[jax.Array]:
    """The results of a pass.

    Args:
      arrays: as `LinearLossCall.kinds_taken` says; shards where axes are split `over` a mesh.
      recompute: for derivatives of this function, which then keep no logits either.
    """
    by_name = dict(zip(head.primals, arrays))
    dtype, _ = head.dtypes(by_name["x"].dtype, by_name["weight"].dtype)

    def gathered(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "x":
            # Inside `jax.shard_map` its type says that it is replicated from here on.
            # Types in a part of a program that XLA's partitioner has split name no axes.
            is_typed = {*sum(over.gathered, ())} <= jax.typeof(a).manual_axis_type.varying
            to = "invarying" if is_typed else "varying"
            return _moved(_gathered(a, over.gathered, dtype, to), over, dtype)
        return _gathered(a, over.stored, dtype, "varying") if kind == "weight" else a

    whole = [*map(gathered, head.kinds_taken, arrays)]
    lead = whole[0].shape[:-1]
    count = math.prod(lead)

    def flattened(kind: Kind, a: jax.Array) -> jax.Array:
        if kind == "mask":  # Of all rows, or of each.
            if math.prod(a.shape[:-1]) == 1:
                return launching.own_buffer(a.reshape(1, -1))
            a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
        if kind in ("row", "mask"):
            a = launching.own_buffer(a)  # Kernels read them, or chunks of them.
        rows = kind in ("x", "row", "mask")
        return a.reshape(count, *a.shape[len(lead) :]) if rows else a

    flat = [*map(flattened, head.kinds_taken, whole)]
    chunks = _Chunks(head, flat, over, recompute)
    directions = {"fwd": chunks.forward, "tan": chunks.tangent, "bwd": chunks.backward}

    def finished(name: str, kind: Kind, a: jax.Array) -> jax.Array:
        if kind in ("x", "row"):
            a = a.reshape(*lead, *a.shape[1:])
        if name not in by_name:
            return launching.own_buffer(a)
        # A gradient. Each device has a sum over its own classes or over its own rows.
        if kind == "x":
            a = _scattered(_moved_back(a, over), over.classes, over.gathered)
        else:
            a = _scattered(a, over.rows, over.stored if kind == "weight" else ())
        return a.astype(head.gradient_dtype(by_name[name].dtype))

    return [*map(finished, head.returns, head.kinds_returned, directions[head.direction]())]


def _gathered(
    a: jax.Array, stored: Sequence[tuple[str, ...]], dtype: np.dtype, to: str
) -> jax.Array:
    """`a` gathered along each axis over the mesh axes of `stored`, in `dtype` if that is narrower.

    `to`: the result's type over these axes, as `jax.lax.all_gather` takes it.
    """
    for axis, names in enumerate(stored):
        if names:
            a = lax.all_gather(_narrow(a, dtype), names, axis=axis, tiled=True, to=to)
    return a


def _moved(x: jax.Array, over: Over, dtype: np.dtype) -> jax.Array:
    """x with whole rows: devices that have a shard of d of the same rows share these rows out."""
    for axis, names in enumerate(over.moved):
        for name in names:
            x = lax.all_to_all(_narrow(x, dtype), name, axis, x.ndim - 1, tiled=True)
    return x


def _moved_back(dx: jax.Array, over: Over) -> jax.Array:
    """x's gradient in shards of d, as x was before `_moved`."""
    for axis, names in reversed([*enumerate(over.moved)]):
        for name in reversed(names):
            dx = lax.all_to_all(dx, name, dx.ndim - 1, axis, tiled=True)
    return dx


def _narrow(a: jax.Array, dtype: np.dtype) -> jax.Array:
    """`a` in the dtype of the products, if that is narrower: devices exchange no more bytes."""
    return a.astype(min(a.dtype, dtype, key=lambda dtype: dtype.itemsize))


def _scattered(a: jax.Array, over: tuple[str, ...], stored: Sequence[tuple[str, ...]]) -> jax.Array:
    """The sum of `a` over mesh axes, of which each device keeps the shard that `stored` says."""
    scattered = sum(stored, ())
    for axis, names in enumerate(stored):
        if names:
            a = lax.psum_scatter(a, names, scatter_dimension=axis, tiled=True)
    return _sum_over(a, tuple(name for name in over if name not in scattered))


def reduced(
    losses: jax.Array, where: jax.Array | None, reduction: Reduction, axes: Sequence[int]
) -> jax.Array:
    """The sum of losses over axes, or their mean by the sum of their weights."""
    total = jnp.sum(losses, axes)
    if reduction == "sum":
        return total
    weights = jnp.ones_like(losses) if where is None else where.astype(losses.dtype)
    return total * _inverse(jnp.sum(weights, axes))


Carry = dict[str, jax.Array]


class _Chunks:
    """The passes over two-dimensional x, and row arrays of one axis."""

    def __init__(
        self, head: LinearLossCall, arrays: Sequence[jax.Array], over: Over, recompute: bool
    ):
        self.head, self.over, self.recompute = head, over, recompute
        given = list(arrays)
        by_name = dict(zip(head.primals, given))
        self.kept = dict(zip(head.kept, given[len(head.primals) : head.residuals]))
        self.linear = given[head.residuals :]
        self.x, self.weight, self.labels = by_name["x"], by_name["weight"], by_name["labels"]
        self.bias, self.where = by_name.get("bias"), by_name.get("where")
        self.mask = by_name.get("mask")
        self.counted = None if self.where is None else counted(self.where)
        self.dtype, self.logits_dtype = head.dtypes(self.x.dtype, self.weight.dtype)
        self.wide = checks.arithmetic_dtype(self.dtype, self.logits_dtype)
        self.rows, self.classes = len(self.x), self.weight.shape[1]
        # Shards of a row's classes have no padding between them, and a mask has none.
        whole = not over.classes and self.mask is None
        self.padding = -self.classes % _COLUMNS if whole else 0
        self.factor = self.padded(self.weight, self.dtype)  # once, before the loop
        dtypes = self.logits_dtype, self.dtype
        shards = lax.axis_size(over.classes) if over.classes else 1
        self.chunk = chunk_rows(head.chunk, self.rows, self.weight.shape, *dtypes, shards)
        # Gradients are summed over devices as in plain JAX, where products round them. In float16
        # they would lose what is small: a forward pass does not have the scale of the loss.
        is_narrow = self.dtype.name == "bfloat16"
        self.summed_dtype = self.dtype if is_narrow else self.wide

    # --------------------------------------------------------------------------------- passes

    def forward(self) -> list[jax.Array]:
        head = self.head
        if head.reduction == "none" or not head.wrt:
            y, *rest = self.of_rows()
            return [self.weighted(y) if head.reduction == "none" else self.total(y), *rest]
        cotangents, sizes = jnp.ones(self.rows, self.wide), None
        if self.where is not None and self.where.dtype != bool:
            cotangents = self.weighted(cotangents)
            sizes = self.sizes([cotangents])
        losses, *gradients = self.gradients([cotangents], self.scale(), sizes)
        return [self.total(losses), *gradients]

    def backward(self) -> list[jax.Array]:
        dy, *others = self.linear
        cotangents = [self.weighted(dy), *others]
        return self.gradients(cotangents, jnp.ones((), self.wide), self.sizes(cotangents))

    def sizes(self, cotangents: Sequence[jax.Array]) -> jax.Array:
        """The size of each row's largest cotangent, as a power of two, which rounds no factor.

        1 where that is not finite, is 0 or does not count.
        """
        size = functools.reduce(jnp.maximum, [jnp.abs(lax.stop_gradient(ct)) for ct in cotangents])
        counts = jnp.isfinite(size) & (size > 0)
        if self.counted is not None:
            counts &= self.counted
        info = jnp.finfo(self.wide)
        size = jnp.clip(jnp.where(counts, size, 1), info.smallest_normal, info.max / 2)
        return lax.reduce_precision(size.astype(self.wide), info.nexp, mantissa_bits=0)

    def of_rows(self) -> list[jax.Array]:
        """The results of each row, and the statistics where the call wants them."""

        def step(rows: _Rows, carry: Carry) -> Carry:
            logits = self.product(rows.of_x(self.x), self.factor, self.bias)
            call = self.call(logits.shape, rows)
            results = linear_loss_call.forward(call, rows.operands(logits))
            return {name: rows.put(carry[name], a) for name, a in results.items()}

        results = self.loop(step, {n: jnp.zeros(self.rows, self.wide) for n in self.head.outputs})
        return [results[name] for name in self.head.outputs]

    def gradients(
        self, cotangents: Sequence[jax.Array], scale: jax.Array, sizes: jax.Array | None
    ) -> list[jax.Array]:
        """`scale` times the gradients of sum(cotangents * results); of a fwd, losses first.

        `sizes`: of the cotangents of each row; None if they are all 1.
        """
        head = self.head
        weight, makes_losses = self.factor, head.direction == "fwd"
        factor = _power_of_two(head.logits_scale)
        if factor != 1:
            cotangents, scale = [ct / factor for ct in cotangents], scale * factor
        of_x = of_weight = scale
        shares = None  # of each row in the sums over rows
        if sizes is not None:
            cotangents = [ct / sizes for ct in cotangents]
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
        """The largest size of a row that counts, 1 if there is none; over all shards of rows."""
        counts = jnp.ones_like(sizes) if self.counted is None else self.counted
        largest = jnp.max(jnp.where(counts, sizes, 0), initial=0)
        if self.over.rows:
            largest = lax.pmax(largest, self.over.rows)
        return jnp.where(largest > 0, largest, 1)

    def finished(self, name: str, gradient: jax.Array, scale: jax.Array) -> jax.Array:
        """A device's gradient, as it is summed over devices; x's and losses are so already."""
        if name not in ("weight", "bias"):
            return gradient
        gradient = scale * lax.slice_in_dim(gradient, 0, self.classes, axis=-1)
        return gradient.astype(self.summed_dtype) if self.over.rows else gradient

    def tangent(self) -> list[jax.Array]:
        """Of each row's results, along those of x, weight and bias that there are."""
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
        results = self.loop(step, {name: jnp.zeros(self.rows, self.wide) for name in names})
        y, *others = (results[name] for name in names)
        return [self.weighted(y), *others]

    def residuals(self, call: Call, rows: "_Rows", logits: jax.Array) -> Carry:
        """What the derivative of a chunk takes: of rows what is kept, or made again."""
        operands = rows.operands(logits)
        kept = rows.kept() if self.kept else linear_loss_call.forward(call, operands)
        return operands | kept

    def weighted(self, losses: jax.Array) -> jax.Array:
        return losses if self.where is None else weighted(losses, self.where)

    def scale(self) -> jax.Array:
        """What the gradients of the sum are multiplied by."""
        if self.head.reduction == "sum":
            return jnp.ones((), self.wide)
        if self.where is None:
            shards = lax.axis_size(self.over.rows) if self.over.rows else 1
            return jnp.asarray(1 / max(self.rows * shards, 1), self.wide)
        return _inverse(_sum_over(jnp.sum(self.where, dtype=self.wide), self.over.rows))

    def total(self, losses: jax.Array) -> jax.Array:
        return self.scale() * _sum_over(jnp.sum(self.weighted(losses)), self.over.rows)

    # --------------------------------------------------------------------------- of one chunk

    def product(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        logits = self.dot(x.astype(self.dtype), weight, (1, 0), self.logits_dtype)
        return logits if bias is None else logits + self.padded(bias, self.logits_dtype)[None]

    def padded(self, a: jax.Array, dtype: np.dtype) -> jax.Array:
        """Weight, bias, or a tangent of theirs; its padding is 0."""
        a = a.astype(dtype)
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, self.padding)]) if self.padding else a

    def dot(self, a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: np.dtype) -> jax.Array:
        """The product over an axis of each, its sums in float32 (float64), rounded once."""
        axes = ((over[:1], over[1:]), ((), ()))
        return lax.dot_general(
            a, b, axes, precision=self.head.precision, preferred_element_type=dtype
        )

    def call(self, shape: tuple[int, ...], rows: "_Rows") -> Call:
        """The function of a chunk's logits and labels."""
        call = linear_loss_call.call_of(
            self.head,
            shape,
            self.logits_dtype,
            has_positions=rows.counted is not None,
            mask=None if self.mask is None else rows.mask.shape,
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
        """What `step` makes of the carry in all chunks, one after the other."""
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
        """An empty carry with the type of a turn's, which inside `jax.shard_map` says more."""
        own = (jax.typeof(a).manual_axis_type.varying for a in (self.x, self.weight, self.labels))
        over = frozenset().union(*own)
        if name in self.head.outputs:  # summed over the classes
            over -= {*self.over.classes}
        return lax.pcast(a, tuple(sorted(over)), to="varying") if over else a


class _Rows:
    """The rows of a chunk.

    The first chunk of several may reach into the second, so that all are of one size and nothing is
    padded: there it counts nothing, and what it writes the second one overwrites. Such chunks start
    at any row, and are copied for kernels, which need aligned addresses.
    """

    def __init__(self, chunks: _Chunks, index: jax.Array):
        size, short = chunks.chunk, -chunks.rows % chunks.chunk
        self.size, self.start = size, jnp.maximum(index * size - short, 0)
        self.chunks = chunks
        own = self.of(chunks.counted) if chunks.counted is not None else None
        if chunks.overlaps:
            first = self.start + jnp.arange(size) < (index + 1) * size - short
            own = first if own is None else own & first
        # Rows that the next chunk has, too, are left out like those that do not count.
        self.counted = own

    @property
    def mask(self) -> jax.Array:
        """Of classes."""
        mask = self.chunks.mask
        assert mask is not None
        return mask if len(mask) == 1 else self.of(mask)

    def operands(self, logits: jax.Array) -> Carry:
        """What a function of logits takes."""
        operands = {"x": logits, "saved": logits, "labels": self.of(self.chunks.labels)}
        if self.counted is not None:
            operands["positions"] = self.counted
        if self.chunks.mask is not None:
            operands["mask"] = self.mask
        return operands

    def kept(self) -> Carry:
        """What a derivative takes of the forward; log_sum tells of rows that do not count."""
        kept = {name: self.of(a) for name, a in self.chunks.kept.items()}
        if self.counted is not None:
            kept["log_sum"] = jnp.where(self.counted, kept["log_sum"], -jnp.inf)
        return kept

    def of(self, a: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(a, self.start, self.size)
        return launching.own_buffer(part) if self.chunks.overlaps else part

    def of_x(self, x: jax.Array) -> jax.Array:
        """Rows of x, 0 where they do not count: weight's gradient is a sum over all of them."""
        part = self.of(x)
        return part if self.counted is None else jnp.where(self.counted[:, None], part, 0)

    def put(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        part = launching.own_buffer(part) if self.chunks.overlaps else part
        return lax.dynamic_update_slice_in_dim(whole, part, self.start, 0)


def _sum_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(a, axes) if axes else a


def _power_of_two(scale: float) -> float:
    """The power of two next below a scale, by which numbers are multiplied without rounding.

    The exponent is limited, so that numbers of the size of 1, times or over it, are finite.
    """
    _, exponent = math.frexp(scale)
    return 2.0 ** max(-100, min(exponent - 1, 100))


def _inverse(total: jax.Array) -> jax.Array:
    """1 / total, and 0 where that is 0: the mean of nothing is 0."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
