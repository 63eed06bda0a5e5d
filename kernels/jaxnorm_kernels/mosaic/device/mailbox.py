"""Values that the warps of a cluster send to each other, through distributed shared memory.

Each block has a mailbox: room for a value of each warp of the cluster, and barriers that count the
bytes that arrive. A warp sends its value to all blocks (``st.async``), and goes on. Plain stores
and an arrival at the other blocks' barriers would not do: these are seen in any order (H200: a
wrong sum in some rows of a million), unless a fence waits for all that the block has stored, its
output too (a third of the bandwidth). Pallas has no such operations, so this is PTX; the
interpreter knows no clusters.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm
from jax.experimental.mosaic.gpu import utils

from jaxnorm_kernels.mosaic.device.layouts import WARP, WARPGROUP_THREADS, WARPS, warps_layout

_SCALAR = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()


def barriers(count: int) -> Any:
    """Scratch for `count` barriers, of 8 bytes each."""
    return plgpu.SMEM((2 * count,), jnp.uint32)


def open_mailbox(barriers: Any, warpgroups: int) -> None:
    """Makes the barriers. Nothing may be sent until `wait_for_cluster`."""
    (words,) = barriers.shape

    @plgpu.inline_mgpu(arg_types=(_REF,))
    def make(context: Any, barriers: Any) -> None:
        del context
        first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), _i32(0))
        for at in range(0, 4 * words, 8):
            utils.inline_ptx(
                f"mbarrier.init.shared::cta.b64 [$0+{at}], {warpgroups};",
                _address(barriers),
                predicate=first,
                has_side_effects=True,
            )
        ptx = "fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    make(barriers)


def wait_for_cluster() -> None:
    """Waits until all blocks of the cluster have opened their mailboxes."""

    @plgpu.inline_mgpu()
    def wait(context: Any) -> None:
        del context
        ptx = "barrier.cluster.wait.acquire;"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    wait()


def send(
    mailbox: Any,
    barriers: Any,
    turn: Any,
    values: Sequence[jax.Array],
    warpgroups: int,
    blocks: int,
) -> None:
    """Sends each warp's elements of `values`, ``(4,)`` arrays, to all `blocks` of the cluster.

    The values of a warp land at its place in the rows ``turn * len(values), ...`` of `mailbox`,
    which are ``4 * warpgroups * blocks`` long; barrier `turn` counts them.
    """
    layout = warps_layout(1).reduce(1)
    parts = WARPS * warpgroups * blocks

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR, *[layout] * len(values)))
    def post(context: Any, mailbox: Any, barriers: Any, turn: Any, *values: Any) -> None:
        del context
        turn = turn.registers.item()
        thread = utils.thread_idx()
        lane = arith.remui(thread, _i32(WARP))
        rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=_i32_type())
        part = arith.addi(
            arith.muli(rank, _i32(WARPS * warpgroups)), arith.divui(thread, _i32(WARP))
        )
        place = arith.addi(arith.muli(turn, _i32(len(values) * parts)), part)
        target = arith.addi(_address(mailbox), arith.muli(place, _i32(4)))
        barrier = arith.addi(_address(barriers), arith.muli(turn, _i32(8)))
        # One thread of each warpgroup announces its share of the bytes to come.
        utils.inline_ptx(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
            barrier,
            _i32(4 * len(values) * parts // warpgroups),
            predicate=arith.cmpi(
                arith.CmpIPredicate.eq, arith.remui(thread, _i32(WARPGROUP_THREADS)), _i32(0)
            ),
            has_side_effects=True,
        )
        # Lane i sends to block i.
        is_sender = arith.cmpi(arith.CmpIPredicate.ult, lane, _i32(blocks))
        for row, value in enumerate(values):
            bits = utils.bitcast(value.registers.item(), _i32_type())
            utils.inline_ptx(
                f"""{{
                .reg .b32 there, counter;
                @$0 mapa.shared::cluster.u32 there, $1, $3;
                @$0 mapa.shared::cluster.u32 counter, $2, $3;
                @$0 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32
                    [there+{4 * row * parts}], $4, [counter];
                }}""",
                is_sender,
                target,
                barrier,
                lane,
                bits,
                has_side_effects=True,
            )

    post(mailbox, barriers, turn, *values)


def receive(barriers: Any, turn: Any, parity: Any) -> None:
    """Waits until the values of all warps of the cluster have arrived, for the n-th time.

    `parity` is n % 2, counted from 0 for each barrier.
    """

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
    def wait(context: Any, barriers: Any, turn: Any, parity: Any) -> None:
        del context
        at = arith.muli(turn.registers.item(), _i32(8))
        barrier = arith.addi(_address(barriers), at)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), barrier)
        nvvm.mbarrier_try_wait_parity(pointer, parity.registers.item(), _i32(10_000_000))

    wait(barriers, turn, parity)


def _i32_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _i32(value: int) -> Any:
    return utils.c(value, _i32_type())


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_i32_type(), utils.memref_ptr(ref))
