"""rms_norm_linear as JAX primitives: a forward, and what is linear in its tangents.

    jaxnorm.rms_norm_linear           x, weight, scale, bias          y, z, rstd
    jaxnorm.rms_norm_tangent          x, rstd, scale | dx, dscale     dn, from the norm's input
    jaxnorm.rms_norm_linear_tangent   x, rstd, scale, weight, bias, z | dn, dweight, dbias

The JVP rule of the first binds the other two on what is saved: x, rstd and, with an activation, z.
The transpose of the second is the backward of rms_norm, a kernel where there is one; that of the
third is ``jaxnorm.rms_norm_linear_backward``. Both of these are plain JAX, and make the normalised
x again from x and rstd; as primitives they keep no more than their operands.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

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


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part of what follows the norm: its tangent, or its backward.

    Attributes:
      direction: ``"tan"`` takes `kept` and the tangents of `wrt`, and returns those of y and, where
        the call returns it, of z; ``"bwd"`` takes `kept` and the cotangents of these, and returns
        those of `wrt`.
      kept: names of the operands and results of the call that it takes.
      wrt: which of n (the normalised x), weight and bias have tangents.
    """

    call: Linear
    direction: Literal["tan", "bwd"]
    kept: tuple[str, ...]
    wrt: tuple[str, ...]

    def __str__(self) -> str:
        """What a jaxpr shows."""
        return f"{str(self.call)[:-1]} wrt={','.join(self.wrt)})"

    def to(self, direction: Literal["tan", "bwd"], wrt: Iterable[str]) -> "Product":
        return dataclasses.replace(self, direction=direction, wrt=tuple(wrt))


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


def _run(*arrays: jax.Array, product: Product) -> list[jax.Array]:
    """The pass of a product; the backward is what JAX makes of the tangent."""
    count = len(product.kept)
    kept, linear = dict(zip(product.kept, arrays[:count])), arrays[count:]
    tangent = functools.partial(_tangent, product, kept)
    if product.direction == "tan":
        return tangent(*linear)
    types = [
        kept["x"].astype(product.call.spec.product_dtype) if n == "n" else kept[n]
        for n in product.wrt
    ]
    return [*jax.linear_transpose(tangent, *types)([*linear])]


def _tangent(product: Product, kept: dict[str, jax.Array], *linear: jax.Array) -> list[jax.Array]:
    layout, spec = _layout_of(kept), product.call.spec

    def lie(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if layout is None:
            return arrays
        return {n: _sharding.reshard(a, layout.mesh, layout.spec(n)) for n, a in arrays.items()}

    kept, along = lie(kept), lie(dict(zip(product.wrt, linear)))
    # Else XLA finds that the forward has made the normalised x before, and keeps that.
    kept["x"] = lax.optimization_barrier(kept["x"])
    tangent: Callable[..., tuple[jax.Array, jax.Array]]
    tangent = _implementation.module("xla").rms_norm_linear_tan  # type: ignore[attr-defined]
    dy, dz = tangent(
        kept["x"],
        kept["rstd"],
        kept.get("scale"),
        kept["weight"],
        kept.get("z"),
        along.get("n"),
        along.get("weight"),
        along.get("bias"),
        spec=spec,
        out_sharding=None if layout is None else NamedSharding(layout.mesh, layout.spec("z")),
    )
    return [dy, dz] if spec.want_z else [dy]


def _types_of_product(*avals: Any, product: Product) -> list[Any]:
    run = functools.partial(_run, product=product)
    return [*jax.make_jaxpr(run)(*avals).out_avals]


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
    kept = {**given, **results}
    del kept["y"]
    product = Product(call, "tan", tuple(kept), tuple(linear))
    moved.update(zip(("y", "z"), _bind_product(product, *kept.values(), *linear.values())))
    return moved


def _bind_product(product: Product, *arrays: jax.Array) -> list[jax.Array]:
    primitive = _PRODUCTS[product.direction]
    results: list[jax.Array] = primitive.bind(*_sharding.vary_alike(arrays), product=product)
    return results


def _jvp_of_product(primals: Any, tangents: Any, *, product: Product) -> tuple[Any, Any]:
    count = len(product.kept)
    results = _bind_product(product, *primals)
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return results, _bind_product(product, *primals[:count], *linear)
    along = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def function(*moving: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, a in zip(along, moving):
            operands[i] = a
        return _run(*operands, product=product)

    _, moved = jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])
    return results, moved


def _transpose(cotangents: Any, *operands: Any, product: Product) -> list[Any]:
    """Of the tangent: the backward. Of the backward: the tangent."""
    count = len(product.kept)
    kept, linear = operands[:count], operands[count:]
    wanted = [ad.is_undefined_primal(a) for a in linear]
    found: list[Any] = [None] * len(linear)
    if product.direction == "tan" and any(not isinstance(ct, ad.Zero) for ct in cotangents):
        wrt = [name for name, is_wanted in zip(product.wrt, wanted) if is_wanted]
        cotangents = map(ad.instantiate_zeros, cotangents)
        results = iter(_bind_product(product.to("bwd", wrt), *kept, *cotangents))
        found = [next(results) if is_wanted else None for is_wanted in wanted]
    elif product.direction == "bwd":
        along = {n: ct for n, ct in zip(product.wrt, cotangents) if not isinstance(ct, ad.Zero)}
        if along:
            found = _bind_product(product.to("tan", along), *kept, *along.values())
    return [None] * count + [a if is_wanted else None for a, is_wanted in zip(found, wanted)]


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
        batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}

        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            return bind(call, *[batched.get(i, a) for i, a in enumerate(arrays)])

        return lax.map(one, batched), results
    x, weight, *others = arrays
    x = jnp.moveaxis(x, dims[0] or 0, 0)
    return bind(call.on(x, weight), x, weight, *others), results


def _batch_of_product(
    arrays: Arrays, dims: Sequence[int | None], *, product: Product
) -> tuple[Arrays, Sequence[int]]:
    """As plain JAX: the gradient that is taken outside `jax.vmap` has batched the forward."""
    results = jax.vmap(functools.partial(_run, product=product), dims)(*arrays)
    return results, [0] * len(results)


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


def _registered(name: str, **rules: Any) -> Primitive:
    primitive = Primitive(f"jaxnorm.{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(rules["types"])
    primitive.def_impl(_eager.alone(primitive, rules["run"]))
    mlir.register_lowering(primitive, rules["lower"], inline=False)
    ad.primitive_jvps[primitive] = rules["jvp"]
    batching.primitive_batchers[primitive] = rules["batch"]
    with contextlib.suppress(ImportError, AttributeError):
        # As those of `_primitive`: without it `checkify` sees no NaN that a call makes.
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    return primitive


_PRIMITIVES = {
    partitioned: _registered(
        NAME,
        types=_types,
        run=lambda *arrays, call: call.xla(*arrays),
        lower=_lower,
        jvp=_jvp,
        batch=_batch,
    )
    for partitioned in (False, True)
}
for primitive in _PRIMITIVES.values():
    partial_eval.dce_rules[primitive] = _drop_unused
_auto_axes.needs_devices(_PRIMITIVES[True])

_PRODUCTS = {
    direction: _registered(
        f"{NAME}{suffix}",
        types=_types_of_product,
        run=_run,
        lower=mlir.lower_fun(_run),
        jvp=_jvp_of_product,
        batch=_batch_of_product,
    )
    for direction, suffix in (("tan", "_tangent"), ("bwd", "_backward"))
}
for primitive in _PRODUCTS.values():
    ad.primitive_transposes[primitive] = _transpose
