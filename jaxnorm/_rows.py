"""Any shape and axes, seen as two-dimensional ``(rows, cols)``: the only place that reshapes."""

import dataclasses
import math

import jax
import jax.numpy as jnp


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
    def cols(self) -> int:
        return math.prod(self.normalised)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[a] for a in self._others)

    @property
    def moved(self) -> bool:
        """Whether the view needs a transpose: the normalised axes are not the last ones."""
        return self._order != tuple(range(len(self.shape)))

    def to_rows(self, x: jax.Array) -> jax.Array:
        """``shape -> (rows, cols)``."""
        if self.moved:
            x = jnp.transpose(x, self._order)
        return x.reshape(self.rows, self.cols)

    def from_rows(self, x: jax.Array) -> jax.Array:
        """``(rows, cols) -> shape``."""
        x = x.reshape([self.shape[a] for a in self._order])
        if self.moved:
            x = jnp.transpose(x, [self._order.index(a) for a in range(len(self.shape))])
        return x

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.shape)) if a not in self.axes)

    @property
    def _order(self) -> tuple[int, ...]:
        return self._others + self.axes
