"""Exchange of values between the warps that share a row, in a block or in a cluster.

`Gather` shows the values of each warp to all of them; `RowSums` adds them up. Blocks of a cluster
send each other values through distributed shared memory (`ClusterExchange`), and count the bytes
that arrive (`TransactionBarriers`). Pallas has no such operations, so these are PTX; the
interpreter knows no clusters.
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
#: float32 values, the most that are sent at once.
MESSAGE = 4


# -------------------------------------------------------------------------------------------------
# Barriers of a block that count the bytes which the blocks of its cluster send to it.
#
# A thread sends (``st.async``), and goes on; who waits for the barrier of its own block sees all
# that was announced. Plain stores and an arrival at the other blocks' barriers would not do: these
# are seen in any order (H200: a wrong sum in some rows of a million), unless a fence waits for all
# that the block has stored, its output too (a third of the bandwidth); and where it has stored
# nothing, the fence of a barrier of the cluster still takes longer than the messages (GroupNorm,
# then silu: 12 of 162 us; H100).
#
# Pallas has no such operations, so this is PTX; the interpreter knows no clusters.


@dataclasses.dataclass(frozen=True)
class TransactionBarriers:
    """One for each stage of an exchange.

    Attributes:
      arrivals: announcements of bytes to come, in each stage.
      stages: exchanges that may be under way.
    """

    arrivals: int
    stages: int

    def scratch(self) -> Any:
        """8 bytes each."""
        return plgpu.SMEM((2 * self.stages,), jnp.uint32)

    def open(self, barriers: Ref) -> None:
        """Before everything else: makes them."""

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
        """Before the first message: waits until all blocks of the cluster have opened theirs."""

        @plgpu.inline_mgpu()
        def wait(context: Any) -> None:
            ptx = "barrier.cluster.wait.acquire;"
            utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

        wait()

    def receive(self, barriers: Ref, stage: Any, parity: Any) -> None:
        """Waits until all that was announced has arrived, for the n-th time.

        `parity` is n % 2, counted from 0 for each stage.
        """

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
        def wait(context: Any, barriers: Any, stage: Any, parity: Any) -> None:
            barrier = barrier_of(barriers, mgpu.Word(stage.registers.item()))
            nvvm.mbarrier_try_wait_parity(
                mgpu.in_shared(barrier), parity.registers.item(), mgpu.i32(10_000_000)
            )

        wait(barriers, stage, parity)


def barrier_of(barriers: Any, stage: mgpu.Word) -> mgpu.Word:
    """The address of a stage's."""
    return mgpu.address_of(barriers) + stage * 8


def announce(barrier: mgpu.Word, size: int, is_one: Any) -> None:
    """The thread of which `is_one` is true announces so many bytes to come."""
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
    """Sends 1, 2 or 4 values to where `target` is in `block`; nothing to blocks that are not."""
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
# Messages cost time, however short they are: 64 for a row instead of 512 (H200, LayerNorm's
# backward over 16 blocks) made it a third faster. So where only sums are wanted, and nobody waits
# for them at once, the warps of a warpgroup add theirs up first.
#
# Pallas has no such operations, so this is PTX; the interpreter knows no clusters.


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
        """One thread of each warpgroup announces its share of the bytes to come."""
        rows, width = self._slots
        is_first = (mgpu.thread() % WARPGROUP_THREADS).is_zero()
        announce(barrier, 4 * rows * width // self.warpgroups, is_first)

    def _add(self, terms: Any, stage: mgpu.Word, of_warp: Sequence[Any]) -> list[Any]:
        """The sums over the warps of the warpgroup, and zeros to fill the last message."""
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
