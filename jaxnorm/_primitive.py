"""A call as a JAX primitive: which implementation runs it is decided when it is lowered.

Nothing that matters is known while a call is traced: neither the platform (work may be placed on
the CPU of a GPU host, or lowered for another machine), nor the number of devices, nor whether the
program is for export. When the primitive is lowered all of it is. So a laptop never imports, traces
or checks a GPU kernel, and a program that a kernel cannot be part of holds XLA's code.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from jaxnorm import _auto_axes, _implementation
from jaxnorm._calls import Call

Jaxpr = Any  # Its class goes by different names in the versions of JAX.


def bind(call: Call, *operands: Any) -> Any:
    """The call on arrays whose types name no mesh axis."""
    leaves, tree = jax.tree.flatten(operands)
    traced, shapes = jax.make_jaxpr(
        lambda *leaves: call.xla(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*leaves)
    primitive = _spread_call_p if _may_be_spread(call) else _call_p
    out = primitive.bind(*leaves, call=call, tree=tree, twin=traced)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _may_be_spread(call: Call) -> bool:
    """Whether a kernel may meet arrays that XLA spreads over devices.

    To partition it JAX has to know the devices when it lowers, which programs without any (for an
    `AbstractMesh`) and with several meshes cannot say. So it is asked for no more than it must.
    """
    platform = _implementation.local_platform()
    return jax.device_count() > 1 and _implementation.has_kernels(call.implementation, platform)


def _types(*avals: Any, twin: Jaxpr, **static: Any) -> list[Any]:
    del avals, static
    return twin.out_avals


def _run(*leaves: Any, twin: Jaxpr, **static: Any) -> Any:
    # Only under `jax.disable_jit`, which is there to see each step.
    del static
    return jaxpr_as_fun(twin)(*leaves)


def _lower(ctx: Any, *leaves: Any, call: Call, tree: Any, twin: Jaxpr) -> Any:
    function = _choose(ctx, call)
    if function is None:
        return mlir.lower_fun(jaxpr_as_fun(twin))(ctx, *leaves)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    return mlir.lower_fun(flat)(ctx, *leaves)


def _choose(ctx: Any, call: Call) -> Callable[..., Any] | None:
    """What the program that is being lowered runs; None for the xla twin, as it was traced."""
    program = ctx.module_context
    whole = _auto_axes.are_whole(program.axis_context)
    name = call.implementation or _default(ctx, call)
    if name == "xla":
        # Of rows XLA fuses more with a softmax, such as attention's mask. But it must not reshape
        # what is sharded, nor transpose what it can reduce as it lies.
        return call.kernel("xla") if whole and not call.view.moved else None
    if whole:
        return call.kernel(name)
    if _auto_axes.can_partition(program.axis_context):
        return _auto_axes.partitioned(call, bind)
    if call.implementation is None:
        return None
    raise ValueError(
        f"implementation={name!r} cannot run {call.spec.op} on arrays that lie on a mesh with axes "
        f"that are neither all manual nor all automatic: {program.axis_context}; leave "
        "implementation out, or enter jax.shard_map with all axes of the mesh"
    )


def _default(ctx: Any, call: Call) -> str:
    """The implementation of a call for which none was named."""
    program = ctx.module_context
    platforms = ctx.platforms or program.platforms
    if program.lowering_parameters.for_export or len(platforms) > 1:
        return "xla"  # An exported program outlives this version's kernels.
    return _implementation.choose(call.in_rows, platforms[0]).name


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_types)
    primitive.def_impl(_run)
    mlir.register_lowering(primitive, _lower)
    return primitive


_call_p = _primitive("jaxnorm")
_spread_call_p = _primitive("jaxnorm_spread")
_auto_axes.needs_devices(_spread_call_p)
