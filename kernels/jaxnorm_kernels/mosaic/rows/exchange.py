"""Exchange of values between the warps that share a row, in a block or in a cluster of blocks.

After a `Gather`, every warp has the values of all warps. After `RowSums`, every warp has the sums
of these values. The blocks of a cluster write values into each other's shared memory, which CUDA
calls distributed shared memory. Barriers count the arriving bytes (`TransactionBarriers`). Pallas
has no such operations, so they are written in PTX. The interpreter does not support clusters.
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
from jaxnorm_kernels.mosaic.device.launch import WARPGROUP, inline
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
#: Maximum number of float32 values in a message. A message is one ``st.async`` instruction, which
#: sends 1, 2 or 4 values to another block.
MESSAGE = 4


# -------------------------------------------------------------------------------------------------
# Barriers in shared memory that count the bytes which the blocks of a cluster send to a block.
#
# A block announces to its barrier how many bytes it will receive. The other blocks send these bytes
# with ``st.async``, without waiting. A thread that waits for the barrier then sees all sent values.
# Plain stores followed by an arrival at the other blocks' barriers do not work, because the arrival
# may become visible before the stores (H200: a wrong sum in some rows of a million). A fence would
# fix the order, but it also waits for all earlier stores of the block. If these earlier stores
# include the block's results, the wait costs a third of the bandwidth. Even without such stores,
# the fence of a cluster barrier takes longer than sending the values: 12 of 162 us in GroupNorm
# followed by silu (H100).
#
# Pallas has no such operations, so they are written in PTX. The interpreter does not support
# clusters.


@dataclasses.dataclass(frozen=True)
class TransactionBarriers:
    """Barriers that count the bytes that arrive in a block, one barrier per stage.

    A stage is memory for the values of one exchange.

    Attributes:
      arrivals: number of announcements that a barrier expects per exchange. An announcement (see
        `announce`) adds to the number of bytes that the barrier waits for.
      stages: number of stages, so at most this many exchanges are in flight at the same time.
    """

    arrivals: int
    stages: int

    def scratch(self) -> Any:
        """Return the shared memory that the barriers need, 8 bytes each."""
        return plgpu.SMEM((2 * self.stages,), jnp.uint32)

    def open(self, barriers: Ref) -> None:
        """Initialise the barriers. A kernel must call this first."""

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
        """Wait until all bytes that were announced for an exchange have arrived.

        `parity` is n % 2 for the n-th exchange that uses this stage (counted from 0).
        """

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
        def wait(context: Any, barriers: Any, stage: Any, parity: Any) -> None:
            barrier = barrier_of(barriers, mgpu.Word(stage.registers.item()))
            nvvm.mbarrier_try_wait_parity(
                mgpu.in_shared(barrier), parity.registers.item(), mgpu.i32(10_000_000)
            )

        wait(barriers, stage, parity)


def barrier_of(barriers: Any, stage: mgpu.Word) -> mgpu.Word:
    """Return the address of the barrier that belongs to stage number `stage`."""
    return mgpu.address_of(barriers) + stage * 8


def announce(barrier: mgpu.Word, size: int, is_one: Any) -> None:
    """Tell a barrier of this block to wait for `size` incoming bytes.

    All threads call this function, but only the thread in which `is_one` is true announces bytes.
    """
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
    """Send 1, 2 or 4 values to the shared memory of another block of the cluster.

    `target` and `barrier` are addresses in shared memory. In block number `block`, the values are
    written to `target`, and the barrier at the address `barrier` counts their bytes. If `block` is
    not below `blocks`, nothing is sent.
    """
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
# Exchange of a row's values between the blocks of a cluster, through distributed shared memory.
#
# Each block has memory for the values of all blocks (slots), and `TransactionBarriers` that count
# the bytes arriving there. The time depends on the number of messages (``st.async`` instructions),
# not on their length: with 64 messages per row instead of 512, LayerNorm's backward pass over 16
# blocks takes a third less time (H200). So if only sums over all warps are needed (`RowSums`), the
# four warps of each warpgroup first add their values, and the warpgroup sends only the sums.


def _tree_sum(values: list[Any]) -> Any:
    while len(values) > 1:
        values = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2])]
    return values[0]


# A layout in which every thread loads the entire array, four elements at a time.
_ALL = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,),)),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(plgpu.Replicated(WARP),),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchange of a row's values between the warps of a block, or of all blocks of a cluster.

    Within a block of up to 8 warpgroups, the values go through shared memory. Between the blocks of
    a cluster, values are sent as messages.

    Attributes:
      warpgroups: number of warpgroups (of 4 warps) per block.
      cluster: number of blocks that share a row; 1 means no cluster.
      values: maximum number of values that a warp contributes to an exchange.
      depth: number of exchanges that a warp may have written but not yet read. With a depth of 2, a
        warp may write exchange ``k + 1`` before it reads exchange k.
      stages: number of stages, each of which is memory for the values of one exchange. The fastest
        warp may write exchange ``k + stages - 1`` while the slowest still reads exchange k.
    """

    warpgroups: int
    cluster: int = 1
    values: int = 1
    depth: int = 1
    stages: int = 1

    #: True if only the sums over all warps are needed. In a cluster, each warpgroup then adds its
    #: warps' values before it sends them.
    _is_sum = False

    @property
    def parts(self) -> int:
        """Number of contributions to each value: one per warp, or one per warpgroup.

        It is one per warpgroup if each warpgroup adds its warps' values before it sends them.
        """
        return self.warpgroups * self.cluster * (1 if self._is_added else WARPS)

    @property
    def _is_added(self) -> bool:
        return self._is_sum and self.cluster > 1

    @property
    def _width(self) -> int:
        """Number of float32 values that a warpgroup sends to a block, padded to complete messages.

        A message (an ``st.async`` instruction) has 1, 2 or 4 values.
        """
        n = self.values
        return n if n <= 2 else -(-n // MESSAGE) * MESSAGE

    @property
    def _slots(self) -> tuple[int, int]:
        """Shape of a stage, which is the memory for one exchange.

        A stage has one element for each contribution to each value (see `parts`). Its shape is
        (number of values, number of contributions). If warpgroups add their warps' values, the
        shape is (number of contributions, number of values with padding); see `_width`.
        """
        return (self.parts, self._width) if self._is_added else (self.values, self.parts)

    @property
    def _barriers(self) -> TransactionBarriers:
        return TransactionBarriers(self.warpgroups, self.stages)

    def scratch(self) -> list[Any]:
        """Return a list with the memory for values (`_slots`), the barriers, and memory for sums.

        The memory for sums is needed only if warpgroups add their warps' values. The refs that a
        kernel's body gets for this list are the argument `scratch` of the other methods.
        """
        rows, width = self._slots
        slots = plgpu.SMEM((self.stages * rows, width), jnp.float32)
        if self.cluster == 1:
            return [slots, plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.depth)]
        terms = (self.stages * self.warpgroups * self.values, WARPS)
        added = [plgpu.SMEM(terms, jnp.float32)] * self._is_added
        return [slots, self._barriers.scratch(), *added]

    def open(self, scratch: Sequence[Any]) -> None:
        """Initialise the barriers of a cluster. A kernel must call this first."""
        if self.cluster > 1:
            self._barriers.open(scratch[1])

    def ready(self) -> None:
        """Wait until the other blocks of the cluster can receive values.

        A kernel calls this once before it sends values. It calls this late, when the other blocks
        have probably started, because the wait is shorter then.
        """
        if self.cluster > 1:
            self._barriers.ready()

    def _stage(self, k: Any) -> Any:
        return lax.rem(jnp.int32(k), self.stages)

    def _receive(self, scratch: Sequence[Any], stage: Any, k: Any) -> None:
        """Wait until all values of exchange `k` have arrived from the blocks of the cluster."""
        self._barriers.receive(scratch[1], stage, lax.rem(lax.div(jnp.int32(k), self.stages), 2))

    @property
    def _of_warpgroup(self) -> Any:
        """Slice that selects four columns of a stage: the columns of this warpgroup's warps.

        A stage in shared memory has one column for each warp of the block. Each warp stores its
        values in its own column.
        """
        return pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)

    def _send(self, scratch: Sequence[Any], stage: Any, values: Sequence[jax.Array]) -> None:
        """Send `values` to all blocks of the cluster.

        Each value is a ``(4,)`` array with an element for each warp of the warpgroup.
        """
        layout = warps_layout(1).reduce(1)
        slots, barriers, *terms = scratch[: 2 + self._is_added]

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
            if self._is_added:
                sums = self._add(terms[0], stage, of_warp)
                self._announce(barrier)
                target += (rank * self.warpgroups + thread // WARPGROUP_THREADS) * (4 * width)
                # Lane i of warp j sends to block 4 i + j, if the cluster has this block.
                block = thread % WARP * WARPS + thread // WARP % WARPS
                messages = [(at, sums[at : at + MESSAGE]) for at in range(0, width, MESSAGE)]
            else:
                self._announce(barrier)
                target += (rank * (WARPS * self.warpgroups) + thread // WARP) * 4
                block = thread % WARP
                messages = [(i * width, [value]) for i, value in enumerate(of_warp)]
            for at, message in messages:
                send(message, target + 4 * at, barrier, block, self.cluster)

        send_values(slots, barriers, terms, stage, list(values))

    def _announce(self, barrier: mgpu.Word) -> None:
        """Announce this warpgroup's part of the bytes that the block will receive.

        The block's warpgroups announce equal parts. The block's barrier waits for all these bytes.
        """
        rows, width = self._slots
        is_first = (mgpu.thread() % WARPGROUP_THREADS).is_zero()
        announce(barrier, 4 * rows * width // self.warpgroups, is_first)

    def _add(self, terms: Any, stage: mgpu.Word, of_warp: Sequence[Any]) -> list[Any]:
        """Return the sum of each value over the four warps of the warpgroup.

        Zeros are appended, so that the sums fill complete messages (see `_width`).
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


@dataclasses.dataclass(frozen=True)
class Gather(Exchange):
    """An exchange after which every warp has the values of all warps."""

    def __call__(
        self, scratch: Sequence[Any], *values: jax.Array, count: Any = 0
    ) -> list[jax.Array]:
        """Exchange values between all warps, and return one array for each argument of `values`.

        Each argument is a ``(4,)`` array with an element for each warp of this warpgroup. The array
        that is returned for this argument has the elements of all warps of the block or, in a
        cluster, of all warps of all blocks. Every warp gets all of these elements, in the same
        order, spread over its lanes. So each warp can reduce the array by itself, without another
        exchange. `count` is the number of earlier calls in this block.
        """
        shared, stage = scratch[0], self._stage(count)
        first = stage * len(values)
        if self.cluster > 1:
            dataclasses.replace(self, values=len(values))._send(scratch, stage, values)
            self._receive(scratch, stage, count)
        else:
            parts = self._of_warpgroup
            for at, value in enumerate(values):
                store(shared.at[first + at, parts], value)
            plgpu.barrier_arrive(scratch[1])
            plgpu.barrier_wait(scratch[1])
        layout = columns_layout(1, min(WARP, self.parts))
        return [load(shared.at[first + at], layout) for at in range(len(values))]


@dataclasses.dataclass(frozen=True)
class RowSums(Exchange):
    """An exchange after which every warp has the sums over all warps, for persistent kernels.

    In a persistent kernel, a block processes many rows, in steps. In each step, the kernel
    exchanges `values` sums: `publish` writes a warpgroup's contributions, and `collect` waits for
    all contributions and adds them. With a `depth` of 2, a step may be published before the
    previous step is collected. The number of `stages` is twice the depth. Mosaic's own reduction
    over the warps of a warpgroup would cause a race: all warpgroups of a block would use the same
    scratch memory.

    Attributes:
      in_lanes: how the contributions to a sum are added. If False, each thread reads and adds all
        contributions; this is fast. If True, each thread reads one contribution, and the warp adds
        them with shuffles; this saves registers.
    """

    in_lanes: bool = False
    _is_sum = True

    def publish(self, scratch: Sequence[Ref], sums: Sequence[jax.Array], k: Any = 0) -> None:
        """Write this warpgroup's contributions to the sums of step `k`, for all warps to read.

        Each element of `sums` is a ``(4,)`` array with a value for each warp.
        """
        stage = self._stage(k)
        if self.cluster > 1:
            self._send(scratch, stage, sums)
            return
        shared, barriers = scratch
        self._store(shared, stage, sums)
        plgpu.barrier_arrive(self._barrier(barriers, k))

    def collect(self, scratch: Sequence[Ref], k: Any = 0) -> list[jax.Array]:
        """Wait for all contributions to step `k`, and return their sums.

        All warps add in the same order, so they get identical sums.
        """
        k = jnp.int32(k)
        stage = self._stage(k)
        if self.cluster > 1:
            self._receive(scratch, stage, k)
            return self._totals(scratch[0], stage)
        shared, barriers = scratch
        plgpu.barrier_wait(self._barrier(barriers, k))
        return self._load_sums(shared, stage)

    def _barrier(self, barriers: Ref, k: Any) -> Ref:
        return barriers.at[lax.rem(k, self.depth)] if self.depth > 1 else barriers

    def _totals(self, slots: Ref, stage: Any) -> list[jax.Array]:
        """Return the sum of each value over the warps of all blocks of the cluster.

        All blocks add in the same order, so their results are identical, bit by bit.
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

        return list(add(slots, stage))

    # The next two methods are written in MLIR, because each of Mosaic's own loads and stores of
    # such values takes 90 operations, and a step may have eight of them.

    def _store(self, shared: Ref, stage: Any, sums: Sequence[jax.Array]) -> None:
        layout = warps_layout(1).reduce(1)

        def reference(shared: Ref, stage: Any, sums: Sequence[jax.Array]) -> None:
            for at, value in enumerate(sums):
                store(shared.at[stage * self.values + at, self._of_warpgroup], value)

        @inline(reference, (_REF, _SCALAR, [layout] * len(sums)))
        def write(context: Any, shared: Any, stage: Any, sums: Sequence[Any]) -> None:
            row, warp = mgpu.Word(stage.registers.item()) * self.values, mgpu.thread() // WARP
            first = mgpu.address_of(shared) + (row * self.parts + warp) * 4
            for i, value in enumerate(sums):
                llvm.store(value.registers.item(), mgpu.in_shared(first + 4 * self.parts * i))

        write(shared, stage, list(sums))

    def _load_sums(self, shared: Ref, stage: Any) -> list[jax.Array]:
        in_lanes = self.in_lanes or self.parts % WARP == 0
        layout = columns_layout(1, min(self.parts, WARP)) if in_lanes else _ALL
        scalar, rows = plgpu.ShapeDtypeStruct((), jnp.float32, _SCALAR), range(self.values)

        @inline(
            lambda shared, stage: [jnp.sum(shared[stage * self.values + at]) for at in rows],
            (_REF, _SCALAR),
            [scalar] * self.values,
        )
        def add(context: Any, shared: Any, stage: Any) -> list[Any]:
            row = mgpu.Word(stage.registers.item()) * self.values
            starts = [self.parts * i for i in rows]
            parts = mgpu.load_arrays(
                [shared], layout.to_mgpu(), (self.parts,), at=(row,), starts=starts
            )
            return [of_sum.reduce("add", 0) for of_sum in parts]

        return list(add(shared, stage))
