"""A row in several warpgroups: of a block, or of all blocks of a cluster. See `tiles`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import CLUSTER, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARPS, Layout, flat_index, warps_layout
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.tiles import Stat, Tile


@dataclasses.dataclass(frozen=True)
class SplitRow(Tile):
    """A row in `warpgroups` of a block, or in those of all `cluster` blocks of a cluster.

    A row takes `exchanges` of statistics, one after the other. `max` and `sum` are those of each
    warp's part of it. Mosaic's reduction over a warpgroup would use the same scratch for all
    warpgroups of the block: a race that neither it nor the interpreter reports (jax 0.11.2 and
    0.12.0).
    """

    warpgroups: int = 2
    cluster: int = 1
    exchanges: int = 1

    def layout_of_vectors(self, vector: int) -> Layout:
        return warps_layout(vector)

    def shape(self, width: int) -> tuple[int, ...]:
        return (WARPS, width // WARPS)

    @functools.cached_property
    def exchange(self) -> Gather:
        return Gather(self.warpgroups, self.cluster, slots=min(2, self.exchanges))

    def scratch(self, stats: int, dtypes: Sequence[np.dtype]) -> list[Any]:
        return dataclasses.replace(self.exchange, values=stats).scratch()

    def open(self, scratch: Sequence[Any]) -> None:
        self.exchange.open(scratch)

    def ready(self) -> None:
        self.exchange.ready()

    def _index(self) -> Any:
        index = lax.axis_index(WARPGROUP)
        if self.cluster > 1:
            index += lax.axis_index(CLUSTER) * self.warpgroups
        return index

    def count_columns(self, shape: tuple[int, ...]) -> jax.Array:
        return flat_index(shape, self.layout_of(shape))

    def gather(
        self, scratch: Sequence[Any], *stats: Stat, step: Any, nth: int = 0
    ) -> list[jax.Array]:
        """The `nth` exchange of the row of this step: see `Gather`."""
        count = step if self.exchanges == 1 else step * self.exchanges + nth
        return self.exchange(scratch, *stats, count=count)

    def part_sizes(self) -> jax.Array | float:
        """How many columns each warp has that are not stale."""
        body, *tail = self.pieces()
        return sum((count_fresh(self._is_fresh(p), self.layout) for p in tail), body.width / WARPS)


def count_fresh(is_fresh: jax.Array, layout: Layout) -> jax.Array:
    """How many columns of each warp are fresh, of a ``(4, n)`` mask."""
    ones = jnp.where(is_fresh, jnp.float32(1), jnp.float32(0))
    return jnp.sum(plgpu.layout_cast(ones, layout), axis=1)
