"""LayerNorm and RMSNorm of an array ``(outer, cols, inner)`` over its middle axis, and GroupNorm.

An index along the last axis is called an inner element; in GroupNorm, it is a channel. Scale and
bias have one value per inner element. GroupNorm normalises groups of neighbouring inner elements
together. The kernel first computes the statistics of each inner element, over all columns. It then
merges the statistics of the inner elements of a group.

The equations are the same as in `norm.forward` and `norm.backward`, with two differences:

* G and the bias do not depend on the column, so dscale = sum(d xh) and dbias = sum(d) are sums over
  the columns of an inner element. In these sums, G is a constant, so sum(d G xh) = G * dscale and
  sum(d G) = G * dbias. The means c2 and c1 are these products, divided by the number of elements.
  (If the output is saved, `norm.backward` computes c2 as mean(d z) instead.)
* If the input is saved, only c = x - mean is computed for each column. The factors r G and r r c2
  are the same for all columns, so they are computed once per inner element:

      n = c (r G) + bias,    dscale = r sum(d c),    dx = d (r G) - r c1 - c (r r c2)

Each block (or cluster of blocks) loads a strip of the array into shared memory (see `rows.strips`),
and reads it there several times. Each warp computes statistics of its own columns. These statistics
are merged over the warps of a block, and then over the blocks of a cluster.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.gradients import add_partials
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device.launch import launch, present, required, split
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.loops.formulas import Arrays, prepare
from jaxnorm_kernels.mosaic.norm.backward import NormFormula
from jaxnorm_kernels.mosaic.norm.elementwise import activation_of, norm_columns, norm_output
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.mosaic.rows.strip_exchange import Merge, Partials, StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Stat, Strip, StripSchedule
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.specs import Spec

_F32 = np.dtype(np.float32)

#: A function ``gather(merge, stats)`` that returns the merged statistics of all warps that share a
#: strip. `merge` is the function that merges them, and `stats` are the statistics of this
#: warpgroup's warps.
Gather = Callable[[Merge, Sequence[Stat | float]], list[Any]]


def norm_strided_fwd(operands: Operands, spec: Spec) -> Results:
    """Run the forward pass on an array ``(outer, cols, inner)``; see `NormOptions.inner_params`."""
    params = present(operands.scale, operands.bias)
    # In a strip, G and r both have one value per inner element, which is the same for all columns.
    # So r * G is computed once per inner element.
    joins = spec.norm.scale_dtype is not None
    rest = spec.replaced(scale_dtype=None) if joins else spec
    strips = required(strip_schedule.strips_of(spec), spec)

    def finish(strip: Strip, gather: Gather, refs: Sequence[Ref]) -> None:
        param_refs, (y_ref, *stat_refs) = split(refs, len(params))
        # Start the loads of the parameters first, so that they run while `_statistics` computes
        # sums. The loads take about as long as the sums.
        prepared = norm_columns([strip.inner_param(ref) for ref in param_refs], spec)
        columns = [strip.broadcast(column) for column in prepared[joins:]]
        rstd, mean = _statistics(strip, gather, spec)
        wide_rstd = strip.broadcast(rstd * prepared[0] if joins else rstd)
        wide_mean = None if mean is None else strip.broadcast(mean)

        def write(fragment: Fragment) -> None:
            y = norm_output(strip.read(0, fragment), wide_rstd, wide_mean, columns, rest)
            strip.store(y_ref, fragment, y)

        strip.each_fragment(write)
        for ref, stat in zip(stat_refs, (rstd, mean)):
            strip.store_stat(ref, stat)

    stats = 1 + spec.returns_mean if spec.has_stats else 0
    y, *statistics = _in_strips(
        finish,
        strips,
        [operands.x],
        params,
        outputs=[(operands.x.shape, spec.y_dtype), *[(strips.stats_shape, _F32)] * stats],
        exchanged=3 if spec.norm.subtract_mean else 1,
        name=f"jaxnorm_{'layer' if spec.norm.subtract_mean else 'rms'}_norm_strided_fwd",
    )
    return Results(y, stats=tuple(stat.reshape(spec.rows) for stat in statistics))


def norm_strided_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradients of x, scale and bias of a norm over the middle axis.

    The kernel sums the gradients of scale and bias over the middle axis. Then XLA sums them over
    the outer axis.
    """
    rows = present(residuals.saved, cotangents.y, cotangents.h)
    params = present(residuals.scale, residuals.bias if spec.reads_bias else None)
    formula, strips = _StripFormula(spec.last), required(strip_schedule.strips_of(spec), spec)
    counts = len(residuals.stats), len(params), 1

    def finish(strip: Strip, gather: Gather, refs: Sequence[Ref]) -> None:
        stat_refs, param_refs, (dx_ref,), gradient_refs = split(refs, *counts)
        inner_stats = [strip.stat(ref) for ref in stat_refs]
        stats = [strip.broadcast(stat) for stat in inner_stats]
        prepared = prepare(formula, [strip.inner_param(ref) for ref in param_refs])
        columns = [strip.broadcast(column) for column in prepared]

        def elements(fragment: Fragment, count: int) -> list[jax.Array]:
            return [strip.read(k, fragment) for k in range(count)]

        def terms(fragment: Fragment) -> list[jax.Array]:
            return formula.terms(elements(fragment, formula.summed), columns, stats)

        sums = gather(_add, strip.sum(terms, formula.row_sums, waits=True))
        gradients, totals = formula.inner_gradients(sums, prepared, inner_stats)
        for ref, gradient in zip(gradient_refs, gradients):
            strip.store_inner(ref, gradient)
        wide = [strip.broadcast(strip.group_sum(total)) for total in totals]

        def write(fragment: Fragment) -> None:
            dx = formula.dx(elements(fragment, len(rows)), columns, stats, wide)
            strip.store(dx_ref, fragment, dx)

        strip.each_fragment(write)

    dx, *partials = _in_strips(
        finish,
        strips,
        rows,
        [*[stat.reshape(strips.stats_shape) for stat in residuals.stats], *params],
        outputs=[
            (rows[0].shape, spec.x_dtype),
            *[((strips.outer, strips.inner), _F32)] * formula.column_sums,
        ],
        exchanged=formula.row_sums,
        name="jaxnorm_norm_strided_bwd",
    )
    groups = (spec.norm.scale_groups, spec.norm.bias_groups)
    dscale, dbias = add_partials(partials, (spec.norm.scale_dtype, spec.norm.bias_dtype), groups)
    return Operands(dx, scale=dscale, bias=dbias)


def _in_strips(
    finish: Callable[[Strip, Gather, Sequence[Ref]], None],
    strips: StripSchedule,
    rows: Sequence[jax.Array],
    others: Sequence[jax.Array],
    *,
    outputs: Sequence[tuple[tuple[int, ...], np.dtype]],
    exchanged: int,
    name: str,
) -> tuple[jax.Array, ...]:
    """Run ``finish(strip, gather, refs)`` on each strip of the arrays `rows`.

    `gather` merges statistics, and `refs` has the refs of `others`, followed by the outputs' refs.

    Args:
      finish: a function that computes and stores the results of a strip. In its first pass over the
        strip, it must wait for the strip's copies (``waits=True`` in `Strip.sum`). Later passes
        must not wait.
      strips: how the arrays are split into strips.
      rows: arrays ``(outer, cols, inner)``, which are loaded into shared memory.
      others: operands that stay in global memory, such as statistics and parameters.
      outputs: shape and dtype of each output.
      exchanged: maximum number of statistics that warps exchange at a time.
      name: the kernel's name.
    """
    exchange = StripExchange(strips, exchanged)
    stages = strips.scratch([a.dtype for a in rows])
    # JAX caches the traced body, so the body must not refer to traced arrays.
    counts = len(rows), len(others) + len(outputs), len(stages)

    def body(*refs: Ref) -> None:
        row_refs, other_refs, stage_refs, exchanged_refs = split(refs, *counts)
        exchange.open(exchanged_refs)
        strip = Strip.begin(strips, row_refs, stage_refs)
        exchange.ready()
        finish(strip, functools.partial(exchange, exchanged_refs), other_refs)

    return launch(
        body,
        [*rows, *others],
        name=name,
        outputs=outputs,
        blocks=strips.count,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[*stages, *exchange.scratch()],
    )


def _statistics(strip: Strip, gather: Gather, spec: Spec) -> tuple[Stat, Stat | None]:
    """Return r (rstd) and the mean of each inner element or, in GroupNorm, of its group."""

    def x(fragment: Fragment) -> jax.Array:
        return strip.read(0, fragment)

    mean = None
    if spec.norm.subtract_mean:
        size = strip.sizes()
        (total,) = strip.sum(lambda fragment: [x(fragment)], waits=True)
        part_mean = total / size
        wide = strip.broadcast(part_mean)
        (part_square,) = strip.sum(lambda fragment: [jnp.square(x(fragment) - wide)])
        mean, square, _ = gather(_merge_moments, [part_mean, part_square, size])
        if strip.strips.group > 1:
            own_mean, mean = mean, strip.group_sum(mean) / strip.strips.group
            square = square + strip.strips.cols * jnp.square(own_mean - mean)
    else:
        (square,) = gather(_add, strip.sum(lambda fragment: [jnp.square(x(fragment))], waits=True))
    square = strip.group_sum(square)
    return lax.rsqrt(square / spec.cols + spec.norm.epsilon), mean


def _add(parts: Partials) -> list[Any]:
    return [parts.total(k) for k in range(len(parts.stats))]


def _merge_moments(parts: Partials) -> list[Any]:
    """Merge the statistics of several parts of the columns.

    Return the mean of all columns, the sum of squares of x - mean, and the number of columns.
    """
    size = parts.total(2)
    mean = parts.sum(lambda part_mean, part_square, n: n * part_mean) / size
    square = parts.sum(
        lambda part_mean, part_square, n: part_square + n * jnp.square(part_mean - mean)
    )
    return [mean, square, size]


class _StripFormula(NormFormula):
    """`NormFormula` for a scale and a bias that belong to inner elements instead of columns."""

    @property
    def row_sums(self) -> int:
        return 1 + (self.spec.norm.subtract_mean or self.spec.norm.bias_dtype is not None)

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        saved, dy = elements
        if self.from_output:
            d, _, z, reciprocal = self.elements(saved, dy, columns, stats)
            return [d * self.x_hat(z, reciprocal), d][: self.row_sums]
        d, c = self._centred(saved, dy, columns, stats)
        return [d * c, d][: self.row_sums]

    def dx(self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays) -> jax.Array:
        """Return the gradient of x."""
        if self.from_output:
            (dx,), _ = self.finish(elements, columns, stats, totals)
            return dx
        saved, dy, *dh = elements
        d, c = self._centred(saved, dy, columns, stats)
        c2, *c1 = [total * (stats[0] / self.spec.cols) for total in totals]
        dx = d * self._rstd_gain(columns, stats)
        if c1:
            dx = dx - c1[0]
        dx = dx - c * (c2 * stats[0])
        return dx + dh[0] if dh else dx

    def inner_gradients(
        self, sums: Arrays, params: Arrays, stats: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return two lists: the gradients of the parameters, and the terms of the row sums.

        All arrays have one value for each inner element (index along the last axis). For each array
        that the method `terms` returns, `sums` contains its sum over the columns (indices along the
        middle axis). `params` are the results of the method `columns`.

        * The first list contains dscale and dbias. A gradient is left out if the call has no such
          parameter.
        * The second list contains sum(d G xh) and, in LayerNorm, sum(d G), over the columns of each
          inner element. The caller adds these sums over all inner elements of a group. Divided by
          the number of elements, they are c2 and c1 (see `norm.backward`).
        """
        dscale, *dbias = sums
        if not self.from_output:
            dscale = dscale * stats[0]
        has = (self.spec.norm.scale_dtype is not None, self.spec.norm.bias_dtype is not None)
        gradients = [total for total, is_there in zip((dscale, *dbias), has) if is_there]
        rows = [dscale, *dbias][: 1 + self.spec.norm.subtract_mean]
        return gradients, rows if not has[0] else [params[0] * total for total in rows]

    def _rstd_gain(self, columns: Arrays, stats: Arrays) -> jax.Array:
        """Return r * G, or r if there is no scale."""
        return stats[0] if self.spec.norm.scale_dtype is None else stats[0] * columns[0]

    def _centred(
        self, x: jax.Array, dy: jax.Array, columns: Arrays, stats: Arrays
    ) -> tuple[jax.Array, jax.Array]:
        """Return d and c = x - mean.

        d is dy. If there is an activation, d is dy times the activation's derivative.
        """
        _, *mean = stats
        c = x - mean[0] if mean else x
        if self.spec.norm.activation is None:
            return dy, c
        n = c * self._rstd_gain(columns, stats)
        if self.spec.reads_bias:
            n = n + columns[-1]
        _, slope = activation_of(self.spec)(n)
        return dy * slope, c
