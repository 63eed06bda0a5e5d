"""Any shape and axes, seen as ``(rows, cols)`` or strided: the only place that reshapes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp

from jaxnorm_kernels.operations import PARAMETERS, Kind
from jaxnorm_kernels.specs import Shared

#: Of x's shape, with 1 for an axis that they are broadcast along.
BROADCAST: tuple[Kind, ...] = ("logits_bias", "mask", "table")

# Operands whose shapes x's does not tell, in the order of a view's fields.
_SHAPES = (*PARAMETERS, *BROADCAST)


@dataclasses.dataclass(frozen=True)
class RowView:
    """How an array of ``shape`` looks when its ``axes`` (sorted, not negative) become columns.

    Attributes:
      shape: of x.
      axes: the normalised ones.
      scale, bias, branch_scale: shapes of the parameters: axes that broadcast, right-aligned, to
        x's other axes (a parameter for each group of rows), then the normalised ones, with 1 where
        it is broadcast. By default the sizes of the normalised axes.
      logits_bias, mask: shapes of a softmax's bias and of its mask: x's, with 1 where they are
        broadcast.
      table: of a rotation's tables: the same, but one of the last axis for each pair of columns.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    scale: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    branch_scale: tuple[int, ...] = ()
    logits_bias: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    table: tuple[int, ...] = ()

    @functools.cached_property
    def normalised(self) -> tuple[int, ...]:
        """Sizes of the normalised axes: the shape of scale and bias, if not told otherwise."""
        return tuple(self.shape[a] for a in self.axes)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """The axes that are not normalised."""
        return tuple(a for a in range(len(self.shape)) if a not in self.axes)

    @functools.cached_property
    def cols(self) -> int:
        return math.prod(self.normalised)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.shape[a] for a in self.others)

    @functools.cached_property
    def moved(self) -> bool:
        """Whether the view needs a transpose: the normalised axes are not the last ones."""
        order = [axis for axis in self._order if self.shape[axis] != 1]
        return order != sorted(order)

    @functools.cached_property
    def strided(self) -> tuple[int, int, int, int] | None:
        """``(outer, cols, inner)`` that an array is as it lies, and `inner_cols`; None for no such.

        The normalised axes lie side by side and are not the last; or the last axes are normalised,
        too, and `inner_cols` is their size: those are neighbours on the inner axis that belong to
        one row.
        """
        match [math.prod(self._sizes(axes)) for axes in self._runs]:
            case [outer, cols, inner]:
                return outer, cols, inner, 1
            case [outer, cols, groups, inner_cols]:
                return outer, cols, groups * inner_cols, inner_cols
            case _:
                return None

    @functools.cached_property
    def _runs(self) -> list[tuple[int, ...]]:
        """Neighbouring axes: others (or none), normalised ones, others, and so on.

        Those of size 1 are left out.
        """
        runs: list[tuple[int, ...]] = [()]
        for axis in (axis for axis, size in enumerate(self.shape) if size != 1):
            if (len(runs) % 2 == 0) != (axis in self.axes):
                runs.append(())
            runs[-1] += (axis,)
        return runs

    @property
    def inner(self) -> int:
        """Of `strided`; 1 for none."""
        return 1 if self.strided is None else self.strided[2]

    @functools.cached_property
    def has_groups(self) -> bool:
        """Whether a parameter belongs to groups of rows, or is broadcast along normalised axes."""
        return any(self.shape_of(kind) != self.normalised for kind in PARAMETERS)

    @functools.cached_property
    def scattered(self) -> bool:
        """Whether a parameter is none of consecutive rows with all columns: it has no view."""
        return any(self._groups(kind) is None for kind in PARAMETERS)

    def groups(self, kind: Kind) -> int:
        """Of consecutive rows, as many as a parameter has rows of its own."""
        return self._groups(kind) or 1

    def _groups(self, kind: Kind) -> int | None:
        lead, columns = self._parts(kind)
        is_whole = columns == self.normalised
        return _leading(lead, self._sizes(self.others)) if is_whole else None

    def inner_groups(self, kind: Kind) -> int | None:
        """Of consecutive outer indices, where a parameter is one of the inner elements of each.

        It is broadcast along the columns of `strided`. None for any other parameter.
        """
        if self.strided is None:
            return None
        outer, columns, *inner = self._runs
        behind = sum(inner, ())
        sizes = dict(zip(self.others + self.axes, sum(self._parts(kind), ())))
        is_inner = all(sizes[a] == 1 for a in columns)
        if not is_inner or any(sizes[a] != self.shape[a] for a in behind):
            return None
        return _leading([sizes[a] for a in outer], self._sizes(outer))

    def _parts(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes that a parameter has along x's other axes, and along the normalised ones."""
        shape = self.shape_of(kind)
        padded = (1,) * (len(self.shape) - len(shape)) + shape
        return padded[: len(self.others)], padded[len(self.others) :]

    def _sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in axes)

    def shared(self, kind: Kind) -> Shared | None:
        """Where the rows find theirs in an operand; None for one of a part of the columns."""
        shape = self.shape_of(kind)
        if not shape:
            return None
        has_cols = {shape[a] != 1 for a in self.axes if self.shape[a] != 1}
        if len(has_cols) > 1:
            return None
        segments: list[tuple[int, bool]] = []
        for axis in self.others:
            size, has_axis = self.shape[axis], shape[axis] != 1
            if size == 1:
                continue
            if segments and segments[-1][1] == has_axis:
                size *= segments.pop()[0]
            segments.append((size, has_axis))
        return Shared(tuple(segments), has_columns=has_cols != {False})

    def axes_of(self, kind: Kind) -> tuple[int, ...]:
        """Which axes of x an operand of this kind has, in its own order."""
        if kind == "array" or kind in BROADCAST:
            return tuple(range(len(self.shape)))
        if kind not in PARAMETERS:
            return self.others
        lacking = len(self.shape) - len(self.shape_of(kind))
        return self.others[lacking:] + self.axes

    def shape_of(self, kind: Kind) -> tuple[int, ...]:
        """Of an operand or result of this kind."""
        if kind in _SHAPES:
            shape: tuple[int, ...] = getattr(self, kind)
            return shape or (self.normalised if kind in PARAMETERS else ())
        return tuple(self.shape[a] for a in self.axes_of(kind))

    def of_shapes(
        self, shape: tuple[int, ...], axes: tuple[int, ...], of: Callable[[Kind], tuple[int, ...]]
    ) -> "RowView":
        """That of an x of another shape, whose operands have the shapes ``of(kind)``."""
        return RowView(shape, axes, *map(of, _SHAPES))

    def batched(self, size: int, kinds: Collection[Kind]) -> "RowView":
        """With one more axis of rows in front, for each of the parameters among `kinds`, too."""

        def batched(kind: Kind) -> tuple[int, ...]:
            shape = self.shape_of(kind)
            if kind in BROADCAST:
                return (size if kind in kinds else 1, *shape) if shape else ()
            if kind not in kinds:
                return getattr(self, kind)
            return (size, *[1] * (len(self.shape) - len(shape)), *shape)

        axes = tuple(axis + 1 for axis in self.axes)
        return self.of_shapes((size, *self.shape), axes, batched)

    def to_rows(self, kind: Kind, a: jax.Array, *, strided: bool = False) -> jax.Array:
        """The two-dimensional view of an array, the one-dimensional view of the others.

        A mask or a bias of logits is ``(n, cols)`` or ``(n, 1)``, as `shared` describes it, or that
        of a whole array. `strided`: that of an array is ``(outer, cols, inner)`` instead, and a
        parameter of inner elements is ``(inner,)`` or ``(groups, inner)``.
        """
        match kind:
            case "stat" | "label":
                return a.reshape(self.rows)
            case "scale" | "bias" | "branch_scale":
                inner_groups = self.inner_groups(kind) if strided else None
                groups = inner_groups or self.groups(kind)
                length = self.cols if inner_groups is None else self.inner
                return a.reshape(length if groups == 1 else (groups, length))
        if strided and self.strided is not None:
            return a.reshape(self.strided[:3])
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

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        return self.others + self.axes


def _leading(parameter: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Groups of neighbours along axes of these sizes, each with another value of a parameter.

    `parameter` are its sizes along them: those, or 1 where it is broadcast.

    None where what is shared changes along another axis than the first ones.
    """
    shared = next((i for i, (n, all_) in enumerate(zip(parameter, sizes)) if n != all_), None)
    if shared is not None and any(n != 1 for n in parameter[shared:]):
        return None
    return math.prod(parameter)
