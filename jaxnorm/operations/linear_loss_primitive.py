"""The JAX primitives of the linear losses: a forward, a tangent and a backward pass.

If the result is a mean or a sum, the JVP rule binds a forward pass that also returns the gradients.
The tangent is the inner product of these gradients with the operands' tangents.

If each row has its own result, the JVP rule binds the tangent primitive. It takes the primals and
the rows' statistics. Its transpose is the backward primitive. Both recompute the logits.

A call takes this number of matmuls (a divergence also computes the teacher's logits)::

    not differentiated                              1
    a mean or a sum, and its gradients              3
    results of each row, and their gradients        4
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import sharding
from jaxnorm.meshes.sharding import Factors, Shards
from jaxnorm.operations import linear_loss_chunks
from jaxnorm.operations.linear_loss_call import OF_ROWS, LinearLossCall, Over, is_inexact, kind
from jaxnorm.operations.loss import counted
from jaxnorm.primitives import remat
from jaxnorm.primitives.recomputation import linear
from jaxnorm.primitives.rules import Rules, batch_first, nonzero, zero_like

_GRADIENT = "jaxnorm_linear_gradient"


class LossRules(Rules[LinearLossCall]):
    """The JAX rules of the linear losses."""

    static = "head"

    def check_vma(self, head: LinearLossCall) -> bool:
        # The equations of a traced function do not say over which mesh axes arrays vary.
        return head.program.after is None

    def lower(self, head: LinearLossCall, ctx: Any, *arrays: Any) -> Any:
        """Lower a pass; inside the user's `jax.shard_map`, without the mesh axes of types."""
        plain = [jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in]
        return super().lower(head, ctx.replace(avals_in=plain), *arrays)

    def types(self, head: LinearLossCall, *avals: Any) -> list[Any]:
        """Return the types of a call's results.

        Results of rows are sharded like the rows of x. A gradient is sharded like its operand.
        """
        by_name, mesh = dict(zip(head.primals, avals)), sharding.mesh_of(avals)
        results = head.program.statistics | head.program.results
        x, types = by_name["x"], []
        for name, kind_ in zip(head.returns, head.kinds_returned):
            if name in by_name:
                dtype = head.gradient_dtype(by_name[name].dtype)
                types.append(by_name[name].update(dtype=dtype, weak_type=False))
                continue
            of_row, axes = results[name], 0 if kind_ == "total" else x.ndim - 1
            split = (*x.sharding.spec[:axes], *[None] * len(of_row.shape))
            shape = (*x.shape[:axes], *of_row.shape)
            types.append(sharding.type_like(x, mesh, shape, of_row.dtype, split))
        return types

    def plain_jax(self, head: LinearLossCall, *arrays: jax.Array) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays)

    def on_shard(self, head: LinearLossCall, *arrays: jax.Array, **layout: Any) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, **layout)

    def differentiated(
        self, head: LinearLossCall, *arrays: jax.Array, **layout: Any
    ) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, recompute=True, **layout)

    def forward_jvp(self, head: LinearLossCall, primals: Any, tangents: Any) -> tuple[Any, Any]:
        if head.wrt:  # The results include gradients, so the tangents are second-order derivatives.
            return self.second_order(head, primals, tangents)
        nonzeros = _of_differentiable(head, tangents)
        if head.reduction == "none":
            with_kept = dataclasses.replace(head, keeps=bool(head.kept))
            outputs = self.bind(with_kept, *primals)
            by_name = dict(zip(with_kept.outputs, outputs))
            residuals = [*primals, *(by_name[name] for name in head.kept)]
            results = [by_name[name] for name in head.outputs]
            along = iter(self.tangents_of(head, residuals, nonzeros))
            return results, [next(along) if is_inexact(y) else zero_like(y) for y in results]
        nonzeros = _without_left_out_rows(head, primals, nonzeros)
        with_gradients = head.with_gradients([*nonzeros])
        outputs = remat.named(self.names(with_gradients), self.bind(with_gradients, *primals))
        return self._along(with_gradients, outputs, nonzeros)

    def with_residuals(self, head: LinearLossCall) -> LinearLossCall | None:
        if head.wrt or head.reduction == "none":
            return None
        # Compute all gradients. When a `jax.checkpoint` policy decides which gradients are saved,
        # JAX does not know yet which gradients are used. Unused ones are removed later as dead
        # code.
        return head.with_gradients(head.differentiable)

    def names(self, head: LinearLossCall) -> list[str | None]:
        return [None, *(_GRADIENT for _ in head.wrt)]

    def derived(
        self, head: LinearLossCall, outputs: Arrays, primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        with_gradients = self.with_residuals(head)
        assert with_gradients is not None
        nonzeros = _of_differentiable(head, tangents)
        nonzeros = _without_left_out_rows(head, primals, nonzeros)
        return self._along(with_gradients, outputs, nonzeros)

    def _along(
        self, head: LinearLossCall, outputs: Arrays, tangents: dict[str, jax.Array]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Return the total (a mean or a sum) and its tangent.

        The tangent is a sum with one term per operand: the inner product of the operand's tangent
        and its gradient. `outputs` has the total and the gradients.
        """
        total, *gradients = outputs
        of = dict(zip(head.wrt, gradients))

        def inner_product(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
            return jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))

        # With `linear`, JAX saves the gradient in the gradient's own dtype. If `inner_product` were
        # called directly, JAX would instead save the result of the cast in `inner_product`: a copy
        # of the gradient in the dtype of the total (usually float32).
        terms = [linear(inner_product, [of[name]], t) for name, t in tangents.items()]
        return [total], [functools.reduce(jnp.add, terms) if terms else zero_like(total)]

    def batch(
        self, head: LinearLossCall, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[Arrays, list[int]]:
        """Batch a call: it becomes one call with more rows, or a loop over the batch elements.

        The loop is used if weight or bias is batched. It is also used if the gradient is computed
        inside of `jax.vmap`, because each batch element then has its own gradients of weight and
        bias. In that case, the batched call is a backward pass that returns these gradients, or a
        forward pass that already computes them. The loop is not slow: the matmuls of one element
        fill a GPU.

        All other batches become one call. If the loss is a mean or a sum, this call returns the
        losses of all rows, which are then averaged or summed for each batch element. If the
        gradient is computed outside of `jax.vmap`, the backward pass of this call takes the
        cotangents of all batch elements, and returns one gradient of weight, which is summed over
        the batch. So it needs memory for only one gradient of weight.
        """
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
        kinds = head.kinds_taken
        parameters = {"weight", "columns", "shared"}
        batched = {kind for kind, dim in zip(kinds, dims) if dim is not None}
        returns_gradients = head.direction == "fwd" and bool(head.wrt)
        if returns_gradients or parameters & {*head.kinds_returned, *batched}:
            one = functools.partial(self.bind, head)
            return sharding.map_batch(one, arrays, dims), [0] * len(head.kinds_returned)

        def with_batch_axis(a: jax.Array, dim: int | None, kind: str) -> jax.Array:
            if kind in parameters:
                return a
            return a[None] if kind == "mask" and dim is None else batch_first(a, dim, size)

        rows = [*map(with_batch_axis, arrays, dims, kinds)]
        if head.direction != "fwd" or head.reduction == "none":
            return self.bind(head, *rows), [0] * len(head.kinds_returned)
        (losses,) = self.bind(dataclasses.replace(head, reduction="none"), *rows)
        weights = dict(zip(head.primals, rows)).get("where", jnp.ones_like(losses))
        axes = range(1, losses.ndim)
        scale = linear_loss_chunks.scale(weights.astype(losses.dtype), head.reduction, axes)
        return [scale * jnp.sum(losses, axes)], [0]

    def shards(self, head: LinearLossCall, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
        """Return the sharding of the loop's rows and classes, and each device's function.

        In the loop, the rows and the classes stay sharded over their mesh axes, if the number of
        shards divides the size. There are two special cases:

        * A mesh axis shards both the rows and the classes. Only one of the two can stay sharded
          over it. If x is smaller than weight, x is gathered, and the classes stay sharded. If
          weight is smaller, weight is gathered, and the classes are not sharded in the loop.
          Instead, the rows are sharded over all mesh axes that shard the classes in the user's
          weight.
        * A mesh axis shards only d, in x or weight. In the loop, it shards the rows, because
          otherwise the devices along it would all do the same work. If x is sharded along d,
          devices exchange shards of d for shards of rows. If weight is sharded along d (FSDP), it
          is gathered once, before the loop.

        Gradients are reduced over the devices once, after the loop, and scattered to the sharding
        of their operands. XLA's own partitioning would gather and reduce in each iteration.
        """
        by_name = dict(zip(head.takes, types))
        x, weight = by_name["x"], by_name["weight"]
        of_rows = by_name.get("labels", by_name.get("candidates", x))
        stored = [sharding.axes_over(weight, axis, mesh) for axis in (0, 1)]
        rows = [sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape) - 1)]
        gathered: tuple[tuple[str, ...], ...] = ((),) * len(rows)
        splits_classes = head.program.after is None
        if splits_classes:
            gathered = _gathered_rows(x, weight, rows, stored[1], mesh)
        rows = [names[: len(names) - len(last)] for names, last in zip(rows, gathered)]
        is_whole = {*sum(rows, ())} & {*stored[1]} or not splits_classes
        classes = () if is_whole else stored[1]
        features = sharding.axes_over(x, len(rows), mesh)
        for name in (*stored[0], *stored[1]):
            if name not in (*sum(rows, ()), *classes, *features):
                _split_rows(rows, name, of_rows, mesh)
        of_x = [names + last for names, last in zip(rows, gathered)]
        moved: list[tuple[str, ...]] = [()] * len(rows)
        # Exchange over the innermost mesh axis first. The outer mesh axes split d into parts, and
        # the innermost axis splits each of these parts again. So devices along the innermost axis
        # have adjacent parts of d. The exchange joins them into one larger part, and the elements
        # of d stay in order.
        for name in reversed(features):
            axis = None if name in classes else _split_rows(rows, name, of_rows, mesh)
            if axis is not None:
                moved[axis] += (name,)
        over_rows = sum(rows, ())
        d, v = (names if {*names} <= {*over_rows} else () for names in stored)
        over = Over(over_rows, classes, stored=(d, v), gathered=gathered, moved=tuple(moved))
        of: dict[str, Any] = {
            "x": (*of_x, tuple(name for name in features if name in sum(moved, ()))),
            "weight": (d, v or classes),
            "row": rows,
            "mask": (*rows, classes),
        }

        def spec(kind: str, shape: Sequence[int] = (0,)) -> PartitionSpec:
            names = [*[()] * (len(shape) - 1), classes] if kind == "columns" else of.get(kind, ())
            if kind == "mask":  # Axes of size 1, along which a mask is broadcast, stay unsharded.
                names = [() if size == 1 else over for size, over in zip(shape, names)]
            return PartitionSpec(*[over or None for over in names])

        operands = zip(head.kinds_taken, types)
        return Shards(
            operands=tuple(spec(kind, aval.shape) for kind, aval in operands),
            results=tuple(spec(kind) for kind in head.kinds_returned),
            run=functools.partial(run, head, over=over),
        )

    def factors(self, head: LinearLossCall, arrays: Arrays) -> Factors:
        fresh = (f"t{i}" for i in itertools.count())
        rows = [f"r{axis}" for axis in range(arrays[0].ndim - 1)]
        shapes = {n: (*rows, *a.shape) for n, a in head.program.statistics.items()}
        shapes |= {n: (*rows, *a.shape) for n, a in head.program.results.items()}
        shapes |= dict(zip(head.takes, (a.shape for a in arrays)))

        def factors(name: str, kind: str) -> str:
            # The axis d has the name d in x, but k in weight. If the names were equal, Shardy would
            # shard weight and its gradient like x. With different names, weight and its gradient
            # keep the sharding of weight.
            known: dict[str, list[str]] = {"x": [*rows, "d"], "weight": ["k", "v"], "total": []}
            if kind in known:
                return " ".join(known[kind])
            first = rows if kind in OF_ROWS else []
            last = ["v"] if kind in ("columns", "mask") else []
            others = len(shapes[name]) - len(first) - len(last)
            names = [*first, *itertools.islice(fresh, others), *last]
            if kind == "mask":
                names = [next(fresh) if s == 1 else n for n, s in zip(names, shapes[name])]
            return " ".join(names)

        operands = [*map(factors, head.takes, head.kinds_taken)]
        results = [*map(factors, head.returns, head.kinds_returned)]
        named = dict.fromkeys(" ".join(operands).split())
        return Factors(operands, results, whole=tuple(n for n in named if n.startswith("t")))


def _gathered_rows(
    x: Any, weight: Any, rows: Sequence[tuple[str, ...]], classes: tuple[str, ...], mesh: Any
) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes over which x is gathered: one tuple for each row axis of x.

    The row axes of x are all axes except the last. The tuple of a row axis has the mesh axes that
    shard both this row axis and the classes. x is gathered over these mesh axes before the loop.
    Among all mesh axes that shard the row axis, these must be the last (innermost) ones, so that
    gathered rows are in order. If they are not, or if weight is smaller than x, weight is gathered
    instead of x, and all tuples are empty.

    Args:
      x, weight: types of the arrays.
      rows: for each row axis of x, the mesh axes that shard it.
      classes: the mesh axes that shard the classes.
      mesh: the mesh.
    """
    gathered = []
    for names in rows:
        count = next((i for i, name in enumerate(reversed(names)) if name not in classes), None)
        gathered.append(names if count is None else names[len(names) - count :])
    shared, split = {*sum(gathered, ())}, {*sum(rows, ())} & {*classes}

    def size(shape: Sequence[int], names: Sequence[str]) -> int:
        return math.prod(shape) // math.prod(mesh.shape[n] for n in names if n not in shared)

    is_smaller = size(x.shape[:-1], sum(rows, ())) < size(weight.shape[1:], classes)
    return tuple(gathered) if shared == split and is_smaller else ((),) * len(rows)


def _split_rows(rows: list[tuple[str, ...]], name: str, labels: Any, mesh: Any) -> int | None:
    """Choose an axis of the rows to shard over the mesh axis `name`; return its index, or None.

    The rows have one or more axes: all axes of x but the last. The choice is the first axis whose
    size is divisible by the number of shards. Axes along which the labels are already sharded over
    `name` are tried first. The result is None if no size is divisible.

    Args:
      rows: for each axis of the rows, the mesh axes that shard it. `name` is added to the tuple of
        the chosen axis, in place.
      name: name of the mesh axis.
      labels: type of the labels, or of another array with the axes of the rows.
      mesh: the mesh.
    """
    splits = [sharding.axes_over(labels, axis, mesh) for axis in range(len(rows))]
    for axis in sorted(range(len(rows)), key=lambda axis: name not in splits[axis]):
        names = (*rows[axis], name)
        if labels.shape[axis] % math.prod(mesh.shape[each] for each in names) == 0:
            rows[axis] = names
            return axis
    return None


def _without_left_out_rows(
    head: LinearLossCall, primals: Arrays, tangents: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the tangents, with those of rows set to 0 where the weight in ``where`` is 0.

    The gradient of x is 0 in these rows. It is multiplied by x's tangent, and if the tangent were
    NaN there, the product would be NaN.
    """
    where = dict(zip(head.primals, primals)).get("where")
    if where is None:
        return tangents

    def of_counted(along: jax.Array) -> jax.Array:
        counts = jnp.expand_dims(counted(where), range(where.ndim, along.ndim))
        counts = jnp.broadcast_to(counts, along.shape)
        counts, along = sharding.vary_alike([counts, along])
        return jnp.where(sharding.lie_alike(counts, along), along, 0)

    return {n: of_counted(t) if kind(n) in OF_ROWS else t for n, t in tangents.items()}


def _of_differentiable(head: LinearLossCall, tangents: Sequence[Any]) -> dict[str, jax.Array]:
    """Return the nonzero tangents of the operands that can have one, in a dict."""
    nonzeros = nonzero(zip(head.primals, tangents))
    return {name: t for name, t in nonzeros.items() if name in head.differentiable}


_RULES = LossRules()
bind = _RULES.bind
