"""Barriers of a block that count the bytes which the blocks of its cluster send to it.

A thread sends (``st.async``), and goes on; who waits for the barrier of its own block sees all that
was announced. Plain stores and an arrival at the other blocks' barriers would not do: these are
seen in any order (H200: a wrong sum in some rows of a million), unless a fence waits for all that
the block has stored, its output too (a third of the bandwidth); and where it has stored nothing,
the fence of a barrier of the cluster still takes longer than the messages (GroupNorm, then silu:
12 of 162 us; H100).

Pallas has no such operations, so this is PTX; the interpreter knows no clusters.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.layouts import Ref
from jaxnorm_kernels.mosaic.device.mgpu import arith, ir, nvvm, utils

_SCALAR = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()
#: float32 values, the most that are sent at once.
MESSAGE = 4


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
            first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), mgpu.i32(0))
            for stage in range(self.stages):
                utils.inline_ptx(
                    f"mbarrier.init.shared::cta.b64 [$0+{8 * stage}], {self.arrivals};",
                    mgpu.address_of(barriers),
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
            barrier = barrier_of(barriers, stage.registers.item())
            nvvm.mbarrier_try_wait_parity(
                mgpu.in_shared(barrier), parity.registers.item(), mgpu.i32(10_000_000)
            )

        wait(barriers, stage, parity)


def barrier_of(barriers: Any, stage: Any) -> Any:
    """The address of a stage's."""
    return mgpu.plus(mgpu.address_of(barriers), mgpu.times(stage, 8))


def announce(barrier: Any, size: int, is_one: Any) -> None:
    """The thread of which `is_one` is true announces so many bytes to come."""
    utils.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        barrier,
        mgpu.i32(size),
        predicate=is_one,
        has_side_effects=True,
    )


def send(message: Sequence[Any], target: Any, barrier: Any, block: Any, blocks: int) -> None:
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
        mgpu.is_below(block, blocks),
        target,
        barrier,
        block,
        *[utils.bitcast(value, ir.IntegerType.get_signless(32)) for value in message],
        has_side_effects=True,
    )
