"""The operations as JAX primitives: a forward, a tangent and a backward one for each function.

    jaxnorm.rms_norm             x, scale                        its JVP rule binds, on what is
    jaxnorm.rms_norm_tangent     y, rstd, scale | dx, dscale     saved, the tangent, whose
    jaxnorm.rms_norm_backward    y, rstd, scale | dy             transpose is the backward

So reverse mode, forward mode and their mixtures follow, under every transformation, and x is never
among what is saved from the output. The tangent and the backward are linear in what follows the
bar, and each other's transpose; their derivatives along what precedes it, which second order needs,
are those of the xla implementation.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.calls import backends
from jaxnorm.calls.call import Arrays, Call
from jaxnorm.meshes import sharding
from jaxnorm.primitives import lowering, remat
from jaxnorm.primitives.registration import registered
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, PARAMETERS, SHARED, Kind
from jaxnorm_kernels.specs import Name


def bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """The results of the pass; None stands for an array that there is not."""
    leaves = sharding.vary_alike([a for a in arrays if a is not None])
    partitioned = may_be_partitioned(call.implementation, leaves)
    primitive = _PRIMITIVES[call.primitives or call.function, call.spec.direction, partitioned]
    results: list[jax.Array] = primitive.bind(*leaves, call=call)
    return results


def may_be_partitioned(implementation: Name | None, arrays: Arrays) -> bool:
    """Whether a kernel may meet arrays that XLA spreads over devices.

    To partition it JAX has to know the devices when it lowers, which programs without any (for an
    `AbstractMesh`) and with several meshes cannot say. So it is asked for no more than it must.
    """
    if jax.device_count() == 1 or sharding.explicit_mesh([*map(jax.typeof, arrays)]) is not None:
        return False
    return backends.has_kernels(implementation, backends.local_platform())


# ------------------------------------------------------------------------------------ evaluation


def _types(*avals: Any, call: Call) -> list[Any]:
    """Types of the results: rows lie as x does, and a parameter's gradient as the parameter."""
    x, *_ = avals
    mesh, spec, view = sharding.mesh_of(avals), x.sharding.spec, call.view
    types = []
    for name, kind, dtype in zip(call.result_names, call.result_kinds, call.result_dtypes):
        if kind in PARAMETERS:
            types.append(avals[call.parameters[name]].update(weak_type=False))
            continue
        shape = view.shape_of(kind)
        split = [spec[axis] for axis in view.axes_of(kind)]
        if kind == "logits_bias":
            split = [None if size == 1 else over for size, over in zip(shape, split)]
        axes = PartitionSpec(*split)
        types.append(
            x.update(
                shape=shape,
                dtype=dtype,
                weak_type=False,
                sharding=x.sharding if mesh.empty else NamedSharding(mesh, axes),
            )
        )
    return types


# -------------------------------------------------------------------------------- differentiation


def _forward_jvp(primals: Any, tangents: Any, *, call: Call) -> tuple[Any, Any]:
    with_stats, operation = call.with_stats(), call.spec.operation
    outputs = bind(with_stats, *primals)
    if not call.spec.want_stats:
        outputs = remat.name(with_stats, outputs)
    arrays = dict(zip(call.primals, primals)) | dict(zip(with_stats.result_names, outputs))
    # The very array that is returned: a reshaped or cast copy would be stored a second time.
    arrays["saved"] = arrays[call.spec.starts_from]
    along: dict[str, jax.Array | None] = {
        name: None if isinstance(t, ad.Zero) else t
        for name, t in zip(call.primals, tangents)
        if name in operation.differentiable
    }
    if operation.derivative is None:
        moved = tangents_of(call, [arrays[name] for name in call.residual_names], along)
    else:  # norm_add: y = residual + norm(x)
        residual, norm = along.pop("residual"), call.first()
        dy, *others = tangents_of(norm, [arrays[name] for name in norm.residual_names], along)
        moved = [_sum([residual, dy], call.spec.residual_dtype), *others]
    by_name = dict(zip(with_stats.result_names, moved))
    results = [arrays[name] for name in call.result_names]
    along_results = [by_name[name] for name in call.result_names]
    return results, [zero_like(a) if t is None else t for a, t in zip(results, along_results)]


def tangents_of(
    call: Call,
    residuals: Sequence[jax.Array],
    tangents: dict[str, jax.Array | None],
) -> list[jax.Array | None]:
    """What the tangent of a forward returns; None for a tangent of 0, among `tangents`, too."""
    along = {name: t for name, t in tangents.items() if t is not None}
    tangent = call.tangent([*along])
    if not along:
        return [None] * len(tangent.result_kinds)
    return [*bind(tangent, *residuals, *along.values())]


def zero_like(a: jax.Array) -> ad.Zero:
    """The tangent 0 of an array."""
    return ad.Zero(jax.typeof(a).to_tangent_aval())


def _sum(terms: Sequence[jax.Array | None], dtype: Any) -> jax.Array | None:
    """The sum in `dtype`, rounded once, of those that are not None; None for that of none."""
    arrays: Sequence[jax.Array] = [a for a in terms if a is not None]
    if not arrays:
        return None
    wide = functools.reduce(jnp.promote_types, [a.dtype for a in arrays])
    arrays = sharding.vary_alike([a.astype(wide) for a in arrays])
    return functools.reduce(jnp.add, arrays).astype(dtype)


def _linear_jvp(primals: Any, tangents: Any, *, call: Call) -> tuple[Any, Any]:
    """Of a tangent or a backward."""
    results = bind(call, *primals)
    along = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if along[0] >= call.residuals:
        linear = [ad.instantiate_zeros(t) for t in tangents[call.residuals :]]
        return results, bind(call, *primals[: call.residuals], *linear)

    def function(*moving: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, a in zip(along, moving):
            operands[i] = a
        return sharding.run(call, Call.xla, operands)

    _, moved = jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])
    return results, moved


def _transpose(cotangents: Any, *operands: Any, call: Call) -> list[Any]:
    """Of a tangent: the backward. Of a backward: the tangent."""
    residuals, linear = operands[: call.residuals], operands[call.residuals :]
    wanted = [ad.is_undefined_primal(a) for a in linear]
    if call.spec.direction == "tan":
        names = [name for name, is_wanted in zip(call.wrt, wanted) if is_wanted]
        results = _backward(cotangents, residuals, names, call)
        found = [results[name] for name in names]
    else:
        found = _tangent(cotangents, residuals, wanted, call)
    cotangent = iter(found)
    return [None] * len(residuals) + [next(cotangent) if w else None for w in wanted]


def _backward(
    cotangents: Any, residuals: Arrays, names: list[str], call: Call
) -> dict[str, jax.Array | None]:
    """The cotangents of the tangents `names`, from those of a tangent's results."""
    dy, *others = cotangents
    dh = others.pop(0) if call.spec.adds_dh or call.spec.normalises_h else None
    if isinstance(dh, ad.Zero) or not {*call.spec.operation.through_h} & {*names}:
        dh = None
    stat_cotangents = any(not isinstance(ct, ad.Zero) for ct in others)
    if isinstance(dy, ad.Zero) and not stat_cotangents:
        return _backward_of_h(dh, residuals, names, call)
    backward = call.backward(names, adds_dh=dh is not None, stat_cotangents=stat_cotangents)
    dstats = map(ad.instantiate_zeros, others if stat_cotangents else [])
    results = bind(backward, *residuals, ad.instantiate_zeros(dy), dh, *dstats)
    return dict(zip(names, results))


def _backward_of_h(
    dh: jax.Array | None, residuals: Arrays, names: list[str], call: Call
) -> dict[str, jax.Array | None]:
    """`_backward` where y is not used."""
    found: dict[str, jax.Array | None] = dict.fromkeys(names)
    if dh is None:
        return found
    if call.spec.operation.starts_from_x:
        arrays, first = dict(zip(call.residual_names, residuals)), call.first()
        arrays["saved"] = arrays["x"]
        inner = [name for name in names if name in ("x", "scale")]
        of_first = [arrays[name] for name in first.residual_names]
        results = bind(first.backward(inner), *of_first, dh) if inner else []
        found.update(zip(inner, results))
    elif "x" in names:
        found["x"] = dh.astype(call.spec.x_dtype)
    if "residual" in names:
        found["residual"] = dh
    return found


def _into_accumulators(cotangents: Any, *operands: Any, call: Call) -> None:
    """The transpose of a norm's tangent, for a backward pass that hands out its accumulators.

    In ``h = x + r; y = norm(h)`` what the residual branch gives the cotangent of h is in its
    accumulator by now. The backward takes it as dh and writes the sum, which else were another pass
    over three arrays of this size.
    """
    residuals, accumulators = operands[: call.residuals], operands[call.residuals :]
    wanted = {
        n: a for n, a in zip(call.wrt, accumulators) if isinstance(a, _accumulators.GradAccum)
    }
    x: Any = wanted.get("x")
    knows = type(x) is _accumulators.ValAccum and not isinstance(x.val, ad.Zero)
    moves = any(not isinstance(ct, ad.Zero) for ct in cotangents)
    adds = knows and moves and call.spec.op == "norm" and not call.spec.adds_dh
    if adds:
        dy, *others = cotangents
        cotangents = [dy, x.val, *others]
        call = call.tangent(call.wrt, adds_dh=True)
    results = _backward(cotangents, residuals, [*wanted], call)
    for name, accumulator in wanted.items():
        if adds and name == "x":
            accumulator.val = results[name]
        else:
            accumulator.accum(results[name])


def _tangent(
    cotangents: Any, residuals: Arrays, wanted: list[bool], call: Call
) -> list[jax.Array | None]:
    """The cotangents of those that are wanted of dy, dh and the statistics'."""
    along = {n: ct for n, ct in zip(call.wrt, cotangents) if not isinstance(ct, ad.Zero)}
    takes_dh = call.spec.adds_dh
    adds_dh = takes_dh and call.spec.op == "norm" and "x" in along
    returns_h = adds_dh or call.spec.normalises_h
    tangent = call.tangent([*along], adds_dh=adds_dh)
    results: list[jax.Array | None] = [*bind(tangent, *residuals, *along.values())]
    if takes_dh and not returns_h:
        results.insert(1, None)
    if returns_h and not takes_dh:
        results.pop(1)
    return [ct for ct, is_wanted in zip(results, wanted) if is_wanted]


# --------------------------------------------------------------------------- what is not used


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """What is not used goes: a call, its h where only y is used, its norm where only h is."""
    equation = rest[-1]  # Newer versions of JAX say in between which inputs are live.
    call = equation.params["call"]
    if not any(used):
        return [False] * len(equation.invars), None
    if call.spec.normalises_h and call.spec.unused is None:
        y, h, *stats = equation.outvars
        if not used[1]:
            equation = equation.replace(outvars=[y, *stats], params={"call": call.without("h")})
        elif not (used[0] or any(used[2:])):
            equation = equation.replace(outvars=[h], params={"call": call.without("y")})
    return [True] * len(equation.invars), equation


# ---------------------------------------------------------------------------------------- batching


def _batch(arrays: Arrays, dims: Sequence[int | None], *, call: Call) -> tuple[Arrays, list[int]]:
    """A batch of rows is more rows; a batch of parameters, or of their gradients, is groups.

    So the pass stays what it is, and a gradient taken outside `jax.vmap` finds the same backward.
    """
    size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
    batched = {kind for kind, dim in zip(call.operand_kinds, dims) if dim is not None}
    if call.spec.direction == "bwd":
        batched.update(kind for kind in call.result_kinds if kind in SHARED)
    view = call.view.batched(size, batched)
    if call.spec.direction == "fwd" and "scale" in batched and "next_scale" in call.primals:
        given = dict(zip(call.primals, arrays))
        for name, dim in zip(call.primals, dims):
            if dim is None and name in call.parameters:  # It gets the other scale's batch axis.
                call, given[name] = call.widened(name, given[name])
        arrays = list(given.values())

    def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
        if dim is not None:
            a = jnp.moveaxis(a, dim, 0)
        elif kind in ("mask", "logits_bias"):
            a = a[None]
        elif kind in PARAMETERS and kind not in batched:
            return a
        else:
            a = jnp.broadcast_to(a, (size, *a.shape))
        return jnp.expand_dims(a, range(1, 1 + len(view.shape_of(kind)) - a.ndim))

    operands = map(with_batch_axis, arrays, dims, call.operand_kinds)
    results = [
        jnp.squeeze(a, tuple(range(1, a.ndim - len(call.view.shape_of(kind)))))
        for kind, a in zip(call.result_kinds, bind(call.on(view), *operands))
    ]
    return results, [0] * len(results)


# ------------------------------------------------------------------------------------ registration


def _with_accumulators() -> Any:
    """JAX's private module, if its backward passes hand their accumulators to transposes.

    Without it nothing breaks: the residual's gradient is then added outside the kernel.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad as private

        if all(hasattr(private, n) for n in ("fancy_transposes", "GradAccum", "ValAccum")):
            return private
    return None


_accumulators = _with_accumulators()


def _primitive(function: str, direction: str, suffix: str, partitioned: bool) -> Primitive:
    is_linear = direction != "fwd"
    primitive = registered(
        f"{function}{suffix}",
        types=_types,
        run=lambda *arrays, call: call.xla(*arrays),
        lower=functools.partial(lowering.lower, bind=bind),
        jvp=_linear_jvp if is_linear else _forward_jvp,
        batch=_batch,
        transpose=_transpose if is_linear else None,
        drop_unused=None if is_linear else _drop_unused,
        partitioned=partitioned,
    )
    is_norm = OPERATIONS[FUNCTIONS[function].op].family == "norm"
    if _accumulators is not None and direction == "tan" and is_norm:
        _accumulators.fancy_transposes[primitive] = _into_accumulators
    return primitive


_PRIMITIVES = {
    (function, direction, partitioned): _primitive(function, direction, suffix, partitioned)
    for function in FUNCTIONS
    for direction, suffix in (("fwd", ""), ("tan", "_tangent"), ("bwd", "_backward"))
    for partitioned in (False, True)
}
