"""Which code a call becomes: decided when its primitive is lowered.

Nothing that matters is known while a call is traced: neither the platform (work may be placed on
the CPU of a GPU host, or lowered for another machine), nor the number of devices, nor whether the
program is for export. When the primitive is lowered all of it is. So a laptop never imports, traces
or checks a GPU kernel, and a program that a kernel cannot be part of holds XLA's code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call, Run
from jaxnorm.meshes import auto_axes


def choose(ctx: Any, call: Call, bind: Run, partitioned: Callable[[Call], Run]) -> Run:
    """What a call becomes; ``bind(call, *arrays)`` makes another one.

    `partitioned`: what becomes of it where XLA spreads its arrays over devices.
    """
    platforms = ctx.platforms or ctx.module_context.platforms
    if _loses_its_kernel_by_dh(call, platforms[0]):
        return _with_dh_added_outside(call, bind)
    is_plain = call.spec.plain or _is_scattered(call)
    name = "xla" if is_plain else _implementation(ctx, call, platforms)
    axes = ctx.module_context.axis_context
    whole = auto_axes.are_whole(axes)
    if name == "xla":
        # On a GPU, XLA fuses more into a softmax of two-dimensional arrays, such as attention's
        # mask. On a CPU, such a reshape hinders loops that write over their operands. Arrays that
        # are sharded, or would be transposed, must stay as they are.
        view, on_cpu = call.view, platforms[0] == "cpu"
        natural = view.moved or view.has_groups or view.logits_bias or view.table
        stays = call.spec.causal or (on_cpu and call.spec.is_softmax)
        in_rows = whole and not (natural or stays)
        return call.kernel("xla") if in_rows else call.xla
    if whole:
        return call.kernel(name)
    if auto_axes.can_partition(axes):
        return partitioned(call)
    if call.implementation is None:
        return call.xla
    raise ValueError(
        f"{call.function}: implementation={name!r} cannot run on arrays that lie on a mesh with "
        f"axes that are neither all manual nor all automatic: {axes}; leave "
        "implementation out, or enter jax.shard_map with all axes of the mesh"
    )


def _is_scattered(call: Call) -> bool:
    """Whether the implementation that was asked for has no view of its parameters."""
    name = call.implementation
    return name is not None and call.spec.scattered and call.as_seen_by(name).scattered


def _implementation(ctx: Any, call: Call, platforms: Sequence[str]) -> str:
    """The implementation that runs a call which kernels may run."""
    if call.implementation is not None:
        name = call.implementation
        backends.placed(call.function, name, platforms)
        # Known here alone: under `jax.vmap` a backward has more rows than where it was called.
        backends.forced(call, name)
        return name
    if ctx.module_context.lowering_parameters.for_export or len(platforms) > 1:
        return "xla"  # An exported program outlives this version's kernels.
    return backends.choose(call.as_seen_by, platforms[0]).name


def _loses_its_kernel_by_dh(call: Call, platform: str) -> bool:
    """Whether a kernel that runs a plain norm's backward does not with dh, whose rows it reads too.

    The transpose adds dh to whatever norm it meets: the user did not ask for that.
    """
    if not (call.spec.adds_dh and call.spec.operation.may_add_dh) or call.spec.plain:
        return False

    def is_kernel_s(call: Call) -> bool:
        if call.implementation is not None:
            spec = call.as_seen_by(call.implementation)
            return backends.module(call.implementation).supports(spec) is None
        return backends.choose(call.as_seen_by, platform).name != "xla"

    return is_kernel_s(call.without_dh()) and not is_kernel_s(call)


def _with_dh_added_outside(call: Call, bind: Run) -> Run:
    def run(*arrays: jax.Array) -> list[jax.Array]:
        *operands, dh = arrays
        dx, *gradients = bind(call.without_dh(), *operands)
        return [dx + dh, *gradients]

    return run
