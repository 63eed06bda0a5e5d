"""The JAX primitives of the linear losses: a forward, a tangent and a backward pass.

If the result is a mean or a sum, the JVP rule binds a forward pass that also returns the gradients.
The tangent is the inner product of these gradients with the operands' tangents.

If each row has its own result, the JVP rule binds the tangent primitive. The transpose of this
primitive is the backward primitive. Both take the primals and, for log-probabilities, results of
the forward pass, and both recompute the logits.

The number of matmuls, without those for a divergence's teacher, is::

    not differentiated                              1
    a mean or a sum, and its gradients              3
    results of each row, and their gradients        4
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import sharding
from jaxnorm.meshes.sharding import Factors, Shards
from jaxnorm.operations import linear_loss_call, linear_loss_chunks
from jaxnorm.operations.linear_loss_call import OF_ROWS, LinearLossCall, Over, is_inexact, kind
from jaxnorm.primitives import remat
from jaxnorm.primitives.recomputation import linear_map
from jaxnorm.primitives.rules import Rules, batch_first, nonzero, zero_like

_GRADIENT = "jaxnorm_linear_gradient"


class LossRules(Rules):
    """The JAX rules of the linear losses."""

    plain_jax = on_shard = staticmethod(linear_loss_chunks.run)

    def check_vma(self, head: LinearLossCall) -> bool:
        # A traced function cannot be checked: its equations do not include the mesh axes over which
        # arrays vary.
        return head.program.after is None

    def lower(self, head: LinearLossCall, ctx: Any, *arrays: Any) -> Any:
        """Lower a pass.

        Inside the user's `jax.shard_map`, an operand's type includes the mesh axes over which the
        operand varies. Remove these mesh axes from the types first.
        """
        plain = [jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in]
        return super().lower(head, ctx.replace(avals_in=plain), *arrays)

    def types(self, head: LinearLossCall, *avals: Any) -> list[Any]:
        """Return the types of a call's results.

        Results of rows are sharded like the rows of x, and a gradient like its operand.
        """
        by_name, mesh, x = dict(zip(head.primals, avals)), sharding.mesh_of(avals), avals[0]
        of_rows, types = head.program.statistics | head.program.results, []
        for name, kind_ in zip(head.returns, head.kinds_returned):
            if (operand := by_name.get(name)) is not None:
                dtype = head.gradient_dtype(operand.dtype)
                types.append(operand.update(dtype=dtype, weak_type=False))
                continue
            axes, own = 0 if kind_ == "total" else x.ndim - 1, of_rows[name].shape
            split = (*x.sharding.spec[:axes], *[None] * len(own))
            shape = (*x.shape[:axes], *own)
            types.append(sharding.type_like(x, mesh, shape, of_rows[name].dtype, split))
        return types

    def forward_jvp(self, head: LinearLossCall, primals: Any, tangents: Any) -> tuple[Any, Any]:
        if head.wrt:  # The results include gradients, so the tangents are second-order derivatives.
            return self.second_order(head, primals, tangents)
        nonzeros = _differentiated(head, tangents)
        if head.reduction != "none":
            full = head.with_gradients([*nonzeros])
            outputs = remat.named(self.names(full), self.bind(full, *primals))
            return self._along(full, outputs, nonzeros)
        with_kept = dataclasses.replace(head, keeps=bool(head.kept))
        by_name = dict(zip(with_kept.outputs, self.bind(with_kept, *primals)))
        residuals = [*primals, *map(by_name.get, head.kept)]
        along = iter(self.tangents_of(head, residuals, nonzeros))
        results = [by_name[name] for name in head.outputs]
        return results, [next(along) if is_inexact(y) else zero_like(y) for y in results]

    def with_residuals(self, head: LinearLossCall) -> LinearLossCall | None:
        # Compute all gradients: when a `jax.checkpoint` policy decides which gradients are saved,
        # it is still unknown which of them are used. Unused ones are removed later as dead code.
        is_total = head.reduction != "none" and not head.wrt
        return head.with_gradients(head.differentiable) if is_total else None

    def names(self, head: LinearLossCall) -> list[str | None]:
        return [None, *(_GRADIENT for _ in head.wrt)]

    def derived(
        self, head: LinearLossCall, outputs: Arrays, primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        full = head.with_gradients(head.differentiable)
        return self._along(full, outputs, _differentiated(head, tangents))

    def _along(
        self, head: LinearLossCall, outputs: Arrays, tangents: dict[str, jax.Array]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Return the total (a mean or a sum) and its tangent.

        The tangent is a sum with one term per operand: the inner product of the operand's tangent
        and its gradient. `outputs` has the total and the gradients.
        """
        total, *gradients = outputs
        of = dict(zip(head.wrt, gradients))

        def inner_product(name: str, gradient: jax.Array, tangent: jax.Array) -> jax.Array:
            terms = gradient.astype(total.dtype) * tangent.astype(total.dtype)
            if "where" in head.primals and kind(name) in OF_ROWS:
                # Masked rows have a gradient of 0, and may have a tangent of NaN.
                terms = jnp.where(gradient == 0, 0, terms)
            return jnp.sum(terms)

        # With `linear_map`, JAX saves the gradient in the gradient's own dtype. If `inner_product`
        # were called directly, JAX would instead save the result of the cast in `inner_product`: a
        # copy of the gradient in the dtype of the total (usually float32).
        terms = [
            linear_map(functools.partial(inner_product, name), [of[name]], t)
            for name, t in tangents.items()
        ]
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
        cotangents of all batch elements. It returns one gradient of weight, summed over the batch.
        So only one gradient of weight is in memory.
        """
        kinds = head.kinds_taken
        parameters = {"weight", "columns", "shared"}
        batched = {kind for kind, dim in zip(kinds, dims) if dim is not None}
        returns_gradients = head.direction == "fwd" and bool(head.wrt)
        if returns_gradients or parameters & {*head.kinds_returned, *batched}:
            one = functools.partial(self.bind, head)
            return sharding.map_batch(one, arrays, dims), [0] * len(head.kinds_returned)
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)

        def with_batch_axis(a: jax.Array, dim: int | None, kind: str) -> jax.Array:
            if kind in parameters:
                return a
            return a[None] if kind == "mask" and dim is None else batch_first(a, dim, size)

        rows = [*map(with_batch_axis, arrays, dims, kinds)]
        if head.direction != "fwd" or head.reduction == "none":
            return self.bind(head, *rows), [0] * len(head.kinds_returned)
        (losses,) = self.bind(dataclasses.replace(head, reduction="none"), *rows)
        where = dict(zip(head.primals, rows)).get("where", jnp.ones_like(losses))
        axes = range(1, losses.ndim)
        scale = linear_loss_call.scale(where.astype(losses.dtype), head.reduction, axes)
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
        * A mesh axis shards only d, in x or weight. In the loop, it shards the rows, so that the
          devices along it do not all do the same work. If x is sharded along d, devices exchange
          shards of d for shards of rows. If weight is sharded along d (FSDP), it is gathered once,
          before the loop.

        Gradients are reduced over the devices once, after the loop, and scattered to the sharding
        of their operands. XLA's own partitioning would gather and reduce in each iteration.
        """
        x, weight = types[:2]
        *rows, features = (sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape)))
        stored = [sharding.axes_over(weight, axis, mesh) for axis in (0, 1)]
        classes = stored[1] if head.program.after is None else ()
        gathered = _gathered_rows(x, weight, rows, classes, mesh)
        rows = [names[: len(names) - len(last)] for names, last in zip(rows, gathered)]
        if {*sum(rows, ())} & {*classes}:
            classes = ()
        exchanged: list[tuple[int, tuple[str, ...], bool]] = []
        # Exchange over the innermost mesh axis first. The outer mesh axes split d into parts, and
        # the innermost axis splits each of these parts again. So devices along the innermost axis
        # have adjacent parts of d. The exchange joins them into one larger part, and the elements
        # of d stay in order.
        of_weight = [name for name in sum(stored, ()) if name not in features]
        for name in (*of_weight, *reversed(features)):
            # Shard one row axis over the mesh axis `name`: the first one whose size is a multiple
            # of its number of shards, including those that `name` adds.
            splits = ((*names, name) for names in rows)
            divides = [not n % _devices(mesh, names) for n, names in zip(x.shape, splits)]
            if any(divides) and name not in (*sum(rows, ()), *classes):
                rows[axis := divides.index(True)] += (name,)
                exchanged += [(axis, (name,), True)] * (name in features)
        d, v = (names if {*names} <= {*sum(rows, ())} else () for names in stored)
        moved = [names[0] for _, names, _ in exchanged]
        of_x = [(*(n for n in names if n not in moved), *g) for names, g in zip(rows, gathered)]
        of_x.append(tuple(n for n in features if n in moved))
        entries_of = _axes(of_x, [d, v or classes], rows, classes, itertools.repeat(()))

        def spec(kind: str, shape: Sequence[int] = ()) -> PartitionSpec:
            return PartitionSpec(*[names or None for names in entries_of(kind, shape)])

        moves = {"x": _gathers(gathered) + exchanged, "weight": _gathers((d, v))}
        over = Over(sum(rows, ()), classes, moves)
        return Shards(
            operands=tuple(spec(kind, a.shape) for kind, a in zip(head.kinds_taken, types)),
            results=tuple(map(spec, head.kinds_returned)),
            run=functools.partial(run, head, over=over),
        )

    def factors(self, head: LinearLossCall, arrays: Arrays) -> Factors:
        rows = [f"r{axis}" for axis in range(arrays[0].ndim - 1)]
        # The axis d has the name d in x, but k in weight. If the names were equal, Shardy would
        # shard weight and its gradient like x. With different names, weight and its gradient keep
        # the sharding of weight.
        others = (f"t{i}" for i in itertools.count())
        names_of = _axes([*rows, "d"], ["k", "v"], rows, "v", others)
        types = self.types(head, *map(jax.typeof, arrays))
        operands, results = (
            [" ".join(names_of(kind, a.shape)) for kind, a in zip(kinds, avals)]
            for kinds, avals in ((head.kinds_taken, arrays), (head.kinds_returned, types))
        )
        named = dict.fromkeys(" ".join(operands).split())
        return Factors(operands, results, whole=tuple(n for n in named if n.startswith("t")))


def _axes(
    x: Sequence[Any],
    weight: Sequence[Any],
    rows: Sequence[Any],
    classes: Any,
    others: Iterator[Any],
) -> Callable[[str, Sequence[int]], list[Any]]:
    """Return a function of an array's kind and shape, which returns one entry for each axis.

    An entry is the name of an axis in a sharding rule, or the mesh axes that shard the axis. `x`
    and `weight` are the entries of the axes of these two arrays. In all other arrays, `rows` has
    the entries of the row axes, and `classes` is the entry of the axis of classes. `others` yields
    the entries of all remaining axes, and of a mask's axes of size 1.
    """
    first = {"x": x, "weight": weight, "row": rows, "mask": rows}
    last = {"columns": [classes], "mask": [classes]}

    def entries(kind: str, shape: Sequence[int]) -> list[Any]:
        start, end = first.get(kind, []), last.get(kind, [])
        between = itertools.islice(others, max(0, len(shape) - len(start) - len(end)))
        found = [*start, *between, *end]
        if kind != "mask":
            return found
        return [next(others) if size == 1 else entry for size, entry in zip(shape, found)]

    return entries


def _gathers(over: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...], bool]]:
    return [(axis, names, False) for axis, names in enumerate(over) if names]


def _devices(mesh: Any, names: Iterable[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _gathered_rows(
    x: Any, weight: Any, rows: Sequence[tuple[str, ...]], classes: tuple[str, ...], mesh: Any
) -> list[tuple[str, ...]]:
    """Return the mesh axes over which x is gathered: one tuple for each row axis of x.

    The row axes of x are all axes except the last. A mesh axis that shards both rows and classes is
    in the tuple of its row axis: before the loop, x is gathered over it. Gathered rows are in order
    only if it is the innermost of the mesh axes that shard the row axis. If it is not, or if weight
    is smaller than x, weight is gathered instead of x, and all tuples are empty.

    Args:
      x, weight: types of the arrays.
      rows: for each row axis of x, the mesh axes that shard it, the innermost one last.
      classes: the mesh axes that shard the classes.
      mesh: the mesh.
    """
    both = {*sum(rows, ())} & {*classes}
    inner = [itertools.takewhile(both.__contains__, reversed(names)) for names in rows]
    gathered = [tuple(reversed([*names])) for names in inner]
    of_rows, of_classes = ({*names} - both for names in (sum(rows, ()), classes))
    x_rows = math.prod(x.shape[:-1]) // _devices(mesh, of_rows)
    is_smaller = x_rows < weight.shape[1] // _devices(mesh, of_classes)
    return gathered if is_smaller and {*sum(gathered, ())} == both else [()] * len(rows)


def _differentiated(head: LinearLossCall, tangents: Sequence[Any]) -> dict[str, jax.Array]:
    """Return a dict of the nonzero tangents, without operands that are not differentiable."""
    pairs = zip(head.primals, tangents)
    return nonzero((name, t) for name, t in pairs if name in head.differentiable)


_RULES = LossRules()
bind = _RULES.bind
