"""The exchange of row statistics between the warps that share a row, in a block or in a cluster."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPS, columns_layout, load, store
from jaxnorm_kernels.mosaic.rows.cluster_exchange import ClusterExchange


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Shows a value of each warp to every warp that shares its row.

    Those are the warps of a block of up to 8 warpgroups, or of all `cluster` blocks of a cluster,
    which send each other their values. With two `stages` a warpgroup may be an exchange ahead of
    another that still reads.
    """

    warpgroups: int
    cluster: int = 1
    stages: int = 1

    @property
    def parts(self) -> int:
        """Warps that share a row, each with a partial result."""
        return WARPS * self.warpgroups * self.cluster

    def in_cluster(self, stats: int = 1) -> ClusterExchange:
        """What exchanges so many statistics between the blocks of a cluster."""
        return ClusterExchange(self.warpgroups, self.cluster, stats, stages=self.stages)

    def scratch(self, stats: int) -> list[Any]:
        """What comes first in `scratch` below, for exchanges of up to `stats` values."""
        if self.cluster > 1:
            return self.in_cluster(stats).scratch()
        shared = plgpu.SMEM((self.stages * stats, self.parts), jnp.float32)
        return [shared, plgpu.Barrier(num_arrivals=self.warpgroups)]

    def open(self, scratch: Sequence[Any]) -> None:
        """Before everything else."""
        if self.cluster > 1:
            self.in_cluster().open(scratch)

    def ready(self) -> None:
        """Once, before the first `gather`: the later, the less there is to wait for."""
        if self.cluster > 1:
            self.in_cluster().ready()

    def gather(self, scratch: Sequence[Any], *stats: jax.Array, count: Any = 0) -> list[jax.Array]:
        """``(4,)`` values of each warpgroup -> ``(parts,)`` values, in the same order everywhere.

        Reducing those stays within a warp, because each warp holds all of them in its lanes.
        `count` is how often the block has gathered before.
        """
        shared = scratch[0]
        stage = lax.rem(jnp.int32(count), self.stages)
        first = stage * len(stats)
        if self.cluster > 1:
            box = self.in_cluster(len(stats))
            box.send(scratch, stage, stats)
            box.receive(scratch, stage, lax.rem(lax.div(jnp.int32(count), self.stages), 2))
        else:
            mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
            for slot, stat in enumerate(stats):
                store(shared.at[first + slot, mine], stat)
            plgpu.barrier_arrive(scratch[1])
            plgpu.barrier_wait(scratch[1])
        layout = columns_layout(1, min(WARP, self.parts))
        return [load(shared.at[first + slot], layout) for slot in range(len(stats))]
