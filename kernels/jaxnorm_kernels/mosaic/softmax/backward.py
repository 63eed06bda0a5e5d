"""Backward passes of softmax and log_softmax, from the saved output y.

z = scale * x + bias are the logits. With d = dy, and sums over the row:

    softmax       dz = y (d - sum(d y) / sum(y))
    log_softmax   dz = d - exp(y) sum(d)
    both          dx = scale * dz
                  dbias = sum(dz) over the rows of x that use the same row of the bias

If y is rounded to 16 bits, its sum over a row may differ from 1. So the kernel computes sum(y), and
divides by it (`Spec.renormalises`). Otherwise, the division by sum(y) is left out.

If the bias has one value per row, its gradient is the sum of dz over the row. The kernel computes
this sum from other sums:

    softmax       sum(dz) = sum(d y) (1 - sum(y))       if dz was not divided by sum(y)
                  sum(dz) = 0                           if it was
    log_softmax   sum(dz) = sum(d) (1 - sum(exp(y)))

Without rounding errors, sum(y) and sum(exp(y)) would be 1, so this gradient would be 0.

Masked elements have y = 0 (softmax) or y = -inf (log_softmax). Their d counts as 0, even if it is
infinite. The backward pass of softmax reads no mask, and treats elements with y = 0 as masked,
including those whose y was rounded to 0. There is one exception: with a finite
`SoftmaxOptions.masked_logit`, masked elements have a nonzero y but dz = 0, so the mask is read.

If the cotangent d of an unmasked element is NaN or infinite, the sum over the row is NaN or
infinite, too. In masked elements, the equations above would then multiply 0 by this sum. The
product would be NaN instead of 0. Calls with a mask, and causal calls, therefore select 0 where y
or exp(y) is 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.gradients import add_rows
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.launch import present, required, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, widen
from jaxnorm_kernels.mosaic.loops.bias_sums import BiasSums
from jaxnorm_kernels.mosaic.loops.forward import ForwardRefs, run, store_stats
from jaxnorm_kernels.mosaic.rows.exchange import RowSums
from jaxnorm_kernels.mosaic.rows.logits import LogitRows, scaled
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, SplitRow, Tile
from jaxnorm_kernels.mosaic.schedules.columns import full_bias_dtype
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class SoftmaxFormula:
    """The backward pass of a row of a softmax. The equations are in the module's docstring."""

    spec: Spec

    @property
    def row_sums(self) -> int:
        """Number of sums along a row, which is the number of arrays that `terms` returns."""
        return 1 + self._sums_weights

    @property
    def bias(self) -> Shared | None:
        """How the bias is broadcast over the rows of x. None if no bias needs a gradient."""
        softmax = self.spec.softmax
        return None if softmax.logits_bias_dtype is None else softmax.logits_bias_rows

    @property
    def sums_rows(self) -> bool:
        """True if the bias has one value per row."""
        return self.bias is not None and not self.bias.has_columns

    def terms(self, y: jax.Array, d: jax.Array) -> list[jax.Array]:
        """Return the terms of the sums along the row: a list with one array for each sum."""
        weights = [self._exp(y) if self._is_log else y] if self._sums_weights else []
        return [d if self._is_log else d * y, *weights]

    def dz(
        self, y: jax.Array, d: jax.Array, keep: Sequence[jax.Array], totals: Sequence[jax.Array]
    ) -> jax.Array:
        """Return dz, the gradient of the logits.

        `totals` are the row's sums of `terms`. If masked elements have a nonzero y (see the
        module's docstring), `keep` is a list with one array: a mask that is True for unmasked
        elements. Otherwise, the list is empty.
        """
        total, *weights = totals
        if self.spec.renormalises:
            (weight,) = weights
            total /= jnp.where(weight == 0.0, 1.0, weight)
        if self._is_log:
            dz = d - self._unless_masked(y, self._exp(y) * total)
        else:
            dz = self._unless_masked(y, y * (d - total))
        return jnp.where(keep[0], dz, 0.0) if keep else dz

    def _unless_masked(self, y: jax.Array, multiple: jax.Array) -> jax.Array:
        """Return `multiple`, with 0 in excluded elements.

        An element is excluded if its y (in log_softmax, exp(y)) is 0. `multiple` is the product of
        this number and a factor that may be NaN, so it may be NaN instead of 0 in excluded
        elements. If the call excludes no elements, `multiple` is returned unchanged.
        """
        spec = self.spec
        if not (spec.is_causal or (spec.has("mask") and spec.drops_masked)):
            return multiple
        return jnp.where(y == (-jnp.inf if self._is_log else 0.0), 0.0, multiple)

    def _exp(self, y: jax.Array) -> jax.Array:
        widest = max(self.spec.x_dtype.itemsize, self.spec.y_dtype.itemsize)
        return numerics.exp(is_wide=widest > 2)(y)

    @property
    def _sums_weights(self) -> bool:
        return self.sums_rows or self.spec.renormalises

    @property
    def _is_log(self) -> bool:
        return self.spec.op == "log_softmax"


def softmax_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: TileSchedule | None = None
) -> Operands:
    """Return the gradients of x and of the bias. `schedule` replaces the default schedule."""
    formula = SoftmaxFormula(spec)
    schedule = required(schedule or softmax_schedule(spec), spec)
    rows = schedule.rows_of(spec)
    exchange = RowSums(rows.warpgroups, rows.cluster, formula.row_sums, stages=2, in_lanes=True)
    is_split = isinstance(rows, SplitRow)
    dtype, sums = full_bias_dtype(spec), None
    if formula.bias is not None and dtype is not None:
        sums = BiasSums(rows, formula.bias, dtype, schedule.splits)

    def body(tile: Tile, refs: ForwardRefs) -> None:
        (dx_ref,) = refs.results
        sum_refs, scratch = split(refs.scratch, int(sums is not None))

        def step(row: Any, k: Any = 0) -> Fragments:
            """Process a tile of rows: store dx, and return dz.

            `row` is the index of the tile's row in the array, or a slice if the tile has several
            rows. `k` is the number of tiles that the block has processed before this tile.
            """
            elements = _read(tile, spec, row, *refs.operands)
            terms = [formula.terms(y, d) for y, d, *_ in elements]
            totals = [tile.sum(term) for term in zip(*terms)]
            if is_split:
                if sums is None:
                    exchange.ready()
                exchange.publish(scratch, totals, k)
                totals = exchange.collect(scratch, k)
            dx, gradients = [], []
            for y, d, *keep in elements:
                dz = formula.dz(y, d, keep, [tile.broadcast(total, y) for total in totals])
                dx.append(scaled(dz, spec))
                gradients.append(dz)
            tile.store(dx_ref, row, dx)
            if refs.stats:
                store_stats(refs.stats, row, totals)
            return gradients

        exchange.open(scratch)
        if sums is None:
            step(tile.row_index(spec.rows))
            return
        if is_split:
            exchange.ready()
        sums.run(sum_refs[0], step)

    (dx,), rest = run(
        body,
        rows,
        spec.rows,
        operands=present(
            residuals.saved, cotangents.y, residuals.mask if spec.reads_mask else None
        ),
        results=[spec.x_dtype],
        stats=2 * formula.sums_rows,
        others=[] if sums is None else [sums.output],
        scratch=exchange.scratch() if is_split else [],
        blocks=None if sums is None else sums.blocks,
        name=f"{spec.op}_bwd",
    )
    dbias = None
    if sums is not None:
        dbias = sums.gradient(*rest)
    elif formula.bias is not None:
        dbias = _of_rows(formula.bias, spec, *rest).astype(spec.softmax.logits_bias_dtype)
    return Operands(dx, logits_bias=dbias)


def _read(
    tile: Tile, spec: Spec, row: Any, y_ref: Ref, dy_ref: Ref, mask: Ref | None = None
) -> list[Sequence[jax.Array]]:
    """Load a tile's rows: return one tuple (y, d) for each fragment (range of columns).

    y and d = dy are in float32. If `SoftmaxOptions.masked_logit` is finite, a tuple is (y, d,
    mask), and the mask is True for unmasked elements.
    """
    logits = LogitRows(tile, spec, row, mask)
    loaded = [logits.load(ref) for ref in (y_ref, dy_ref)]
    y, d = [[widen(v, tile.layout) for v in values] for values in loaded]
    if not logits.drops and logits.masks:  # masked elements have a finite logit
        return list(zip(y, d, logits.keep()))
    if logits.drops:
        keep, nothing = logits.keep(), -jnp.inf if spec.op == "log_softmax" else 0.0
        if spec.softmax.causal:  # Elements above the diagonal were not loaded.
            y = [jnp.where(k, v, nothing) for k, v in zip(keep, y)]
        if spec.reads_mask or not spec.logits.has_mask:
            d = [jnp.where(k, v, 0.0) for k, v in zip(keep, d)]
    if spec.logits.has_mask and mask is None:
        d = [jnp.where(p == 0, 0.0, v) for p, v in zip(y, d)]
    return list(zip(y, d))


def _of_rows(shared: Shared, spec: Spec, totals: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the gradient of a bias that is constant along each row of x, as an ``(n, 1)`` array.

    The bias has n values. Several rows of x may use the same value. The gradient of a value is the
    sum of dz (the gradient of the logits) over all elements of the rows that use it. `totals` and
    `weights` are the formula's row sums: sum(d * y) and sum(y) for softmax, sum(d) and sum(exp(y))
    for log_softmax.
    """
    # If the call renormalises, sum(dz) is 0 (see the module's docstring). But if the row's total is
    # infinite or NaN, sum(dz) must be NaN. ``totals - totals`` is 0 for a finite total, and NaN
    # otherwise.
    dz = totals - totals if spec.renormalises else totals * (1 - weights)
    return add_rows(shared, dz)
