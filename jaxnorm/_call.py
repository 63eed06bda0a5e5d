"""One call of an operation: its static part, and what its passes take and return.

A call has three passes, each a function of the contract over arrays of any shape::

    pass          takes                      returns
    fwd           primals                    outputs
    tan           residuals, tangents        outputs (their tangents)
    bwd           residuals, outputs         tangents (their cotangents)

    softmaxes     primals    x, mask, bias                      outputs     y
                  residuals  y, mask
    cross_entropy primals    x, labels, mask, positions         outputs     loss, statistics
                  residuals  x, statistics, labels, mask
    norm          primals    x, scale, bias                     outputs     y, statistics
                  residuals  y or x, statistics, scale, bias
    add_norm      primals    x, residual, scale, bias           outputs     y, h, statistics
                  residuals  y or h, statistics, scale, bias
    norm_add      primals    x, residual, scale                 outputs     y, statistics
    norm_add_norm primals    x, residual, scale, next_scale     outputs     y, h, statistics
                  residuals  x, y or h, statistics, scale, next_scale

``tan`` and ``bwd`` are linear in what follows the residuals, and each other's transpose. A ``bwd``
takes h's cotangent where the spec says ``adds_dh``; that of a plain norm may, too, for which h is
its x. norm_add has a ``fwd`` alone, because its derivatives are the norm's. The arrays of a call
are passed around as the flat list of those that are there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm import _implementation
from jaxnorm._rows import Kind, RowView
from jaxnorm_kernels.specs import Name, Op, Spec

Arrays = Sequence[jax.Array]
#: What computes a pass: takes the arrays of a call one by one, and returns those of its results.
Run = Callable[..., list[jax.Array]]

_PRIMALS: dict[Op, tuple[str, ...]] = {
    "softmax": ("x", "mask", "logits_bias"),
    "log_softmax": ("x", "mask", "logits_bias"),
    "cross_entropy": ("x", "labels", "mask", "positions"),
    "norm": ("x", "scale", "bias"),
    "add_norm": ("x", "residual", "scale", "bias"),
    "norm_add": ("x", "residual", "scale"),
    "norm_add_norm": ("x", "residual", "scale", "next_scale"),
}
# The statistics tell which rows have an entry.
_NOT_SAVED = ("x", "residual", "logits_bias", "positions")
# Booleans and integers, which have no tangents.
_CONSTANTS = ("mask", "labels", "positions")
_KINDS: dict[str, Kind] = {
    "mask": "mask",
    "labels": "label",
    "positions": "label",
    "logits_bias": "logits_bias",
    "scale": "scale",
    "next_scale": "scale",
    "bias": "bias",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Attributes:
      function: the public one's name, which errors tell.
      spec: of the whole arrays; ``spec.axes`` are those of the view.
      view: how an implementation of two-dimensional arrays sees them.
      implementation: asked for by name, or None.
      wrt: names of the primals that have a tangent, in ``tan`` and ``bwd``.
      primitives: whose primitives it binds, where those are another function's: the loss of a
        linear layer makes calls of the cross-entropy.
    """

    function: str
    spec: Spec
    view: RowView
    implementation: Name | None
    wrt: tuple[str, ...] = ()
    primitives: str | None = None

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
        if spec.is_norm:
            text += f" save={spec.saved}"
        if spec.logits_scale != 1:
            text += f" scale={spec.logits_scale}"
        if spec.causal:
            text += " causal"
        if spec.label_smoothing:
            text += f" label_smoothing={spec.label_smoothing}"
        if spec.z_loss:
            text += f" z_loss={spec.z_loss}"
        if self.implementation is not None:
            text += f" implementation={self.implementation}"
        return f"({text})" if not self.wrt else f"({text} wrt={','.join(self.wrt)})"

    # ------------------------------------------------------------------------- other passes

    def with_stats(self) -> "Call":
        """The forward, with h and the statistics among its outputs."""
        return self._with(want_stats=not self.spec.is_softmax, unused=None)

    def without(self, unused: Literal["y", "h"]) -> "Call":
        """The forward, without y or h among its outputs."""
        return self._with(unused=unused, want_stats=self.spec.want_stats and unused != "y")

    def first(self) -> "Call":
        """The norm of x, whose output goes to the residual."""
        return dataclasses.replace(self, spec=self.spec.first)

    def tangent(self, wrt: Sequence[str], *, adds_dh: bool = False) -> "Call":
        """Of the same outputs; of those whose cotangents a backward takes."""
        wanted = self.spec.stat_cotangents if self.spec.direction == "bwd" else self.spec.want_stats
        call = dataclasses.replace(self, wrt=tuple(wrt))
        return call._with(
            direction="tan",
            want_stats=wanted,
            unused=None,
            stat_cotangents=False,
            adds_dh=adds_dh,
        )

    def backward(
        self,
        wrt: Sequence[str],
        *,
        adds_dh: bool = False,
        stat_cotangents: bool = False,
        overwrites_x: bool = False,
    ) -> "Call":
        call = dataclasses.replace(self, wrt=tuple(wrt))
        return call._with(
            direction="bwd",
            want_stats=False,
            unused=None,
            stat_cotangents=stat_cotangents,
            adds_dh=adds_dh,
            overwrites_x=overwrites_x,
            # Its gradient is computed only where it is asked for.
            **({} if "logits_bias" in wrt else {"logits_bias_dtype": None}),
        )

    def without_dh(self) -> "Call":
        return self._with(adds_dh=False)

    def gradient(self) -> "Call":
        """The backward that the gradient of all outputs of a forward takes."""
        call = self.first() if self.spec.op == "norm_add" else self
        return call.backward(call.differentiable, adds_dh=self.spec.normalises_h)

    def on(self, view: RowView) -> "Call":
        """The same call on arrays of another shape: a batch, or a shard."""
        return dataclasses.replace(self, view=view)._with(
            rows=view.rows,
            cols=view.cols,
            axes=view.axes,
            scale_groups=view.groups("scale"),
            bias_groups=view.groups("bias"),
            logits_bias_shape=view.logits_bias,
            scattered=view.scattered,
        )

    def widened(self, name: str, parameter: jax.Array) -> tuple["Call", jax.Array]:
        """The call with that parameter in the arithmetic dtype, if its own is narrower.

        For one that is broadcast to groups of rows: their gradients are then added up before the
        sum is rounded to the parameter's own dtype.
        """
        dtype = jnp.promote_types(parameter.dtype, self.spec.compute_dtype)
        return self._with(**{f"{name}_dtype": dtype}), parameter.astype(dtype)

    def _with(self, **changes: Any) -> "Call":
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    # ------------------------------------------------------------- what a pass takes and returns

    @functools.cached_property
    def primals(self) -> tuple[str, ...]:
        """Names of the arrays that the forward takes."""
        spec = self.spec
        absent = {
            "mask": not spec.has_mask,
            "positions": not spec.has_positions,
            "scale": spec.scale_dtype is None,
            "bias": spec.bias_dtype is None,
            "next_scale": spec.next_scale_dtype is None,
            "logits_bias": spec.logits_bias_dtype is None,
        }
        return tuple(name for name in _PRIMALS[spec.op] if not absent.get(name))

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the primals that can have a tangent."""
        return tuple(name for name in self.primals if name not in _CONSTANTS)

    @functools.cached_property
    def operand_kinds(self) -> list[Kind]:
        return jax.tree.leaves(self._operands)

    @functools.cached_property
    def result_kinds(self) -> list[Kind]:
        return jax.tree.leaves(self._tangents if self.spec.direction == "bwd" else self._outputs)

    @property
    def array_dtypes(self) -> list[np.dtype]:
        """Of the results that are arrays of x's shape."""
        spec = self.spec
        if spec.direction == "bwd":
            dtypes = {"x": spec.x_dtype, "residual": spec.last.x_dtype}
            return [dtypes[name] for name in self.wrt if name in dtypes]
        return [spec.y_dtype, spec.last.x_dtype][spec.unused == "y" :]

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """Where the operands of ``tan`` and ``bwd`` have each parameter."""
        names = [name for name in self.primals if name not in _NOT_SAVED]
        return {name: self.residuals - len(names) + i for i, name in enumerate(names)}

    @functools.cached_property
    def residuals(self) -> int:
        """How many of the operands of ``tan`` and ``bwd`` are residuals."""
        return len(jax.tree.leaves(self._residuals))

    @property
    def _operands(self) -> tuple[Any, ...]:
        """A tree with a kind for each array, and None for what there is not."""
        match self.spec.direction:
            case "fwd":
                names = _PRIMALS[self.spec.op]
                return tuple(_kind(name) if name in self.primals else None for name in names)
            case "tan":
                return (*self._residuals, *self._tangents)
            case "bwd":
                return (*self._residuals, *self._outputs)

    @property
    def _statistics(self) -> tuple[Kind, ...]:
        stat: Kind = "stat"
        if self.spec.op in ("norm_add_norm", "cross_entropy"):
            return (stat, stat)
        return (stat,) * (1 + self.spec.returns_mean)

    @property
    def _residuals(self) -> tuple[Any, ...]:
        arrays: list[Kind] = ["array"] * (1 + (self.spec.op == "norm_add_norm"))
        parameters = [name for name in _PRIMALS[self.spec.op] if name not in _NOT_SAVED]
        kinds = [_kind(name) if name in self.primals else None for name in parameters]
        return (*arrays, *(() if self.spec.is_softmax else (self._statistics,)), *kinds)

    @property
    def _outputs(self) -> tuple[Any, ...]:
        array: Kind = "array"
        if self.spec.is_softmax:
            return (array,)
        has_statistics = self.spec.want_stats or self.spec.stat_cotangents
        statistics = (self._statistics,) if has_statistics else ()
        if self.spec.op == "cross_entropy":
            return ("stat", *statistics)
        has_h = self.spec.adds_dh or (self.spec.direction != "bwd" and self.spec.returns_h)
        y = None if self.spec.unused == "y" else array
        return (y, array if has_h else None, *statistics)

    @property
    def _tangents(self) -> tuple[Kind | None, ...]:
        names = [name for name in _PRIMALS[self.spec.op] if name not in _CONSTANTS]
        return tuple(_kind(name) if name in self.wrt else None for name in names)

    # ------------------------------------------------------------------------------ running it

    def as_seen_by(self, name: str) -> Spec:
        """The spec of the view that the implementation `name` gets.

        That is two-dimensional, by a transpose where the normalised axes are not the last ones, but
        for an implementation that takes those as they lie.
        """
        view = self.view
        in_rows = dataclasses.replace(
            self.spec,
            axes=(-1,),
            moved_axis=view.moved,
            mask_rows=view.shared("mask"),
            logits_bias_rows=view.shared("logits_bias"),
            queries=view.shape[-2] if self.spec.causal else 0,
        )
        strided = self._strided(in_rows)
        if strided is None or not _implementation.knows_inner(name):
            return in_rows
        # Where rows have no view, the reason to refuse is that of the strided one.
        if in_rows.scattered or _implementation.takes_inner(name, strided):
            return strided
        return in_rows

    def _strided(self, in_rows: Spec) -> Spec | None:
        """`in_rows` of the view that needs no transpose; None where there is no such view."""
        view = self.view
        if view.strided is None:
            return None
        *_, inner, inner_cols = view.strided
        strided = dataclasses.replace(in_rows, moved_axis=False, inner=inner, inner_cols=inner_cols)
        kinds = {_KINDS[name] for name in self.parameters if self.spec.is_norm}
        groups = {kind: view.inner_groups(kind) for kind in kinds}
        if groups and None not in groups.values():
            return dataclasses.replace(
                strided,
                scattered=False,
                inner_params=True,
                scale_groups=groups.get("scale") or 1,
                bias_groups=groups.get("bias") or 1,
            )
        return strided if inner_cols == 1 or not groups else None

    def xla(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results by the xla implementation, which needs no view."""
        return self._run("xla", self.spec, arrays)

    def kernel(self, name: str) -> Run:
        """The implementation `name`, through its view of the arrays."""

        def view_of(kind: Kind, a: jax.Array, strided: bool) -> jax.Array:
            if kind == "mask" and name == "xla":  # which knows no `Shared`, and fuses this
                a = jnp.broadcast_to(a, self.view.shape)
            return self.view.to_rows(kind, a, strided=strided)

        def run(*arrays: jax.Array) -> list[jax.Array]:
            spec = self.as_seen_by(name)
            strided = spec.inner > 1
            rows = [view_of(kind, a, strided) for kind, a in zip(self.operand_kinds, arrays)]
            results = self._run(name, spec, rows)
            return [
                self.view.from_rows(kind, a, strided=strided)
                for kind, a in zip(self.result_kinds, results)
            ]

        return run

    def _run(self, name: str, spec: Spec, arrays: Arrays) -> list[jax.Array]:
        function = getattr(_implementation.module(name), f"{spec.op}_{spec.direction}")
        operands = jax.tree.unflatten(jax.tree.structure(self._operands), arrays)
        results = function(*operands, spec=spec)
        if spec.direction == "bwd":
            names = [name for name in _PRIMALS[spec.op] if name not in _CONSTANTS]
            return [d for primal, d in zip(names, results) if primal in self.wrt]
        leaves: list[jax.Array] = jax.tree.leaves(results)
        return leaves


def _kind(name: str) -> Kind:
    return _KINDS.get(name, "array")
