"""A call for which no implementation was named: a JAX primitive, decided when it is lowered.

Nothing that matters is known while a call is traced: neither the platform (work may be placed on
the CPU of a GPU host, or lowered for another machine), nor the number of devices, nor whether the
program is for export. When the primitive is lowered all of it is. So a laptop never imports, traces
or checks a GPU kernel, and a program that a kernel cannot be part of holds XLA's code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from jaxnorm import _implementation
from jaxnorm_kernels.specs import Spec

Jaxpr = Any  # Its class goes by different names in the versions of JAX.


def default_call(function: str, spec: Spec, twin: Callable[..., Any], *operands: Any) -> Any:
    """`function` of the contract, by the implementation that the place it is lowered for gets.

    Args:
      function: of :class:`jaxnorm_kernels.specs.Implementation`.
      twin: the same function of the xla implementation: it gives the types, and runs where nothing
        else is chosen.
    """
    leaves, tree = jax.tree.flatten(operands)
    traced, shapes = jax.make_jaxpr(
        lambda *leaves: twin(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*leaves)
    out = _call_p.bind(*leaves, function=function, spec=spec, tree=tree, twin=traced)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _types(*avals: Any, twin: Jaxpr, **static: Any) -> list[Any]:
    del avals, static
    return twin.out_avals


def _run(*leaves: Any, twin: Jaxpr, **static: Any) -> Any:
    # Only under `jax.disable_jit`, which is there to see each step.
    del static
    return jaxpr_as_fun(twin)(*leaves)


def _lower(ctx: Any, *leaves: Any, function: str, spec: Spec, tree: Any, twin: Jaxpr) -> Any:
    name = _choose(ctx, spec).name

    def kernel(*leaves: Any) -> list[Any]:
        operands = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(_implementation.bind(name, function, spec)(*operands))

    return mlir.lower_fun(jaxpr_as_fun(twin) if name == "xla" else kernel)(ctx, *leaves)


def _choose(ctx: Any, spec: Spec) -> _implementation.Choice:
    """As `_implementation.choose`, for the program that is being lowered."""
    program = ctx.module_context
    platforms: Sequence[str] = ctx.platforms or program.platforms
    if program.lowering_parameters.for_export or len(platforms) > 1:
        return _implementation.Choice("xla", "an exported program outlives this jax's kernels")
    if not _one_device_sees_all(program.axis_context) or any(map(_is_sharded, ctx.avals_in)):
        return _implementation.Choice("xla", "XLA would gather what a kernel reads from a mesh")
    return _implementation.choose(spec, platforms[0])


def _one_device_sees_all(axes: Any) -> bool:
    """Whether arrays are whole here: on one device, or a shard inside `jax.shard_map`."""
    if isinstance(axes, mlir.SPMDAxisContext):
        return all(size == 1 or name in axes.manual_axes for name, size in axes.mesh.shape.items())
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def _is_sharded(aval: Any) -> bool:
    """Whether the type itself names a mesh axis (Explicit axes)."""
    return any(axis is not None for axis in aval.sharding.spec)


_call_p = Primitive("jaxnorm")
_call_p.multiple_results = True
_call_p.def_abstract_eval(_types)
_call_p.def_impl(_run)
mlir.register_lowering(_call_p, _lower)
