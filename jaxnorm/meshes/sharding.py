"""How a call is partitioned over a mesh, depending on the types of its mesh axes.

Explicit axes   types name the mesh axes, and this module runs the call in `jax.shard_map`
Auto axes       XLA decides when it compiles; see `auto_axes`
Manual axes     inside `jax.shard_map`, the operands are shards already
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm.calls.call import Arrays, Call, Run
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels.operations import PARAMETERS, SHARED, Kind


class Shards(NamedTuple):
    """The sharding of a call's arrays on a mesh, and the function that each device runs."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    run: Run


class Factors(NamedTuple):
    """A sharding rule for Shardy: axes of the same name are sharded over the same mesh axes.

    Attributes:
      operands, results: for each array, the names of its axes, separated by blanks.
      whole: names of the axes that are gathered.
    """

    operands: list[str]
    results: list[str]
    whole: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes over which each axis of x is sharded."""

    view: RowView
    mesh_axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: Iterable[Any], view: RowView) -> "Layout":
        """Return the layout of an array with this `PartitionSpec`."""
        entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        missing = len(view.shape) - len(entries)
        return cls(view, (*map(tuple, entries), *[()] * missing))

    @property
    def cols_over(self) -> tuple[str, ...]:
        return sum((self.mesh_axes[a] for a in self.view.axes), ())

    def spec(self, kind: Kind, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the `PartitionSpec` of an operand or result with this kind and global shape."""
        split = (self.mesh_axes[axis] or None for axis in self.view.axes_of(kind))
        # A mask or a parameter may be broadcast along some axes.
        return PartitionSpec(*(None if size == 1 else s for size, s in zip(shape, split)))

    def with_whole_rows(self) -> "Layout":
        """Return the layout with unsplit rows: a rotation must not split pairs of columns."""
        axes = self.view.axes
        split = ((() if i in axes else over) for i, over in enumerate(self.mesh_axes))
        return dataclasses.replace(self, mesh_axes=tuple(split))

    def summed_over(self, kind: Kind) -> tuple[str, ...]:
        """Return the mesh axes over which partial gradients of an operand must be summed."""
        if kind not in SHARED:
            return ()
        split = jax.tree.leaves(tuple(self.spec(kind, self.view.shape_of(kind))))
        return tuple(axis for axis in sum(self.mesh_axes, ()) if axis not in split)

    def view_of_shard(self, shape: tuple[int, ...]) -> RowView:
        """Return the view for a shard of x that has this shape."""
        view = self.view

        def of_shard(kind: Kind) -> tuple[int, ...]:
            sizes = view.shape_of(kind)
            split = tuple(1 if s == 1 else shape[a] for s, a in zip(sizes, view.axes_of(kind)))
            # A table's last axis (pairs of columns) is not split.
            return (*split[:-1], *sizes[-1:]) if kind == "table" else split

        return view.of_shapes(shape, view.axes, of_shard)

    def queries_over(self, call: Call) -> tuple[str, ...]:
        """Return the mesh axes that shard the queries of a causal softmax; its mask needs them."""
        return self.mesh_axes[-2] if call.spec.softmax.causal else ()

    def check(self, function: str, mesh: Any) -> None:
        """Raise ValueError if an axis of x cannot be split into shards of equal size."""
        for size, axes in zip(self.view.shape, self.mesh_axes):
            shards = math.prod(mesh.shape[a] for a in axes)
            if size % shards:
                raise ValueError(
                    f"{function}: x has shape {self.view.shape} and is sharded by "
                    f"{self.spec('array', self.view.shape)}; {size} is no multiple of the "
                    f"{shards} shards of its axis; pad x, or shard it over fewer devices"
                )


def shards_of_rows(call: Call, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
    """Return how a call is sharded: all arrays follow the sharding of its first array, x.

    ``run(call, *arrays)`` computes the call on a shard. Rows are independent of each other. A
    parameter's gradient is summed over the devices that have rows of it. If rows are split, their
    statistics are summed over the devices that share a row.
    """
    layout = Layout.of(types[0].sharding.spec, call.view)
    if call.spec.norm.rotated:
        layout = layout.with_whole_rows()
    layout.check(call.function, mesh)

    def run_shard(*arrays: jax.Array) -> list[jax.Array]:
        shard = call.on(layout.view_of_shard(arrays[0].shape))
        if layout.cols_over:
            results = _with_split_rows(shard, call.view.cols, layout).xla(*arrays)
        elif queries_over := layout.queries_over(call):
            results = shard.replaced(queries_over=queries_over).xla(*arrays)
        else:
            results = run(shard, *arrays)
        return [
            lax.psum(a, axes) if (axes := layout.summed_over(kind)) else a
            for kind, a in zip(call.kinds_returned, results)
        ]

    return Shards(
        operands=tuple(layout.spec(k, a.shape) for k, a in zip(call.kinds_taken, types)),
        results=tuple(layout.spec(k, call.view.shape_of(k)) for k in call.kinds_returned),
        run=run_shard,
    )


def factors_of_rows(call: Call, arrays: Sequence[jax.Array]) -> Factors:
    """Return the sharding rule of a call: axis i of x is named `xi` in all arrays.

    Parameters are gathered, since they are small: their sharding does not affect that of x. Their
    gradients have separate axis names, so that they can be sharded in any way.
    """
    places = itertools.count()

    def factors(kinds: list[Kind], shapes: list[tuple[int, ...]], prefix: str) -> list[str]:
        return [
            " ".join(
                f"{prefix}{next(places)}"
                if size == 1 or kind in PARAMETERS or (kind == "table" and axis in call.view.axes)
                else f"x{axis}"
                for axis, size in zip(call.view.axes_of(kind), shape)
            )
            + (f" {prefix}{next(places)}" if kind == "candidate" else "")
            for kind, shape in zip(kinds, shapes)
        ]

    operands = factors(call.kinds_taken, [a.shape for a in arrays], "p")
    results = factors(call.kinds_returned, [*map(call.view.shape_of, call.kinds_returned)], "g")
    # A pair is two columns, so the columns are whole. Shardy requires the order of occurrence.
    of_pairs = {f"x{axis}" for axis in call.view.axes} if call.spec.norm.rotated else set()
    names = dict.fromkeys(" ".join(operands).split())
    whole = [name for name in names if name.startswith("p") or name in of_pairs]
    return Factors(operands, results, tuple(whole))


def _with_split_rows(shard: Call, cols: int, layout: Layout) -> Call:
    if shard.implementation not in (None, "xla"):
        raise ValueError(
            f"{shard.function}: implementation={shard.implementation!r} cannot run over an axis "
            f"that is sharded: x has shape {layout.view.shape}, sharded by "
            f"{layout.spec('array', layout.view.shape)}; leave implementation out, or shard other "
            "axes"
        )
    if queries_over := layout.queries_over(shard):
        shard = shard.replaced(queries_over=queries_over)
    return shard.replaced(
        cols=cols,
        cols_over=layout.cols_over,
        axes_over=tuple(layout.mesh_axes[axis] for axis in layout.view.axes),
    )


def run(
    whole: Run, shards: Callable[[Sequence[Any], Any], Shards], arrays: Arrays
) -> list[jax.Array]:
    """Return ``whole(*arrays)``; if the mesh has Explicit axes, computed on shards instead.

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
    """Map a function over a batch like `jax.vmap`, but in a loop.

    The batch axis of results is axis 0. `dims` has the batch axis of each array; None for an array
    that all batch elements share. If Explicit mesh axes split the batch, each device loops over its
    own part.
    """
    batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}
    shared = {i: arrays[i] for i, d in enumerate(dims) if d is None}

    def loop(batched: dict[int, jax.Array], shared: dict[int, jax.Array]) -> Any:
        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            by_place = {**batched, **shared}
            return function(*[by_place[i] for i in range(len(by_place))])

        return lax.map(one, batched)

    # `jax.vmap` ensures that all batch axes have the same sharding, and that shared arrays are not
    # sharded over the same mesh axes.
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
    """Return x's type with another shape, dtype and sharding.

    `split` has an entry for each axis, as in a `PartitionSpec`.
    """
    sharding = x.sharding if mesh.empty else NamedSharding(mesh, PartitionSpec(*split))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def lie_alike(a: jax.Array, like: jax.Array) -> jax.Array:
    """Reshard `a` to the sharding of `like`, which has the same shape."""
    sharding = jax.typeof(like).sharding
    differs = not sharding.mesh.empty and jax.typeof(a).sharding.spec != sharding.spec
    return reshard(a, sharding.mesh, sharding.spec) if differs else a


def broadcast_alike(a: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Reshard `a` to match the sharding of `like`, to which it broadcasts.

    Axes where the sizes differ, or are 1, are not split.
    """
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty:
        return a
    sizes = zip(a.shape, like.shape, sharding.spec)
    spec = PartitionSpec(*[None if n == 1 or n != size else over for n, size, over in sizes])
    return a if jax.typeof(a).sharding.spec == spec else reshard(a, sharding.mesh, spec)


def lie_as(a: jax.Array, aval: Any) -> jax.Array:
    """Reshard `a` to the sharding in the type `aval`."""
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
    """Return the first of the types' meshes that is not empty; an empty mesh if all are empty."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def axes_over(aval: Any, axis: int, mesh: Any) -> tuple[str, ...]:
    """Return the mesh axes that split an axis of an array; none if they do not divide its size."""
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
