"""linear_softmax_cross_entropy as JAX primitives: a forward, a tangent and a backward one.

    "mean", "sum"   the JVP rule of the forward binds the forward that returns the gradients too;
                    the tangent is their inner product with the operands' tangents
    "none"          the JVP rule of the forward binds, on the primals, the tangent, whose transpose
                    is the backward; both make the logits again

So what is not differentiated makes one product; the gradient of a mean three, and of rows' losses
four.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.meshes import auto_axes, sharding
from jaxnorm.operations import checks, linear_loss_chunks
from jaxnorm.operations.linear_loss_call import NAME, Head, Kind, Over
from jaxnorm.primitives.registration import registered

_GRADIENT = "jaxnorm_linear_gradient"

Arrays = Sequence[jax.Array]


def bind(head: Head, *arrays: jax.Array) -> list[jax.Array]:
    """The results of the pass."""
    arrays = (*sharding.vary_alike(arrays),)
    primitive = _PRIMITIVES[head.direction, _may_be_partitioned(arrays)]
    results: list[jax.Array] = primitive.bind(*arrays, head=head)
    return results


def _may_be_partitioned(arrays: Arrays) -> bool:
    """Whether XLA may spread arrays over devices, of which JAX then has to know when it lowers.

    Programs without any, for an `AbstractMesh`, cannot say. On Explicit axes the types do.
    """
    return jax.device_count() > 1 and sharding.explicit_mesh([*map(jax.typeof, arrays)]) is None


# ------------------------------------------------------------------------------------ evaluation


def _types(*avals: Any, head: Head) -> list[Any]:
    """Types of the results: rows lie as those of x, and a gradient as what it is of."""
    given = dict(zip(head.primals, avals))
    x, mesh = given["x"], sharding.mesh_of(avals)
    wide = np.dtype(np.float64 if _logits_dtype(given) == np.float64 else np.float32)

    def of_x(axes: int) -> Any:
        """The type of the losses along the first axes of x."""
        spec = PartitionSpec(*x.sharding.spec[:axes])
        return x.update(
            shape=x.shape[:axes],
            dtype=wide,
            weak_type=False,
            sharding=x.sharding if mesh.empty else NamedSharding(mesh, spec),
        )

    def gradient(operand: Any) -> Any:
        return operand.update(dtype=head.gradient_dtype(operand.dtype), weak_type=False)

    gradients = iter(head.wrt)
    return [
        of_x(x.ndim - 1 if kind == "row" else 0)
        if kind in ("row", "total")
        else gradient(given[next(gradients)])
        for kind in head.result_kinds
    ]


def _logits_dtype(given: dict[str, Any]) -> np.dtype:
    return checks.product_dtype(given["x"].dtype, given["weight"].dtype)


def _run(*arrays: jax.Array, head: Head) -> list[jax.Array]:
    return _run_anywhere(head, arrays)


# -------------------------------------------------------------------------------- differentiation


def _forward_jvp(primals: Any, tangents: Any, *, head: Head) -> tuple[Any, Any]:
    if head.wrt:  # Second order: `linear_loss_chunks.run` is differentiated as it is.
        return _jvp_of_run(primals, tangents, head)
    along = {n: t for n, t in zip(head.primals, tangents) if not isinstance(t, ad.Zero)}
    if not along:
        results = bind(head, *primals)
        return results, [_zero_like(a) for a in results]
    if head.reduction == "none":
        results = bind(head, *primals)
        return results, bind(head.to("tan", [*along]), *primals, *along.values())
    total, *gradients = bind(head.to("fwd", [*along]), *primals)
    gradients = [checkpoint_name(g, _GRADIENT) for g in gradients]

    # What is kept for the transpose is the gradient as it is, half the size of its float32.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def inner_product(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
        return jnp.sum(gradient.astype(total.dtype) * tangent.astype(total.dtype))

    terms = map(inner_product, gradients, along.values())
    return [total], [functools.reduce(jnp.add, terms)]


def _linear_jvp(primals: Any, tangents: Any, *, head: Head) -> tuple[Any, Any]:
    """Of a tangent or a backward, which are linear in what follows the primals."""
    count = len(head.primals)
    if any(not isinstance(t, ad.Zero) for t in tangents[:count]):
        return _jvp_of_run(primals, tangents, head)
    linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
    return bind(head, *primals), bind(head, *primals[:count], *linear)


def _jvp_of_run(primals: Any, tangents: Any, head: Head) -> tuple[Any, Any]:
    along = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def function(*moving: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, a in zip(along, moving):
            operands[i] = a
        return _run_anywhere(head, operands, recompute=True)

    results = bind(head, *primals)
    _, moved = jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])
    return results, moved


def _zero_like(a: jax.Array) -> ad.Zero:
    return ad.Zero(jax.typeof(a).to_tangent_aval())


def _transpose(cotangents: Any, *operands: Any, head: Head) -> list[Any]:
    """Of a tangent: the backward. Of a backward: the tangent."""
    count = len(head.primals)
    primals, linear = operands[:count], operands[count:]
    wanted = [ad.is_undefined_primal(a) for a in linear]
    found: list[Any] = [None] * len(linear)
    along = {n: ct for n, ct in zip(head.wrt, cotangents) if not isinstance(ct, ad.Zero)}
    if head.direction == "tan":
        (dloss,) = cotangents
        if not isinstance(dloss, ad.Zero):
            wrt = [name for name, is_wanted in zip(head.wrt, wanted) if is_wanted]
            results = iter(bind(head.to("bwd", wrt), *primals, dloss))
            found = [next(results) if is_wanted else None for is_wanted in wanted]
    elif along:
        found = bind(head.to("tan", [*along]), *primals, *along.values())
    return [None] * count + found


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Gradients that are not used are not made: a rematerialised forward makes one product."""
    equation = rest[-1]  # Newer versions of JAX say in between which inputs are live.
    head: Head = equation.params["head"]
    if not any(used):
        return [False] * len(equation.invars), None
    if head.direction == "fwd" and head.wrt:
        wrt = [name for name, is_used in zip(head.wrt, used[1:]) if is_used]
        outvars = [v for v, kept in zip(equation.outvars, [True, *used[1:]]) if kept]
        equation = equation.replace(outvars=outvars, params={"head": head.to("fwd", wrt)})
    return [True] * len(equation.invars), equation


# ---------------------------------------------------------------------------------------- batching


def _batch(arrays: Arrays, dims: Sequence[int | None], *, head: Head) -> tuple[Arrays, list[int]]:
    """A batch of rows is more rows, where they share weight and bias.

    Else, and where each of the batch has a gradient of weight, it is a loop: the products of one
    are large enough. The mean of each of a batch becomes a mean of rows' losses, so that a gradient
    taken outside `jax.vmap` sums weight's over all rows and makes none for each of the batch.
    """
    size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
    kinds = head.operand_kinds
    parameters = {"weight", "bias"}
    if parameters & {*head.result_kinds, *(k for k, d in zip(kinds, dims) if d is not None)} or (
        head.direction == "fwd" and head.wrt
    ):
        one = functools.partial(bind, head)
        return sharding.map_batch(one, arrays, dims), [0] * len(head.result_kinds)

    def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
        if kind in parameters:
            return a
        return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)

    rows = [*map(with_batch_axis, arrays, dims, kinds)]
    if head.direction != "fwd" or head.reduction == "none":
        return bind(head, *rows), [0] * len(head.result_kinds)
    (losses,) = bind(head.rowwise(), *rows)
    positions = dict(zip(head.primals, rows)).get("positions")
    axes = range(1, losses.ndim)
    return [linear_loss_chunks.reduced(losses, positions, head.reduction, axes)], [0]


# ----------------------------------------------------------------------------------------- meshes


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Over which mesh axes the rows of x and the axes of weight are split.

    Weight is gathered along d, once, before the loop (FSDP), and along the classes where those are
    split as the rows are. Its gradient is summed over the devices once, after the loop, and each
    keeps its shard of what was gathered.
    """

    rows: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    scattered: tuple[tuple[str, ...], tuple[str, ...]]

    @classmethod
    def of(cls, x: Any, weight: Any, mesh: Any) -> "_Layout":
        """Of types with shardings. What does not divide an axis does not split it."""
        rows = tuple(sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape) - 1))
        taken = {*sum(rows, ())}
        d, v = (sharding.axes_over(weight, axis, mesh) for axis in (0, 1))
        return cls(
            rows,
            classes=() if taken & {*v} else v,
            scattered=(d if taken >= {*d} else (), v if taken >= {*v} else ()),
        )

    @property
    def over(self) -> Over:
        return Over(sum(self.rows, ()), self.classes, self.scattered)

    def operand(self, kind: Kind) -> PartitionSpec:
        rows, classes = [names or None for names in self.rows], self.classes or None
        specs: dict[Kind, tuple[Any, ...]] = {
            "x": (*rows, None),
            "weight": (None, classes),
            "bias": (classes,),
            "row": (*rows,),
            "total": (),
        }
        return PartitionSpec(*specs[kind])

    def result(self, kind: Kind) -> PartitionSpec:
        if kind != "weight":
            return self.operand(kind)
        d, v = self.scattered
        return PartitionSpec(d or None, v or self.classes or None)


def _lower(ctx: Any, *arrays: Any, head: Head) -> Any:
    axes = ctx.module_context.axis_context

    def function(*arrays: jax.Array) -> list[jax.Array]:
        with jax.named_scope(ctx.primitive.name):
            if sharding.explicit_mesh(ctx.avals_in) is not None:
                results = _run_anywhere(head, arrays)
                return [sharding.lie_as(a, aval) for a, aval in zip(results, ctx.avals_out)]
            if auto_axes.can_partition(axes) and not auto_axes.are_whole(axes):
                return _partitioned(head, arrays)
            return linear_loss_chunks.run(head, *arrays)

    return mlir.lower_fun(function)(ctx, *arrays)


def _run_anywhere(head: Head, arrays: Arrays, *, recompute: bool = False) -> list[jax.Array]:
    """`linear_loss_chunks.run`, on shards where a mesh has Explicit axes."""
    run = functools.partial(linear_loss_chunks.run, head, recompute=recompute)
    avals = [jax.typeof(a) for a in arrays]
    mesh = sharding.explicit_mesh(avals)
    if mesh is None:
        return run(*arrays)
    layout = _Layout.of(avals[0], avals[1], mesh)
    in_specs = tuple(map(layout.operand, head.operand_kinds))
    results: list[jax.Array] = jax.shard_map(
        functools.partial(run, over=layout.over),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=[*map(layout.result, head.result_kinds)],
        axis_names=sharding.explicit_axes(mesh),
    )(*[sharding.reshard(a, mesh, spec) for a, spec in zip(arrays, in_specs)])
    return results


def _partitioned(head: Head, arrays: Arrays) -> list[jax.Array]:
    """`linear_loss_chunks.run`, on the shards that XLA's partitioner has in hand (Auto axes).

    Its own code would be right, too, but would sum weight's gradient over the devices, and gather
    weight, in each turn of the loop.
    """

    def partition(mesh: Any, given: Any, _: Any) -> tuple[Any, ...]:
        layout = _Layout.of(given[0], given[1], mesh)
        operands = tuple(NamedSharding(mesh, layout.operand(kind)) for kind in head.operand_kinds)
        results = [NamedSharding(mesh, layout.result(kind)) for kind in head.result_kinds]
        run = functools.partial(linear_loss_chunks.run, head, over=layout.over)
        return mesh, run, results, operands

    rows = " ".join(f"r{axis}" for axis in range(arrays[0].ndim - 1))
    # Weight's d is another than x's: how it is stored says how its gradient is to lie.
    factors = {"x": f"{rows} d", "weight": "k v", "bias": "v", "row": rows, "total": ""}
    operands, results = (
        ", ".join(factors[kind] for kind in kinds)
        for kinds in (head.operand_kinds, head.result_kinds)
    )
    whole = auto_axes.asks_partitioner(
        head,
        functools.partial(linear_loss_chunks.run, head),
        partition,
        sharding_rule=f"{operands} -> {results}",
        need_replication_factors=("d",),
    )
    return whole(*arrays)


# ------------------------------------------------------------------------------------ registration


_PRIMITIVES = {
    (direction, partitioned): registered(
        f"{NAME}{suffix}",
        types=_types,
        run=_run,
        lower=_lower,
        jvp=_forward_jvp if direction == "fwd" else _linear_jvp,
        batch=_batch,
        transpose=None if direction == "fwd" else _transpose,
        drop_unused=_drop_unused if direction == "fwd" else None,
        partitioned=partitioned,
    )
    for direction, suffix in (("fwd", ""), ("tan", "_tangent"), ("bwd", "_backward"))
    for partitioned in (False, True)
}
