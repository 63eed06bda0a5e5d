"""One call of an operation: its static part, and what its passes take and return.

A call has three passes, each a function of the contract over arrays of any shape::

    pass          takes                      returns
    fwd           primals                    outputs
    tan           residuals, tangents        outputs (their tangents)
    bwd           residuals, outputs         tangents (their cotangents)

    norms         primals    x, scale, bias                 outputs     y, statistics if wanted
                  residuals  y or x, statistics, scale, bias
    softmaxes     primals    x, mask                        outputs     y
                  residuals  y, mask

``tan`` and ``bwd`` are linear in what follows the residuals, and each other's transpose. The arrays
of a call are passed around as the flat list of those that are there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxnorm import _implementation
from jaxnorm._rows import Kind, RowView
from jaxnorm_kernels.specs import Name, Spec

Arrays = Sequence[jax.Array]
Function = Callable[..., list[jax.Array]]

_TANGENTS: dict[str, Kind] = {"x": "array", "scale": "scale", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Attributes:
      function: the public one's name.
      spec: of the whole arrays; ``spec.axes`` are those of the view.
      view: how an implementation of two-dimensional arrays sees them.
      implementation: asked for by name, or None.
      wrt: names of the primals that have a tangent, in ``tan`` and ``bwd``.
    """

    function: str
    spec: Spec
    view: RowView
    implementation: Name | None
    wrt: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once: a call outside `jax.jit` looks up what is compiled for it.
        return hash((self.function, self.spec, self.view, self.implementation, self.wrt))

    def __str__(self) -> str:
        """What a jaxpr shows."""
        spec = self.spec
        text = f"{spec.x_dtype.name}{list(self.view.shape)} -> {spec.y_dtype.name}"
        if len(self.view.axes) > 1 or self.view.moved:
            text += f" axis={self.view.axes}"
        if spec.op == "norm":
            text += f" save={spec.saved}"
        if self.implementation is not None:
            text += f" implementation={self.implementation}"
        return f"({text})" if not self.wrt else f"({text} wrt={','.join(self.wrt)})"

    # ------------------------------------------------------------------------- other passes

    def with_stats(self) -> "Call":
        """The forward, with the statistics among its outputs."""
        spec = dataclasses.replace(self.spec, want_stats=self.spec.op == "norm")
        return dataclasses.replace(self, spec=spec)

    def tangent(self, wrt: Sequence[str]) -> "Call":
        """Of the same outputs; of those whose cotangents a backward takes."""
        wanted = self.spec.stat_cotangents if self.spec.direction == "bwd" else self.spec.want_stats
        return self._pass("tan", wrt, want_stats=wanted, stat_cotangents=False)

    def backward(self, wrt: Sequence[str], *, stat_cotangents: bool = False) -> "Call":
        return self._pass("bwd", wrt, want_stats=False, stat_cotangents=stat_cotangents)

    def on(self, view: RowView) -> "Call":
        """The same call on arrays of another shape: a batch, or a shard."""
        spec = dataclasses.replace(
            self.spec, rows=view.rows, cols=view.cols, axes=view.axes, grouped=view.grouped
        )
        return dataclasses.replace(self, spec=spec, view=view)

    def _pass(self, direction: Any, wrt: Sequence[str], **changes: Any) -> "Call":
        spec = dataclasses.replace(self.spec, direction=direction, **changes)
        return dataclasses.replace(self, spec=spec, wrt=tuple(wrt))

    # ------------------------------------------------------------- what a pass takes and returns

    @property
    def primals(self) -> tuple[str, ...]:
        """Names of the primals that can have a tangent."""
        present = {"x": True, "scale": self.spec.scale_dtype, "bias": self.spec.bias_dtype}
        return tuple(name for name in _TANGENTS if present[name])

    @functools.cached_property
    def operand_kinds(self) -> list[Kind]:
        return jax.tree.leaves(self._operands)

    @functools.cached_property
    def result_kinds(self) -> list[Kind]:
        return jax.tree.leaves(self._tangents if self.spec.direction == "bwd" else self._outputs)

    @functools.cached_property
    def residuals(self) -> int:
        """How many of the operands of ``tan`` and ``bwd`` are residuals."""
        return len(jax.tree.leaves(self._residuals))

    @property
    def _operands(self) -> tuple[Any, ...]:
        """A tree with a kind for each array, and None for what there is not."""
        match self.spec.direction:
            case "fwd":
                return ("array", *self._parameters)
            case "tan":
                return (*self._residuals, *self._tangents)
            case "bwd":
                return (*self._residuals, *self._outputs)

    @property
    def _parameters(self) -> tuple[Kind | None, ...]:
        if self.spec.op != "norm":
            mask: Kind | None = "mask" if self.spec.has_mask else None
            return (mask,)
        scale: Kind | None = None if self.spec.scale_dtype is None else "scale"
        bias: Kind | None = None if self.spec.bias_dtype is None else "bias"
        return scale, bias

    @property
    def _statistics(self) -> tuple[Kind, ...]:
        stat: Kind = "stat"
        return (stat,) * (1 + self.spec.returns_mean)

    @property
    def _residuals(self) -> tuple[Any, ...]:
        stats = (self._statistics,) if self.spec.op == "norm" else ()
        return ("array", *stats, *self._parameters)

    @property
    def _outputs(self) -> tuple[Any, ...]:
        has_statistics = self.spec.want_stats or self.spec.stat_cotangents
        return ("array", self._statistics) if has_statistics else ("array",)

    @property
    def _tangents(self) -> tuple[Kind | None, ...]:
        names = _TANGENTS if self.spec.op == "norm" else ["x"]
        return tuple(_TANGENTS[name] if name in self.wrt else None for name in names)

    # ------------------------------------------------------------------------------ running it

    @property
    def in_rows(self) -> Spec:
        """The spec of the two-dimensional arrays."""
        return dataclasses.replace(self.spec, axes=(-1,), moved_axis=self.view.moved)

    def xla(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results by the xla implementation, which needs no view."""
        return self._run("xla", self.spec, arrays)

    def kernel(self, name: str) -> Function:
        """The implementation `name`, through the view of rows."""

        def run(*arrays: jax.Array) -> list[jax.Array]:
            rows = [self.view.to_rows(kind, a) for kind, a in zip(self.operand_kinds, arrays)]
            results = self._run(name, self.in_rows, rows)
            return [self.view.from_rows(kind, a) for kind, a in zip(self.result_kinds, results)]

        return run

    def _run(self, name: str, spec: Spec, arrays: Arrays) -> list[jax.Array]:
        function = getattr(_implementation.module(name), f"{spec.op}_{spec.direction}")
        operands = jax.tree.unflatten(jax.tree.structure(self._operands), arrays)
        results = function(*operands, spec=spec)
        if spec.direction == "bwd" and spec.op == "norm":
            return [d for primal, d in zip(_TANGENTS, results) if primal in self.wrt]
        leaves: list[jax.Array] = jax.tree.leaves(results)
        return leaves
