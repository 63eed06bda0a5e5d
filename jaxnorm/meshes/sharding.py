"""How a call is partitioned over a mesh, by what the types of its operands say.

Explicit axes   the types name the mesh axes: `jax.shard_map`, here
Auto axes       XLA decides when it compiles: `auto_axes`
Manual axes     inside `jax.shard_map` the operands are shards already
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes.shards import Shards


def run(
    whole: Run, shards: Callable[[Sequence[Any], Any], Shards], arrays: Arrays
) -> list[jax.Array]:
    """``whole(*arrays)``, or on their shards where a mesh has Explicit axes.

    `shards`: makes of the types of the arrays, and of the mesh, what a device does.
    """
    avals = [jax.typeof(a) for a in arrays]
    mesh = explicit_mesh(avals)
    if mesh is None:
        return whole(*arrays)
    operands, results, run_shard = shards(avals, mesh)
    sharded = jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=operands,
        out_specs=[*results],
        axis_names=explicit_axes(mesh),
    )
    # A parameter may be sharded for storage (FSDP): it is gathered, as small as it is.
    outputs: list[jax.Array] = sharded(*[reshard(a, mesh, s) for a, s in zip(arrays, operands)])
    return outputs


def map_batch(
    function: Callable[..., list[jax.Array]], arrays: Arrays, dims: Sequence[int | None]
) -> list[jax.Array]:
    """What `jax.vmap` makes of a function, by a loop over the batch; results have it first.

    `dims`: which axis of each array is the batch, None for an array that all of it shares. Where
    mesh axes split the batch (Explicit axes), each device loops over its own part.
    """
    batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}
    shared = {i: arrays[i] for i, d in enumerate(dims) if d is None}

    def loop(batched: dict[int, jax.Array], shared: dict[int, jax.Array]) -> Any:
        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            by_place = {**batched, **shared}
            return function(*[by_place[i] for i in range(len(by_place))])

        return lax.map(one, batched)

    # `jax.vmap` sees to it that the batch of each array is split alike, and no shared array by it.
    batch = jax.typeof(next(iter(batched.values())))
    over = axes_over(batch, 0, batch.sharding.mesh)
    if not over:
        return loop(batched, shared)
    sharded = jax.shard_map(
        loop,
        mesh=batch.sharding.mesh,
        in_specs=(PartitionSpec(over), PartitionSpec()),
        out_specs=PartitionSpec(over),
        axis_names={*over},
    )
    results: list[jax.Array] = sharded(batched, shared)
    return results


def type_like(x: Any, mesh: Any, shape: tuple[int, ...], dtype: Any, split: Iterable[Any]) -> Any:
    """The type x has, of another shape and dtype, its axes split over axes of the mesh."""
    sharding = x.sharding if mesh.empty else NamedSharding(mesh, PartitionSpec(*split))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def lie_alike(a: jax.Array, like: jax.Array) -> jax.Array:
    """`a`, of another's shape, with the mesh axes that its type names."""
    sharding = jax.typeof(like).sharding
    differs = not sharding.mesh.empty and jax.typeof(a).sharding.spec != sharding.spec
    return reshard(a, sharding.mesh, sharding.spec) if differs else a


def broadcast_alike(a: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """`a`, whose axes are those of another, or of size 1, with the mesh axes that its type names.

    An axis of any other size is whole.
    """
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty:
        return a
    sizes = zip(a.shape, like.shape, sharding.spec)
    spec = PartitionSpec(*[None if n == 1 or n != size else over for n, size, over in sizes])
    return a if jax.typeof(a).sharding.spec == spec else reshard(a, sharding.mesh, spec)


def lie_as(a: jax.Array, aval: Any) -> jax.Array:
    """`a` with the sharding of a type."""
    sharding = aval.sharding
    return a if sharding.mesh.empty else reshard(a, sharding.mesh, sharding.spec)


def vary_alike(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Makes all arrays vary over the same manual mesh axes, inside `jax.shard_map`.

    A parameter that is the same on every device meets rows that are not. The gradient of this cast
    is the sum over those axes, so that of the parameter is the same on every device again.
    """
    if len(arrays) == 1:
        return arrays
    varying = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    everywhere = varying[0].union(*varying)
    return [
        a if axes == everywhere else lax.pcast(a, tuple(sorted(everywhere - axes)), to="varying")
        for a, axes in zip(arrays, varying)
    ]


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh with Explicit axes that arrays of these types lie on, or meet; None for no such one.

    Types need not name an axis: those of replicated arrays have a mesh all the same, and arrays
    that are not committed to a device (whose types have none) meet that of `jax.set_mesh`. On it no
    sharding is left to XLA, and its partitioner cannot be asked (`auto_axes`).
    """
    mesh = mesh_of(avals)
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return mesh if AxisType.Explicit in mesh.axis_types else None


def mesh_of(avals: Sequence[Any]) -> Any:
    """The mesh of types: the first that is not empty."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def axes_over(aval: Any, axis: int, mesh: Any) -> tuple[str, ...]:
    """Mesh axes that split an axis of a type; none where its size is no multiple of the shards."""
    entry = (*aval.sharding.spec, *[None] * len(aval.shape))[axis]
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return () if aval.shape[axis] % math.prod(mesh.shape[name] for name in names) else names


def explicit_axes(mesh: Any) -> set[str]:
    """What `jax.shard_map` takes as ``axis_names`` to make the explicit axes manual."""
    if mesh.are_all_axes_explicit:
        return set()  # All, for `jax.shard_map`; but not those that `jax.vmap` has taken.
    return {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}


def reshard(a: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """`a`, lying over a mesh as `spec` says."""
    # A sharding and not its spec alone, which would need a mesh to be set.
    resharded: jax.Array = jax.reshard(a, NamedSharding(mesh, spec))
    return resharded
