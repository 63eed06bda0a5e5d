"""Any shape and axes, seen as ``(rows, cols)`` or strided: the only place that reshapes."""

import dataclasses
import math
from collections.abc import Collection
from typing import Literal

import jax
import jax.numpy as jnp

from jaxnorm_kernels.specs import Shared

#: What an operand or a result of a call is: an array of x's shape; a mask or a bias of logits, each
#: broadcast to it; a statistic of each row, over axes that are not normalised; a parameter, over
#: those that are.
Kind = Literal["array", "mask", "logits_bias", "stat", "scale", "bias"]

PARAMETERS: tuple[Kind, ...] = ("scale", "bias")
#: Whose gradients are sums over those elements of x that share one of theirs.
SHARED: tuple[Kind, ...] = (*PARAMETERS, "logits_bias")


@dataclasses.dataclass(frozen=True)
class RowView:
    """How an array of ``shape`` looks when its ``axes`` (sorted, not negative) become columns.

    Attributes:
      shape: of x.
      axes: the normalised ones.
      scale_lead, bias_lead: axes that the parameter has before the normalised ones, one parameter
        for each group of rows. They broadcast, right-aligned, to x's other axes.
      logits_bias, mask: shapes of a softmax's bias and of its mask: x's, with 1 where they are
        broadcast.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    scale_lead: tuple[int, ...] = ()
    bias_lead: tuple[int, ...] = ()
    logits_bias: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()

    @property
    def normalised(self) -> tuple[int, ...]:
        """Sizes of the normalised axes: the shape of scale and bias."""
        return tuple(self.shape[a] for a in self.axes)

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that are not normalised."""
        return tuple(a for a in range(len(self.shape)) if a not in self.axes)

    @property
    def cols(self) -> int:
        return math.prod(self.normalised)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[a] for a in self.others)

    @property
    def moved(self) -> bool:
        """Whether the view needs a transpose: the normalised axes are not the last ones."""
        order = [axis for axis in self._order if self.shape[axis] != 1]
        return order != sorted(order)

    @property
    def inner(self) -> int:
        """Elements behind normalised axes that lie side by side, and are not the last; else 1.

        Then an array is ``(rows / inner, cols, inner)`` as it lies.
        """
        order = [axis for axis in self._order if self.shape[axis] != 1]
        normalised = [axis for axis in self.axes if self.shape[axis] != 1]
        behind = [axis for axis in order if normalised and axis > normalised[-1]]
        before = [axis for axis in order if normalised and axis < normalised[0]]
        if not behind or [*before, *normalised, *behind] != sorted(order):
            return 1
        return math.prod(self.shape[axis] for axis in behind)

    @property
    def has_groups(self) -> bool:
        """Whether a parameter belongs to groups of rows."""
        return bool(self.scale_lead or self.bias_lead)

    @property
    def scattered(self) -> bool:
        """Whether a parameter belongs to rows that are not consecutive: there is no view of it."""
        return any(self._groups(kind) is None for kind in PARAMETERS)

    def groups(self, kind: Kind) -> int:
        """Of consecutive rows, as many as a parameter has rows of its own."""
        return self._groups(kind) or 1

    def _groups(self, kind: Kind) -> int | None:
        sizes = [self.shape[axis] for axis in self.others]
        lead = self._lead(kind)
        lead = (1,) * (len(sizes) - len(lead)) + lead
        # The parameter of a row may change with the first axes alone.
        shared = next((i for i, (own, all_) in enumerate(zip(lead, sizes)) if own != all_), None)
        if shared is not None and any(own != 1 for own in lead[shared:]):
            return None
        return math.prod(lead)

    def shared(self, kind: Literal["mask", "logits_bias"]) -> Shared | None:
        """Where the rows find theirs in a mask or a bias; None for one of a part of the columns."""
        shape = self.shape_of(kind)
        if not shape:
            return None
        own_cols = {shape[a] != 1 for a in self.axes if self.shape[a] != 1}
        if len(own_cols) > 1:
            return None
        segments: list[tuple[int, bool]] = []
        for axis in self.others:
            size, own = self.shape[axis], shape[axis] != 1
            if size == 1:
                continue
            if segments and segments[-1][1] == own:
                size *= segments.pop()[0]
            segments.append((size, own))
        return Shared(tuple(segments), has_columns=own_cols != {False})

    def axes_of(self, kind: Kind) -> tuple[int, ...]:
        """Which axes of x an operand of this kind has, in its own order."""
        match kind:
            case "array" | "mask" | "logits_bias":
                return tuple(range(len(self.shape)))
            case "stat":
                return self.others
            case "scale" | "bias":
                lead = len(self._lead(kind))
                return self.others[len(self.others) - lead :] + self.axes

    def shape_of(self, kind: Kind) -> tuple[int, ...]:
        """Of an operand or result of this kind."""
        if kind in PARAMETERS:
            return self._lead(kind) + self.normalised
        if kind == "logits_bias":
            return self.logits_bias
        if kind == "mask":
            return self.mask
        return tuple(self.shape[a] for a in self.axes_of(kind))

    def batched(self, size: int, kinds: Collection[Kind]) -> "RowView":
        """With one more axis of rows in front, for each of the parameters among `kinds`, too."""

        def lead(kind: Kind) -> tuple[int, ...]:
            own = self._lead(kind)
            missing = len(self.others) - len(own)
            return (size, *[1] * missing, *own) if kind in kinds else own

        axes = tuple(axis + 1 for axis in self.axes)

        def logits(kind: Literal["mask", "logits_bias"]) -> tuple[int, ...]:
            own = self.shape_of(kind)
            return (size if kind in kinds else 1, *own) if own else ()

        return RowView(
            shape=(size, *self.shape),
            axes=axes,
            scale_lead=lead("scale"),
            bias_lead=lead("bias"),
            logits_bias=logits("logits_bias"),
            mask=logits("mask"),
        )

    def to_rows(self, kind: Kind, a: jax.Array, *, strided: bool = False) -> jax.Array:
        """The two-dimensional view of an array, the one-dimensional view of the others.

        A mask or a bias of logits is ``(n, cols)`` or ``(n, 1)``, as `shared` describes it, or that
        of a whole array. `strided`: that of an array is ``(rows / inner, cols, inner)`` instead.
        """
        match kind:
            case "stat":
                return a.reshape(self.rows)
            case "scale" | "bias":
                groups = self.groups(kind)
                return a.reshape(self.cols if groups == 1 else (groups, self.cols))
        if strided:
            return a.reshape(self.rows // self.inner, self.cols, self.inner)
        rows = math.prod(a.shape[axis] for axis in self.others)
        cols = math.prod(a.shape[axis] for axis in self.axes)
        if self.moved:
            a = jnp.transpose(a, self._order)
        return a.reshape(rows, cols)

    def from_rows(self, kind: Kind, a: jax.Array, *, strided: bool = False) -> jax.Array:
        """The inverse of `to_rows`."""
        if kind == "stat" or kind in PARAMETERS:
            return a.reshape(self.shape_of(kind))
        shape = self.shape_of(kind)
        if strided or not self.moved:
            return a.reshape(shape)
        a = a.reshape([shape[axis] for axis in self._order])
        return jnp.transpose(a, [self._order.index(axis) for axis in range(len(self.shape))])

    def _lead(self, kind: Kind) -> tuple[int, ...]:
        return self.scale_lead if kind == "scale" else self.bias_lead

    @property
    def _order(self) -> tuple[int, ...]:
        return self.others + self.axes
