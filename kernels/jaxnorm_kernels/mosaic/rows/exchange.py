"""Exchange of values between the warps that share a row, in a block or in a cluster.

`Gather` gives every warp the values of all warps; `RowSums` gives it their sums. The blocks of a
cluster send values to each other through distributed shared memory (`ClusterExchange`), and
barriers count the bytes that arrive (`TransactionBarriers`). Pallas has no such operations, so
these are written in PTX. The interpreter does not support clusters.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import WARPGROUP
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Ref,
    columns_layout,
    load,
    store,
    warps_layout,
)
from jaxnorm_kernels.mosaic.device.mgpu import FragmentedArray, arith, ir, llvm, nvvm, utils

_SCALAR = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()
#: The largest number of float32 values in one message.
MESSAGE = 4


# -------------------------------------------------------------------------------------------------
# Barriers of a block that count the bytes which the blocks of its cluster send to it.
#
# A thread sends values with ``st.async`` and continues. A thread that waits for its own block's
# barrier then sees all announced values. Plain stores followed by an arrival at the other blocks'
# barriers do not work, because they may become visible in any order (H200: a wrong sum in some rows
# of a million). A fence would fix the order, but it waits for everything that the block has stored,
# including its results (a third of the bandwidth). Even if nothing was stored, the fence of a
# cluster barrier takes longer than the messages (GroupNorm, then silu: 12 of 162 us; H100).
#
# Pallas has no such operations, so these are written in PTX. The interpreter does not support
# clusters.


@dataclasses.dataclass(frozen=True)
class TransactionBarriers:
    """Barriers for the stages of an exchange, one per stage.

    Attributes:
      arrivals: the number of times per exchange that a block announces incoming bytes to a stage's
        barrier.
      stages: the number of exchanges that may be in flight.
    """

    arrivals: int
    stages: int

    def scratch(self) -> Any:
        """Return the scratch memory of the barriers, 8 bytes each."""
        return plgpu.SMEM((2 * self.stages,), jnp.uint32)

    def open(self, barriers: Ref) -> None:
        """Initialise the barriers; call it first in the kernel."""

        @plgpu.inline_mgpu(arg_types=(_REF,))
        def make(context: Any, barriers: Any) -> None:
            first = mgpu.thread().is_zero()
            for stage in range(self.stages):
                utils.inline_ptx(
                    f"mbarrier.init.shared::cta.b64 [$0+{8 * stage}], {self.arrivals};",
                    mgpu.address_of(barriers).value,
                    predicate=first,
                    has_side_effects=True,
                )
            ptx = "fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;"
            utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

        make(barriers)

    def ready(self) -> None:
        """Wait until all blocks of the cluster have initialised their barriers."""

        @plgpu.inline_mgpu()
        def wait(context: Any) -> None:
            ptx = "barrier.cluster.wait.acquire;"
            utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

        wait()

    def receive(self, barriers: Ref, stage: Any, parity: Any) -> None:
        """Wait until all bytes that were announced for a stage's n-th exchange have arrived.

        `parity` is n % 2, where n starts at 0 for each stage.
        """

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
        def wait(context: Any, barriers: Any, stage: Any, parity: Any) -> None:
            barrier = barrier_of(barriers, mgpu.Word(stage.registers.item()))
            nvvm.mbarrier_try_wait_parity(
                mgpu.in_shared(barrier), parity.registers.item(), mgpu.i32(10_000_000)
            )

        wait(barriers, stage, parity)


def barrier_of(barriers: Any, stage: mgpu.Word) -> mgpu.Word:
    """Return the address of a stage's barrier."""
    return mgpu.address_of(barriers) + stage * 8


def announce(barrier: mgpu.Word, size: int, is_one: Any) -> None:
    """Announce `size` incoming bytes to a barrier, from the one thread where `is_one` is true."""
    utils.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        barrier.value,
        mgpu.i32(size),
        predicate=is_one,
        has_side_effects=True,
    )


def send(
    message: Sequence[Any], target: mgpu.Word, barrier: mgpu.Word, block: mgpu.Word, blocks: int
) -> None:
    """Send 1, 2 or 4 values to address `target` in block number `block`, if that exists."""
    kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[len(message)]
    values = ", ".join(f"${4 + i}" for i in range(len(message)))
    values = values if len(message) == 1 else f"{{{values}}}"
    utils.inline_ptx(
        f"""{{
        .reg .b32 there, counter;
        @$0 mapa.shared::cluster.u32 there, $1, $3;
        @$0 mapa.shared::cluster.u32 counter, $2, $3;
        @$0 st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind}
            [there], {values}, [counter];
        }}""",
        block.is_below(blocks),
        *[word.value for word in (target, barrier, block)],
        *[utils.bitcast(value, ir.IntegerType.get_signless(32)) for value in message],
        has_side_effects=True,
    )


# -------------------------------------------------------------------------------------------------
# Values that the blocks of a cluster send to each other, through distributed shared memory.
#
# Each block has slots, and barriers that count the bytes that arrive in it (`TransactionBarriers`).
#
# The cost depends on the number of messages, not on their length: with 64 messages per row instead
# of 512, LayerNorm's backward over 16 blocks became a third faster (H200). So if only sums are
# needed, and not immediately, the warps of a warpgroup add their values first.


@dataclasses.dataclass(frozen=True)
class ClusterExchange:
    """Exchange of values between the warps that share a row, once for each row.

    Attributes:
      warpgroups: the number of warpgroups per block.
      blocks: the number of blocks per cluster.
      values: the number of values that each warp contributes to an exchange.
      added: True if only the sums over all warps are needed. Each warpgroup then adds its warps'
        values before it sends them.
      stages: the number of exchanges that may be in flight. The fastest warp may send the values of
        exchange ``k + stages - 1`` while the slowest still reads those of exchange k.
    """

    warpgroups: int
    blocks: int
    values: int
    added: bool = False
    stages: int = 1

    @property
    def parts(self) -> int:
        """Number of contributions to each value: one per warp, or per warpgroup if `added`."""
        return self.warpgroups * self.blocks * (1 if self.added else WARPS)

    @property
    def _width(self) -> int:
        """Number of float32 values that a warpgroup sends, after padding to whole messages.

        A message holds 1, 2 or 4 values.
        """
        n = self.values
        return n if n <= 2 else -(-n // MESSAGE) * MESSAGE

    @property
    def _slots(self) -> tuple[int, int]:
        """The shape of a stage's slots: (values, parts), or (parts, sums) if they are `added`."""
        return (self.parts, self._width) if self.added else (self.values, self.parts)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(self.warpgroups, self.stages)

    def scratch(self) -> list[Any]:
        """Return the scratch memory: slots, barriers and, if `added`, the terms of warpgroups."""
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
        """Initialise the barriers; call it first in the kernel."""
        self._barriers.open(scratch[1])

    def ready(self) -> None:
        """Wait until all blocks have initialised their barriers, before the first `send`."""
        self._barriers.ready()

    def send(self, scratch: Sequence[Any], stage: Any, values: Sequence[jax.Array]) -> None:
        """Send `values`, arrays with one element for each of the four warps, to all blocks."""
        layout = warps_layout(1).reduce(1)
        slots, barriers, *terms = scratch[: 2 + self.added]

        @plgpu.inline_mgpu(
            arg_types=(_REF, _REF, [_REF] * len(terms), _SCALAR, [layout] * len(values))
        )
        def send_values(
            context: Any, slots: Any, barriers: Any, terms: Any, stage: Any, values: Sequence[Any]
        ) -> None:
            stage, thread = mgpu.Word(stage.registers.item()), mgpu.thread()
            i32 = ir.IntegerType.get_signless(32)
            rank = mgpu.Word(utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32))
            of_warp = [value.registers.item() for value in values]
            barrier = barrier_of(barriers, stage)
            rows, width = self._slots
            target = mgpu.address_of(slots) + stage * (4 * rows * width)
            if self.added:
                sums = self._add(terms[0], stage, of_warp)
                self._announce(barrier)
                target += (rank * self.warpgroups + thread // WARPGROUP_THREADS) * (4 * width)
                # Lane i of warp j sends to block 4 i + j.
                block = thread % WARP * WARPS + thread // WARP % WARPS
                messages = [(at, sums[at : at + MESSAGE]) for at in range(0, width, MESSAGE)]
            else:
                self._announce(barrier)
                target += (rank * (WARPS * self.warpgroups) + thread // WARP) * 4
                block = thread % WARP
                messages = [(i * width, [value]) for i, value in enumerate(of_warp)]
            for at, message in messages:
                send(message, target + 4 * at, barrier, block, self.blocks)

        send_values(slots, barriers, terms, stage, list(values))

    def _announce(self, barrier: mgpu.Word) -> None:
        """Announce this warpgroup's share of the block's incoming bytes, from one thread."""
        rows, width = self._slots
        is_first = (mgpu.thread() % WARPGROUP_THREADS).is_zero()
        announce(barrier, 4 * rows * width // self.warpgroups, is_first)

    def _add(self, terms: Any, stage: mgpu.Word, of_warp: Sequence[Any]) -> list[Any]:
        """Return the sums of each value over the warps of the warpgroup.

        Zeros are appended until the sums fill whole messages (see `_width`).
        """
        thread = mgpu.thread()
        first = stage * self.warpgroups + thread // WARPGROUP_THREADS
        first = mgpu.address_of(terms) + first * (4 * WARPS * self.values)
        for i, value in enumerate(of_warp):
            at = thread // WARP % WARPS * 4 + 4 * WARPS * i
            llvm.store(value, mgpu.in_shared(first + at))
        utils.warpgroup_barrier()
        sums = [_tree_sum(mgpu.load_floats(first + 16 * i, WARPS)) for i in range(self.values)]
        return sums + [arith.constant(ir.F32Type.get(), 0.0)] * (self._width - len(sums))

    def receive(self, scratch: Sequence[Any], stage: Any, parity: Any) -> None:
        """Wait until all values of the stage's n-th exchange have arrived in the slots.

        `parity` is n % 2, where n starts at 0 for each stage.
        """
        self._barriers.receive(scratch[1], stage, parity)

    def totals(self, scratch: Sequence[Any], stage: Any) -> list[jax.Array]:
        """Return the sums over all warps, which all blocks compute with identical bits.

        This requires `added`.
        """
        scalar = plgpu.ShapeDtypeStruct((), jnp.float32, _SCALAR)
        lanes = min(WARP, 1 << (self.parts - 1).bit_length())

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=[scalar] * self.values)
        def add(context: Any, slots: Any, stage: Any) -> list[Any]:
            rows, width = self._slots
            stage = mgpu.Word(stage.registers.item())
            first = mgpu.address_of(slots) + stage * (4 * rows * width)
            lane = mgpu.thread() % lanes
            zero = arith.constant(ir.F32Type.get(), 0.0)
            sums: list[Any] = [zero] * self.values
            for start in range(0, self.parts, lanes):
                part = lane + start
                exists = part.is_below(self.parts)
                part = mgpu.Word(arith.select(exists, part.value, mgpu.i32(0)))
                at = first + part * (4 * width)
                elements = [
                    element
                    for j in range(0, width, MESSAGE)
                    for element in mgpu.load_floats(at + 4 * j, min(width, MESSAGE))
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


# Every thread reads the whole array, four elements at a time, and adds them itself.
_ALL = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,),)),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(plgpu.Replicated(WARP),),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchange between the warps of a block of up to 8 warpgroups, or of the blocks of a cluster.

    The warps of a block exchange values through shared memory; the blocks of a cluster send
    messages.

    Attributes:
      values: the largest number of values that a warp contributes to an exchange.
      depth: the number of exchanges that may be published before the first of them is read.
    """

    warpgroups: int
    cluster: int = 1
    values: int = 1
    depth: int = 1

    @property
    def stages(self) -> int:
        """The number of stages.

        The fastest warp may write exchange ``k + stages - 1`` while exchange k is read.
        """
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """The number of contributions per value: one per warp of a block."""
        return WARPS * self.warpgroups

    def in_cluster(self, values: int) -> ClusterExchange:
        """Return the exchange of `values` values between the blocks of a cluster."""
        return ClusterExchange(self.warpgroups, self.cluster, values, stages=self.stages)

    def scratch(self) -> list[Any]:
        """Return the shared memory and barriers, in the order of a kernel's arguments."""
        if self.cluster > 1:
            return self.in_cluster(self.values).scratch()
        shared = plgpu.SMEM((self.stages * self.values, self.parts), jnp.float32)
        return [shared, plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.depth)]

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise the barriers of the cluster; call it first in the kernel."""
        if self.cluster > 1:
            self.in_cluster(self.values).open(scratch)

    def ready(self) -> None:
        """Wait for the other blocks, once, before the first values are sent.

        A kernel calls this late, because the wait is shorter then.
        """
        if self.cluster > 1:
            self.in_cluster(self.values).ready()

    def _stage(self, k: Any) -> Any:
        return lax.rem(jnp.int32(k), self.stages)

    def _receive(self, scratch: Sequence[Any], stage: Any, k: Any, values: int) -> ClusterExchange:
        """Wait for exchange `k` of a cluster, and return the object that reads its results."""
        exchange = self.in_cluster(values)
        exchange.receive(scratch, stage, lax.rem(lax.div(jnp.int32(k), self.stages), 2))
        return exchange

    @property
    def _of_warpgroup(self) -> Any:
        """The slots of this warpgroup's warps."""
        return pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)


@dataclasses.dataclass(frozen=True)
class Gather(Exchange):
    """Give every warp the values of all warps.

    With 2 `slots`, a warpgroup may be one step ahead of another.
    """

    slots: int = 1

    @property
    def stages(self) -> int:
        """The number of stages, one per slot."""
        return self.slots

    def __call__(
        self, scratch: Sequence[Any], *values: jax.Array, count: Any = 0
    ) -> list[jax.Array]:
        """Turn ``(4,)`` values per warpgroup into ``(parts,)`` values, in a fixed order.

        The result contains the values of all blocks. Each warp holds all of them in its lanes, so
        it can reduce them without further exchange. `count` is the number of earlier calls by the
        block.
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
    """Sums of `values` over all warps, for each step of a persistent kernel.

    Mosaic's own reduction over warps would be a race, because all warpgroups of a block would use
    the same scratch memory. With a `depth` of 2, a step may be published before the previous one is
    collected.

    Each thread reads all contributions to a sum and adds them, which is fast. With `in_lanes`, a
    thread reads one contribution and the warp adds them by shuffles, which saves registers.
    """

    in_lanes: bool = False

    @property
    def stages(self) -> int:
        """Twice the number of exchanges that may be in flight."""
        return 2 * self.depth

    def in_cluster(self, values: int) -> ClusterExchange:
        """Return the exchange between the blocks of a cluster, which sends sums only."""
        return dataclasses.replace(super().in_cluster(values), added=True)

    def publish(self, scratch: Sequence[Ref], sums: Sequence[jax.Array], k: Any = 0) -> None:
        """Publish the sums of step `k`, each a ``(4,)`` array over this warpgroup's warps."""
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
        """Return the totals of step `k`. Each warp adds all contributions in the same order."""
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
