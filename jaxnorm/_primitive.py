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
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm import _auto_axes, _implementation, _lowering, _remat, _sharding
from jaxnorm._call import Arrays, Call
from jaxnorm._rows import PARAMETERS, Kind


def bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """The results of the pass; None stands for an array that there is not."""
    leaves = _sharding.vary_alike([a for a in arrays if a is not None])
    primitive = _PRIMITIVES[call.function, call.spec.direction, _may_be_spread(call)]
    results: list[jax.Array] = primitive.bind(*leaves, call=call)
    return results


def _may_be_spread(call: Call) -> bool:
    """Whether a kernel may meet arrays that XLA spreads over devices.

    To partition it JAX has to know the devices when it lowers, which programs without any (for an
    `AbstractMesh`) and with several meshes cannot say. So it is asked for no more than it must.
    """
    if jax.device_count() == 1:
        return False
    return _implementation.has_kernels(call.implementation, _implementation.local_platform())


# ------------------------------------------------------------------------------------ evaluation


def _types(*avals: Any, call: Call) -> list[Any]:
    """Types of the results: rows lie as x does, and a parameter's gradient as the parameter."""
    x, *_ = avals
    mesh, spec, view = _sharding.mesh_of(avals), x.sharding.spec, call.view
    array_dtype = call.spec.x_dtype if call.spec.direction == "bwd" else call.spec.y_dtype
    types = []
    for kind in call.result_kinds:
        if kind in PARAMETERS:
            parameter = avals[call.operand_kinds.index(kind)]
            types.append(parameter.update(weak_type=False))
            continue
        axes = PartitionSpec(*[spec[axis] for axis in view.axes_of(kind)])
        types.append(
            x.update(
                shape=view.shape_of(kind),
                dtype=array_dtype if kind == "array" else call.spec.compute_dtype,
                weak_type=False,
                sharding=x.sharding if mesh.empty else NamedSharding(mesh, axes),
            )
        )
    return types


def _run(primitive: Primitive, *arrays: jax.Array, call: Call) -> list[jax.Array]:
    """Outside `jax.jit`: compiled alone."""
    if jax.config.jax_disable_jit:
        return call.xla(*arrays)  # which is there to see each step
    results: list[jax.Array] = _compiled(primitive, call)(*arrays)
    return results


@functools.lru_cache(maxsize=4096)
def _compiled(primitive: Primitive, call: Call) -> Any:
    def run(*arrays: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = primitive.bind(*arrays, call=call)
        return results

    run.__name__ = run.__qualname__ = primitive.name  # what profiles show
    return jax.jit(run)


# -------------------------------------------------------------------------------- differentiation


def _forward_jvp(primals: Any, tangents: Any, *, call: Call) -> tuple[Any, Any]:
    names = [n for n, t in zip(call.primals, tangents) if not isinstance(t, ad.Zero)]
    outputs = bind(call.with_stats(), *primals)
    if not call.spec.want_stats:
        outputs = _remat.name(call.spec.op, outputs)
    y, *stats = outputs
    # The very array that is returned: a reshaped or cast copy would be stored a second time.
    saved = primals[0] if call.spec.op == "norm" and call.spec.saved == "input" else y
    linear = [t for t in tangents if not isinstance(t, ad.Zero)]
    moved = bind(call.tangent(names), saved, *stats, *primals[1:], *linear)
    return outputs[: len(call.result_kinds)], moved


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
        return _sharding.run(call, Call.xla, operands)

    _, moved = jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])
    return results, moved


def _transpose(cotangents: Any, *operands: Any, call: Call) -> list[Any]:
    """Of a tangent: the backward. Of a backward: the tangent."""
    residuals, linear = operands[: call.residuals], operands[call.residuals :]
    wanted = [ad.is_undefined_primal(a) for a in linear]
    given = [not isinstance(ct, ad.Zero) for ct in cotangents]
    if call.spec.direction == "tan":
        names = [name for name, is_wanted in zip(call.wrt, wanted) if is_wanted]
        stat_cotangents = any(given[1:])
        transpose = call.backward(names, stat_cotangents=stat_cotangents)
        cotangents = cotangents if stat_cotangents else cotangents[:1]
        results = iter(bind(transpose, *residuals, *map(ad.instantiate_zeros, cotangents)))
    else:
        transpose = call.tangent([name for name, is_given in zip(call.wrt, given) if is_given])
        cotangents = [ct for ct, is_given in zip(cotangents, given) if is_given]
        outputs = bind(transpose, *residuals, *cotangents)
        results = (ct for ct, is_wanted in zip(outputs, wanted) if is_wanted)
    return [None] * len(residuals) + [next(results) if w else None for w in wanted]


# ---------------------------------------------------------------------------------------- batching


def _batch(arrays: Arrays, dims: Sequence[int | None], *, call: Call) -> tuple[Arrays, list[int]]:
    """A batch of rows is more rows; a batch of parameters, or of their gradients, is groups.

    So the pass stays what it is, and a gradient taken outside `jax.vmap` finds the same backward.
    """
    size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
    batched = {kind for kind, dim in zip(call.operand_kinds, dims) if dim is not None}
    if call.spec.direction == "bwd":
        batched.update(kind for kind in call.result_kinds if kind in PARAMETERS)
    view = call.view.batched(size, batched)

    def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
        if dim is not None:
            a = jnp.moveaxis(a, dim, 0)
        elif kind == "mask":
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


def _primitive(name: str, jvp: Any) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_types)
    primitive.def_impl(functools.partial(_run, primitive))
    # Out of line: the same call of another layer is lowered once.
    mlir.register_lowering(primitive, functools.partial(_lowering.lower, bind=bind), inline=False)
    ad.primitive_jvps[primitive] = jvp
    if jvp is _linear_jvp:
        ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    with contextlib.suppress(ImportError, AttributeError):
        # `checkify` has no public table of the primitives that may make a NaN. Without it nothing
        # breaks, but its float checks see none that a call makes.
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    return primitive


_PRIMITIVES = {
    (function, direction, spread): _primitive(
        f"jaxnorm.{function}{suffix}", _forward_jvp if direction == "fwd" else _linear_jvp
    )
    for function in ("softmax", "log_softmax", "layer_norm", "rms_norm")
    for direction, suffix in (("fwd", ""), ("tan", "_tangent"), ("bwd", "_backward"))
    for spread in (False, True)
}
for (*_, spread), primitive in _PRIMITIVES.items():
    if spread:
        _auto_axes.needs_devices(primitive)
