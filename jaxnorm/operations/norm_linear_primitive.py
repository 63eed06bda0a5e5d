"""rms_norm_linear as a JAX primitive: its forward.

    jaxnorm.rms_norm_linear           x, weight, scale, bias          y, z, rstd
    jaxnorm.rms_norm_tangent          x, rstd, scale | dx, dscale     dn, from the norm's input
    jaxnorm.rms_norm_linear_tangent   x, rstd, scale, weight, bias, z | dn, dweight, dbias

The JVP rule of the first binds the other two on what is saved: x, rstd and, with an activation, z.
The transpose of the second is the backward of rms_norm, a kernel where there is one; the third is
of `norm_linear_product`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding

from jaxnorm.calls.call import Arrays, Call, Run
from jaxnorm.meshes import auto_axes, sharding
from jaxnorm.operations import norm_linear_product
from jaxnorm.operations.norm import norm_call
from jaxnorm.operations.norm_linear_call import NAME, Layout, Linear
from jaxnorm.operations.norm_linear_product import Product
from jaxnorm.primitives import lowering, remat, row_operations
from jaxnorm.primitives.registration import registered


def bind(call: Linear, *arrays: jax.Array) -> list[jax.Array]:
    """The results of the forward."""
    primitive = _PRIMITIVES[row_operations.may_be_partitioned(call.implementation, arrays)]
    results: list[jax.Array] = primitive.bind(*sharding.vary_alike(arrays), call=call)
    return results


# ------------------------------------------------------------------------------------ evaluation


def _types(*avals: Any, call: Linear) -> list[Any]:
    """Types of the results: rows lie as those of x, features as those of weight."""
    x, weight, *_ = avals
    mesh, spec = sharding.mesh_of(avals), call.spec
    layout = None if mesh.empty else Layout.of(x, weight, mesh)
    of_rows = spec.norm.compute_dtype
    return [
        x.update(
            shape=x.shape[:-1] if name == "rstd" else (*x.shape[:-1], spec.features),
            dtype=of_rows if name == "rstd" else spec.y_dtype,
            weak_type=False,
            sharding=x.sharding if layout is None else NamedSharding(mesh, layout.spec(name)),
        )
        for name in call.results
    ]


# -------------------------------------------------------------------------------- differentiation


def _jvp(primals: Any, tangents: Any, *, call: Linear) -> tuple[Any, Any]:
    full = call.with_residuals()
    results = dict(zip(full.results, bind(full, *primals)))
    results = {name: remat.name_of_linear(name, a) for name, a in results.items()}
    along = {n: t for n, t in zip(call.operands, tangents) if not isinstance(t, ad.Zero)}
    moved = _tangents(call, dict(zip(call.operands, primals)), results, along)
    kept = [results[name] for name in call.results]
    return kept, [
        row_operations.zero_like(a) if moved.get(name) is None else moved[name]
        for name, a in zip(call.results, kept)
    ]


def _tangents(
    call: Linear,
    given: dict[str, jax.Array],
    results: dict[str, jax.Array],
    along: dict[str, jax.Array],
) -> dict[str, jax.Array | None]:
    """Those of the results; None, or none, for a tangent of 0."""
    norm = norm_of(call, given["x"].shape)
    stats_and_scale = [results["rstd"], *([given["scale"]] if "scale" in given else [])]
    of_norm = {name: along.get(name) for name in ("x", "scale")}
    moved: dict[str, jax.Array | None] = {}
    dn, *stats = row_operations.tangents_of(norm, [given["x"], *stats_and_scale], of_norm)
    if stats:
        (moved["rstd"],) = stats
    linear = {name: a for name, a in along.items() if name in ("weight", "bias")}
    if dn is not None:
        linear["n"] = dn
    if not linear:
        return moved
    kept = {**given, **results}
    del kept["y"]
    product = Product(call, "tan", tuple(kept), tuple(linear))
    moved.update(
        zip(("y", "z"), norm_linear_product.bind(product, *kept.values(), *linear.values()))
    )
    return moved


def norm_of(call: Linear, shape: tuple[int, ...]) -> Call:
    """The norm of x with this shape, from its input: its tangent and its backward are the call's.

    They know rstd where the call returns it.
    """
    spec = call.spec
    norm = norm_call(
        "rms_norm",
        shape,
        spec.x_dtype,
        {} if spec.scale_dtype is None else {"scale": (shape[-1:], spec.scale_dtype)},
        axis=-1,
        epsilon=spec.epsilon,
        scale_offset=spec.scale_offset,
        dtype=spec.product_dtype,
        save="input",
        implementation=call.implementation,
    )
    return norm.with_stats() if spec.want_rstd else norm


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """What is not used goes; z alone needs no activation, and rstd alone no product."""
    equation = rest[-1]  # Newer versions of JAX say in between which inputs are live.
    if not any(used):
        return [False] * len(equation.invars), None
    call: Linear = equation.params["call"]
    names = [name for name, is_used in zip(call.results, used) if is_used]
    outvars = [v for v, is_used in zip(equation.outvars, used) if is_used]
    equation = equation.replace(outvars=outvars, params={"call": call.of(*names)})
    return [True] * len(equation.invars), equation


# ---------------------------------------------------------------------------------------- batching


def _batch(arrays: Arrays, dims: Sequence[int | None], *, call: Linear) -> tuple[Arrays, list[int]]:
    """A batch of x is more rows; one of parameters is a loop, whose products are large enough."""
    results = [0] * len(call.results)
    if any(dim is not None for dim in dims[1:]):
        return sharding.map_batch(functools.partial(bind, call), arrays, dims), results
    x, weight, *others = arrays
    x = jnp.moveaxis(x, dims[0] or 0, 0)
    return bind(call.on(x, weight), x, weight, *others), results


# ----------------------------------------------------------------------------------------- meshes


def _on_shards(call: Linear, layout: Layout) -> Run:
    """The call where each device has its shards and the mesh axes have names."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        shard = call.on(*arrays[:2])
        if not layout.cols:
            return bind(shard, *arrays)
        if call.implementation not in (None, "xla"):
            raise ValueError(
                f"{NAME}: implementation={call.implementation!r} cannot run over an axis that is "
                f"sharded: x is sharded by {layout.spec('x')}; leave implementation out, or shard "
                "other axes"
            )
        return shard.over(call.spec.cols, layout.cols).xla(*arrays)

    return run


def _lower(ctx: Any, *arrays: Any, call: Linear) -> Any:
    mesh = sharding.explicit_mesh(ctx.avals_in)
    function = _choose if mesh is None else functools.partial(_on_explicit_axes, mesh)

    def named(*arrays: jax.Array) -> list[jax.Array]:
        with jax.named_scope(ctx.primitive.name):
            return function(ctx, call)(*arrays)

    return mlir.lower_fun(named)(ctx, *arrays)


def _choose(ctx: Any, call: Linear) -> Run:
    name = lowering.chosen(ctx, call) if call.spec.want_y else "xla"
    if name == "xla":
        return call.xla
    return lowering.where_it_lies(ctx, call, name, lambda: _partitioned(call))


def _on_explicit_axes(mesh: Any, ctx: Any, call: Linear) -> Run:
    x, weight, *_ = ctx.avals_in
    layout = Layout.of(x, weight, mesh)
    in_specs = tuple(map(layout.spec, call.operands))

    def run(*arrays: jax.Array) -> list[jax.Array]:
        sharded = jax.shard_map(
            _on_shards(call, layout),
            mesh=layout.mesh,
            in_specs=in_specs,
            out_specs=[*map(layout.spec, call.results)],
            axis_names=sharding.explicit_axes(layout.mesh),
            check_vma=False,  # rstd is the same on all devices that have features of a row
        )
        laid = [sharding.reshard(a, layout.mesh, spec) for a, spec in zip(arrays, in_specs)]
        return [sharding.lie_as(a, aval) for a, aval in zip(sharded(*laid), ctx.avals_out)]

    return run


def _partitioned(call: Linear) -> Run:
    """The call on the shards that XLA's partitioner has in hand (Auto axes)."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        def partition(mesh: Any, given: Any, _: Any) -> tuple[Any, ...]:
            layout = Layout.of(given[0], given[1], mesh)
            operands, results = (
                [NamedSharding(mesh, layout.spec(name)) for name in names]
                for names in (call.operands, call.results)
            )
            return mesh, _on_shards(call, layout), results, tuple(operands)

        rows = " ".join(f"r{axis}" for axis in range(arrays[0].ndim - 1))
        # Parameters come along x's columns whole, however they are stored; x stays as it is.
        factors = {"x": f"{rows} d", "weight": "k f", "scale": "s", "bias": "f", "rstd": rows}
        operands, results = (
            ", ".join(factors.get(name, f"{rows} f") for name in names)
            for names in (call.operands, call.results)
        )
        rule = f"{operands} -> {results}"
        whole = auto_axes.asks_partitioner(call, call.xla, partition, sharding_rule=rule)
        return whole(*arrays)

    return run


# ------------------------------------------------------------------------------------ registration


_PRIMITIVES = {
    partitioned: registered(
        NAME,
        types=_types,
        run=lambda *arrays, call: call.xla(*arrays),
        lower=_lower,
        jvp=_jvp,
        batch=_batch,
        drop_unused=_drop_unused,
        partitioned=partitioned,
    )
    for partitioned in (False, True)
}
