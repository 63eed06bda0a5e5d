"""Functions of linear logits as JAX primitives: a forward, a tangent and a backward one.

    "mean", "sum"   the JVP rule of the forward binds the forward that returns the gradients too;
                    the tangent is their inner product with the operands' tangents
    of rows         the JVP rule of the forward binds, on the primals and rows' statistics, the
                    tangent, whose transpose is the backward; both make the logits again

So what is not differentiated makes one product; the gradient of a mean three, and of rows' results
four.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import sharding
from jaxnorm.meshes.shards import Factors, Shards
from jaxnorm.operations import checks, linear_loss_chunks
from jaxnorm.operations.linear_loss_call import Kind, LinearLossCall, Over
from jaxnorm.operations.loss import counted
from jaxnorm.primitives import remat
from jaxnorm.primitives.linear import linear
from jaxnorm.primitives.rules import Rules, batch_first, nonzero, zero_like

_GRADIENT = "jaxnorm_linear_gradient"


class _LossRules(Rules[LinearLossCall]):
    """What the loss has for itself."""

    static = "head"

    def types(self, head: LinearLossCall, *avals: Any) -> list[Any]:
        """Types of the results: rows lie as those of x, and a gradient as what it is of."""
        by_name = dict(zip(head.primals, avals))
        x, mesh = by_name["x"], sharding.mesh_of(avals)
        wide = checks.arithmetic_dtype(*head.dtypes(x.dtype, by_name["weight"].dtype))
        types = []
        for name, kind in zip(head.returns, head.kinds_returned):
            if name in by_name:
                dtype = head.gradient_dtype(by_name[name].dtype)
                types.append(by_name[name].update(dtype=dtype, weak_type=False))
            else:
                axes = x.ndim - 1 if kind == "row" else 0
                split = x.sharding.spec[:axes]
                types.append(sharding.type_like(x, mesh, x.shape[:axes], wide, split))
        return types

    def plain(self, head: LinearLossCall, *arrays: jax.Array) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays)

    def on_shard(self, head: LinearLossCall, *arrays: jax.Array, **layout: Any) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, **layout)

    def differentiated(
        self, head: LinearLossCall, *arrays: jax.Array, **layout: Any
    ) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, recompute=True, **layout)

    def forward_jvp(self, head: LinearLossCall, primals: Any, tangents: Any) -> tuple[Any, Any]:
        if head.wrt:  # Gradients are among the results.
            return self.second_order(head, primals, tangents)
        nonzeros = nonzero(zip(head.primals, tangents))
        if head.reduction == "none":
            with_kept = head.with_kept()
            outputs = self.bind(with_kept, *primals)
            by_name = dict(zip(with_kept.outputs, outputs))
            residuals = [*primals, *(by_name[name] for name in head.kept)]
            return outputs[: len(head.outputs)], self.tangents_of(head, residuals, nonzeros)
        nonzeros = _without_left_out_rows(head, primals, nonzeros)
        with_gradients = head.with_gradients([*nonzeros])
        outputs = remat.named(self.names(with_gradients), self.bind(with_gradients, *primals))
        return self._along(with_gradients, outputs, nonzeros)

    def with_residuals(self, head: LinearLossCall) -> LinearLossCall | None:
        if head.wrt or head.reduction == "none":
            return None
        # All gradients: which of them a derivative needs is unknown where a policy is asked. Those
        # that it does not need are dropped later.
        return head.with_gradients([n for n in ("x", "weight", "bias") if n in head.primals])

    def names(self, head: LinearLossCall) -> list[str | None]:
        return [None, *(_GRADIENT for _ in head.wrt)]

    def derived(
        self, head: LinearLossCall, outputs: Arrays, primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        with_gradients = self.with_residuals(head)
        assert with_gradients is not None
        nonzeros = nonzero(zip(head.primals, tangents))
        nonzeros = _without_left_out_rows(head, primals, nonzeros)
        return self._along(with_gradients, outputs, nonzeros)

    def _along(
        self, head: LinearLossCall, outputs: Arrays, tangents: dict[str, jax.Array]
    ) -> tuple[list[jax.Array], list[Any]]:
        """The total and its tangent: inner products of gradients and tangents."""
        total, *gradients = outputs
        of = dict(zip(head.wrt, gradients))

        def inner_product(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
            return jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))

        # `linear` saves the gradient in its own dtype, and not as float32, twice the size.
        terms = [linear(inner_product, [of[name]], t) for name, t in tangents.items()]
        return [total], [functools.reduce(jnp.add, terms) if terms else zero_like(total)]

    def batch(
        self, head: LinearLossCall, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[Arrays, list[int]]:
        """A batch of rows is more rows, where they share weight and bias.

        Else, and where each of the batch has a gradient of weight, it is a loop: the products of
        one are large enough. The mean of each of a batch becomes a mean of rows' losses, so that a
        gradient taken outside `jax.vmap` sums weight's over all rows and makes none for each of the
        batch.
        """
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
        kinds = head.kinds_taken
        parameters = {"weight", "bias"}
        batched = {kind for kind, dim in zip(kinds, dims) if dim is not None}
        returns_gradients = head.direction == "fwd" and bool(head.wrt)
        if returns_gradients or parameters & {*head.kinds_returned, *batched}:
            one = functools.partial(self.bind, head)
            return sharding.map_batch(one, arrays, dims), [0] * len(head.kinds_returned)

        def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
            if kind in parameters:
                return a
            return a[None] if kind == "mask" and dim is None else batch_first(a, dim, size)

        rows = [*map(with_batch_axis, arrays, dims, kinds)]
        if head.direction != "fwd" or head.reduction == "none":
            return self.bind(head, *rows), [0] * len(head.kinds_returned)
        (losses,) = self.bind(head.rowwise(), *rows)
        where = dict(zip(head.primals, rows)).get("where")
        axes = range(1, losses.ndim)
        return [linear_loss_chunks.reduced(losses, where, head.reduction, axes)], [0]

    def shards(self, head: LinearLossCall, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
        """Split the rows of x and the classes as they lie, where the shards divide them.

        A mesh axis that splits only x or weight along d, or weight along V beside the rows, splits
        rows, too: without that its devices would all compute the same. Devices with shards of x
        along d exchange them for rows. Each device gathers weight
        along d once, before the loop (FSDP). Where a mesh axis splits the rows and the classes, it
        gathers weight or x, whichever is smaller. Gradients are summed over the devices once, after
        the loop, and each device keeps its shard. XLA would gather and sum in each turn of the
        loop.
        """
        by_name = dict(zip(head.takes, types))
        x, weight = by_name["x"], by_name["weight"]
        stored = [sharding.axes_over(weight, axis, mesh) for axis in (0, 1)]
        rows = [sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape) - 1)]
        gathered = _gathered_rows(x, weight, rows, stored[1], mesh)
        rows = [names[: len(names) - len(last)] for names, last in zip(rows, gathered)]
        classes = () if {*sum(rows, ())} & {*stored[1]} else stored[1]
        features = sharding.axes_over(x, len(rows), mesh)
        for name in (*stored[0], *stored[1]):
            if name not in (*sum(rows, ()), *classes, *features):
                _split_rows(rows, name, by_name["labels"], mesh)
        of_x = [names + last for names, last in zip(rows, gathered)]
        moved: list[tuple[str, ...]] = [()] * len(rows)
        for name in reversed(features):  # An exchange over the innermost axis keeps d in its order.
            axis = None if name in classes else _split_rows(rows, name, by_name["labels"], mesh)
            if axis is not None:
                moved[axis] += (name,)
        over_rows = sum(rows, ())
        d, v = (names if {*names} <= {*over_rows} else () for names in stored)
        over = Over(over_rows, classes, stored=(d, v), gathered=gathered, moved=tuple(moved))
        axes: dict[Kind, Any] = {
            "x": (*of_x, tuple(name for name in features if name in sum(moved, ()))),
            "weight": (d, v or classes),
            "bias": (classes,),
            "row": rows,
            "mask": (*rows, classes),
            "total": (),
        }

        def spec(kind: Kind, shape: Sequence[int] = ()) -> PartitionSpec:
            names = axes[kind]
            if kind == "mask":  # Which may be broadcast.
                names = [() if size == 1 else over for size, over in zip(shape, names)]
            return PartitionSpec(*[over or None for over in names])

        operands = zip(head.kinds_taken, types)
        return Shards(
            operands=tuple(spec(kind, aval.shape) for kind, aval in operands),
            results=tuple(spec(kind) for kind in head.kinds_returned),
            run=functools.partial(run, head, over=over),
        )

    def factors(self, head: LinearLossCall, arrays: Arrays) -> Factors:
        axes = [f"r{axis}" for axis in range(arrays[0].ndim - 1)]
        rows = " ".join(axes)
        # Weight's d is another than x's: how it is stored says how its gradient is to lie.
        factors = {"x": f"{rows} d", "weight": "k v", "bias": "v", "row": rows, "total": ""}
        if head.has_mask:
            shape = arrays[head.takes.index("mask")].shape
            names = (
                f"m{i}" if size == 1 else n for i, (n, size) in enumerate(zip([*axes, "v"], shape))
            )
            factors["mask"] = " ".join(names)
        operands, results = (
            [factors[kind] for kind in kinds] for kinds in (head.kinds_taken, head.kinds_returned)
        )
        return Factors(operands, results, whole=())


def _gathered_rows(
    x: Any, weight: Any, rows: Sequence[tuple[str, ...]], classes: tuple[str, ...], mesh: Any
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes over which x is gathered along each axis of its rows.

    These split the classes, too, and are the last of those that split their axis of the rows, so
    that a gathered shard has rows in their order. There are none if weight's shard, gathered over
    the same axes, is smaller.
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
    """Split an axis of the rows over the mesh axis `name`, too, and return it; None if none fits.

    `rows`: the mesh axes that split each axis of the rows, changed in place. An axis along which
    the labels are split in this way comes first, then the leftmost one.
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
    """Set x's tangent to 0 in rows that do not count: times a gradient of 0, NaN would stay NaN."""
    where = dict(zip(head.primals, primals)).get("where")
    if where is None or "x" not in tangents:
        return tangents
    counts = jnp.broadcast_to(counted(where)[..., None], tangents["x"].shape)
    counts, along = sharding.vary_alike([counts, tangents["x"]])
    along = jnp.where(sharding.lie_alike(counts, along), along, 0)
    return tangents | {"x": along}


_RULES = _LossRules()
bind = _RULES.bind
