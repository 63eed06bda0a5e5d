"""Functions of linear logits as JAX primitives: a forward, a tangent and a backward one.

    "mean", "sum"   the JVP rule of the forward binds the forward that returns the gradients too;
                    the tangent is their inner product with the operands' tangents
    of rows         the JVP rule of the forward binds, on the primals and rows' statistics, the
                    tangent, whose transpose is the backward; both make the logits again

So what is not differentiated makes one product; the gradient of a mean three, and of rows' results
four.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import sharding
from jaxnorm.meshes.shards import Factors, Shards
from jaxnorm.operations import checks, linear_loss_chunks
from jaxnorm.operations.linear_loss_call import Head, Kind, Over
from jaxnorm.operations.loss import counted
from jaxnorm.primitives.rules import Rules, batch_first, nonzero

_GRADIENT = "jaxnorm_linear_gradient"


class _LossRules(Rules[Head]):
    """What the loss has for itself."""

    static = "head"

    def types(self, head: Head, *avals: Any) -> list[Any]:
        """Types of the results: rows lie as those of x, and a gradient as what it is of."""
        by_name = dict(zip(head.primals, avals))
        x, mesh = by_name["x"], sharding.mesh_of(avals)
        wide = checks.arithmetic_dtype(*head.dtypes(x.dtype, by_name["weight"].dtype))
        types = []
        for name, kind in zip(head.result_names, head.result_kinds):
            if name in by_name:
                dtype = head.gradient_dtype(by_name[name].dtype)
                types.append(by_name[name].update(dtype=dtype, weak_type=False))
            else:
                axes = x.ndim - 1 if kind == "row" else 0
                split = x.sharding.spec[:axes]
                types.append(sharding.type_like(x, mesh, x.shape[:axes], wide, split))
        return types

    def plain(self, head: Head, *arrays: jax.Array) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays)

    def on_shard(self, head: Head, *arrays: jax.Array, **layout: Any) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, **layout)

    def differentiated(self, head: Head, *arrays: jax.Array, **layout: Any) -> list[jax.Array]:
        return linear_loss_chunks.run(head, *arrays, recompute=True, **layout)

    def forward_jvp(self, head: Head, primals: Any, tangents: Any) -> tuple[Any, Any]:
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
        total, *gradients = self.bind(head.with_gradients([*nonzeros]), *primals)
        gradients = [checkpoint_name(g, _GRADIENT) for g in gradients]

        # What is kept for the transpose is the gradient as it is, half the size of its float32.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def inner_product(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
            return jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))

        terms = map(inner_product, gradients, nonzeros.values())
        return [total], [functools.reduce(jnp.add, terms)]

    def batch(
        self, head: Head, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[Arrays, list[int]]:
        """A batch of rows is more rows, where they share weight and bias.

        Else, and where each of the batch has a gradient of weight, it is a loop: the products of
        one are large enough. The mean of each of a batch becomes a mean of rows' losses, so that a
        gradient taken outside `jax.vmap` sums weight's over all rows and makes none for each of the
        batch.
        """
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
        kinds = head.operand_kinds
        parameters = {"weight", "bias"}
        batched = {kind for kind, dim in zip(kinds, dims) if dim is not None}
        returns_gradients = head.direction == "fwd" and bool(head.wrt)
        if returns_gradients or parameters & {*head.result_kinds, *batched}:
            one = functools.partial(self.bind, head)
            return sharding.map_batch(one, arrays, dims), [0] * len(head.result_kinds)

        def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
            if kind in parameters:
                return a
            return a[None] if kind == "mask" and dim is None else batch_first(a, dim, size)

        rows = [*map(with_batch_axis, arrays, dims, kinds)]
        if head.direction != "fwd" or head.reduction == "none":
            return self.bind(head, *rows), [0] * len(head.result_kinds)
        (losses,) = self.bind(head.rowwise(), *rows)
        where = dict(zip(head.primals, rows)).get("where")
        axes = range(1, losses.ndim)
        return [linear_loss_chunks.reduced(losses, where, head.reduction, axes)], [0]

    def shards(self, head: Head, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
        """Rows of x, and classes, are split as they lie, where shards divide them.

        Weight is gathered along d, once, before the loop (FSDP), and along the classes where those
        are split as the rows are. Its gradient is summed over the devices once, after the loop, and
        each keeps its shard of what was gathered. How XLA would partition the loop would be right,
        too, but would gather and sum in each turn.
        """
        x, weight, *_ = types
        rows = tuple(sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape) - 1))
        d, v = (sharding.axes_over(weight, axis, mesh) for axis in (0, 1))
        over_rows = sum(rows, ())
        classes = () if {*over_rows} & {*v} else v
        d, v = (names if {*names} <= {*over_rows} else () for names in (d, v))
        over = Over(over_rows, classes, scattered=(d, v))
        axes: dict[Kind, Any] = {
            "x": (*rows, ()),
            "weight": ((), classes),
            "bias": (classes,),
            "row": rows,
            "mask": (*rows, classes),
            "total": (),
        }
        of_gradients = axes | {"weight": (d, v or classes)}

        def spec(axes: dict[Kind, Any], kind: Kind, shape: Sequence[int] = ()) -> PartitionSpec:
            names = axes[kind]
            if kind == "mask":  # Which may be broadcast.
                names = [() if size == 1 else over for size, over in zip(shape, names)]
            return PartitionSpec(*[over or None for over in names])

        operands = zip(head.operand_kinds, types)
        return Shards(
            operands=tuple(spec(axes, kind, aval.shape) for kind, aval in operands),
            results=tuple(spec(of_gradients, kind) for kind in head.result_kinds),
            run=functools.partial(run, head, over=over),
        )

    def factors(self, head: Head, arrays: Arrays) -> Factors:
        axes = [f"r{axis}" for axis in range(arrays[0].ndim - 1)]
        rows = " ".join(axes)
        # Weight's d is another than x's: how it is stored says how its gradient is to lie.
        factors = {"x": f"{rows} d", "weight": "k v", "bias": "v", "row": rows, "total": ""}
        if head.has_mask:
            shape = arrays[head.operand_names.index("mask")].shape
            names = (
                f"m{i}" if size == 1 else n for i, (n, size) in enumerate(zip([*axes, "v"], shape))
            )
            factors["mask"] = " ".join(names)
        operands, results = (
            [factors[kind] for kind in kinds] for kinds in (head.operand_kinds, head.result_kinds)
        )
        return Factors(operands, results, whole=("d",))


def _without_left_out_rows(
    head: Head, primals: Arrays, tangents: dict[str, jax.Array]
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
