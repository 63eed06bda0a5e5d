"""The exchange of statistics between the warps that share a strip, in a block or in a cluster.

Each warp has, for each inner element, the statistics of its columns. It shows them to the warps of
its block, each of which merges them all. Of a cluster, each block then sends what it merged to all
blocks, which merge that. There a barrier of the cluster is enough, which waits for all that its
threads have stored before: a block takes few strips, and has stored nothing before its first one.

Pallas has no loads and stores of another block's shared memory, so these are PTX; the interpreter
knows no clusters.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import CLUSTER, WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import WARPS, Ref, load, store
from jaxnorm_kernels.mosaic.device.mgpu import utils
from jaxnorm_kernels.mosaic.rows.strips import Stat, Strips


@dataclasses.dataclass(frozen=True)
class Parts:
    """The statistics of the parts of a strip's columns, in shared memory.

    Attributes:
      count: of the parts.
      stats: of each statistic, what gives that of a part; or a number that all parts have.
    """

    count: int
    stats: Sequence[Callable[[Any], Stat] | float]

    def max(self, term: Callable[..., Stat]) -> Stat:
        """The maximum over the parts of what `term` makes of the statistics of each."""
        return self._reduce(jnp.maximum, term)

    def sum(self, term: Callable[..., Stat]) -> Stat:
        """The sum over the parts of what `term` makes of the statistics of each."""
        return self._reduce(operator.add, term)

    def total(self, which: int) -> Stat | float:
        """The sum of a statistic over the parts."""
        stat = self.stats[which]
        return self.count * stat if isinstance(stat, float) else self.sum(lambda *s: s[which])

    def _reduce(self, pairwise: Callable[[Stat, Stat], Stat], term: Callable[..., Stat]) -> Stat:
        """In a loop, or the compiler would load all parts at once, and need registers for them."""

        def of(part: Any) -> Stat:
            stats = [s if isinstance(s, float) else s(part) for s in self.stats]
            return term(*stats)

        return lax.fori_loop(1, self.count, lambda part, so_far: pairwise(so_far, of(part)), of(0))


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
    def _stages(self) -> int:
        """A warpgroup may be a strip ahead of another one that still reads."""
        return 1 if self.strips.blocks == self.strips.count else 2

    @property
    def _parts(self) -> int:
        return WARPS * self.strips.warpgroups

    def scratch(self) -> list[Any]:
        """What the warps tell, a barrier for it, and what the blocks of a cluster tell."""
        strips = self.strips
        of_warps = (self._stages * self.stats, self._parts, strips.width)
        of_blocks = (self._stages * self.stats, strips.cluster, strips.width)
        return [
            plgpu.SMEM(of_warps, jnp.float32),
            plgpu.Barrier(num_arrivals=strips.warpgroups),
            *[plgpu.SMEM(of_blocks, jnp.float32)] * (strips.cluster > 1),
        ]

    def open(self) -> None:
        """Before everything else: tells the other blocks that this one runs."""
        if self.strips.cluster > 1:
            _cluster_barrier("arrive.relaxed")

    def ready(self) -> None:
        """Before the first exchange: waits until all blocks of the cluster run."""
        if self.strips.cluster > 1:
            _cluster_barrier("wait.acquire")

    def __call__(
        self, scratch: Sequence[Any], step: Any, merge: Merge, stats: Sequence[Stat | float]
    ) -> list[Any]:
        """``(4, width)`` of each warpgroup -> ``(width,)``, the same in all warps, bit by bit.

        Args:
          scratch: of `scratch`.
          step: how often the block has exchanged before.
          merge: run once on the parts of a block, and once on those of the blocks.
          stats: of this warpgroup's warps.
        """
        of_warps, barrier, *of_blocks = scratch
        first = lax.rem(jnp.int32(step), self._stages) * self.stats
        arrays = [stat for stat in stats if not isinstance(stat, float)]
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for at, stat in enumerate(arrays):
            store(of_warps.at[first + at, mine], stat)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        merged = merge(self._parts_in(of_warps, first, stats, self._parts))
        if self.strips.cluster == 1:
            return merged
        arrays = [stat for stat in merged if not isinstance(stat, float)]
        rank = lax.axis_index(CLUSTER)
        slots = [of_blocks[0].at[first + at, rank] for at in range(len(arrays))]
        self._send(slots, arrays)
        _cluster_barrier("arrive.release")
        _cluster_barrier("wait.acquire")
        return merge(self._parts_in(of_blocks[0], first, merged, self.strips.cluster))

    def _parts_in(self, slots: Ref, first: Any, stats: Sequence[Any], parts: int) -> Parts:
        """Those of a list of statistics, of which `slots` has those that are no numbers."""
        readers: list[Callable[[Any], Stat] | float] = []
        at = first
        for stat in stats:
            if isinstance(stat, float):
                readers.append(stat)
                continue
            readers.append(functools.partial(self._part, slots, at))
            at = at + 1
        return Parts(parts, readers)

    def _part(self, slots: Ref, row: Any, part: Any) -> Stat:
        return load(slots.at[row, part], self.strips.stat_layout)

    def _send(self, slots: Sequence[Ref], stats: Sequence[Stat]) -> None:
        """Stores this block's statistics in a slot of each block of the cluster.

        Every warp has them, and so have several parts of a warp: each part stores to another block.
        """
        threads, cluster = self.strips.threads, self.strips.cluster
        ref, layout = plgpu.RefType(), self.strips.stat_layout

        @plgpu.inline_mgpu(arg_types=([ref] * len(stats), [layout] * len(stats)))
        def send(context: Any, slots: Any, stats: Any) -> None:
            del context
            block = mgpu.quotient(utils.thread_idx(), threads)
            exists = mgpu.is_below(block, cluster)
            lane = mgpu.remainder(utils.thread_idx(), threads)
            for slot, stat in zip(slots, stats):
                values = mgpu.elements_of(stat.registers.item())
                first = mgpu.address_of(slot)
                first = mgpu.plus(first, mgpu.times(lane, 4 * len(values)))
                for at, value in enumerate(values):
                    utils.inline_ptx(
                        """{
                        .reg .b32 there;
                        @$0 mapa.shared::cluster.u32 there, $1, $2;
                        @$0 st.shared::cluster.f32 [there], $3;
                        }""",
                        exists,
                        mgpu.plus(first, 4 * at),
                        block,
                        value,
                        has_side_effects=True,
                    )

        send(list(slots), list(stats))


def _cluster_barrier(step: str) -> None:
    """A step of the barrier of all threads of the cluster."""

    @plgpu.inline_mgpu()
    def barrier(context: Any) -> None:
        del context
        utils.inline_ptx(f"barrier.cluster.{step};", has_side_effects=True, convergent=True)

    barrier()
