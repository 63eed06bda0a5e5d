"""How a call is partitioned over a mesh, depending on the types of its mesh axes.

Explicit axes   types name the mesh axes, and this module runs the call in `jax.shard_map`
Auto axes       XLA decides when it compiles; see `auto_axes`
Manual axes     inside `jax.shard_map`, the operands are shards already
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
    """Return ``whole(*arrays)``, computed on shards if the mesh has Explicit axes.

    `shards` takes the types of the arrays and the mesh, and returns their sharding and the function
    that each device runs.
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
    # A parameter that is sharded for storage (FSDP) is gathered, since it is small.
    outputs: list[jax.Array] = sharded(*[reshard(a, mesh, s) for a, s in zip(arrays, operands)])
    return outputs


def map_batch(
    function: Callable[..., list[jax.Array]], arrays: Arrays, dims: Sequence[int | None]
) -> list[jax.Array]:
    """Map a function over a batch as `jax.vmap` does, but in a loop; results have the batch first.

    `dims`: the batch axis of each array; None for an array that the whole batch shares. If Explicit
    mesh axes split the batch, each device loops over its own part.
    """
    batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}
    shared = {i: arrays[i] for i, d in enumerate(dims) if d is None}

    def loop(batched: dict[int, jax.Array], shared: dict[int, jax.Array]) -> Any:
        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            by_place = {**batched, **shared}
            return function(*[by_place[i] for i in range(len(by_place))])

        return lax.map(one, batched)

    # `jax.vmap` ensures that all batches are sharded alike, and no shared array over the same axes.
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
    """Return x's type with another shape and dtype; `split` names the mesh axes of each axis."""
    sharding = x.sharding if mesh.empty else NamedSharding(mesh, PartitionSpec(*split))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def lie_alike(a: jax.Array, like: jax.Array) -> jax.Array:
    """Reshard `a` like another array of its shape."""
    sharding = jax.typeof(like).sharding
    differs = not sharding.mesh.empty and jax.typeof(a).sharding.spec != sharding.spec
    return reshard(a, sharding.mesh, sharding.spec) if differs else a


def broadcast_alike(a: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Reshard `a`, which broadcasts to another array, like that array.

    Axes of size 1, or of a size that differs from the other array's, are not split.
    """
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty:
        return a
    sizes = zip(a.shape, like.shape, sharding.spec)
    spec = PartitionSpec(*[None if n == 1 or n != size else over for n, size, over in sizes])
    return a if jax.typeof(a).sharding.spec == spec else reshard(a, sharding.mesh, spec)


def lie_as(a: jax.Array, aval: Any) -> jax.Array:
    """Reshard `a` to the sharding of a type."""
    sharding = aval.sharding
    return a if sharding.mesh.empty else reshard(a, sharding.mesh, sharding.spec)


def vary_alike(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Make all arrays vary over the same manual mesh axes, inside `jax.shard_map`.

    A parameter is the same on every device, but the rows are not. The gradient of this cast is the
    sum over these axes, so that the parameter's gradient is also the same on every device.
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
    """Return the mesh with Explicit axes for arrays of these types; None if there is none.

    The types of replicated arrays have a mesh although they name none of its axes. The types of
    arrays that are not committed to a device have no mesh, and the mesh of `jax.set_mesh` applies.
    On a mesh with Explicit axes, XLA chooses no sharding, and the rules in `auto_axes` do not work.
    """
    mesh = mesh_of(avals)
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return mesh if AxisType.Explicit in mesh.axis_types else None


def mesh_of(avals: Sequence[Any]) -> Any:
    """Return the first mesh of these types that is not empty; an empty one if all are."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def axes_over(aval: Any, axis: int, mesh: Any) -> tuple[str, ...]:
    """Return the mesh axes that split an axis of a type; none if the shards do not divide it."""
    entry = (*aval.sharding.spec, *[None] * len(aval.shape))[axis]
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return () if aval.shape[axis] % math.prod(mesh.shape[name] for name in names) else names


def explicit_axes(mesh: Any) -> set[str]:
    """Return the ``axis_names`` with which `jax.shard_map` makes the Explicit axes Manual."""
    if mesh.are_all_axes_explicit:
        return set()  # `jax.shard_map` then takes all axes except those that `jax.vmap` uses.
    return {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}


def reshard(a: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Reshard `a` over a mesh as `spec` says."""
    # A NamedSharding, because a PartitionSpec alone would need `jax.set_mesh`.
    resharded: jax.Array = jax.reshard(a, NamedSharding(mesh, spec))
    return resharded
