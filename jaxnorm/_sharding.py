"""How a call is partitioned over a mesh, by what the types of its operands say.

Explicit axes   the types name the mesh axes: `jax.shard_map`, here
Auto axes       XLA decides when it compiles: `_auto_axes`
Manual axes     inside `jax.shard_map` the operands are shards already
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm import _primitive
from jaxnorm._calls import Call
from jaxnorm._shards import Layout, on_shards


def run(call: Call, *operands: Any) -> Any:
    """The call on operands of any sharding."""
    return _run(call, _primitive.bind, operands)


def run_twin(call: Call, *operands: Any) -> Any:
    """The same in plain JAX, which can be differentiated and batched."""
    return _run(dataclasses.replace(call, implementation="xla"), _xla, operands)


def _run(call: Call, bind: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    if not any(_names_axes(a) for a in jax.tree.leaves(operands)):
        return bind(call, *operands)
    x = jax.typeof(operands[0])
    mesh = x.sharding.mesh
    layout = Layout.of(x.sharding.spec, call.view)

    def specs(kinds: Any, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        of_leaves = [layout.spec(kind, a.shape) for kind, a in zip(kinds, leaves)]
        return jax.tree.unflatten(structure, of_leaves)

    in_specs = specs(call.operand_kinds(operands), operands)
    # A parameter may be sharded for storage (FSDP): it is gathered, as small as it is.
    operands = jax.tree.map(lambda a, s: _reshard(a, mesh, s), operands, in_specs)
    out = jax.eval_shape(call.xla, *operands)
    return jax.shard_map(
        on_shards(call, layout, bind),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=specs(call.result_kinds(out), out),
        axis_names=_explicit_axes(mesh),
    )(*operands)


def _xla(call: Call, *operands: Any) -> Any:
    return call.xla(*operands)


def like(gradient: jax.Array | None, parameter: jax.Array | None) -> jax.Array | None:
    """`gradient` with the sharding that the type of `parameter` has."""
    if gradient is None or parameter is None or not _names_axes(parameter):
        return gradient
    sharding = jax.typeof(parameter).sharding
    return _reshard(gradient, sharding.mesh, sharding.spec)


def vary_alike(*operands: jax.Array | None) -> list[jax.Array | None]:
    """Makes all operands vary over the same manual mesh axes, inside `jax.shard_map`.

    A parameter that is the same on every device meets rows that are not. The gradient of this cast
    is the sum over those axes, so that of the parameter is the same on every device again.
    """
    varying = [frozenset() if a is None else _varying(a) for a in operands]
    everywhere = frozenset().union(*varying)
    return [
        a if a is None or own == everywhere else _vary(a, everywhere - own)
        for a, own in zip(operands, varying)
    ]


def _explicit_axes(mesh: Any) -> set[str]:
    if mesh.are_all_axes_explicit:
        return set()  # All, for `jax.shard_map`; but not those that `jax.vmap` has taken.
    return {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}


def _reshard(a: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    # A sharding and not its spec alone, which would need a mesh to be set.
    resharded: jax.Array = jax.reshard(a, NamedSharding(mesh, spec))
    return resharded


def _names_axes(a: jax.Array) -> bool:
    return any(axis is not None for axis in jax.typeof(a).sharding.spec)


def _varying(a: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def _vary(a: jax.Array, axes: frozenset[str]) -> jax.Array:
    varied: jax.Array = lax.pcast(a, tuple(sorted(axes)), to="varying")
    return varied
