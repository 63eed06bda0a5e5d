"""The exchange of statistics between the warps that share a strip, in a block or in a cluster.

Each warp has, for each inner element, the statistics of its columns. It shows them to the warps of
its block, each of which merges them all. Of a cluster, each block then sends what it merged to all
blocks (`transaction_barriers`), which merge that.
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
from jaxnorm_kernels.mosaic.device.mgpu import arith, utils
from jaxnorm_kernels.mosaic.rows.exchange import (
    MESSAGE,
    TransactionBarriers,
    announce,
    send,
)
from jaxnorm_kernels.mosaic.rows.strip import Stat
from jaxnorm_kernels.mosaic.rows.strips import Strips


@dataclasses.dataclass(frozen=True)
class Parts:
    """The statistics of the parts of a strip's columns, in shared memory.

    Attributes:
      count: of the parts.
      stats: of each statistic, what gives that of a part; or a number that all parts have.
    """

    count: int
    stats: Sequence[Callable[[Any], Stat] | float]

    def sum(self, term: Callable[..., Stat]) -> Stat:
        """Return the sum over the parts of what `term` makes of the statistics of each.

        In a loop, or the compiler would load all parts at once, and need registers for them.
        """

        def of(part: Any) -> Stat:
            return term(*[s if isinstance(s, float) else s(part) for s in self.stats])

        return lax.fori_loop(1, self.count, lambda part, total: total + of(part), of(0))

    def total(self, which: int) -> Stat | float:
        """The sum of a statistic over the parts."""
        stat = self.stats[which]
        return self.count * stat if isinstance(stat, float) else self.sum(lambda *s: s[which])


#: Statistics of parts of the columns -> those of all of them.
Merge = Callable[[Parts], list[Any]]


@dataclasses.dataclass(frozen=True)
class StripExchange:
    """What the warps that share a strip tell each other, once for each strip.

    Attributes:
      strips: that are shared.
      stats: that are exchanged, at most.
    """

    strips: Strips
    stats: int

    @property
    def _parts(self) -> int:
        return WARPS * self.strips.warpgroups

    def scratch(self) -> list[Any]:
        """What the warps tell, a barrier for it, and what the blocks of a cluster tell."""
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
        """Before everything else: makes the barriers of the cluster."""
        if self.strips.cluster > 1:
            self._barriers.open(scratch[-1])

    def ready(self) -> None:
        """Before the first exchange: waits until all blocks of the cluster have theirs."""
        if self.strips.cluster > 1:
            self._barriers.ready()

    def __call__(
        self, scratch: Sequence[Any], merge: Merge, stats: Sequence[Stat | float]
    ) -> list[Any]:
        """``(4, width)`` of each warpgroup -> ``(width,)``, the same in all warps, bit by bit.

        Args:
          scratch: of `scratch`.
          merge: run once on the parts of a block, and once on those of the blocks.
          stats: of this warpgroup's warps.
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

    def _parts_in(self, slots: Ref, stats: Sequence[Any], parts: int) -> Parts:
        """Those of a list of statistics, of which `slots` has those that are no numbers."""
        rows = itertools.count()
        readers = [
            stat if isinstance(stat, float) else functools.partial(self._part, slots, next(rows))
            for stat in stats
        ]
        return Parts(parts, readers)

    def _part(self, slots: Ref, row: Any, part: Any) -> Stat:
        return load(slots.at[row, part], self.strips.stat_layout)

    def _send(self, slots: Sequence[Ref], stats: Sequence[Stat], barriers: Ref) -> None:
        """Sends this block's statistics to a slot of each block of the cluster.

        Every warp has them, and so have several parts of a warp: each part sends to another block.
        """
        threads, cluster, width = self.strips.threads, self.strips.cluster, self.strips.width
        ref, layout = plgpu.RefType(), self.strips.stat_layout

        @plgpu.inline_mgpu(arg_types=([ref] * len(stats), [layout] * len(stats), ref))
        def send_stats(context: Any, slots: Any, stats: Any, barriers: Any) -> None:
            thread = utils.thread_idx()
            barrier = mgpu.address_of(barriers)
            is_first = arith.cmpi(arith.CmpIPredicate.eq, thread, mgpu.i32(0))
            announce(barrier, 4 * len(stats) * cluster * width, is_first)
            block = mgpu.quotient(thread, threads)
            lane = mgpu.remainder(thread, threads)
            for slot, stat in zip(slots, stats):
                values = mgpu.elements_of(stat.registers.item())
                first = mgpu.plus(mgpu.address_of(slot), mgpu.times(lane, 4 * len(values)))
                for at in range(0, len(values), MESSAGE):
                    message, target = values[at : at + MESSAGE], mgpu.plus(first, 4 * at)
                    send(message, target, barrier, block, cluster)

        send_stats(list(slots), list(stats), barriers)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(arrivals=1, stages=1)
