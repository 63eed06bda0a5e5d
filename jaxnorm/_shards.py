"""A call on the shards of its arrays, whichever way they came to be shards."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm._calls import Call
from jaxnorm._rows import Kind, RowView

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Over which mesh axes each axis of x is split."""

    view: RowView
    mesh_axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: Iterable[Any], view: RowView) -> "Layout":
        """The layout of an array with this `PartitionSpec`."""
        entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        missing = len(view.shape) - len(entries)
        return cls(view, (*map(tuple, entries), *[()] * missing))

    @property
    def rows_over(self) -> tuple[str, ...]:
        return sum((self.mesh_axes[a] for a in self.view.others), ())

    @property
    def cols_over(self) -> tuple[str, ...]:
        return sum((self.mesh_axes[a] for a in self.view.axes), ())

    def spec(self, kind: Kind, shape: tuple[int, ...]) -> PartitionSpec:
        """Of an operand or result of this kind and (global) shape."""
        split = [self.mesh_axes[a] or None for a in self.view.axes_of(kind)]
        if kind == "mask":  # which may be broadcast along some axes
            split = [None if size == 1 else s for size, s in zip(shape, split)]
        return PartitionSpec(*split)

    def check(self, function: str, mesh: Any) -> None:
        """ValueError where a shard would not be a whole part of the array."""
        for size, axes in zip(self.view.shape, self.mesh_axes):
            shards = math.prod(mesh.shape[a] for a in axes)
            if size % shards:
                raise ValueError(
                    f"{function}: x has shape {self.view.shape} and is sharded by "
                    f"{self.spec('array', self.view.shape)}; {size} is no multiple of the "
                    f"{shards} shards of its axis; pad x, or shard it over fewer devices"
                )


def on_shards(call: Call, layout: Layout, bind: Function) -> Function:
    """The call where each device has its shards and the mesh axes have names.

    Rows need nothing from each other. What a parameter's gradient needs is one sum over the devices
    that have rows, and the statistics of split rows one over those that share them.
    """

    def run(*operands: Any) -> Any:
        shard = call.on(RowView(operands[0].shape, call.view.axes))
        if layout.cols_over:
            results = _with_split_rows(shard, call.view.cols, layout).xla(*operands)
        else:
            results = bind(shard, *operands)
        leaves, tree = jax.tree.flatten(results)
        summed = [
            lax.psum(a, layout.rows_over) if kind == "param" and layout.rows_over else a
            for kind, a in zip(shard.result_kinds(results), leaves)
        ]
        return jax.tree.unflatten(tree, summed)

    return run


def _with_split_rows(shard: Call, cols: int, layout: Layout) -> Call:
    if shard.implementation not in (None, "xla"):
        raise ValueError(
            f"implementation={shard.implementation!r} cannot run {shard.spec.op} over an axis that "
            f"is sharded: x has shape {layout.view.shape}, sharded by "
            f"{layout.spec('array', layout.view.shape)}; leave implementation out, or shard other "
            "axes"
        )
    spec = dataclasses.replace(shard.spec, cols=cols, cols_over=layout.cols_over)
    return dataclasses.replace(shard, spec=spec)
