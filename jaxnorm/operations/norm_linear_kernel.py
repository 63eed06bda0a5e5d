"""Mosaic's kernel of RMSNorm and the product after it, which `rms_norm_linear` runs by name."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxnorm.calls import backends
from jaxnorm.meshes import sharding
from jaxnorm.operations import products
from jaxnorm_kernels import buffers

if TYPE_CHECKING:
    from jaxnorm.operations.norm_linear import Linear

#: y of a call, of the names of its arrays and those.
Composition = Callable[..., jax.Array]


def by_name(
    call: "Linear", composed: Composition, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    """y by the kernel, of the arrays that `names` names, differentiated as `composed` is.

    ValueError where arrays may be spread over devices and, once the call is lowered, on a platform
    without it.
    """
    _check_whole(call, arrays)
    return _by_kernel(call, composed, names, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _by_kernel(
    call: "Linear", composed: Composition, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    return _kernel(call, names)(*arrays)


@functools.partial(_by_kernel.defjvp, symbolic_zeros=True)
def _(
    call: "Linear",
    composed: Composition,
    names: tuple[str, ...],
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> Any:
    _, dy = products.jvp(functools.partial(composed, call, names), primals, tangents)
    return _by_kernel(call, composed, names, *primals), dy


def _kernel(call: "Linear", names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """The kernel: a batch of x is more rows, one of parameters a loop."""

    @custom_vmap
    def run(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, map(buffers.own, arrays)))
        x, weight = _placed.bind(operands["x"], call=call), operands["weight"]
        *lead, cols = x.shape
        spec = dataclasses.replace(call.spec, rows=math.prod(lead))
        y = backends.module("mosaic").rms_norm_linear_fwd(  # type: ignore[attr-defined]
            x.reshape(spec.rows, cols), weight, operands.get("scale"), operands.get("bias"), spec
        )
        return buffers.own(y).reshape(*lead, weight.shape[1])

    @run.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        del size
        if not any(is_batched[1:]):
            return run(*arrays), True
        batched = [a for a, is_one in zip(arrays, is_batched) if is_one]

        def one(batch: list[jax.Array]) -> jax.Array:
            rest = iter(batch)
            return run(*[next(rest) if is_one else a for a, is_one in zip(arrays, is_batched)])

        return lax.map(one, batched), True

    return run


def _lower(ctx: Any, x: Any, *, call: "Linear") -> list[Any]:
    """Nothing. But where a program will run is known when it is lowered, and not before."""
    platforms = ctx.platforms or ctx.module_context.platforms
    backends.placed(call.function, "mosaic", platforms)
    return [x]


def _run(x: jax.Array, *, call: "Linear") -> jax.Array:
    backends.placed(call.function, "mosaic", (backends.local_platform(),))
    return x


# x, on a platform that has the kernel; ValueError on another. Inside a `custom_vmap`, and a
# `custom_jvp`: it meets no transformation.
_placed = Primitive("jaxnorm.placed")
_placed.def_abstract_eval(lambda x, call: x)
_placed.def_impl(_run)
mlir.register_lowering(_placed, _lower)


def _check_whole(call: "Linear", arrays: Sequence[jax.Array]) -> None:
    """ValueError where arrays may be spread over devices: the kernel is not partitioned."""
    mesh = sharding.mesh_of([jax.typeof(a) for a in arrays])
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    spread = {
        axis: mesh.shape[axis]
        for axis, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind != AxisType.Manual and mesh.shape[axis] > 1
    }
    if spread:
        raise ValueError(
            f"{call.function}: implementation={call.implementation!r} is a kernel of whole "
            f"arrays, and the arrays lie on a mesh with axes {spread}; expected one device, or "
            "shards; call it inside jax.shard_map over these axes, or leave implementation out"
        )
