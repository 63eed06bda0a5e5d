"""Exchange of statistics between the warps that share a strip, in a block or in a cluster.

For each inner element, a warp computes statistics of its own columns. It writes them to shared
memory, and then every warp of the block merges the statistics of all warps. In a cluster, each
block sends its merged statistics to all blocks, and each block then merges the statistics of all
blocks (see `TransactionBarriers`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import CLUSTER, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARPS, Ref, load, store
from jaxnorm_kernels.mosaic.rows.exchange import (
    MESSAGE,
    TransactionBarriers,
    announce,
    send,
)
from jaxnorm_kernels.mosaic.rows.strips import Stat, StripSchedule


@dataclasses.dataclass(frozen=True)
class Partials:
    """Statistics of several parts of a strip's columns, in shared memory.

    A part consists of the columns of one warp, or of one block.

    Attributes:
      count: number of parts.
      stats: one entry per statistic. An entry is a function that maps the index of a part to the
        part's value, or a number if all parts have the same value.
    """

    count: int
    stats: Sequence[Callable[[Any], Stat] | float]

    def sum(self, term: Callable[..., Stat]) -> Stat:
        """Apply `term` to the statistics of each part, and return the sum of the results.

        This is a loop, because otherwise the compiler would load the statistics of all parts into
        registers at once.
        """

        def of(part: Any) -> Stat:
            return term(*[s if isinstance(s, float) else s(part) for s in self.stats])

        return lax.fori_loop(1, self.count, lambda part, total: total + of(part), of(0))

    def total(self, which: int) -> Stat | float:
        """Return the sum of statistic number `which` over all parts."""
        stat = self.stats[which]
        return self.count * stat if isinstance(stat, float) else self.sum(lambda *s: s[which])


#: A function that merges statistics: from the statistics of each part of the columns, it computes
#: the statistics over all columns.
Merge = Callable[[Partials], list[Any]]


@dataclasses.dataclass(frozen=True)
class StripExchange:
    """Exchange of statistics between the warps that share a strip, once per strip.

    Attributes:
      strips: how the array is split into strips.
      stats: maximum number of statistics in an exchange.
    """

    strips: StripSchedule
    stats: int

    @property
    def _parts(self) -> int:
        return WARPS * self.strips.warpgroups

    def scratch(self) -> list[Any]:
        """Return the shared memory and the barriers of the exchange."""
        strips = self.strips
        of_warps = (self.stats, self._parts, strips.width)
        of_blocks = (self.stats, strips.cluster, strips.width)
        scratch = [
            plgpu.SMEM(of_warps, jnp.float32),
            plgpu.Barrier(num_arrivals=strips.warpgroups),
        ]
        if strips.cluster == 1:
            return scratch
        return [*scratch, plgpu.SMEM(of_blocks, jnp.float32), self._barriers.scratch()]

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise the barriers of a cluster. A kernel must call this first."""
        if self.strips.cluster > 1:
            self._barriers.open(scratch[-1])

    def ready(self) -> None:
        """Wait until all blocks of the cluster have initialised their barriers."""
        if self.strips.cluster > 1:
            self._barriers.ready()

    def __call__(
        self, scratch: Sequence[Any], merge: Merge, stats: Sequence[Stat | float]
    ) -> list[Any]:
        """Merge the statistics of all warps that share the strip.

        The results are ``(width,)`` arrays, which are equal in all warps.

        Args:
          scratch: the shared memory and barriers that the method `scratch` requests.
          merge: the function that merges statistics. It is applied to the statistics of a block's
            warps and, in a cluster, then to the statistics of the cluster's blocks.
          stats: statistics of this warpgroup's four warps, ``(4, width)`` arrays. An entry is a
            float if all warps have the same value.
        """
        of_warps, barrier, *of_cluster = scratch
        arrays = [stat for stat in stats if not isinstance(stat, float)]
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for at, stat in enumerate(arrays):
            store(of_warps.at[at, mine], stat)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        merged = merge(self._parts_in(of_warps, stats, self._parts))
        if self.strips.cluster == 1:
            return merged
        arrays = [stat for stat in merged if not isinstance(stat, float)]
        of_blocks, barriers = of_cluster
        rank = lax.axis_index(CLUSTER)
        slots = [of_blocks.at[at, rank] for at in range(len(arrays))]
        self._send(slots, arrays, barriers)
        self._barriers.receive(barriers, jnp.int32(0), jnp.int32(0))
        return merge(self._parts_in(of_blocks, merged, self.strips.cluster))

    def _parts_in(self, slots: Ref, stats: Sequence[Any], parts: int) -> Partials:
        """Return the statistics of all parts of a strip, as a `Partials` object.

        If an entry of `stats` is a number, all parts have this value. The other statistics differ
        between parts, and are read from `slots`, in shared memory.
        """
        rows = itertools.count()
        readers = [
            stat if isinstance(stat, float) else functools.partial(self._part, slots, next(rows))
            for stat in stats
        ]
        return Partials(parts, readers)

    def _part(self, slots: Ref, row: Any, part: Any) -> Stat:
        return load(slots.at[row, part], self.strips.stat_layout)

    def _send(self, slots: Sequence[Ref], stats: Sequence[Stat], barriers: Ref) -> None:
        """Send this block's statistics to all blocks of the cluster.

        The threads of the block form groups of `StripSchedule.threads` neighbouring threads. Every
        group has a complete copy of the strip's statistics. Group i sends its copy to block i of
        the cluster. If there are more groups than blocks, the remaining groups send nothing.
        """
        threads, cluster, width = self.strips.threads, self.strips.cluster, self.strips.width
        ref, layout = plgpu.RefType(), self.strips.stat_layout

        @plgpu.inline_mgpu(arg_types=([ref] * len(stats), [layout] * len(stats), ref))
        def send_stats(context: Any, slots: Any, stats: Any, barriers: Any) -> None:
            thread = mgpu.thread()
            barrier = mgpu.address_of(barriers)
            announce(barrier, 4 * len(stats) * cluster * width, thread.is_zero())
            block, lane = thread // threads, thread % threads
            for slot, stat in zip(slots, stats):
                values = mgpu.elements_of(stat.registers.item())
                first = mgpu.address_of(slot) + lane * (4 * len(values))
                for at in range(0, len(values), MESSAGE):
                    send(values[at : at + MESSAGE], first + 4 * at, barrier, block, cluster)

        send_stats(list(slots), list(stats), barriers)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(arrivals=1, stages=1)
