"""The passes of the linear losses, each computed in chunks of rows.

A chunk takes up to three matmuls, which XLA computes. dlogits are the gradients of the logits:

    logits = x @ W + b        stored for the current chunk only
    dx     = dlogits @ W^T    written into the chunk's rows of an array for all rows
    dW    += x^T @ dlogits    accumulated in float32

The matmul itself adds its result to dW in place (cuBLAS' beta = 1). XLA can do this because nothing
else in the loop reads dW.

The first chunk precedes the loop and writes the array in which dW is accumulated, so this array
need not be set to zero. A single chunk needs no such array: the matmul writes dW in the gradient's
dtype. Several chunks need none if the dlogits of all rows are stored: then one matmul computes dx
and one computes dW, after the loop. `linear_loss_call.chunks_of` decides whether they are stored.

For the cross-entropy, logits have the dtype to which x and weight promote, or the dtype that the
user requests. 16-bit logits halve the memory traffic of each pass over them, and dlogits can reuse
their buffer. For the other functions, logits are float32 (or float64). If logits z were rounded to
bfloat16, log-probabilities would have errors of about 2^-9 * |z|.

dlogits have the dtype of the matmuls' operands. They include all factors: 1 / (sum of the weights)
for a mean, `logits_scale`, and the loss weight or the cotangent of each row. So the matmuls write
the final dx and dW, and no other pass over these arrays is needed.

In float16, small dlogits would underflow (below 6e-8). Therefore, each row of float16 dlogits is
divided by a power of two: the magnitude of the row's factors or, if JAX differentiates the results,
of the row's largest element. This division is undone in float32: the row of dx and, before the
matmul for dW, the row of x are multiplied by the power of two.
"""

import dataclasses
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
from jaxnorm.operations.linear_loss_call import OF_ROWS, LinearLossCall, Over, is_inexact, kind
from jaxnorm.operations.loss import counted
from jaxnorm.primitives import row_operations
from jaxnorm_kernels import launching

# Before the loop, the number of classes is padded to a multiple of this number. A row of 16-bit
# weights or logits then takes a multiple of 16 bytes. Without this padding, XLA pads the operands
# and slices the result of every matmul in the loop.
COLUMNS = 8

_WHOLE = Over()


def run(head: LinearLossCall, *arrays: jax.Array, over: Over = _WHOLE) -> list[jax.Array]:
    """Compute the results of a pass.

    Args:
      head: the static description of the pass.
      arrays: operands in the order of `LinearLossCall.takes`; one device's shards on a mesh.
      over: the mesh axes over which the operands are sharded.
    """
    by_name = dict(zip(head.primals, arrays))
    if head.direction == "tan":
        forward = dataclasses.replace(head, direction="fwd", wrt=())
        along = dict(zip(head.wrt, arrays[head.residuals :]))

        def floats(*values: jax.Array) -> list[jax.Array]:
            given = (by_name | dict(zip(along, values))).values()
            return [*filter(is_inexact, run(forward, *given, over=over))]

        return jax.jvp(floats, [by_name[name] for name in along], [*along.values()])[1]

    def moved(a: jax.Array, kind: str) -> jax.Array:
        for axis, names, is_exchange in over.moves.get(kind, ()):
            if is_exchange:
                a = lax.all_to_all(a, names, axis, a.ndim - 1, tiled=True)
            else:
                a = lax.all_gather(a, names, axis=axis, tiled=True)
        return a

    def narrow(a: jax.Array) -> jax.Array:  # Devices then exchange fewer bytes.
        return a.astype(min(a.dtype, head.dtypes[0], key=lambda dtype: dtype.itemsize))

    pairs = zip(arrays, head.kinds_taken)
    whole = [moved(narrow(a), kind) if over.moves.get(kind) else a for a, kind in pairs]
    lead = whole[0].shape[:-1]
    count = math.prod(lead)

    def flattened(name: str, kind: str, a: jax.Array) -> jax.Array:
        if kind == "mask":  # Give the mask one row, or a row for each row of x.
            if math.prod(a.shape[:-1]) == 1:
                return launching.own_buffer(a.reshape(1, -1))
            a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
        if kind in ("row", "mask") and name != "teacher_x":
            a = launching.own_buffer(a)  # Kernels read these arrays and need aligned buffers.
        return a.reshape(count, *a.shape[len(lead) :]) if kind in OF_ROWS else a

    flat = [*map(flattened, head.takes, head.kinds_taken, whole)]
    chunks = Chunks(head, flat, over)
    cotangents = map(chunks.masked, chunks.linear)
    results = chunks.forward() if head.direction == "fwd" else chunks.gradients([*cotangents])

    def finished(name: str, kind: str, a: jax.Array) -> jax.Array:
        if kind in OF_ROWS:
            a = a.reshape(*lead, *a.shape[1:])
        if name not in by_name:
            return launching.own_buffer(a)
        # `a` is a gradient, and each device has a partial sum over its shard of classes or rows.
        sums = over.classes if kind == "x" else () if kind == "row" else over.rows
        if moves := over.moves.get(kind):
            # The transpose of an all-gather is a reduce-scatter.
            given, _ = sharding.vary_alike([by_name[name].astype(a.dtype), a])
            (a,) = jax.linear_transpose(functools.partial(moved, kind=kind), given)(a)
            sums = tuple(n for n in sums if n not in [n for _, names, _ in moves for n in names])
        return linear_loss_call.sum_over(a, sums).astype(head.gradient_dtype(by_name[name].dtype))

    return [*map(finished, head.returns, head.kinds_returned, results)]


Carry = dict[str, jax.Array]


class Chunks:
    """The arrays of a call, with methods that run the loop: `forward` and `gradients`.

    x is two-dimensional: its leading axes are flattened to rows.
    """

    def __init__(self, head: LinearLossCall, arrays: Sequence[jax.Array], over: Over):
        self.head, self.over = head, over
        self.primals = dict(zip(head.primals, arrays))
        self.kept = dict(zip(head.kept, arrays[len(head.primals) : head.residuals]))
        self.linear = [*arrays[head.residuals :]]
        self.x, weight = self.primals["x"], self.primals["weight"]
        self.where = self.primals.get("where")
        self.counted = None if self.where is None else counted(self.where)
        self.dtype, self.logits_dtype = head.dtypes
        loss, results = head.program.loss, head.program.results.values()
        self.wide = checks.arithmetic_dtype(self.logits_dtype, *(a.dtype for a in results))
        self.rows, self.classes = len(self.x), weight.shape[1]
        # The classes are not padded in two cases. If they are sharded, the padding would be in the
        # middle of each row. If there is a mask of classes, the mask would have to be padded too.
        whole = not over.classes and (loss is None or not loss.spec.logits.has_mask)
        self.padding = -self.classes % COLUMNS if whole else 0
        # Cast and pad the weights once, before the loop.
        self.given = self.primals | {"weight": self.padded(weight, self.dtype)}
        if head.teacher is not None:
            of_teacher = self.padded(self.primals["teacher_weight"], head.teacher)
            self.given |= {"teacher_weight": of_teacher}
        # Besides the logits, there is a second array of their shape and dtype in two cases: a
        # divergence has the teacher's logits, and a traced function that uses the logits itself has
        # their gradient.
        copies = 2 if loss is None or loss.spec.loss.teacher_dtype is not None else 1
        # If `holds_dlogits` is True, the dlogits of all rows are stored. If it is False, a chunk's
        # dlogits may overwrite the chunk's logits.
        self.chunk, self.holds_dlogits = linear_loss_call.chunks_of(
            head.chunk,
            self.rows,
            weight.shape,
            (self.logits_dtype, self.dtype),
            shards=lax.axis_size(over.classes) if over.classes else 1,
            copies=copies,
            accumulator=self.accumulator,
        )

    def forward(self) -> list[jax.Array]:
        head = self.head
        if head.wrt:
            weights = self.scale() * self.masked(jnp.ones(self.rows, self.wide))
            losses, *gradients = self.gradients([weights])
            return [self.total(losses), *gradients]

        def step(rows: Rows, carry: Carry) -> Carry:
            results = self.results(rows, *self.of_chunk(rows))
            return {name: rows.put(carry[name], results[name]) for name in carry}

        by_name = self.loop(step, self.empty_results())
        if head.reduction != "none":
            return [self.total(*by_name.values())]
        results = head.program.results
        return [self.masked(by_name[n]) if n in results else by_name[n] for n in head.outputs]

    def gradients(self, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return a list of the gradients of sum(cotangents * results).

        The pass is a backward pass, or a forward pass that also returns gradients. In such a
        forward pass, the list starts with the losses of all rows, and `cotangents` has the factor
        of each row's loss in the mean or sum.
        """
        head, losses_of = self.head, self.head.outputs if self.head.direction == "fwd" else ()
        dtypes = {name: self.gradient_dtype(name) for name in head.wrt}
        is_narrow = self.dtype.name == "float16"
        in_one = (self.chunk == self.rows or self.holds_dlogits) and not is_narrow
        weight_dtype = dtypes["weight"] if in_one and "weight" in dtypes else self.wide
        zeros = {name: jnp.zeros(self.primals[name].shape, dtypes[name]) for name in head.wrt}
        of_rows = {name: a for name, a in zeros.items() if kind(name) in OF_ROWS}

        def step(rows: Rows, carry: Carry) -> Carry:
            losses, dlogits, sizes, others = self.derivative(rows, cotangents)
            results = {name: rows.put(carry[name], losses) for name in losses_of}
            for name, gradient in others.items():
                if name in of_rows:
                    gradient = rows.unmasked(gradient).astype(dtypes[name])
                    results[name] = rows.put(carry[name], gradient)
                else:
                    wide = jnp.promote_types(self.wide, gradient.dtype)
                    results[name] = added(carry, name, rows.if_any(gradient).astype(wide))
            if self.holds_dlogits:
                return results | {"dlogits": rows.put(carry["dlogits"], dlogits)}
            return results | products(rows, dlogits, carry, sizes)

        def products(rows: Rows, dlogits: jax.Array, carry: Carry, sizes: Any = 1) -> Carry:
            x, results = rows.of_x(self.x), {}
            if "bias" in head.wrt:
                db = jnp.sum(sizes * dlogits.astype(self.wide), 0)
                results["bias"] = added(carry, "bias", db)
            if "x" in head.wrt:
                dtype = self.wide if is_narrow else dtypes["x"]
                dx = sizes * self.dot(dlogits, self.given["weight"], (1, 1), dtype)
                results["x"] = rows.put(carry["x"], dx.astype(dtypes["x"]))
            if "weight" in head.wrt:
                largest: Any = jnp.max(sizes) if is_narrow else 1
                x = sizes / largest * x.astype(self.wide) if is_narrow else x
                dw = self.dot(x.astype(self.dtype), dlogits, (0, 0), weight_dtype)
                results["weight"] = added(carry, "weight", largest * dw)
            return results

        def added(carry: Carry, name: str, part: jax.Array) -> jax.Array:
            return carry[name] + part if name in carry else part

        carry = (self.empty_results() if losses_of else {}) | of_rows
        of_products = {"x", "weight", "bias"} if self.holds_dlogits else set()
        if self.holds_dlogits:
            carry.pop("x", None)
            carry["dlogits"] = lax.empty((self.rows, self.classes + self.padding), self.dtype)
        results = self.loop(step, carry, starts_sums=not {*head.wrt} <= {*of_rows, *of_products})
        if self.holds_dlogits:
            all_rows = Rows(self, jnp.int32(0), self.rows)
            results |= products(all_rows, results.pop("dlogits"), of_rows)

        def finished(name: str) -> jax.Array:
            a = results.get(name, zeros[name])  # There are no results if there are no rows.
            a = a[..., : self.classes] if name in ("weight", "bias") else a
            return a.astype(dtypes[name])

        return [*(results[name] for name in losses_of), *map(finished, head.wrt)]

    @property
    def accumulator(self) -> int:
        """Number of additional bytes that several chunks need to accumulate weight's gradient.

        It is the size of an array of weight's shape in the dtype of the sum. It is 0 if the
        gradient is not computed, or if even a single chunk needs such an array, in two cases:

        * The gradient has the dtype of the sum. Then the array becomes the gradient itself.
        * The matmuls are in float16. Then the sum is stored in the wider dtype, because it must be
          multiplied by a power of two before it is cast to the gradient's dtype.
        """
        has_sum = "weight" in self.head.wrt
        is_narrow = self.dtype.name == "float16"
        if not has_sum or is_narrow or self.gradient_dtype("weight") == self.wide:
            return 0
        return math.prod(self.primals["weight"].shape) * self.wide.itemsize

    def gradient_dtype(self, name: str) -> np.dtype:
        """Return the dtype of an operand's gradient on one device, before the sum over devices.

        As in plain JAX, bfloat16 gradients are rounded before this sum. float16 gradients are not
        rounded, because small ones would underflow: the forward pass of a loss computes them, and
        the loss scale multiplies them only in the backward pass.
        """
        dtype = self.head.gradient_dtype(self.primals[name].dtype)
        if kind(name) == "row" or not (self.over.classes if name == "x" else self.over.rows):
            return dtype
        if kind(name) == "shared":
            return np.dtype(jnp.promote_types(self.wide, dtype))
        return self.dtype if self.dtype.name == "bfloat16" else self.wide

    def empty_results(self) -> Carry:
        """Return arrays of zeros, into which the loop writes the results of the rows."""
        types = self.head.program.statistics | self.head.program.results
        names = self.head.outputs
        return {n: jnp.zeros((self.rows, *types[n].shape), types[n].dtype) for n in names}

    def masked(self, y: jax.Array) -> jax.Array:
        """Multiply each row's part of an array by the row's ``where``; masked rows become 0."""
        if self.where is None or self.counted is None:
            return y
        if self.where.dtype != bool and is_inexact(y):
            y = (_like(self.where, y) * y).astype(y.dtype)
        return jnp.where(_like(self.counted, y), y, jnp.zeros_like(y))

    def scale(self) -> jax.Array:
        weights = jnp.ones(self.rows) if self.where is None else self.where
        weights, reduction = weights.astype(self.wide), self.head.reduction
        return linear_loss_call.scale(weights, reduction, (0,), self.over.rows)

    def total(self, losses: jax.Array) -> jax.Array:
        sums = jnp.sum(self.masked(losses))
        return self.scale() * linear_loss_call.sum_over(sums, self.over.rows)

    def of_chunk(self, rows: "Rows") -> tuple[jax.Array, Carry]:
        """Return the logits of a chunk, and a dict of the other operands of a traced function.

        The dict is empty if there is no traced function. If there is one, the arrays of a masked
        row are replaced by those of an unmasked row: a NaN in a masked row would spread to the
        gradients of shared arrays, which are sums over all rows.
        """
        given, is_traced = self.given, self.head.program.after is not None
        x = rows.filled(rows.of(given["x"])) if is_traced else rows.of_x(given["x"])
        logits = self.product(x, given["weight"], given.get("bias"), self.head.dtypes)
        if not is_traced:
            return logits, {}
        arrays = {
            name: rows.filled(rows.of(given[name])) if kind(name) == "row" else given[name]
            for name in self.head.primals
            if name.startswith(("row", "shared"))
        }
        logits, *others = sharding.vary_alike([logits, *arrays.values()])
        return logits, dict(zip(arrays, others))

    def results(self, rows: "Rows", logits: jax.Array, arrays: Carry) -> Carry:
        """Return a dict of a chunk's results; if the call has `keeps=True`, also of statistics."""
        program, sources = self.head.program, [logits[:, : self.classes]]
        if program.loss is not None:
            call, operands = self.loss(rows, logits, arrays)
            outputs = _bound(call.with_stats() if self.head.keeps else call, operands)
            if program.after is None:
                return outputs
            sources = [*map(rows.filled, outputs.values())]
        return dict(zip(program.results, self.mapped(program.after, rows, sources, arrays)))

    def derivative(
        self, rows: "Rows", cotangents: Sequence[jax.Array]
    ) -> tuple[Any, jax.Array, Any, Carry]:
        """Differentiate the results of a chunk with respect to its logits and other operands.

        Return four values:

        1. The first result of the chunk's rows, or None if the forward pass has saved it.
        2. The gradient of the logits, in the dtype of the matmuls' operands.
        3. The powers of two by which the rows of a float16 gradient have been divided, so that
           small elements do not underflow; 1 for other dtypes.
        4. A dict of the gradients of the other operands, which only a traced function has.
        """
        program, loss = self.head.program, self.head.program.loss
        logits, arrays = self.of_chunk(rows)
        wanted = {name: a for name, a in arrays.items() if name in self.head.wrt}
        cotangents = [*map(rows.of, cotangents)]

        def pulled(function: Callable[..., Any], *of: jax.Array) -> list[Any]:
            """Return the first result, and the gradients of the arrays `of` and of `wanted`."""

            def inexact(*values: jax.Array) -> list[jax.Array]:
                others = arrays | dict(zip(wanted, values[len(of) :]))
                return [y for y in function(values[: len(of)], others) if is_inexact(y)]

            ys, pullback = jax.vjp(inexact, *of, *wanted.values())
            # Rows that also belong to the next chunk are counted in that chunk, so mask them here.
            cts = [rows.unmasked(ct).astype(y.dtype) for ct, y in zip(cotangents, ys)]
            gradients = pullback([*sharding.vary_alike([*ys, *cts])[len(ys) :]])
            of_arrays = [*map(rows.unmasked, gradients[: len(of)])]
            return [ys[0], of_arrays, dict(zip(wanted, gradients[len(of) :]))]

        def divided(arrays: Sequence[jax.Array], factor: Any = 1) -> tuple[Any, Any]:
            """Return the arrays with rows divided by powers of two, and these powers.

            Unless the matmuls are float16, return the arrays unchanged, and 1.
            """
            if self.dtype.name != "float16":
                return arrays, 1
            of_rows = jnp.concatenate([jnp.abs(a).reshape(rows.size, -1) for a in arrays], -1)
            largest = jnp.max(of_rows, -1, keepdims=True, initial=0)
            sizes = lax.stop_gradient(_powers_of_two(largest * jnp.abs(factor)))
            return [a / _like(sizes[:, 0], a) for a in arrays], sizes

        if loss is None:  # JAX differentiates the results.
            y, dlogits, others = pulled(
                lambda logits, arrays: self.results(rows, logits[0], arrays).values(), logits
            )
            (of_logits,), sizes = divided(dlogits)
            return y, of_logits.astype(self.dtype), sizes, others
        call, operands = self.loss(rows, logits, arrays)
        factor = operands.get("logits_scale", jnp.ones(1))[:, None] * call.spec.logits.logits_scale
        call = call.with_stats()
        outputs = rows.kept() if self.kept else _bound(call, operands)
        y, others = outputs.get(call.returns[0]), {}
        if program.after is not None:
            sources = [rows.filled(outputs[name]) for name in loss.returns]
            after = functools.partial(self.mapped, program.after, rows)
            y, cotangents, others = pulled(after, *sources)
        # If the logits and their gradient have the same dtype, the gradient may overwrite the
        # logits.
        outputs_of = call.returns[: len(cotangents)]
        cotangents, sizes = divided(cotangents, factor)
        call = call.backward(("x",), outputs_of, gradient_dtype=self.dtype)
        (of_logits,) = _bound(call, operands | outputs, cotangents).values()
        return y, of_logits, sizes, others

    def loss(self, rows: "Rows", logits: jax.Array, arrays: Carry) -> tuple[Call, Carry]:
        """Return the call of the jaxnorm loss on a chunk's logits, and a dict of its operands."""
        program, loss, given = self.head.program, self.head.program.loss, self.given
        assert loss is not None
        operands = {name: rows.of(given[name]) for name in loss.primals[1:] if name in given}
        if program.before is not None:
            operands = dict(zip(loss.primals[1:], self.mapped(program.before, rows, [], arrays)))
        if self.head.teacher is not None:
            of_teacher = given["teacher_weight"], given.get("teacher_bias")
            dtypes = self.head.teacher, loss.spec.loss.teacher_dtype
            teacher_logits = self.product(rows.of_x(given["teacher_x"]), *of_teacher, dtypes)
            operands["teacher_logits"] = teacher_logits
        elif "teacher_logits" in operands:
            operands["teacher_logits"] = self.padded(operands["teacher_logits"])
        positions = _both(rows.counted, operands.get("positions"))
        operands |= {} if positions is None else {"positions": positions}
        changes: dict[str, Any] = {"padding": self.padding, "has_positions": positions is not None}
        if over := self.over.classes:
            cols = logits.shape[1] * lax.axis_size(over)
            changes |= {"cols": cols, "cols_over": over, "axes_over": (over,)}
        mask = len(operands.get("mask", ()))
        call = linear_loss_call.loss_of_rows(loss, logits.shape, mask, **changes)
        return call, {"x": logits, "saved": logits} | operands

    def mapped(
        self, traced: Any, rows: "Rows", sources: Sequence[jax.Array], arrays: Carry
    ) -> list[jax.Array]:
        """Run a traced function of `sources` and `arrays` on each row of a chunk."""
        axes = [*[0] * len(sources), *(0 if kind(name) == "row" else None for name in arrays)]
        run = jax.vmap(functools.partial(sharding.evaluated, traced), axes, axis_size=rows.size)
        results: list[jax.Array] = run(*sources, *arrays.values())
        return results

    def product(self, x: jax.Array, weight: jax.Array, bias: Any, dtypes: Any) -> jax.Array:
        """Return ``x @ weight + bias``.

        `dtypes` has the dtype of the matmul's operands, and the dtype of the result.
        """
        logits = self.dot(x.astype(dtypes[0]), weight, (1, 0), dtypes[1])
        return logits if bias is None else logits + self.padded(bias, dtypes[1])[None]

    def padded(self, a: jax.Array, dtype: np.dtype | None = None) -> jax.Array:
        """Cast `a` to `dtype`, and pad its last axis (the classes) with zeros."""
        a = a.astype(dtype or a.dtype)
        return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, self.padding)]) if self.padding else a

    def dot(self, a: jax.Array, b: jax.Array, over: tuple[int, int], dtype: np.dtype) -> jax.Array:
        """Return the matmul of `a` and `b` over axis `over[0]` of `a` and axis `over[1]` of `b`.

        The sums are float32 (or float64) and are rounded once, to `dtype`.
        """
        axes = ((over[:1], over[1:]), ((), ()))
        wide = max(dtype, a.dtype, key=lambda dtype: dtype.itemsize)  # as `lax` requires
        options: Any = {"precision": self.head.precision, "preferred_element_type": wide}
        return lax.dot_general(a, b, axes, **options).astype(dtype)

    def loop(
        self, step: Callable[["Rows", Carry], Carry], carry: Carry, *, starts_sums: bool = False
    ) -> Carry:
        """Run all chunks, and return the carry after the last one.

        ``step(rows, carry)`` processes one chunk and returns the next carry. If `starts_sums` is
        True, the first step adds arrays to `carry`. The carry of a loop must have the same arrays
        in all iterations, so this step then runs before the loop.
        """
        carry = {name: self.varying(name, a) for name, a in carry.items()}
        if not self.rows:
            return carry
        count = math.ceil(self.rows / self.chunk)

        # If JAX differentiates a pass, for second-order derivatives, it saves no logits.
        @jax.checkpoint
        def body(i: Any, carry: Carry) -> Carry:
            return step(Rows(self, i), carry)

        first = int(starts_sums or count == 1)
        carry = body(jnp.int32(0), carry) if first else carry
        return lax.fori_loop(first, count, body, carry) if first < count else carry

    def varying(self, name: str, a: jax.Array) -> jax.Array:
        """Cast an array of the loop's initial carry to the type that `step` returns.

        Inside `jax.shard_map`, a type says over which mesh axes an array varies. The arrays of the
        initial carry vary over no mesh axes.
        """
        operands = (*self.primals.values(), *self.linear)
        over = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in operands))
        if name in self.head.outputs:  # `step` sums these arrays over all shards of classes.
            over -= {*self.over.classes}
        return lax.pcast(a, tuple(sorted(over)), to="varying") if over else a


class Rows:
    """The rows of one chunk, with methods that slice the arrays of the call.

    All chunks have the same number of rows, without padding. If this number does not divide the
    number of all rows, the first two chunks overlap. The rows that both chunks contain are masked
    in the first chunk, and the second chunk overwrites their results.

    With an overlap, the slices of the second and later chunks may start at unaligned addresses.
    Kernels need aligned addresses, so the slices are copied.
    """

    def __init__(self, chunks: Chunks, index: jax.Array, size: int | None = None):
        size = size or chunks.chunk
        short = -chunks.rows % size
        self.size, self.start = size, jnp.maximum(index * size - short, 0)
        self.chunks, self.overlaps, is_first = chunks, short > 0, None
        if self.overlaps:
            places = self.start + jnp.arange(size, dtype=self.start.dtype)
            is_first = places < (index + 1) * size - short
        # A mask of the chunk's rows: False for rows that the user masks or that also belong to the
        # next chunk. It is None if the user masks no rows and no chunks overlap.
        self.counted = _both(None if chunks.counted is None else self.of(chunks.counted), is_first)

    def kept(self) -> Carry:
        """Return the chunk's rows of the saved results and statistics, in a dict.

        The statistic log_sum is -inf in masked rows: the loss ignores rows with this value.
        """
        kept = {name: self.of(a) for name, a in self.chunks.kept.items()}
        if self.counted is not None:
            kept["log_sum"] = jnp.where(self.counted, kept["log_sum"], -jnp.inf)
        return kept

    def of(self, a: jax.Array) -> jax.Array:
        if len(a) == 1:  # a mask of classes that all rows share, or there is only one row
            return a
        part = lax.dynamic_slice_in_dim(a, self.start, self.size)
        return launching.own_buffer(part) if self.overlaps else part

    def of_x(self, x: jax.Array) -> jax.Array:
        """Return this chunk's rows of x, with zeros in masked rows.

        The gradient of weight is a sum over all rows, so a NaN in a masked row would make this
        gradient NaN.
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


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Return the mask ``a & b``, or the mask that is not None, or None."""
    return a & b if a is not None and b is not None else b if a is None else a


def _like(of_rows: jax.Array, a: jax.Array) -> jax.Array:
    """Append axes of size 1 to `of_rows`, so that it broadcasts against `a`."""
    return of_rows.reshape(*of_rows.shape, *[1] * (a.ndim - of_rows.ndim))


def _bound(call: Call, operands: Carry, linear: Sequence[jax.Array] = ()) -> Carry:
    """Run a pass of a loss on a chunk's logits, and return a dict with its results.

    In a backward pass, `linear` has the cotangents of the loss's results.
    """
    names = call.primals if call.direction == "fwd" else call.residual_names
    arrays = [operands[name] for name in names]
    # If the classes are sharded, run plain JAX, which sums over all shards of a row.
    run = call.xla if call.spec.cols_over else functools.partial(row_operations.bind, call)
    return dict(zip(call.returns, run(*arrays, *linear)))


def _powers_of_two(sizes: jax.Array) -> jax.Array:
    """Round positive numbers down to powers of two.

    Zeros, infinities and NaNs become the largest of these powers, or 1 if there is no such power.
    """
    counts, info = jnp.isfinite(sizes) & (sizes > 0), jnp.finfo(sizes.dtype)
    sizes = jnp.clip(jnp.where(counts, sizes, 1), info.smallest_normal, info.max / 2)
    sizes = lax.reduce_precision(sizes, info.nexp, mantissa_bits=0)
    largest = jnp.max(jnp.where(counts, sizes, 0), initial=0)
    return jnp.where(counts, sizes, jnp.where(largest > 0, largest, 1))
