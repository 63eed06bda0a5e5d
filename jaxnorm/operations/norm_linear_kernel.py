"""Mosaic's kernel of RMSNorm and the product after it, which `rms_norm_linear` runs by name."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.meshes import sharding
from jaxnorm.operations import products
from jaxnorm_kernels import buffers
from jaxnorm_kernels.linear_spec import LinearSpec
from jaxnorm_kernels.specs import Name

Function = Literal["rms_norm_linear"]
NAME: Function = "rms_norm_linear"

#: y of a call, of the names of its arrays and those.
Composition = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class NormLinearCall:
    """The static part of a call of `rms_norm_linear`.

    Attributes:
      norm: the norm of x or of h. Its result is an operand of the matmul.
      spec: the whole call, for a kernel of the norm and the matmul.
      implementation: the name that the user gave, or None.
    """

    function: ClassVar[Function] = NAME

    norm: Call
    spec: LinearSpec
    implementation: Name | None

    def as_seen_by(self, name: str) -> LinearSpec:
        """The spec that the implementation `name` gets."""
        del name
        return self.spec


def by_name(
    call: NormLinearCall, composed: Composition, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    """y by the kernel, of the arrays that `names` names, differentiated as `composed` is.

    ValueError where arrays may be spread over devices and, once the call is lowered, on a platform
    without it.
    """
    _check_whole(call, arrays)
    return _by_kernel(call, composed, names, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _by_kernel(
    call: NormLinearCall, composed: Composition, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    return _kernel(call, names)(*arrays)


@functools.partial(_by_kernel.defjvp, symbolic_zeros=True)
def _(
    call: NormLinearCall,
    composed: Composition,
    names: tuple[str, ...],
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> Any:
    _, dy = products.jvp(functools.partial(composed, call, names), primals, tangents)
    return _by_kernel(call, composed, names, *primals), dy


def _kernel(call: NormLinearCall, names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """The kernel: a batch of x is more rows, one of parameters a loop."""
    from jaxnorm_kernels import mosaic

    @custom_vmap
    def run(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, map(buffers.own, arrays)))
        x, weight = _placed.bind(operands["x"], call=call), operands["weight"]
        *lead, cols = x.shape
        spec = dataclasses.replace(call.spec, rows=math.prod(lead))
        y = mosaic.rms_norm_linear_fwd(
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


def _lower(ctx: Any, x: Any, *, call: NormLinearCall) -> list[Any]:
    """Nothing. But where a program will run is known when it is lowered, and not before."""
    platforms = ctx.platforms or ctx.module_context.platforms
    backends.placed(call.function, "mosaic", platforms)
    return [x]


def _run(x: jax.Array, *, call: NormLinearCall) -> jax.Array:
    backends.placed(call.function, "mosaic", (backends.local_platform(),))
    return x


# x, on a platform that has the kernel; ValueError on another. Inside a `custom_vmap`, and a
# `custom_jvp`: it meets no transformation.
_placed = Primitive("jaxnorm.placed")
_placed.def_abstract_eval(lambda x, call: x)
_placed.def_impl(_run)
mlir.register_lowering(_placed, _lower)


def _check_whole(call: NormLinearCall, arrays: Sequence[jax.Array]) -> None:
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
