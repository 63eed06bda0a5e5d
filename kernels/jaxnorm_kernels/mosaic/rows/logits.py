"""Masks, biases and causal masks of a softmax, and which columns of a row a softmax loads.

A mask or a bias may be broadcast over the rows of x. A `Shared` describes how. A block loads the
rows of the mask that its own rows use, so the mask is not expanded in memory. A causal softmax does
not load columns above the diagonal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.device.launch import BLOCK
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    Layout,
    Ref,
    columns_layout,
    load,
    widen,
)
from jaxnorm_kernels.mosaic.device.registers import load_mask, renewed
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, RowTile, Tile
from jaxnorm_kernels.specs import Spec


def scaled(z: jax.Array, spec: Spec) -> jax.Array:
    """Multiply `z`, the logits or their gradient, by the softmax's scale."""
    return z if spec.logits.logits_scale == 1 else jnp.float32(spec.logits.logits_scale) * z


def scaled_logits(x: jax.Array, spec: Spec) -> jax.Array:
    """Multiply the logits x by the softmax's scale. The product is finite if x is finite.

    An overflow would turn a finite row into NaN: if all logits of a row are the lowest finite
    number, which some programs use as a mask, all products would be -inf.
    """
    z, lowest = scaled(x, spec), np.finfo(np.float32).min
    if not spec.scale_may_overflow:
        return z
    return jnp.minimum(jnp.maximum(z, jnp.minimum(x, lowest)), jnp.maximum(x, -lowest))


def shared_operands(spec: Spec) -> list[Shared | None]:
    """Return a list that describes how the mask and the bias are broadcast over the rows of x.

    The first entry describes the mask, if the pass reads a mask. The next entry describes the bias,
    if there is a bias. An entry is a `Shared`, or None if the spec does not describe the broadcast.
    """
    if not spec.is_softmax:
        return []
    bias = [spec.softmax.logits_bias_rows] * spec.has("logits_bias")
    return [spec.logits.mask_rows] * spec.reads_mask + bias


def depends_on_index(spec: Spec) -> bool:
    """Return True if the result of a row depends on its index in x, not only on its elements."""
    return spec.is_causal or bool(shared_operands(spec))


def run_of_rows(spec: Spec) -> int:
    """Return the length of a *run*: consecutive rows of x that a block may process together.

    The rows of a run use either consecutive rows of the mask (or bias), or the same row. In a
    causal softmax, the rows of a run also belong to the same score matrix, in which rows are
    queries and columns are keys.
    """
    runs = [shared.run for shared in shared_operands(spec) if shared is not None]
    return math.gcd(*runs, *([spec.softmax.queries] if spec.is_causal else []))


def threads_of_runs(spec: Spec, threads: int, vector: int) -> tuple[int, int]:
    """Increase the threads per row until all rows of a block belong to one run (`run_of_rows`).

    Returns a pair: the number of threads per row, and the number of elements of a vector. The more
    threads share a row, the fewer rows a block has. If ``threads * vector`` would exceed the number
    of columns, `vector` is halved. If the rows of a block belong to several runs even with the
    maximum number of threads, the caller must choose a block with a single row.
    """
    run = run_of_rows(spec)
    while run % (WARPGROUP_THREADS // threads) and threads < min(WARP, spec.cols // 2):
        threads *= 2
        while threads * vector > spec.cols:
            vector //= 2
    return threads, vector


# Causal rows with at least this many columns have smaller units than other rows (see
# `causal_unit`). Shorter causal rows have the same units as other rows, because no other units were
# timed for them.
_LEAST_CAUSAL_COLS = 512
# Minimum number of bytes that a thread loads at once in a causal row.
_LEAST_LOAD_BYTES = 8


def causal_unit(spec: Spec, threads: int, vector: int, parts: int) -> tuple[int, int]:
    """Return a pair (threads per row, elements of a vector) that gives a causal row `parts` units.

    A unit consists of ``threads * vector`` columns, which the threads of a row load at once. A
    causal softmax does not load units that are entirely above the diagonal. On average, it loads
    half a unit more than necessary, so small units are better. First `vector` is halved, then
    `threads`, until the row has `parts` units or both are minimal. For rows with a mask or a bias,
    and for short rows, `threads` and `vector` are returned unchanged.
    """
    if not spec.is_causal or shared_operands(spec) or spec.cols < _LEAST_CAUSAL_COLS:
        return threads, vector
    least = max(1, _LEAST_LOAD_BYTES // spec.y_dtype.itemsize)
    while threads * vector * parts > spec.cols and (vector > least or threads > 1):
        if vector > least:
            vector //= 2
        else:
            threads //= 2
    return threads, vector


@dataclasses.dataclass(frozen=True)
class LogitRows:
    """The rows of x that a block processes, with their mask or bias.

    All of these rows belong to one run (see `run_of_rows`).

    Attributes:
      tile: how the block distributes the rows over its threads.
      spec: the call's spec.
      row: index of these rows in x, an integer or a slice.
      mask_ref: the complete mask, or None.
    """

    tile: Tile
    spec: Spec
    row: Any
    mask_ref: Ref | None = None

    def load(self, ref: Ref) -> Fragments:
        """Load the rows from a ``(rows, cols)`` ref, in the ref's dtype."""
        return [self._load_fragment(ref, self.row, p) for p in self.tile.fragments()]

    def load_shared(self, ref: Ref, shared: Shared) -> Fragments:
        """Load a mask or a bias, and broadcast it: one value for each element of the rows.

        A bias is converted to float32, a mask to int8.
        """
        row, is_mask = self.shared_row(shared), ref.dtype == np.bool_
        if not shared.has_columns:
            value = self._load_value(ref, row)
            value = value if is_mask else value.astype(jnp.float32)
            shapes = [self.tile.shape(p.width) for p in self.tile.fragments()]
            return [_expanded(value, shape, 0) for shape in shapes]
        fragments = [self._load_fragment(ref, row, p) for p in self.tile.fragments()]
        return fragments if is_mask else [widen(v, self.tile.layout) for v in fragments]

    @property
    def masks(self) -> bool:
        """True if some elements are masked, by the mask or by causality."""
        return self.spec.softmax.causal or self.mask_ref is not None

    @property
    def drops(self) -> bool:
        """True if some elements are masked, and these are excluded from the softmax.

        Otherwise, masked elements have a finite constant logit (`SoftmaxOptions.masked_logit`).
        """
        return self.masks and self.spec.drops_masked

    def keep(self, *, again: bool = False) -> list[jax.Array]:
        """Return a list with a boolean mask for each fragment: True for unmasked elements.

        The list is empty if no element is masked. If `again` is True, the causal mask is computed
        again at each use, by comparing rows and columns. A comparison takes one instruction, but
        storing its result for each element takes several.
        """
        masks = [] if self._mask is None else [self._mask]
        if self.spec.softmax.causal:
            query = renewed(self.query) if again else self.query
            masks.append([self._reached(p, query) for p in self.tile.fragments()])
        return [functools.reduce(jnp.logical_and, of_fragment) for of_fragment in zip(*masks)]

    def each(self, function: Callable[[jax.Array], jax.Array], values: Fragments) -> Fragments:
        """Apply a function to each fragment (column range) of the rows.

        In a causal softmax, fragments above the diagonal are skipped: their results are 0.
        """
        if not self.spec.softmax.causal:
            return each_fragment(function, values)

        zeros = {
            shape: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.tile.layout)
            for shape in dict.fromkeys(v.shape for v in values)
        }

        def of_fragment(fragment: Fragment, value: jax.Array) -> jax.Array:
            zero = zeros[value.shape]
            return lax.cond(self._is_reached(fragment), lambda: function(value), lambda: zero)

        return [of_fragment(p, v) for p, v in zip(self.tile.fragments(), values)]

    @functools.cached_property
    def _mask(self) -> Fragments | None:
        if self.mask_ref is None or self.spec.logits.mask_rows is None:
            return None
        return [
            values != 0 for values in self.load_shared(self.mask_ref, self.spec.logits.mask_rows)
        ]

    def _is_reached(self, fragment: Fragment) -> jax.Array:
        """Return True if a fragment (column range) has an element on or below the diagonal."""
        return fragment.start <= self.query + (self.tile.rows - 1)

    def shared_row(self, shared: Shared) -> Any:
        """Return the index of the row (or rows) of a mask or bias that the tile's rows use."""
        row = operand_row(shared, self.first)
        has_each = bool(shared.segments) and shared.segments[-1][1]
        return pl.ds(row, self.tile.rows) if self.tile.rows > 1 and has_each else row

    @property
    def first(self) -> jax.Array:
        """Index of the tile's first row in x."""
        return jnp.int32(getattr(self.row, "start", self.row))

    @property
    def query(self) -> jax.Array:
        """Index of the tile's first row within its score matrix.

        The rows of a score matrix are queries, and its columns are keys.
        """
        return lax.rem(self.first, jnp.int32(self.spec.softmax.queries))

    def _reached(self, fragment: Fragment, query: jax.Array) -> jax.Array:
        """Return a mask of a fragment (column range): True on or below the diagonal.

        `query` is the index of the tile's first row within its score matrix (queries x keys).
        """
        shape = self.tile.shape(fragment.width)
        if self.tile.rows > 1:
            query = query + lax.broadcasted_iota(jnp.int32, shape, 0)
        return self.tile.columns(shape) <= query - fragment.start

    def _load_fragment(self, ref: Ref, row: Any, fragment: Fragment) -> jax.Array:
        """Load a fragment. If it is above the diagonal, load the row's first columns in its place.

        The values are not used in this case. The first columns come from the L1 cache, because they
        are loaded in any case. A branch around each load would be slower: a thread has predicate
        registers for the conditions of only six loads, so the seventh load would wait.
        """
        shape = self.tile.shape(fragment.width)
        layout = self.tile.layout
        is_row = isinstance(self.tile, RowTile) and not isinstance(row, pl.Slice)
        if is_row:  # all rows of the tile use the same row of the mask or bias
            layout, shape = columns_layout(self.tile.vector, self.tile.threads), (fragment.width,)

        if self.spec.softmax.causal:
            start = jnp.where(self._is_reached(fragment), fragment.start, 0)
            fragment = dataclasses.replace(fragment, start=start)
        values = _load(ref.at[row, fragment.columns()], layout, shape)
        return _expanded(values, self.tile.shape(fragment.width), 1) if is_row else values

    def _load_value(self, ref: Ref, row: Any) -> jax.Array:
        """Load one value for each row of the tile, or a single value for all rows of the tile."""
        if isinstance(row, pl.Slice):
            return _load(ref.at[row, 0], self.tile.layout.reduce(1), (self.tile.rows,))
        value = load(ref.at[row, 0], None)
        return value.astype(jnp.int8) if value.dtype == np.bool_ else value


def first_row(tile: Tile, spec: Spec) -> Any:
    """Return the index in x of the rows that a block processes.

    If several rows of x use the same row of the bias or the mask, these rows of x are assigned to
    blocks that run at the same time. The first of these blocks loads this row of the bias or mask
    from memory, and the other blocks load it from the L2 cache.
    """
    operands = [s for s in shared_operands(spec) if s is not None and s.has_columns and s.segments]
    shared = operands[-1] if operands else None
    if shared is None or shared.sharing == 1 or not shared.segments[-1][1]:
        return tile.first_row(spec.rows)
    block, sharing = lax.axis_index(BLOCK), jnp.int32(shared.sharing)
    row = row_of_x(shared, lax.div(block, sharing) * tile.rows, lax.rem(block, sharing))
    return tile.row_index(spec.rows, lax.div(row, jnp.int32(tile.rows)))


def operand_row(shared: Shared, row: jax.Array) -> jax.Array:
    """Return the index of the row of a mask, bias or table that row number `row` of x uses."""
    index, rows_inside = jnp.int32(0), 1
    for at, (size, has_each) in reversed(list(enumerate(shared.segments))):
        if has_each:
            place = lax.rem(row, jnp.int32(size)) if at else row
            index, rows_inside = index + place * rows_inside, rows_inside * size
        row = lax.div(row, jnp.int32(size))
    return index


def row_of_x(shared: Shared, shared_row: Any, nth: Any) -> jax.Array:
    """Return the index of a row of x. This function is the inverse of `operand_row`.

    An operand (mask, bias or table) is broadcast over the rows of x, so several rows of x use the
    same row of the operand. Consider all rows of x that use the operand's row `shared_row`. Number
    them from 0. The result is the index in x of the row with number `nth`.
    """
    row, rows_inside = jnp.int32(0), 1
    for size, has_each in reversed(shared.segments):
        index = shared_row if has_each else nth
        row = row + lax.rem(index, jnp.int32(size)) * rows_inside
        rows_inside *= size
        if has_each:
            shared_row = lax.div(shared_row, jnp.int32(size))
        else:
            nth = lax.div(nth, jnp.int32(size))
    return row


def each_fragment(function: Callable[[jax.Array], jax.Array], values: Fragments) -> Fragments:
    """Apply a function to each fragment (column range) of a row."""
    return [function(v) for v in values]


def _load(ref: Ref, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    return (load_mask if ref.dtype == np.bool_ else load)(ref, layout, shape)


def _expanded(value: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Broadcast `value` to `shape`, the shape of a fragment (column range) of the rows.

    `value` is a scalar, or has a value per row (axis 0) or per column (axis 1).
    """
    if not value.ndim:
        return lax.broadcast(value, shape)
    return lax.broadcast_in_dim(value, shape, (axis,))
