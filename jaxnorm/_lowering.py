"""Which code a call becomes: decided when its primitive is lowered.

Nothing that matters is known while a call is traced: neither the platform (work may be placed on
the CPU of a GPU host, or lowered for another machine), nor the number of devices, nor whether the
program is for export. When the primitive is lowered all of it is. So a laptop never imports, traces
or checks a GPU kernel, and a program that a kernel cannot be part of holds XLA's code.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir

from jaxnorm import _auto_axes, _implementation, _sharding
from jaxnorm._call import Call, Function


def lower(ctx: Any, *arrays: Any, call: Call, bind: Callable[..., Any]) -> Any:
    """The lowering rule of all primitives; `bind` binds the call's own, on shards."""
    if _sharding.names_axes(*ctx.avals_in):
        function = _on_explicit_axes(ctx, call, bind)
    else:
        function = _choose(ctx, call, bind)

    def named(*arrays: jax.Array) -> list[jax.Array]:
        with jax.named_scope(ctx.primitive.name):
            return function(*arrays)

    return mlir.lower_fun(named)(ctx, *arrays)


def _on_explicit_axes(ctx: Any, call: Call, bind: Callable[..., Any]) -> Function:
    def run(*arrays: jax.Array) -> list[jax.Array]:
        results = _sharding.run(call, bind, arrays)
        return [_sharding.lie_as(a, aval) for a, aval in zip(results, ctx.avals_out)]

    return run


def _choose(ctx: Any, call: Call, bind: Callable[..., Any]) -> Function:
    program = ctx.module_context
    whole = _auto_axes.are_whole(program.axis_context)
    platforms = ctx.platforms or program.platforms
    if _loses_its_kernel_by_dh(call, platforms[0]):
        return _with_dh_added_outside(call, bind)
    named = None if call.implementation is None else call.as_seen_by(call.implementation)
    if call.spec.plain or (named is not None and named.scattered):
        name = "xla"
    elif call.implementation is not None and named is not None:
        name = call.implementation
        _implementation.placed(name, call.spec, platforms)
        # Known here alone: under `jax.vmap` a backward has more rows than where it was called.
        _implementation.forced(named, name)
    elif program.lowering_parameters.for_export or len(platforms) > 1:
        name = "xla"  # An exported program outlives this version's kernels.
    else:
        name = _implementation.choose(call.as_seen_by, platforms[0]).name
    if name == "xla":
        # Of rows XLA fuses more with a softmax, such as attention's mask. But it must not reshape
        # what is sharded, nor transpose what it can reduce as it lies.
        natural = call.view.moved or call.view.has_groups or call.view.logits_bias
        in_rows = whole and not (natural or call.spec.causal)
        return call.kernel("xla") if in_rows else call.xla
    if whole:
        return call.kernel(name)
    if _auto_axes.can_partition(program.axis_context):
        return _auto_axes.partitioned(call, bind)
    if call.implementation is None:
        return call.xla
    raise ValueError(
        f"implementation={name!r} cannot run {call.spec.op} on arrays that lie on a mesh with axes "
        f"that are neither all manual nor all automatic: {program.axis_context}; leave "
        "implementation out, or enter jax.shard_map with all axes of the mesh"
    )


def _loses_its_kernel_by_dh(call: Call, platform: str) -> bool:
    """Whether a kernel that runs a plain norm's backward does not with dh, whose rows it reads too.

    The transpose adds dh to whatever norm it meets: the user did not ask for that.
    """
    if call.spec.op != "norm" or not call.spec.adds_dh or call.spec.plain:
        return False

    def is_kernel_s(call: Call) -> bool:
        if call.implementation is not None:
            spec = call.as_seen_by(call.implementation)
            return _implementation.module(call.implementation).supports(spec) is None
        return _implementation.choose(call.as_seen_by, platform).name != "xla"

    return is_kernel_s(call.without_dh()) and not is_kernel_s(call)


def _with_dh_added_outside(call: Call, bind: Callable[..., Any]) -> Function:
    def run(*arrays: jax.Array) -> list[jax.Array]:
        *operands, dh = arrays
        dx, *gradients = bind(call.without_dh(), *operands)
        return [dx + dh, *gradients]

    return run
