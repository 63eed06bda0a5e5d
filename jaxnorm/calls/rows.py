"""Reshapes between arrays of any shape and the two- or three-dimensional arrays of kernels.

A kernel normalises the rows of arrays ``(rows, cols)``, or the middle axis of arrays ``(outer,
cols, inner)``, the strided view. A `RowView` describes how x and the other arrays of a call are
reshaped to these shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Self

import jax
import jax.numpy as jnp

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.operations import PARAMETERS, Kind

#: The kinds of operands that have all axes of x, with size 1 where they are broadcast.
BROADCAST: tuple[Kind, ...] = ("logits_bias", "mask", "table")

# The kinds of operands whose shapes do not follow from x's shape. `RowView` has a field for each
# kind, with the same name and in the same order.
_SHAPES = (*PARAMETERS, *BROADCAST)


# Views are interned, so identical layers of a model share one object and its cached properties.
_once = functools.lru_cache(maxsize=4096)


@dataclasses.dataclass(frozen=True)
class RowView:
    """The shapes of a call's arrays, and how they are reshaped to ``(rows, cols)``.

    The normalised axes of x become columns, and its other axes become rows.

    Attributes:
      shape: shape of x.
      axes: the normalised axes, sorted and not negative.
      scale, bias, branch_scale: shapes of the parameters. The last axes of a parameter are the
        normalised axes, with the same sizes as in x, or with size 1 where the parameter is
        broadcast. A parameter may have more axes in front of these, so that different rows of x use
        different values. The axes in front broadcast, right-aligned, to the axes of x that are not
        normalised. `()` means that a parameter has the normalised axes only, with their sizes in x.
      logits_bias, mask: shapes of a softmax's bias and of its mask. They have all axes of x, with
        size 1 where they are broadcast. If the call has no bias, or no mask, its shape is `()`.
      table: shape of the cos and sin tables of a rotation; `()` without a rotation. A table has all
        axes of x, with size 1 where it is broadcast. Its last axis has one value for each pair of
        columns.
      candidates: ``(k,)`` if each row has k labels; `()` if it has one label.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    scale: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    branch_scale: tuple[int, ...] = ()
    logits_bias: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    table: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()

    @classmethod
    @_once
    def of(cls, shape: tuple[int, ...], axes: tuple[int, ...], **shapes: tuple[int, ...]) -> Self:
        """Return the view for an x of this shape; `shapes` has the operands' shapes, by kind."""
        return cls(shape, axes, **shapes)

    @functools.cached_property
    def normalised(self) -> tuple[int, ...]:
        """Sizes of the normalised axes, which are the default shape of scale and bias."""
        return self._sizes(self.axes)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the axes of x that are not normalised."""
        return tuple([a for a in range(len(self.shape)) if a not in self.axes])

    @functools.cached_property
    def cols(self) -> int:
        return math.prod(self.normalised)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self._sizes(self.others))

    @functools.cached_property
    def moved(self) -> bool:
        """True if x must be transposed before it is reshaped to ``(rows, cols)``.

        This is so if the normalised axes are not the last ones.
        """
        order = [axis for axis in self._order if self.shape[axis] != 1]
        return order != sorted(order)

    @functools.cached_property
    def strided(self) -> tuple[int, int, int, int] | None:
        """The sizes ``(outer, cols, inner, inner_cols)`` of the strided view, or None.

        The view exists in two cases:

        - The normalised axes are adjacent, but are not the last axes of x. `cols` is the number of
          elements along these axes, `outer` along the axes before them, and `inner` along the axes
          after them. `inner_cols` is 1.
        - There are two runs of adjacent normalised axes, and the second one ends with the last axis
          of x. An example is GroupNorm of x (batch, positions, groups, channels of a group), which
          normalises over the positions and the channels of a group. Then `outer` is the number of
          batch elements, and `cols` the number of positions. The inner axis has all channels, and
          `inner_cols` is the number of channels of a group. A row includes `inner_cols` consecutive
          elements of the inner axis, for all of the `cols` positions.
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
        """The axes of x, split into runs of adjacent axes.

        The axes of a run are all normalised, or all not normalised. The two kinds of runs
        alternate. The first run has axes that are not normalised, and may be empty. Axes of size 1
        are left out.
        """
        runs: list[tuple[int, ...]] = [()]
        for axis in (axis for axis, size in enumerate(self.shape) if size != 1):
            if (len(runs) % 2 == 0) != (axis in self.axes):
                runs.append(())
            runs[-1] += (axis,)
        return runs

    @property
    def inner(self) -> int:
        """Size of the inner axis of the strided view; 1 if there is no such view."""
        return 1 if self.strided is None else self.strided[2]

    @functools.cached_property
    def has_groups(self) -> bool:
        """True if a parameter's shape differs from `normalised`.

        Such a parameter has separate values for groups of rows, or is broadcast along a normalised
        axis.
        """
        return any(self.shape_of(kind) != self.normalised for kind in PARAMETERS)

    @_once
    def groups(self, kind: Kind) -> int | None:
        """Return the number of groups of rows of x for which a parameter has separate values.

        The rows of a group are consecutive. If all rows use the same values, the result is 1. It is
        None if the parameter cannot be reshaped to ``(groups, cols)``, as kernels need it: because
        the rows that share a value are not consecutive, or because the parameter is broadcast along
        a normalised axis.
        """
        lead, columns = self._parts(kind)
        is_whole = columns == self.normalised
        return _leading(lead, self._sizes(self.others)) if is_whole else None

    @_once
    def inner_groups(self, kind: Kind) -> int | None:
        """Return n if the parameter has the shape ``(n, inner)`` in the strided view, else None.

        In the strided view, x has the shape ``(outer, cols, inner)``. A parameter of the shape
        ``(n, inner)`` varies along the inner axis and is broadcast along the columns. The outer
        axis is divided into n groups of consecutive indices, and each group has its own values.
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
        """Return a parameter's sizes along x's unnormalised axes, and along the normalised axes."""
        shape = self.shape_of(kind)
        padded = (1,) * (len(self.shape) - len(shape)) + shape
        return padded[: len(self.others)], padded[len(self.others) :]

    def _sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple([self.shape[axis] for axis in axes])

    def shared(self, kind: Kind) -> Shared | None:
        """Return the map from rows of x to rows of a broadcast operand, such as a mask or a table.

        The result is None if the operand is absent, or if it is broadcast along some of the
        normalised axes but not all.
        """
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

    @_once
    def axes_of(self, kind: Kind) -> tuple[int, ...]:
        """Return, for each axis of an operand of this kind, the axis of x to which it corresponds.

        The kind "candidate" (k labels for each row) has an additional last axis. No axis of x
        corresponds to it, so the result leaves it out.
        """
        if kind == "array" or kind in BROADCAST:
            return tuple(range(len(self.shape)))
        if kind not in PARAMETERS:
            return self.others
        lacking = len(self.shape) - len(self.shape_of(kind))
        return self.others[lacking:] + self.axes

    @_once
    def shape_of(self, kind: Kind) -> tuple[int, ...]:
        """Return the shape of an operand or result of this kind."""
        if kind in _SHAPES:
            shape: tuple[int, ...] = getattr(self, kind)
            return shape or (self.normalised if kind in PARAMETERS else ())
        sizes = self._sizes(self.axes_of(kind))
        return sizes + self.candidates if kind == "candidate" else sizes

    def with_shapes(
        self,
        shape: tuple[int, ...],
        axes: tuple[int, ...],
        shape_of: Callable[[Kind], tuple[int, ...]],
    ) -> "RowView":
        """Return a `RowView` with another shape of x, and with other normalised `axes`.

        ``shape_of(kind)`` must return the new shape of the operand that is named `kind`, such as
        "scale" or "mask". The number of labels of each row does not change.
        """
        view = RowView.of(shape, axes, **{kind: shape_of(kind) for kind in _SHAPES})
        return dataclasses.replace(view, candidates=self.candidates) if self.candidates else view

    def batched(self, size: int, kinds: Collection[Kind]) -> "RowView":
        """Return the `RowView` of a call that is batched by `jax.vmap`.

        x and the operands whose names are in `kinds` get a new first axis, of length `size`. All
        batch elements share the other operands.
        """

        def batched(kind: Kind) -> tuple[int, ...]:
            shape = self.shape_of(kind)
            if kind in BROADCAST:
                return (size if kind in kinds else 1, *shape) if shape else ()
            if kind not in kinds:
                return getattr(self, kind)
            return (size, *[1] * (len(self.shape) - len(shape)), *shape)

        axes = tuple(axis + 1 for axis in self.axes)
        return self.with_shapes((size, *self.shape), axes, batched)

    def to_rows(self, kind: Kind, a: jax.Array, *, strided: bool = False) -> jax.Array:
        """Reshape an array for a kernel.

        An array of x's shape becomes ``(rows, cols)``, and a statistic or label becomes
        ``(rows,)``. A parameter becomes ``(cols,)`` or ``(groups, cols)``. A mask of the logits, or
        a bias that is added to the logits, becomes ``(n, cols)`` or ``(n, 1)``. If n is smaller
        than the number of rows of x, several rows of x use the same row of the mask or bias. The
        method `shared` returns the map from rows of x to rows of the mask or bias.

        If `strided` is True, an array of x's shape becomes ``(outer, cols, inner)`` instead, and a
        parameter that varies along the inner axis becomes ``(inner,)`` or ``(groups, inner)``.
        Statistics and labels have the same shape as without `strided`.
        """
        match kind:
            case "stat" | "label":
                return a.reshape(self.rows)
            case "candidate":
                return a.reshape(self.rows, *self.candidates)
            case "scale" | "bias" | "branch_scale":
                inner_groups = self.inner_groups(kind) if strided else None
                groups = inner_groups or self.groups(kind) or 1
                length = self.cols if inner_groups is None else self.inner
                return a.reshape(length if groups == 1 else (groups, length))
        if strided and self.strided is not None:
            return a.reshape(self.strided[:3])
        rows = math.prod([a.shape[axis] for axis in self.others])
        cols = math.prod([a.shape[axis] for axis in self.axes])
        if self.moved:
            a = jnp.transpose(a, self._order)
        return a.reshape(rows, cols)

    def from_rows(self, kind: Kind, a: jax.Array, *, strided: bool = False) -> jax.Array:
        """Reshape a result of a kernel to the shape that users see: the inverse of `to_rows`."""
        if kind in ("stat", "candidate") or kind in PARAMETERS:
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
    """Return the number of groups into which a parameter divides the elements of x, or None.

    The elements of x that use the same element of the parameter form a group. The result is None if
    the elements of a group are not consecutive in row-major order. This is so if the parameter is
    broadcast along one axis and varies along a later axis.

    Args:
      parameter: the sizes of some axes of the parameter; 1 where the parameter is broadcast.
      sizes: the sizes of the same axes of x.
    """
    shared = next((i for i, (n, all_) in enumerate(zip(parameter, sizes)) if n != all_), None)
    if shared is not None and any(n != 1 for n in parameter[shared:]):
        return None
    return math.prod(parameter)
