"""Values that the blocks of a cluster send to each other, through distributed shared memory.

Each block has slots, and barriers that count the bytes that arrive in it (`TransactionBarriers`).

Messages cost time, however short they are: 64 for a row instead of 512 (H200, LayerNorm's backward
over 16 blocks) made it a third faster. So where only sums are wanted, and nobody waits for them at
once, the warps of a warpgroup add theirs up first.

Pallas has no such operations, so this is PTX; the interpreter knows no clusters.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPGROUP_THREADS, WARPS, warps_layout
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, arith, ir, llvm, utils
from jaxnorm_kernels.mosaic.rows.transaction_barriers import (
    MESSAGE,
    TransactionBarriers,
    announce,
    barrier_of,
    send,
)

_SCALAR = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()


@dataclasses.dataclass(frozen=True)
class ClusterExchange:
    """What the warps that share a row tell each other, once for each row.

    Attributes:
      warpgroups: of a block.
      blocks: of the cluster.
      values: that each warp has to tell, in each exchange.
      added: only the sums over all warps are wanted: a warpgroup adds its warps' values up first.
      stages: exchanges that may be under way: the fastest warp sends the values of exchange
        ``k + stages - 1`` while the slowest may be reading those of exchange k.
    """

    warpgroups: int
    blocks: int
    values: int
    added: bool = False
    stages: int = 1

    @property
    def parts(self) -> int:
        """Of each value, in the slots: a warp's or, of those that are added, a warpgroup's."""
        return self.warpgroups * self.blocks * (1 if self.added else WARPS)

    @property
    def _width(self) -> int:
        """Of a warpgroup's sums: whole messages, or a message of 1, 2 or 4."""
        n = self.values
        return n if n <= 2 else -(-n // MESSAGE) * MESSAGE

    @property
    def _slots(self) -> tuple[int, int]:
        """Shape in a stage: values by parts or, of those that are added, parts by sums."""
        return (self.parts, self._width) if self.added else (self.values, self.parts)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(self.warpgroups, self.stages)

    def scratch(self) -> list[Any]:
        """Slots, barriers of 8 bytes each, and what a warpgroup adds up."""
        rows, width = self._slots
        scratch = [
            plgpu.SMEM((self.stages * rows, width), jnp.float32),
            self._barriers.scratch(),
        ]
        if self.added:
            terms = (self.stages * self.warpgroups * self.values, WARPS)
            scratch.append(plgpu.SMEM(terms, jnp.float32))
        return scratch

    def open(self, scratch: Sequence[Any]) -> None:
        """Before everything else: makes the barriers."""
        self._barriers.open(scratch[1])

    def ready(self) -> None:
        """Before the first `send`: waits until all blocks have opened their exchanges."""
        self._barriers.ready()

    def send(self, scratch: Sequence[Any], stage: Any, values: Sequence[jax.Array]) -> None:
        """Sends `values`, an array over the four warps each, to all blocks of the cluster."""
        layout = warps_layout(1).reduce(1)
        slots, barriers, *terms = scratch[: 2 + self.added]

        @plgpu.inline_mgpu(
            arg_types=(_REF, _REF, [_REF] * len(terms), _SCALAR, [layout] * len(values))
        )
        def send_values(
            context: Any, slots: Any, barriers: Any, terms: Any, stage: Any, values: Sequence[Any]
        ) -> None:
            stage, thread = stage.registers.item(), utils.thread_idx()
            rank = utils.inline_ptx(
                "mov.u32 $0, %cluster_ctarank;", result_types=ir.IntegerType.get_signless(32)
            )
            of_warp = [value.registers.item() for value in values]
            barrier = barrier_of(barriers, stage)
            rows, width = self._slots
            target = mgpu.plus(mgpu.address_of(slots), mgpu.times(stage, 4 * rows * width))
            if self.added:
                sums = self._add(terms[0], stage, of_warp)
                self._announce(barrier)
                sender = mgpu.plus(mgpu.times(rank, self.warpgroups), mgpu.warpgroup(thread))
                target = mgpu.plus(target, mgpu.times(sender, 4 * width))
                # Lane i of warp j sends to block 4 i + j.
                block = mgpu.plus(mgpu.times(mgpu.lane(thread), WARPS), mgpu.warp(thread))
                messages = [(at, sums[at : at + MESSAGE]) for at in range(0, width, MESSAGE)]
            else:
                self._announce(barrier)
                sender = mgpu.plus(
                    mgpu.times(rank, WARPS * self.warpgroups), mgpu.quotient(thread, WARP)
                )
                target = mgpu.plus(target, mgpu.times(sender, 4))
                block = mgpu.lane(thread)
                messages = [(i * width, [value]) for i, value in enumerate(of_warp)]
            for at, message in messages:
                send(message, mgpu.plus(target, 4 * at), barrier, block, self.blocks)

        send_values(slots, barriers, terms, stage, list(values))

    def _announce(self, barrier: Any) -> None:
        """One thread of each warpgroup announces its share of the bytes to come."""
        rows, width = self._slots
        of_warpgroup = mgpu.remainder(utils.thread_idx(), WARPGROUP_THREADS)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, of_warpgroup, mgpu.i32(0))
        announce(barrier, 4 * rows * width // self.warpgroups, is_first)

    def _add(self, terms: Any, stage: Any, of_warp: Sequence[Any]) -> list[Any]:
        """The sums over the warps of the warpgroup, and zeros to fill the last message."""
        thread = utils.thread_idx()
        first = mgpu.plus(mgpu.times(stage, self.warpgroups), mgpu.warpgroup(thread))
        first = mgpu.plus(mgpu.address_of(terms), mgpu.times(first, 4 * WARPS * self.values))
        for i, value in enumerate(of_warp):
            at = mgpu.plus(mgpu.times(mgpu.warp(thread), 4), 4 * WARPS * i)
            llvm.store(value, mgpu.in_shared(mgpu.plus(first, at)))
        utils.warpgroup_barrier()
        sums = [
            _tree_sum(mgpu.load_floats(mgpu.plus(first, 16 * i), WARPS)) for i in range(self.values)
        ]
        return sums + [arith.constant(ir.F32Type.get(), 0.0)] * (self._width - len(sums))

    def receive(self, scratch: Sequence[Any], stage: Any, parity: Any) -> None:
        """Waits until all values have arrived in the slots, for the n-th time.

        `parity` is n % 2, counted from 0 for each stage.
        """
        self._barriers.receive(scratch[1], stage, parity)

    def totals(self, scratch: Sequence[Any], stage: Any) -> list[jax.Array]:
        """The sums over all warps, where they are `added`: the same in all blocks, bit by bit."""
        scalar = plgpu.ShapeDtypeStruct((), jnp.float32, _SCALAR)
        lanes = min(WARP, 1 << (self.parts - 1).bit_length())

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=[scalar] * self.values)
        def add(context: Any, slots: Any, stage: Any) -> list[Any]:
            rows, width = self._slots
            first = mgpu.plus(
                mgpu.address_of(slots), mgpu.times(stage.registers.item(), 4 * rows * width)
            )
            lane = mgpu.remainder(utils.thread_idx(), lanes)
            zero = arith.constant(ir.F32Type.get(), 0.0)
            sums: list[Any] = [zero] * self.values
            for start in range(0, self.parts, lanes):
                part = mgpu.plus(lane, start)
                exists = mgpu.is_below(part, self.parts)
                part = arith.select(exists, part, mgpu.i32(0))
                at = mgpu.plus(first, mgpu.times(part, 4 * width))
                elements = [
                    element
                    for j in range(0, width, MESSAGE)
                    for element in mgpu.load_floats(mgpu.plus(at, 4 * j), min(width, MESSAGE))
                ]
                sums = [
                    arith.addf(s, arith.select(exists, e, zero)) for s, e in zip(sums, elements)
                ]
            distance = lanes // 2
            while distance:
                sums = [arith.addf(s, utils.shfl_bfly(s, distance)) for s in sums]
                distance //= 2
            return [FragmentedArray.splat(s, ()) for s in sums]

        return add(scratch[0], stage)


def _tree_sum(values: list[Any]) -> Any:
    while len(values) > 1:
        values = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2])]
    return values[0]
