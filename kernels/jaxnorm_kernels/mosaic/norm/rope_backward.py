"""Backward pass of RMSNorm and the rotation after it, from the output or from the input.

Row of N; G = scale + scale_offset, r = rstd, d = dy; R' is the rotation's transpose:

    from the output    n = R' y / (cos^2 + sin^2),     xh = n / G,     c2 = mean(d' n)
    from the input     xh = x r,                                       c2 = mean(d' G xh)
    both               d' = R' d,                      dx = r (d' G - xh c2)
                       dscale = sum_rows(d' xh)

|xh| is clipped to sqrt(N), its true bound: in a column with a small scale, what n has of its
partner's rounding may be any multiple of it. As in `walks.rows_ring`, persistent blocks carry
dscale in registers, while the copy engine keeps a ring of shared memory filled.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.gradients import add_partials
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device.barriers import in_plain_order, warpgroup_barrier
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch, required, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, load, store, widen
from jaxnorm_kernels.mosaic.norm.elementwise import gain, reciprocal, within_limit
from jaxnorm_kernels.mosaic.rows.heads import HeadTile, Parts, rotated_back
from jaxnorm_kernels.mosaic.rows.shares import Share
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.mosaic.schedules.norm_backward import persistent_blocks
from jaxnorm_kernels.mosaic.walks.rows_ring import sum_of_rows
from jaxnorm_kernels.mosaic.walks.stages import Stages
from jaxnorm_kernels.specs import Spec

_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Formula:
    """The equations above, of the parts of the rows of a tile, in float32."""

    spec: Spec
    tile: HeadTile

    def gains(self, scale: Parts) -> tuple[Parts, Parts]:
        """G and 1 / G of each part; none without a scale."""
        g = [gain(part, self.spec.last) for part in scale]
        return g, [reciprocal(part, self.spec.last) for part in g]

    def __call__(
        self, saved: Parts, d: Parts, table: Parts, gains: tuple[Parts, Parts], r: jax.Array
    ) -> tuple[Parts, Parts]:
        """dx, and the terms of dscale."""
        tile, (g, reciprocals) = self.tile, gains
        of_rows = [tile.broadcast(r, part) for part in saved]
        xh, n = self._normalised(saved, table, reciprocals, of_rows)
        d = rotated_back(d, *table)
        dg = [part * tile.expand(of) for part, of in zip(d, g)] if g else d
        c2 = tile.sum([a * b for a, b in (zip(dg, xh) if n is None else zip(d, n))])
        of_sum = [tile.broadcast(r * (c2 / self.spec.cols), part) for part in saved]
        dx = [a * r - b * c for a, r, b, c in zip(dg, of_rows, xh, of_sum)]
        return dx, [a * b for a, b in zip(d, xh)]

    def _normalised(
        self, saved: Parts, table: Parts, reciprocals: Parts, r: Parts
    ) -> tuple[Parts, Parts | None]:
        """xh and, from the output, n."""
        if self.spec.norm.saved == "input":
            return [part * of_row for part, of_row in zip(saved, r)], None
        cos, sin = table
        square = cos * cos + sin * sin
        inverse = jnp.where(square == 0, jnp.float32(0), 1 / square)
        a, b, *rest = rotated_back([within_limit(part, self.spec) for part in saved], cos, sin)
        n = [a * inverse, b * inverse, *rest]
        bound = math.sqrt(self.spec.cols)
        xh = [a * self.tile.expand(b) for a, b in zip(n, reciprocals)] if reciprocals else n
        return [jnp.clip(part, -bound, bound) for part in xh], n


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What a block, which is a warpgroup, does with its rows, tile by tile.

    Attributes:
      held: ``(stages, rows, cols)`` of saved and of dy.
      sums: for each part ``(rows of a tile, its columns)``, to add up; empty without a scale.
    """

    formula: _Formula
    tile: HeadTile
    tops: Sequence[int]
    rstd: Ref
    tables: Sequence[Ref]
    dx: Ref
    partials: Sequence[Ref]
    stages: Stages
    held: Sequence[Ref]
    share: Share
    sums: Sequence[Ref]
    gains: tuple[Parts, Parts]

    def run(self, block: Any) -> None:
        """Each step in turn; then the block's sums for dscale are written."""
        tile = self.tile
        zeros = [
            plgpu.layout_cast(jnp.zeros((tile.rows, width), jnp.float32), layout)
            for width, layout in zip(tile.widths, tile.layouts(tile.rows_layout))
            if self.sums
        ]
        carried = lax.fori_loop(0, self.stages.steps, self.step, zeros)
        for target in self.partials:
            for ref, value in zip(self.sums, carried):
                store(ref, value)
            warpgroup_barrier()
            layouts = tile.layouts(tile.columns_layout)
            totals = [sum_of_rows(ref, layout) for ref, layout in zip(self.sums, layouts)]
            tile.store_param(target.at[block], totals)

    def step(self, k: Any, carried: Parts) -> Parts:
        """dx of the rows of step `k`, and with them the sums; then its stage is free."""
        first, tile = self.share.first_row(k), self.tile
        shared = self.formula.spec.norm.table_rows
        assert shared is not None
        # They come from the L2 cache while the stage arrives.
        ahead = [
            (
                [tile.load_table(ref, shared, first + top) for ref in self.tables],
                load(self.rstd.at[pl.ds(first + top, tile.rows)], tile.stat_layout),
            )
            for top in self.tops
        ]
        at = self.stages.wait(k)
        layouts = tile.layouts(tile.rows_layout)
        for top, (table, r) in zip(self.tops, ahead):
            saved, d = (
                [widen(part, of) for part, of in zip(tile.load_shared(ref.at[at], top), layouts)]
                for ref in self.held
            )
            dx, terms = self.formula(saved, d, table, self.gains, r)
            tile.store(self.dx, pl.ds(first + top, tile.rows), dx)
            added = [self.skip_stale(term, k, first + top) for term in terms]
            carried = [a + b for a, b in zip(carried, added)]
        self.stages.refill(k)
        return carried

    def skip_stale(self, term: jax.Array, k: Any, first: Any) -> jax.Array:
        """`term`, and 0 in the rows that are in a step before `k`, too."""
        if not self.share.has_stale_rows:
            return term
        row = first + lax.broadcasted_iota(jnp.int32, term.shape, 0)
        return jnp.where(self.share.is_new(row, k), term, jnp.float32(0))


def norm_rope_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Heads | None = None
) -> Operands:
    """See `Implementation.backward`."""
    schedule = required(schedule or heads.backward(spec), spec)
    tile, blocks = schedule.tile(spec), persistent_blocks(spec, schedule)
    params = [a for a in (residuals.scale,) if a is not None]
    (rstd,) = residuals.stats
    rows = [residuals.saved, cotangents.y]
    arrays = [*rows, rstd, residuals.cos, residuals.sin, *params]
    count, has_scale = len(arrays), bool(params)
    widths = tile.widths * has_scale

    def body(*refs: Any) -> None:
        (saved, d, rstd, cos, sin, *scale), (dx, *rest) = split(refs, count)
        partials, held, sums, (full,) = split(rest, has_scale, 2, len(widths))
        in_plain_order(*held, *sums)
        block = lax.axis_index(BLOCK)
        share = Share.of(block, rows=spec.rows, groups=1, blocks=blocks, height=schedule.rows)

        def copies(k: Any, at: Any) -> Iterable[tuple[Ref, Ref]]:
            step = pl.ds(share.first_row(k), schedule.rows)
            return ((source.at[step], stage.at[at]) for source, stage in zip((saved, d), held))

        stages = Stages(schedule.stages, share.count(), full, copies)
        stages.start()
        formula = _Formula(spec, tile)
        gains = formula.gains(tile.load_param(scale[0]) if scale else [])
        tops = range(0, schedule.rows, tile.rows)
        _Kernel(
            formula, tile, tops, rstd, (cos, sin), dx, partials, stages, held, share, sums, gains
        ).run(block)

    dx, *partials = launch(
        body,
        arrays,
        name="jaxnorm_rms_norm_rope_bwd",
        outputs=[
            (rows[0].shape, spec.x_dtype),
            *[((blocks, spec.cols), _F32)] * has_scale,
        ],
        blocks=blocks,
        scratch=[
            *[plgpu.SMEM((schedule.stages, schedule.rows, spec.cols), v.dtype) for v in rows],
            *[plgpu.SMEM((tile.rows, width), jnp.float32) for width in widths],
            plgpu.Barrier(num_arrivals=len(rows), num_barriers=schedule.stages),
        ],
        auto_barriers=False,
    )
    (dscale,) = add_partials(partials, (spec.norm.scale_dtype,))
    return Operands(dx, scale=dscale)
