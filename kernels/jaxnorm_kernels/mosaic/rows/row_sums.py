"""How the warps that share rows add up the sums of them, of which each warp has its part."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPS, Ref, columns_layout, load, store
from jaxnorm_kernels.mosaic.rows.cluster_exchange import ClusterExchange

# Every thread reads all of an array, four elements at a time, and adds them up by itself.
_ALL = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,),)),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(plgpu.Replicated(WARP),),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class RowSums:
    """The exchange of `sums` values for each step of a persistent kernel.

    Not by Mosaic's reduction over warps: its scratch is at one place for all warpgroups of a block,
    which is a race. With `depth` 2, a step may be published while the one before is not collected.
    In a cluster the blocks send each other their parts.

    A thread reads all parts of a sum, which is quick, or with `in_lanes` one of them, and the warp
    adds them up by shuffles: for kernels that have no register to spare.
    """

    warpgroups: int
    sums: int
    depth: int = 1
    cluster: int = 1
    in_lanes: bool = False

    @property
    def parts(self) -> int:
        """Of a sum: the warps of a block."""
        return WARPS * self.warpgroups

    @property
    def stages(self) -> int:
        """The fastest warp publishes step k + stages - 1 while the slowest may collect step k."""
        return 2 * self.depth

    @property
    def in_cluster(self) -> ClusterExchange:
        """What exchanges the sums between the blocks of a cluster."""
        return ClusterExchange(
            self.warpgroups, self.cluster, self.sums, added=True, stages=self.stages
        )

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, in the order of a kernel's arguments."""
        if self.cluster > 1:
            return self.in_cluster.scratch()
        shared = plgpu.SMEM((self.stages * self.sums, self.parts), jnp.float32)
        return [shared, plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.depth)]

    def open(self, scratch: Sequence[Ref]) -> None:
        """Before everything else."""
        if self.cluster > 1:
            self.in_cluster.open(scratch)

    def ready(self) -> None:
        """Once, before the first `publish`: the later, the less there is to wait for."""
        if self.cluster > 1:
            self.in_cluster.ready()

    def publish(self, scratch: Sequence[Ref], sums: Sequence[jax.Array], k: Any = 0) -> None:
        """`sums`: for each sum a ``(4,)`` array over the warps of this warpgroup."""
        stage = lax.rem(jnp.int32(k), self.stages)
        if self.cluster > 1:
            self.in_cluster.send(scratch, stage, sums)
            return
        shared, barriers = scratch
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for j, value in enumerate(sums):
            store(shared.at[stage * self.sums + j, mine], value)
        plgpu.barrier_arrive(self._barrier(barriers, k))

    def collect(self, scratch: Sequence[Ref], k: Any = 0) -> list[jax.Array]:
        """The totals of step `k`. Each warp adds up all parts, in the same order."""
        k = jnp.int32(k)
        stage = lax.rem(k, self.stages)
        if self.cluster > 1:
            self.in_cluster.receive(scratch, stage, lax.rem(lax.div(k, self.stages), 2))
            return self.in_cluster.totals(scratch, stage)
        shared, barriers = scratch
        plgpu.barrier_wait(self._barrier(barriers, k))
        in_lanes = self.in_lanes or self.parts % WARP == 0
        layout = columns_layout(1, min(self.parts, WARP)) if in_lanes else _ALL
        first = stage * self.sums
        return [jnp.sum(load(shared.at[first + j], layout)) for j in range(self.sums)]

    def _barrier(self, barriers: Ref, k: Any) -> Ref:
        return barriers.at[lax.rem(k, self.depth)] if self.depth > 1 else barriers
