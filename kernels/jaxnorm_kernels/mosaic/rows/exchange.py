"""What the warps that share a row tell each other, in a block or in a cluster.

Each warp has some values, numbers that it reduced its columns to. `Gather` shows those of all warps
to each of them at once; `RowSums` adds them up, between other work of a persistent kernel.
"""

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
class Exchange:
    """Among the warps of a block of up to 8 warpgroups, or of all `cluster` blocks of a cluster.

    The warps of a block tell each other through shared memory; blocks send each other what they
    have.

    Attributes:
      values: of each warp, at most.
      depth: exchanges that may be under way before the first of them is read.
    """

    warpgroups: int
    cluster: int = 1
    values: int = 1
    depth: int = 1

    @property
    def stages(self) -> int:
        """The fastest warp tells its values of exchange ``k + stages - 1`` while k is read."""
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """Of a value: the warps of a block."""
        return WARPS * self.warpgroups

    def in_cluster(self, values: int) -> ClusterExchange:
        """What exchanges so many values between the blocks of a cluster."""
        return ClusterExchange(self.warpgroups, self.cluster, values, stages=self.stages)

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, in the order of a kernel's arguments."""
        if self.cluster > 1:
            return self.in_cluster(self.values).scratch()
        shared = plgpu.SMEM((self.stages * self.values, self.parts), jnp.float32)
        return [shared, plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.depth)]

    def open(self, scratch: Sequence[Any]) -> None:
        """Before everything else."""
        if self.cluster > 1:
            self.in_cluster(self.values).open(scratch)

    def ready(self) -> None:
        """Once, before the first values are told: the later, the less there is to wait for."""
        if self.cluster > 1:
            self.in_cluster(self.values).ready()

    def _stage(self, k: Any) -> Any:
        return lax.rem(jnp.int32(k), self.stages)

    def _receive(self, scratch: Sequence[Any], stage: Any, k: Any, values: int) -> ClusterExchange:
        """What has received exchange `k` of a cluster."""
        exchange = self.in_cluster(values)
        exchange.receive(scratch, stage, lax.rem(lax.div(jnp.int32(k), self.stages), 2))
        return exchange

    @property
    def _of_warpgroup(self) -> Any:
        """The parts of this warpgroup's warps."""
        return pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)


@dataclasses.dataclass(frozen=True)
class Gather(Exchange):
    """Shows each warp's values to all: with two `slots` a warpgroup may be one exchange ahead."""

    slots: int = 1

    @property
    def stages(self) -> int:
        """As many as slots."""
        return self.slots

    def __call__(
        self, scratch: Sequence[Any], *values: jax.Array, count: Any = 0
    ) -> list[jax.Array]:
        """``(4,)`` values of each warpgroup -> ``(parts,)`` values, in the same order everywhere.

        Those of all blocks. Reducing them stays within a warp, because each warp holds all of them
        in its lanes. `count` is how often the block has gathered before.
        """
        shared, stage = scratch[0], self._stage(count)
        first = stage * len(values)
        if self.cluster > 1:
            self.in_cluster(len(values)).send(scratch, stage, values)
            self._receive(scratch, stage, count, len(values))
        else:
            parts = self._of_warpgroup
            for at, value in enumerate(values):
                store(shared.at[first + at, parts], value)
            plgpu.barrier_arrive(scratch[1])
            plgpu.barrier_wait(scratch[1])
        layout = columns_layout(1, min(WARP, self.parts * self.cluster))
        return [load(shared.at[first + at], layout) for at in range(len(values))]


@dataclasses.dataclass(frozen=True)
class RowSums(Exchange):
    """The sums of `values` over all warps, for each step of a persistent kernel.

    Not by Mosaic's reduction over warps: its scratch is at one place for all warpgroups of a block,
    which is a race. With a `depth` of 2, a step may be published while the one before is not
    collected.

    A thread reads all parts of a sum, which is quick, or with `in_lanes` one of them, and the warp
    adds them up by shuffles: for kernels that have no register to spare.
    """

    in_lanes: bool = False

    @property
    def stages(self) -> int:
        """Twice as many as may be under way."""
        return 2 * self.depth

    def in_cluster(self, values: int) -> ClusterExchange:
        """As in an exchange, but for the sums alone."""
        return dataclasses.replace(super().in_cluster(values), added=True)

    def publish(self, scratch: Sequence[Ref], sums: Sequence[jax.Array], k: Any = 0) -> None:
        """`sums`: for each sum a ``(4,)`` array over the warps of this warpgroup."""
        stage = self._stage(k)
        if self.cluster > 1:
            self.in_cluster(self.values).send(scratch, stage, sums)
            return
        shared, barriers = scratch
        parts = self._of_warpgroup
        for at, value in enumerate(sums):
            store(shared.at[stage * self.values + at, parts], value)
        plgpu.barrier_arrive(self._barrier(barriers, k))

    def collect(self, scratch: Sequence[Ref], k: Any = 0) -> list[jax.Array]:
        """The totals of step `k`. Each warp adds up all parts, in the same order."""
        k = jnp.int32(k)
        stage = self._stage(k)
        if self.cluster > 1:
            return self._receive(scratch, stage, k, self.values).totals(scratch, stage)
        shared, barriers = scratch
        plgpu.barrier_wait(self._barrier(barriers, k))
        in_lanes = self.in_lanes or self.parts % WARP == 0
        layout = columns_layout(1, min(self.parts, WARP)) if in_lanes else _ALL
        first = stage * self.values
        return [jnp.sum(load(shared.at[first + at], layout)) for at in range(self.values)]

    def _barrier(self, barriers: Ref, k: Any) -> Ref:
        return barriers.at[lax.rem(k, self.depth)] if self.depth > 1 else barriers
