"""One call of a function of the contract, over arrays of any shape."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxnorm import _implementation
from jaxnorm._rows import Kind, RowView
from jaxnorm_kernels.specs import Spec

# What the functions of the contract take and return, each for None and tuples too.
_OPERANDS: dict[str, tuple[Kind, ...]] = {
    "norm_fwd": ("array", "param", "param"),
    "norm_bwd": ("array", "stat", "param", "param", "array"),
    **dict.fromkeys(("softmax_fwd", "log_softmax_fwd"), ("array", "mask")),
    **dict.fromkeys(("softmax_bwd", "log_softmax_bwd"), ("array", "mask", "array")),
}
_RESULTS: dict[str, Any] = {
    "norm_fwd": ("array", "stat"),
    "norm_bwd": ("array", "param", "param"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Attributes:
      function: of :class:`jaxnorm_kernels.specs.Implementation`.
      spec: of the whole arrays; ``spec.axes`` are those of the view.
      view: how an implementation of two-dimensional arrays sees them.
      implementation: asked for by name, or None.
    """

    function: str
    spec: Spec
    view: RowView
    implementation: str | None

    def on(self, view: RowView) -> "Call":
        """The same call on arrays of another shape: a batch, or a shard."""
        spec = dataclasses.replace(self.spec, rows=view.rows, cols=view.cols, axes=view.axes)
        return dataclasses.replace(self, spec=spec, view=view)

    @property
    def in_rows(self) -> Spec:
        """The spec of the two-dimensional arrays."""
        return dataclasses.replace(self.spec, axes=(-1,), moved_axis=self.view.moved)

    def operand_kinds(self, operands: tuple[Any, ...]) -> list[Kind]:
        """Of the leaves of `operands`."""
        return _kinds(_OPERANDS[self.function], operands)

    def result_kinds(self, results: Any) -> list[Kind]:
        """Of the leaves of `results`."""
        return _kinds(_RESULTS.get(self.function, "array"), results)

    def xla(self, *operands: Any) -> Any:
        """The xla implementation, which needs no view."""
        return getattr(_implementation.module("xla"), self.function)(*operands, spec=self.spec)

    def kernel(self, name: str) -> Callable[..., Any]:
        """The implementation `name`, through the view of rows."""
        function = getattr(_implementation.module(name), self.function)

        def run(*operands: Any) -> Any:
            kinds = self.operand_kinds(operands)
            leaves, tree = jax.tree.flatten(operands)
            rows = [self.view.to_rows(kind, a) for kind, a in zip(kinds, leaves)]
            results = function(*jax.tree.unflatten(tree, rows), spec=self.in_rows)
            kinds = self.result_kinds(results)
            leaves, tree = jax.tree.flatten(results)
            whole = [self.view.from_rows(kind, a) for kind, a in zip(kinds, leaves)]
            return jax.tree.unflatten(tree, whole)

        return run


def _kinds(prefix: Any, tree: Any) -> list[Kind]:
    kinds: list[Kind] = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
    return kinds
