"""Forward and backward pass of RMSNorm of attention heads, followed by a rotation (RoPE)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.gradients import add_partials
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch, present, required, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, load, store, widen
from jaxnorm_kernels.mosaic.loops.formulas import BackwardCall, BackwardRefs
from jaxnorm_kernels.mosaic.loops.narrow_rows import RowIndex, TileWork, narrow_rows_backward
from jaxnorm_kernels.mosaic.loops.pipelined import Share
from jaxnorm_kernels.mosaic.norm.elementwise import gain, reciprocal, within_limit
from jaxnorm_kernels.mosaic.rows.heads import HeadTile, rotated, rotated_back
from jaxnorm_kernels.mosaic.rows.tiles import Fragments
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.mosaic.schedules.norm_backward import persistent_blocks
from jaxnorm_kernels.specs import Spec

# -------------------------------------------------------------------------------------------------
# RMSNorm of heads, followed by a rotation. It rotates pairs of columns of n, called na and nb:
#
#     n = x r G        r = 1 / sqrt(mean(x^2) + epsilon)        G = scale + scale_offset
#     y = (na cos - nb sin, nb cos + na sin), and y = n in columns that are not rotated


def norm_rope_fwd(operands: Operands, spec: Spec, *, schedule: Heads | None = None) -> Results:
    """Run the forward pass of RMSNorm with a rotation; see `Implementation.forward`.

    The statistics that it returns are float32.
    """
    schedule = required(schedule or heads.forward(spec), spec)
    tile, shared = schedule.tile(spec), spec.norm.table_rows
    assert shared is not None
    layouts = tile.row_layouts
    arrays = present(operands.x, operands.cos, operands.sin, operands.scale)
    # JAX caches the traced body, so the body must not refer to traced arrays.
    count = len(arrays)

    def body(*refs: Any) -> None:
        (x, cos, sin, *scale), (y, *rstd) = split(refs, count)
        first = jnp.minimum(lax.axis_index(BLOCK) * tile.rows, spec.rows - tile.rows)
        rows = pl.ds(first, tile.rows)
        raw = tile.load(x, rows)
        gains = [[gain(v, spec.last) for v in tile.load_param(ref)] for ref in scale]
        table = tile.load_tables((cos, sin), shared, first)
        fragments = [widen(v, layout) for v, layout in zip(raw, layouts)]
        square = tile.sum([jnp.square(v) for v in fragments])
        r = lax.rsqrt(square / spec.cols + spec.norm.epsilon)
        n = [v * tile.broadcast(r, v) for v in fragments]
        for of_scale in gains:
            n = [v * tile.expand(g) for v, g in zip(n, of_scale)]
        tile.store(y, rows, rotated(n, *table))
        for ref in rstd:
            store(ref.at[rows], r)

    shape, stats = operands.x.shape, [((spec.rows,), np.dtype(np.float32))] * spec.has_stats
    y, *rstd = launch(
        body,
        arrays,
        name="jaxnorm_rms_norm_rope_fwd",
        outputs=[(shape, spec.y_dtype), *stats],
        blocks=-(-spec.rows // tile.rows),
    )
    return Results(y, stats=tuple(rstd))


# -------------------------------------------------------------------------------------------------
# Backward pass of RMSNorm followed by a rotation, from the saved output or the saved input.
#
# For a row of N elements, let G = scale + scale_offset, r = rstd, d = dy, and R' the transpose of
# the rotation:
#
#     from the output    n = R' y / (cos^2 + sin^2),     xh = n / G,     c2 = mean(d' n)
#     from the input     xh = x r,                                       c2 = mean(d' G xh)
#     both               d' = R' d,                      dx = r (d' G - xh c2)
#                        dscale = sum_rows(d' xh)
#
# |xh| is clipped to sqrt(N), its mathematical bound. This matters if one column of a pair has a
# small scale, and the other column a large one. R' y mixes the two columns, so the rounding error
# of the large y may be much larger than n of the column with the small scale. The loop over rows is
# in `loops.narrow_rows`.


@dataclasses.dataclass(frozen=True)
class _RotatedRows:
    """The backward pass of a tile of rows, in float32. The equations are above the class.

    A row is a list of arrays, one for each fragment of the row (see `HeadTile`).

    Attributes:
      spec: the call's spec.
      tile: how a warpgroup distributes its rows over threads.
      rstd: ref of the rows' reciprocal standard deviations, ``(rows,)``.
      tables: refs of the tables of cos and sin.
      gains: two lists with an array for each fragment. The first list contains G, and the second
        list 1 / G. Without a scale, both lists are empty.
    """

    spec: Spec
    tile: HeadTile
    rstd: Ref
    tables: Sequence[Ref]
    gains: tuple[Fragments, Fragments]

    def load(self, first: Any) -> tuple[Fragments, jax.Array]:
        """Return a pair: [cos, sin], and rstd. `first` is the index of the tile's first row."""
        shared = self.spec.norm.table_rows
        assert shared is not None
        table = self.tile.load_tables(self.tables, shared, first)
        return table, load(self.rstd.at[pl.ds(first, self.tile.rows)], self.tile.stat_layout)

    def finish(
        self, held: Sequence[Ref], at: RowIndex, _: None, loaded: tuple[Fragments, jax.Array]
    ) -> tuple[list[Fragments], Fragments]:
        """Return ``[dx]`` and the terms of dscale; see `TileWork.finish`.

        `held` are the buffers of the saved array and of dy. `loaded` is the result of `load`.
        """
        tile, (table, r), (g, reciprocals) = self.tile, loaded, self.gains
        saved, d = (tile.load_shared(ref, at) for ref in held)
        of_rows = [tile.broadcast(r, v) for v in saved]
        xh, n = self._normalised(saved, table, reciprocals, of_rows)
        d = rotated_back(d, *table)
        dg = [v * tile.expand(of) for v, of in zip(d, g)] if g else d
        c2 = tile.sum([a * b for a, b in (zip(dg, xh) if n is None else zip(d, n))])
        of_sum = [tile.broadcast(r * (c2 / self.spec.cols), v) for v in saved]
        dx = [a * r - b * c for a, r, b, c in zip(dg, of_rows, xh, of_sum)]
        return [dx], [a * b for a, b in zip(d, xh)] if g else []

    def _normalised(
        self, saved: Fragments, table: Fragments, reciprocals: Fragments, r: Fragments
    ) -> tuple[Fragments, Fragments | None]:
        """Return the normalised input xh, and n = xh * G. n is None if the input is saved."""
        if self.spec.norm.saved == "input":
            return [v * of_row for v, of_row in zip(saved, r)], None
        cos, sin = table
        square = cos * cos + sin * sin
        inverse = jnp.where(square == 0, jnp.float32(0), 1 / square)
        a, b, *rest = rotated_back([within_limit(v, self.spec) for v in saved], cos, sin)
        n = [a * inverse, b * inverse, *rest]
        bound = math.sqrt(self.spec.cols)
        xh = [a * self.tile.expand(b) for a, b in zip(n, reciprocals)] if reciprocals else n
        return [jnp.clip(v, -bound, bound) for v in xh], n


def norm_rope_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Heads | None = None
) -> Operands:
    """Run the backward pass of RMSNorm with a rotation; see `Implementation.backward`."""
    schedule = required(schedule or heads.backward(spec), spec)
    tile = schedule.tile(spec)
    params = present(residuals.cos, residuals.sin, residuals.scale)

    def start(refs: BackwardRefs, share: Share) -> TileWork:
        cos, sin, *scale = refs.params
        g = [gain(v, spec.last) for ref in scale for v in tile.load_param(ref)]
        gains = g, [reciprocal(v, spec.last) for v in g]
        rows = _RotatedRows(spec, tile, *refs.stats, (cos, sin), gains)
        return TileWork(rows.finish, early=rows.load)

    dx, *partials = narrow_rows_backward(
        start,
        BackwardCall(
            [residuals.saved, cotangents.y],
            residuals.stats,
            params,
            groups=1,
            blocks=persistent_blocks(spec, schedule),
            results=[spec.x_dtype],
            name="jaxnorm_rms_norm_rope_bwd",
        ),
        tile=tile,
        rows=schedule.rows,
        stages=schedule.stages,
        column_sums=int(residuals.scale is not None),
    )
    (dscale,) = add_partials(partials, (spec.norm.scale_dtype,))
    return Operands(dx, scale=dscale)
