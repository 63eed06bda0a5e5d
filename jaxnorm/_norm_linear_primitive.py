"""rms_norm_linear as a JAX primitive: a forward, whose derivatives are made of what exists.

    forward     y, z, rstd  from  x, weight, scale, bias          this primitive
    tangent     dn          from  x, rstd, scale | dx, dscale     that of rms_norm from its input
                dy          from  x, rstd, scale, weight, z | dn, dweight, dbias

The transpose of the first tangent is the backward of rms_norm, a kernel where there is one. The
second one is plain JAX, rematerialised as a whole: what it needs of the normalised x it makes again
from x and rstd, in the forward mode as in its transpose, and keeps nothing but its operands. So
every derivative, of any order, keeps x, rstd and, with an activation, z.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm import _auto_axes, _eager, _implementation, _lowering, _primitive, _remat, _sharding
from jaxnorm._call import Arrays, Call, Function
from jaxnorm._norm import norm_call
from jaxnorm._norm_linear_call import NAME, Linear


def bind(call: Linear, *arrays: jax.Array) -> list[jax.Array]:
    """The results of the forward."""
    primitive = _PRIMITIVES[_primitive.may_be_partitioned(call.implementation)]
    results: list[jax.Array] = primitive.bind(*_sharding.vary_alike(arrays), call=call)
    return results


# ------------------------------------------------------------------------------------ evaluation


def _types(*avals: Any, call: Linear) -> list[Any]:
    """Types of the results: rows lie as those of x, features as those of weight."""
    x, weight, *_ = avals
    mesh, spec = _sharding.mesh_of(avals), call.spec
    layout = None if mesh.empty else _Layout.of(x, weight, mesh)
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
    results = {name: _remat.name_of_linear(name, a) for name, a in results.items()}
    along = {n: t for n, t in zip(call.operands, tangents) if not isinstance(t, ad.Zero)}
    moved = _tangents(call, dict(zip(call.operands, primals)), results, along)
    kept = [results[name] for name in call.results]
    return kept, [
        _primitive.zero_like(a) if moved.get(name) is None else moved[name]
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
    dn, *stats = _primitive.tangents_of(norm, [given["x"], *stats_and_scale], of_norm)
    if stats:
        (moved["rstd"],) = stats
    linear = {name: a for name, a in along.items() if name in ("weight", "bias")}
    if dn is not None:
        linear["n"] = dn
    if not linear:
        return moved
    kept = {name: a for name, a in {**given, **results}.items() if name not in ("y", "bias")}
    run = jax.checkpoint(functools.partial(_of_product, call, _layout_of(given)))
    moved["y"], moved["z"] = run(kept, linear)
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


def _of_product(
    call: Linear,
    layout: "_Layout | None",
    kept: dict[str, jax.Array],
    along: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The tangents of y and z, from what is kept; its transpose makes those of the operands."""

    def lie(name: str, a: jax.Array) -> jax.Array:
        return a if layout is None else _sharding.reshard(a, layout.mesh, layout.spec(name))

    kept = {name: lie(name, a) for name, a in kept.items()}
    along = {name: lie(name, a) for name, a in along.items()}
    arrays = _sharding.vary_alike([*kept.values(), *along.values()])
    kept, along = dict(zip(kept, arrays)), dict(zip(along, arrays[len(kept) :]))
    tangent: Callable[..., tuple[jax.Array, jax.Array]]
    tangent = _implementation.module("xla").rms_norm_linear_tan  # type: ignore[attr-defined]
    return tangent(
        kept["x"],
        kept["rstd"],
        kept.get("scale"),
        kept["weight"],
        kept.get("z"),
        along.get("n"),
        along.get("weight"),
        along.get("bias"),
        spec=call.spec,
        out_sharding=None if layout is None else NamedSharding(layout.mesh, layout.spec("z")),
    )


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
        batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}

        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            return bind(call, *[batched.get(i, a) for i, a in enumerate(arrays)])

        return lax.map(one, batched), results
    x, weight, *others = arrays
    x = jnp.moveaxis(x, dims[0] or 0, 0)
    return bind(call.on(x, weight), x, weight, *others), results


# ----------------------------------------------------------------------------------------- meshes


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Over which mesh axes rows, columns and features are split.

    Weight is split along its columns as x is, and gathered where it is stored otherwise (FSDP), or
    where features are split over axes that split x. Where columns are split, the products' sums
    cross the mesh.
    """

    mesh: Any
    rows: tuple[tuple[str, ...], ...]
    cols: tuple[str, ...]
    features: tuple[str, ...]

    @classmethod
    def of(cls, x: Any, weight: Any, mesh: Any) -> "_Layout":
        """Of types with shardings. What does not divide an axis does not split it."""
        *rows, cols = (_sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape)))
        features = _sharding.axes_over(weight, 1, mesh)
        taken = {*sum(rows, ()), *cols}
        return cls(mesh, tuple(rows), cols, () if taken & {*features} else features)

    def spec(self, name: str) -> PartitionSpec:
        """Of an operand or a result, or of the normalised x, ``n``."""
        rows = [names or None for names in self.rows]
        cols, features = self.cols or None, self.features or None
        specs: dict[str, tuple[Any, ...]] = {
            "weight": (cols, features),
            "scale": (cols,),
            "bias": (features,),
            "rstd": (*rows,),
            **dict.fromkeys(("x", "n"), (*rows, cols)),
            **dict.fromkeys(("y", "z"), (*rows, features)),
        }
        return PartitionSpec(*specs[name])


def _layout_of(given: dict[str, jax.Array]) -> _Layout | None:
    """Of arrays whose types name mesh axes; else None."""
    avals = [jax.typeof(a) for a in given.values()]
    if not _sharding.names_axes(*avals):
        return None
    return _Layout.of(jax.typeof(given["x"]), jax.typeof(given["weight"]), _sharding.mesh_of(avals))


def _on_shards(call: Linear, layout: _Layout) -> Function:
    """The call where each device has its shards and the mesh axes have names."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        shard = call.on(*arrays[:2])
        if not layout.cols:
            return bind(shard, *arrays)
        if call.implementation not in (None, "xla"):
            raise ValueError(
                f"implementation={call.implementation!r} cannot run {NAME} over an axis that is "
                f"sharded: x is sharded by {layout.spec('x')}; leave implementation out, or shard "
                "other axes"
            )
        return shard.over(call.spec.cols, layout.cols).xla(*arrays)

    return run


def _lower(ctx: Any, *arrays: Any, call: Linear) -> Any:
    function = _on_explicit_axes if _sharding.names_axes(*ctx.avals_in) else _choose

    def named(*arrays: jax.Array) -> list[jax.Array]:
        with jax.named_scope(ctx.primitive.name):
            return function(ctx, call)(*arrays)

    return mlir.lower_fun(named)(ctx, *arrays)


def _choose(ctx: Any, call: Linear) -> Function:
    name = _lowering.chosen(ctx, call) if call.spec.want_y else "xla"
    if name == "xla":
        return call.xla
    return _lowering.where_it_lies(ctx, call, name, lambda: _partitioned(call))


def _on_explicit_axes(ctx: Any, call: Linear) -> Function:
    x, weight, *_ = ctx.avals_in
    layout = _Layout.of(x, weight, _sharding.mesh_of(ctx.avals_in))
    in_specs = tuple(map(layout.spec, call.operands))

    def run(*arrays: jax.Array) -> list[jax.Array]:
        sharded = jax.shard_map(
            _on_shards(call, layout),
            mesh=layout.mesh,
            in_specs=in_specs,
            out_specs=[*map(layout.spec, call.results)],
            axis_names=_sharding.explicit_axes(layout.mesh),
            check_vma=False,  # rstd is the same on all devices that have features of a row
        )
        laid = [_sharding.reshard(a, layout.mesh, spec) for a, spec in zip(arrays, in_specs)]
        return [_sharding.lie_as(a, aval) for a, aval in zip(sharded(*laid), ctx.avals_out)]

    return run


def _partitioned(call: Linear) -> Function:
    """The call on the shards that XLA's partitioner has in hand (Auto axes)."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        def partition(mesh: Any, given: Any, _: Any) -> tuple[Any, ...]:
            layout = _Layout.of(given[0], given[1], mesh)
            operands, results = (
                [NamedSharding(mesh, layout.spec(name)) for name in names]
                for names in (call.operands, call.results)
            )
            return mesh, _on_shards(call, layout), results, tuple(operands)

        @custom_partitioning
        def whole(*arrays: jax.Array) -> list[jax.Array]:
            return call.xla(*arrays)

        rows = " ".join(f"r{axis}" for axis in range(arrays[0].ndim - 1))
        # Parameters come along x's columns whole, however they are stored; x stays as it is.
        factors = {"x": f"{rows} d", "weight": "k f", "scale": "s", "bias": "f", "rstd": rows}
        operands, results = (
            ", ".join(factors.get(name, f"{rows} f") for name in names)
            for names in (call.operands, call.results)
        )
        whole.def_partition(partition, sharding_rule=f"{operands} -> {results}")
        found: list[jax.Array] = whole(*arrays)
        return found

    return run


# ------------------------------------------------------------------------------------ registration


def _registered(*, partitioned: bool) -> Primitive:
    primitive = Primitive(f"jaxnorm.{NAME}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(_types)
    primitive.def_impl(_eager.alone(primitive, lambda *arrays, call: call.xla(*arrays)))
    mlir.register_lowering(primitive, _lower, inline=False)
    ad.primitive_jvps[primitive] = _jvp
    batching.primitive_batchers[primitive] = _batch
    partial_eval.dce_rules[primitive] = _drop_unused
    with contextlib.suppress(ImportError, AttributeError):
        # As those of `_primitive`: without it `checkify` sees no NaN that a call makes.
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    if partitioned:
        _auto_axes.needs_devices(primitive)
    return primitive


_PRIMITIVES = {partitioned: _registered(partitioned=partitioned) for partitioned in (False, True)}
