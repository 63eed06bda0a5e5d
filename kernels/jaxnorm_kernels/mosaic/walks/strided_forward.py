"""Forward kernels over ``(outer, cols, inner)``, normalised over the middle axis.

Blocks hold strips, not rows (see `rows.strips`), and an operation says what is done with each. A
part of a strip is what a warp has of its columns, or a block of a cluster.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxnorm_kernels.mosaic.device.launch import launch
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.rows.strip import Stat, Strip, each_strip
from jaxnorm_kernels.mosaic.rows.strip_exchange import Merge, StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Strips

#: Statistics of the parts of a strip -> those of the strip, and the same of several kinds.
Gather = Callable[[Merge, Sequence[Stat | float]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Refs:
    """What a kernel reads and writes, beside x."""

    params: Sequence[Ref]
    y: Ref
    stats: Sequence[Ref]


def strided_forward(
    finish: Callable[[Strip, Gather, Refs], None],
    x: jax.Array,
    params: Sequence[jax.Array],
    *,
    strips: Strips,
    y_dtype: np.dtype,
    stats: int = 0,
    exchanged: int,
    name: str,
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs `finish` on each strip of x: y, and as many statistics, in the shape of the strips'.

    Args:
      exchanged: how many values the parts of a strip exchange at a time, at most.
      name: of the kernel, without the package's.
    """
    exchange = StripExchange(strips, exchanged)
    # What traces the body keeps the count: it may hold no traced array.
    param_count = len(params)
    held = strips.scratch([x.dtype])

    def body(x_ref: Ref, *refs: Any) -> None:
        param_refs, (y_ref, *refs) = refs[:param_count], refs[param_count:]
        stat_refs, scratch = refs[:stats], refs[stats:]
        exchanged_refs = scratch[len(held) :]

        def one(strip: Strip) -> None:
            gather = functools.partial(exchange, exchanged_refs, strip.step)
            finish(strip, gather, Refs(param_refs, y_ref, stat_refs))

        exchange.open(exchanged_refs)
        each_strip(strips, [x_ref], scratch[: len(held)], one, exchange.ready)

    y, *statistics = launch(
        body,
        [x, *params],
        name=f"jaxnorm_{name}_strided_fwd",
        outputs=[
            (x.shape, y_dtype),
            *[(strips.stats_shape, np.dtype(np.float32))] * stats,
        ],
        blocks=strips.blocks,
        cluster=strips.cluster,
        warpgroups=strips.warpgroups,
        scratch=[*held, *exchange.scratch()],
    )
    return y, statistics
