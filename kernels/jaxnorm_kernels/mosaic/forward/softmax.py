"""softmax and log_softmax. With m = max(x) over a row:

    softmax      y = exp(x - m) / sum(exp(x - m))
    log_softmax  y = x - m - log(sum(exp(x - m)))

Where parts of a row are reduced apart, part p by its own maximum,

    m = max(m_p)        sum(exp(x - m)) = sum(s_p exp(m_p - m))        s_p = sum(exp(x - m_p))
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.mosaic import elementwise
from jaxnorm_kernels.mosaic.device.launch import found
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.forward import schedule as schedules
from jaxnorm_kernels.mosaic.forward.kernel import Refs, run
from jaxnorm_kernels.mosaic.forward.schedule import Schedule
from jaxnorm_kernels.mosaic.rows.tiles import LoadedRow, SplitRow, Steps, Tile
from jaxnorm_kernels.specs import Spec

# A part of a row may hold nothing but -inf. Against this maximum its exponentials are 0; against
# its own, -inf, they would be NaN. A whole row of -inf still ends as 0 / 0.
_LOWEST = float(np.finfo(np.float32).min)

Exp = Callable[[jax.Array], jax.Array]


def softmax_fwd(
    x: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    spec: Spec,
    *,
    schedule: Schedule | None = None,
) -> jax.Array:
    """y; `schedule` stands in for the one of the table."""
    del mask, bias  # `supports` refuses them
    schedule = found(schedule or schedules.choose(spec), spec)
    rows = schedule.rows_of(spec)
    (y,), _ = run(
        _in_registers(rows, spec),
        rows,
        spec,
        schedule,
        operands=[x],
        results=[spec.y_dtype],
        exchanged=2,
        name=f"{spec.op}_fwd",
    )
    return y


#: The op is in the spec.
log_softmax_fwd = softmax_fwd


def _in_registers(tile: Tile, spec: Spec) -> Callable[[Refs], None]:
    exp = elementwise.exp(is_wide=spec.y_dtype.itemsize > 2)

    def load(x: jax.Array) -> tuple[jax.Array]:
        return (widen(x, tile.layout),)

    def body(refs: Refs) -> None:
        (y_ref,) = refs.results

        def finish(row: LoadedRow, _: None) -> None:
            part_m = m = jnp.maximum(tile.max(row.read()), _LOWEST)
            e = [exp(v - tile.broadcast(m, v)) for v in row.read()]
            s = tile.sum(e)
            if isinstance(tile, SplitRow):
                m, s = _merge(tile.gather(refs.scratch, m, s, step=row.step), exp)
            if spec.op == "log_softmax":
                y = [v - tile.broadcast(m, v) - tile.broadcast(jnp.log(s), v) for v in row.read()]
            elif not isinstance(tile, SplitRow):
                y = [v * tile.broadcast(1 / s, v) for v in e]
            elif len(e) == 1 and not tile.rereads:
                # exp(x - m) is exp(x - m_p) exp(m_p - m).
                r = exp(part_m - m) * (1 / s)
                y = [v * tile.broadcast(r, v) for v in e]
            else:
                # Columns that two parts hold must come out alike.
                y = [exp(v - m) * (1 / s) for v in row.read()]
            tile.store(y_ref, row.index, y)

        tile.each_row(refs.operands, spec.rows, refs.scratch, Steps(load, finish))

    return body


def _merge(parts: Sequence[jax.Array], exp: Exp) -> tuple[jax.Array, jax.Array]:
    part_m, part_s = parts
    m = jnp.max(part_m)
    return m, jnp.sum(part_s * exp(part_m - m))
