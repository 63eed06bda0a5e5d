"""RMSNorm of heads, and the rotation of their pairs (a, b) of columns after it.

n = x r G        r = 1 / sqrt(mean(x^2) + epsilon)        G = scale + scale_offset
y = (na cos - nb sin, nb cos + na sin), and n in the columns that are not rotated
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch, required, split
from jaxnorm_kernels.mosaic.device.layouts import store, widen
from jaxnorm_kernels.mosaic.norm.elementwise import gain
from jaxnorm_kernels.mosaic.rows.heads import rotated
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Spec


def norm_rope_fwd(operands: Operands, spec: Spec, *, schedule: Heads | None = None) -> Results:
    """See `Implementation.forward`; statistics are float32."""
    schedule = required(schedule or heads.forward(spec), spec)
    tile, shared = schedule.tile(spec), spec.table_rows
    assert shared is not None
    layouts = tile.row_layouts
    params = [a for a in (operands.scale,) if a is not None]
    arrays = [operands.x, operands.cos, operands.sin, *params]
    count = len(arrays)  # What traces the body keeps it: it may hold no traced array.

    def body(*refs: Any) -> None:
        (x, cos, sin, *scale), (y, *rstd) = split(refs, count)
        first = jnp.minimum(lax.axis_index(BLOCK) * tile.rows, spec.rows - tile.rows)
        rows = pl.ds(first, tile.rows)
        raw = tile.load(x, rows)
        gains = [[gain(part, spec.last) for part in tile.load_param(ref)] for ref in scale]
        table = [tile.load_table(ref, shared, first) for ref in (cos, sin)]
        parts = [widen(part, layout) for part, layout in zip(raw, layouts)]
        square = tile.sum([jnp.square(part) for part in parts])
        r = lax.rsqrt(square / spec.cols + spec.epsilon)
        n = [part * tile.broadcast(r, part) for part in parts]
        for of_scale in gains:
            n = [part * tile.expand(g) for part, g in zip(n, of_scale)]
        tile.store(y, rows, rotated(n, *table))
        for ref in rstd:
            store(ref.at[rows], r)

    shape, stats = operands.x.shape, [((spec.rows,), np.dtype(np.float32))] * spec.want_stats
    y, *rstd = launch(
        body,
        arrays,
        name="jaxnorm_rms_norm_rope_fwd",
        outputs=[(shape, spec.y_dtype), *stats],
        blocks=-(-spec.rows // tile.rows),
    )
    return Results(y, stats=tuple(rstd))
