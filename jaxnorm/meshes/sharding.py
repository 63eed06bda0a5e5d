"""How a call on sharded arrays is computed, for each type of mesh axis.

Explicit axes   the arrays' types include the sharding: `run` computes the call in `jax.shard_map`
Auto axes       XLA chooses the sharding when it compiles: `auto_axes` defines a partitioning rule
Manual axes     the caller's code is inside `jax.shard_map`, and its arrays are shards already
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal  # type: ignore[attr-defined]
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm.calls.call import Arrays, Call, Run
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels.operations import PARAMETERS, SHARED, Kind


class Shards(NamedTuple):
    """The sharding of a call's arrays on a mesh, and the function that each device runs.

    Attributes:
      operands, results: the `PartitionSpec` of each array.
      run: function that takes one device's shards of the operands, and returns the device's shards
        of the results.
    """

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    run: Run


class Factors(NamedTuple):
    """A sharding rule for Shardy, XLA's partitioner: axes of the same name have the same sharding.

    Attributes:
      operands, results: for each array, the names of its axes, separated by blanks.
      whole: names of the array axes that must not be sharded. Shardy gathers arrays along them.
    """

    operands: list[str]
    results: list[str]
    whole: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of x, from which the sharding of a call's other arrays is derived.

    Attributes:
      view: the `RowView` of the unsharded arrays.
      mesh_axes: for each axis of x, a tuple of the names of the mesh axes that shard it.
    """

    view: RowView
    mesh_axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: Iterable[Any], view: RowView) -> "Layout":
        """Return the layout for an x with this `PartitionSpec`."""
        entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        missing = len(view.shape) - len(entries)
        return cls(view, (*map(tuple, entries), *[()] * missing))

    @property
    def cols_over(self) -> tuple[str, ...]:
        return sum((self.mesh_axes[a] for a in self.view.axes), ())

    def spec(self, kind: Kind, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the `PartitionSpec` of an operand or result with this kind and global shape."""
        split = (self.mesh_axes[axis] or None for axis in self.view.axes_of(kind))
        # Axes of size 1, along which a mask or a parameter is broadcast, cannot be sharded.
        return PartitionSpec(*(None if size == 1 else s for size, s in zip(shape, split)))

    def with_whole_rows(self) -> "Layout":
        """Return the layout in which the normalised axes are not sharded.

        A call with a rotation needs this: it rotates pairs of columns, which must be on one device.
        """
        axes = self.view.axes
        split = ((() if i in axes else over) for i, over in enumerate(self.mesh_axes))
        return dataclasses.replace(self, mesh_axes=tuple(split))

    def summed_over(self, kind: Kind) -> tuple[str, ...]:
        """Return the mesh axes over which an operand's gradient must be summed.

        Each device computes the gradient for its rows. A parameter's gradient is the sum over all
        devices whose rows use the parameter. `kind` is the operand's kind.
        """
        if kind not in SHARED:
            return ()
        split = jax.tree.leaves(tuple(self.spec(kind, self.view.shape_of(kind))))
        return tuple(axis for axis in sum(self.mesh_axes, ()) if axis not in split)

    def view_of_shard(self, shape: tuple[int, ...]) -> RowView:
        """Return the `RowView` of one device's arrays, given the shape of its shard of x."""
        view = self.view

        def of_shard(kind: Kind) -> tuple[int, ...]:
            sizes = view.shape_of(kind)
            split = tuple(1 if s == 1 else shape[a] for s, a in zip(sizes, view.axes_of(kind)))
            # A rotary table's last axis, the pairs of columns, is not sharded.
            return (*split[:-1], *sizes[-1:]) if kind == "table" else split

        return view.with_shapes(shape, view.axes, of_shard)

    def queries_over(self, call: Call) -> tuple[str, ...]:
        """Return the mesh axes over which the query axis of a causal softmax is sharded.

        Each device needs its position along these mesh axes, to compute its part of the causal
        mask. If the call is not a causal softmax, the result is empty.
        """
        return self.mesh_axes[-2] if call.spec.is_causal else ()

    def check(self, function: str, mesh: Any) -> None:
        """Raise ValueError if an axis of x cannot be divided into shards of equal size."""
        for size, axes in zip(self.view.shape, self.mesh_axes):
            shards = math.prod(mesh.shape[a] for a in axes)
            if size % shards:
                raise ValueError(
                    f"{function}: x has shape {self.view.shape} and is sharded by "
                    f"{self.spec('array', self.view.shape)}; {size} is no multiple of the "
                    f"{shards} shards of its axis; pad x, or shard it over fewer devices"
                )


def shards_of_rows(call: Call, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
    """Return the sharding of a call's arrays, derived from the sharding of the first operand.

    The first operand is x, or a saved array that has x's shape. ``run(call, *arrays)`` computes the
    call on one device's shards. Rows are independent of each other. A parameter's gradient is
    summed over all devices whose rows use the parameter. If the columns are sharded, row statistics
    are summed over the devices that have parts of the row.
    """
    layout = Layout.of(types[0].sharding.spec, call.view)
    if call.view.table:
        layout = layout.with_whole_rows()
    layout.check(call.function, mesh)

    def run_shard(*arrays: jax.Array) -> list[jax.Array]:
        shard = call.with_view(layout.view_of_shard(arrays[0].shape))
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
    """Return Shardy's sharding rule for a call. The axes of x are named x0, x1, ... in all arrays.

    Parameters are small, so every device gets them unsharded, and their sharding does not affect
    the sharding of x. The axes of their gradients have names of their own, so the gradients can be
    sharded in any way.
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
    # Find the names of the axes that must not be sharded. With a rotation, these include the names
    # of x's columns, because each device needs both columns of a pair. Shardy requires these names
    # in the order in which they occur in the rule.
    of_pairs = {f"x{axis}" for axis in call.view.axes} if call.view.table else set()
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
    whole: Run,
    shards: Callable[[Sequence[Any], Any], Shards],
    arrays: Arrays,
    *,
    check_vma: bool = True,
) -> list[jax.Array]:
    """Return ``whole(*arrays)``, computed on shards if the mesh has Explicit axes.

    Without Explicit axes, `whole` is called. With Explicit axes, each device runs another function
    on its shards, in `jax.shard_map` (`_on_shards` describes an exception). ``shards(types, mesh)``
    returns this function, and the shardings of its operands and results. `types` are the types of
    the arrays. `check_vma` is the argument of `jax.shard_map`.
    """
    avals = [jax.typeof(a) for a in arrays]
    mesh = explicit_mesh(avals)
    if mesh is None:
        return whole(*arrays)
    operands, results, run_shard = shards(avals, mesh)
    axes = explicit_axes(mesh)
    sharded = _on_shards(run_shard, whole, mesh, operands, [*results], axes, check_vma)
    # If a parameter is sharded (FSDP), gather it. This is cheap, because parameters are small.
    outputs: list[jax.Array] = sharded(*[reshard(a, mesh, s) for a, s in zip(arrays, operands)])
    return outputs


def _on_shards(
    run_shard: Run,
    whole: Run,
    mesh: Any,
    operands: Any,
    results: Any,
    axes: set[str],
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Return a function that runs `run_shard` on each device's shards, in `jax.shard_map`.

    There is one exception, inside a `jax.shard_map` of the user. Suppose that the mesh has Auto
    axes, and that `axes` includes a mesh axis that precedes a Manual mesh axis. XLA would abort the
    process ("Manual axes must be sorted by mesh axis index", jax 0.11.2 to 0.12.0.1). In this case,
    the returned function computes `whole`, and XLA's partitioner shards it.

    Args:
      run_shard: function of one device's shards of the operands.
      whole: function that computes the same results from the unsharded operands.
      mesh: the mesh.
      operands, results: the `PartitionSpec` of each array.
      axes: the mesh axes over which `jax.shard_map` maps; an empty set means all.
      check_vma: the argument of `jax.shard_map`.
    """
    manual = [n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Manual]
    if axes and manual and AxisType.Auto in mesh.axis_types:
        order = mesh.axis_names.index
        if min(map(order, axes)) < max(map(order, manual)):
            out = jax.tree.map(functools.partial(NamedSharding, mesh), results)
            return jax.sharding.auto_axes(whole, axes=(*axes,), out_sharding=out)
    return jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=operands,
        out_specs=results,
        axis_names=axes,
        check_vma=check_vma,
    )


def map_batch(
    function: Callable[..., list[jax.Array]], arrays: Arrays, dims: Sequence[int | None]
) -> list[jax.Array]:
    """Apply a function to each element of a batch in a loop, for use in a batching rule.

    Args:
      function: function of the arrays of one batch element.
      arrays: the batched arrays, and arrays that all batch elements share.
      dims: for each array, its batch axis; None for an array that all batch elements share.

    Returns:
      The results, with the batch axis in front. If the batch is sharded over Explicit mesh axes,
      each device loops over its shard of the batch.
    """
    batched = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}
    shared = {i: arrays[i] for i, d in enumerate(dims) if d is None}

    def loop(batched: dict[int, jax.Array], shared: dict[int, jax.Array]) -> Any:
        def one(batched: dict[int, jax.Array]) -> list[jax.Array]:
            by_place = {**batched, **shared}
            return function(*[by_place[i] for i in range(len(by_place))])

        return lax.map(one, batched)

    # `jax.vmap` ensures that all batch axes are sharded over the same mesh axes, and that arrays
    # without a batch axis are not sharded over these mesh axes.
    batch = jax.typeof(next(iter(batched.values())))
    over = axes_over(batch, 0, batch.sharding.mesh)
    if not over:
        return loop(batched, shared)
    specs = PartitionSpec(over), PartitionSpec()
    sharded = _on_shards(loop, loop, batch.sharding.mesh, specs, PartitionSpec(over), {*over})
    results: list[jax.Array] = sharded(batched, shared)
    return results


def type_like(x: Any, mesh: Any, shape: tuple[int, ...], dtype: Any, split: Iterable[Any]) -> Any:
    """Return the abstract value `x` with another shape, dtype and sharding.

    `split` has the `PartitionSpec` entry of each axis. If the mesh is empty, `split` is ignored.
    """
    sharding = x.sharding if mesh.empty else NamedSharding(mesh, PartitionSpec(*split))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def lie_alike(a: jax.Array, like: jax.Array) -> jax.Array:
    """Reshard `a` to the sharding of `like`, an array of the same shape."""
    sharding = jax.typeof(like).sharding
    differs = not sharding.mesh.empty and jax.typeof(a).sharding.spec != sharding.spec
    return reshard(a, sharding.mesh, sharding.spec) if differs else a


def broadcast_alike(a: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Reshard `a`, which broadcasts to the shape of `like`, to match the sharding of `like`.

    An axis of `a` that is broadcast or has size 1 is not sharded.
    """
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty:
        return a
    sizes = zip(a.shape, like.shape, sharding.spec)
    spec = PartitionSpec(*[None if n == 1 or n != size else over for n, size, over in sizes])
    return a if jax.typeof(a).sharding.spec == spec else reshard(a, sharding.mesh, spec)


def lie_as(a: jax.Array, aval: Any) -> jax.Array:
    """Reshard `a` to the sharding of the abstract value `aval`."""
    sharding = aval.sharding
    return a if sharding.mesh.empty else reshard(a, sharding.mesh, sharding.spec)


def vary_alike(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Cast arrays inside `jax.shard_map` so that all vary over the same Manual mesh axes.

    Rows differ between devices, while a parameter has the same value on all devices.
    `jax.lax.pcast` casts the parameter to the type of an array that varies. The transpose of this
    cast sums over the mesh axes, so the parameter's gradient has the same value on all devices.
    """
    if len(arrays) == 1:
        return arrays
    varying = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    everywhere = varying[0].union(*varying)
    return [
        a if axes == everywhere else lax.pcast(a, tuple(sorted(everywhere - axes)), to="varying")
        for a, axes in zip(arrays, varying)
    ]


def evaluated(program: ClosedJaxpr, *arrays: jax.Array) -> list[jax.Array]:
    """Evaluate a program that was traced outside of the `jax.shard_map` in which it may run.

    Inside `jax.shard_map`, all operands of an equation must vary over the same mesh axes, so they
    are cast. The equations of an inner `jax.jit` are evaluated inline, because the types in it do
    not include these mesh axes. Shardings in the parameters of equations come from arrays that the
    traced function closes over. These shardings are dropped, because a shard has no sharding.
    """
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arrays])
    )

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        operands = [*map(value, equation.invars)]
        if equation.primitive.name in ("jit", "pjit"):
            results: Any = evaluated(equation.params["jaxpr"], *operands)
        elif equation.primitive.name == "reshard":
            results = operands
        else:
            params = {
                key: None if isinstance(param, NamedSharding) else param
                for key, param in equation.primitive.get_bind_params(equation.params).items()
            }
            operands = [jnp.asarray(a) if isinstance(a, np.generic) else a for a in operands]
            results = equation.primitive.bind(*vary_alike(operands), **params)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results)
    return [*map(value, jaxpr.outvars)]


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """Return the mesh of arrays with these types, or None if the mesh has no Explicit axes.

    The types of sharded and of replicated arrays include a mesh. The type of an array that is not
    committed to a device includes no mesh. If no type includes a mesh, the result is the mesh that
    `jax.set_mesh` has set.
    """
    mesh = mesh_of(avals)
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return mesh if AxisType.Explicit in mesh.axis_types else None


def mesh_of(avals: Sequence[Any]) -> Any:
    """Return the mesh of the first array type that has a mesh; otherwise an empty mesh."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def axes_over(aval: Any, axis: int, mesh: Any) -> tuple[str, ...]:
    """Return the names of the mesh axes over which an axis of an array is sharded.

    The result is empty if the number of shards does not divide the size of the axis.
    """
    entry = (*aval.sharding.spec, *[None] * len(aval.shape))[axis]
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return () if aval.shape[axis] % math.prod(mesh.shape[name] for name in names) else names


def explicit_axes(mesh: Any) -> set[str]:
    """Return the argument ``axis_names`` that makes `jax.shard_map` map over the Explicit axes."""
    if mesh.are_all_axes_explicit:
        return set()  # an empty set means all axes, except those that `jax.vmap` uses
    return {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}


def reshard(a: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Reshard `a` to the `PartitionSpec` `spec` on a mesh."""
    # Pass a NamedSharding: a PartitionSpec would be applied to the mesh of `jax.set_mesh`.
    resharded: jax.Array = jax.reshard(a, NamedSharding(mesh, spec))
    return resharded
