"""softmax and log_softmax of ``(outer, cols, inner)`` over the middle axis.

The equations are those of `softmax.forward`, and so is how parts are merged.
"""

import jax
import jax.numpy as jnp

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.launch import required
from jaxnorm_kernels.mosaic.rows.logits import scaled
from jaxnorm_kernels.mosaic.rows.pieces import Piece
from jaxnorm_kernels.mosaic.rows.strip import Stat, Strip
from jaxnorm_kernels.mosaic.rows.strip_exchange import Parts
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.walks.strided_forward import Gather, Refs, strided_forward
from jaxnorm_kernels.specs import Spec


def softmax_strided_fwd(operands: Operands, spec: Spec) -> Results:
    """Of softmax or log_softmax; x and y are ``(outer, cols, inner)``, of 16 or 32 bits."""
    exp = numerics.exp(is_wide=spec.y_dtype.itemsize > 2)

    def merge(parts: Parts) -> list[Stat]:
        m = parts.max(lambda part_m, part_s: part_m)
        return [m, parts.sum(lambda part_m, part_s: part_s * exp(part_m - m))]

    def finish(strip: Strip, gather: Gather, refs: Refs) -> None:
        def z(piece: Piece) -> jax.Array:
            return scaled(strip.read(0, piece), spec)

        part_m = strip.max(z, numerics.LOWEST, waits=True)
        wide_m = strip.broadcast(part_m)
        (part_s,) = strip.sum(lambda piece: [exp(z(piece) - wide_m)])
        m, s = gather(merge, [part_m, part_s])
        is_log = spec.op == "log_softmax"
        m, r = strip.broadcast(m), strip.broadcast(jnp.log(s) if is_log else 1 / s)

        def y(piece: Piece) -> jax.Array:
            return z(piece) - m - r if is_log else exp(z(piece) - m) * r

        strip.each_piece(lambda piece: strip.store(refs.y, piece, y(piece)))

    strips = required(strip_schedule.strips_of(spec), spec)
    y, _ = strided_forward(
        finish, operands.x, [], strips=strips, y_dtype=spec.y_dtype, exchanged=2, name=spec.op
    )
    return Results(y)
