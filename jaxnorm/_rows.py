"""Any shape and axes, seen as two-dimensional ``(rows, cols)``: the only place that reshapes."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

#: What an operand or a result of a call is: an array of x's shape; a mask that broadcasts to it; a
#: statistic of each row, over the axes that are not normalised; a parameter, over those that are.
Kind = Literal["array", "mask", "stat", "param"]


@dataclasses.dataclass(frozen=True)
class RowView:
    """How an array of ``shape`` looks when its ``axes`` (sorted, not negative) become columns."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

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
        return self._order != tuple(range(len(self.shape)))

    def axes_of(self, kind: Kind) -> tuple[int, ...]:
        """Which axes of x an operand of this kind has."""
        match kind:
            case "array" | "mask":
                return tuple(range(len(self.shape)))
            case "stat":
                return self.others
            case "param":
                return self.axes

    def batched(self, size: int) -> "RowView":
        """With one more axis of rows, in front."""
        return RowView((size, *self.shape), tuple(a + 1 for a in self.axes))

    def to_rows(self, kind: Kind, a: jax.Array) -> jax.Array:
        """The two-dimensional view of an array or mask, the one-dimensional view of the others."""
        match kind:
            case "stat":
                return a.reshape(self.rows)
            case "param":
                return a.reshape(self.cols)
            case "mask":
                a = jnp.broadcast_to(a, self.shape)
        if self.moved:
            a = jnp.transpose(a, self._order)
        return a.reshape(self.rows, self.cols)

    def from_rows(self, kind: Kind, a: jax.Array) -> jax.Array:
        """The inverse of `to_rows`."""
        if kind in ("stat", "param"):
            return a.reshape([self.shape[axis] for axis in self.axes_of(kind)])
        a = a.reshape([self.shape[axis] for axis in self._order])
        if self.moved:
            a = jnp.transpose(a, [self._order.index(axis) for axis in range(len(self.shape))])
        return a

    @property
    def _order(self) -> tuple[int, ...]:
        return self.others + self.axes
