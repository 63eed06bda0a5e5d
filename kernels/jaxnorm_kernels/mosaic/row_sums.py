"""How the warps that share rows add up the sums of them, of which each warp has its part."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mosaic_gpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

from jaxnorm_kernels.mosaic.barriers import warpgroup_barrier
from jaxnorm_kernels.mosaic.cluster import CLUSTER
from jaxnorm_kernels.mosaic.formulas import Arrays, Ref
from jaxnorm_kernels.mosaic.launch import WARPGROUP
from jaxnorm_kernels.mosaic.tiles import WARP, WARPS, load, store

# Every thread reads all of an array, four elements at a time, and adds them up by itself.
_ALL = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,),)),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(plgpu.Replicated(WARP),),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class RowSums:
    """The exchange of `sums` values for each step of a persistent kernel.

    Not by Mosaic's reduction over warps: its scratch is at one place for all warpgroups of a block,
    which is a race. With `depth` 2, a step may be published while the one before is not collected.
    In a cluster, the warps read the parts of the other blocks from there.
    """

    warpgroups: int
    sums: int
    depth: int = 1
    cluster: int = 1

    def scratch(self) -> list[Any]:
        # The fastest warp publishes step k + 2 depth - 1 while the slowest may still collect k.
        slots = (2 * self.depth, self.sums, WARPS * self.warpgroups)
        counts = {"num_arrivals": self.warpgroups, "num_barriers": self.depth}
        barrier = plgpu.Barrier(**counts)
        if self.cluster > 1:
            barrier = plgpu.ClusterBarrier(collective_axes=(CLUSTER,), **counts)
        return [plgpu.SMEM(slots, jnp.float32), barrier]

    def publish(self, scratch: Sequence[Ref], sums: Arrays, k: Any = 0) -> None:
        """`sums`: for each sum a ``(4,)`` array over the warps of this warpgroup."""
        shared, _ = scratch
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for j, value in enumerate(sums):
            store(shared.at[lax.rem(k, 2 * self.depth), j, mine], value)
        if self.cluster > 1:
            warpgroup_barrier()  # One thread arrives for all.
        plgpu.barrier_arrive(self._barrier(scratch, k))

    def collect(self, scratch: Sequence[Ref], k: Any = 0) -> list[jax.Array]:
        """The totals of step `k`. Each warp adds up all parts, in the same order."""
        shared, _ = scratch
        plgpu.barrier_wait(self._barrier(scratch, k))
        slot = lax.rem(k, 2 * self.depth)
        if self.cluster > 1:
            return _cluster_sums(shared, slot, self.sums, self.warpgroups, self.cluster)
        return [jnp.sum(load(shared.at[slot, j], _ALL)) for j in range(self.sums)]

    def leave(self, scratch: Sequence[Ref], k: Any) -> None:
        """After `k` steps: waits until no other block reads this one's shared memory."""
        if self.cluster > 1:
            warpgroup_barrier()
            plgpu.barrier_arrive(self._barrier(scratch, k))
            plgpu.barrier_wait(self._barrier(scratch, k))

    def _barrier(self, scratch: Sequence[Ref], k: Any) -> Ref:
        return scratch[1].at[lax.rem(k, self.depth)] if self.depth > 1 else scratch[1]


def _cluster_sums(shared: Ref, slot: Any, sums: int, warpgroups: int, blocks: int) -> list[Any]:
    """The sums of ``shared[slot, :, :]`` over all warps of all blocks; in every thread alike.

    A lane reads the parts of a warpgroup of a block; then the lanes add up theirs. Pallas' own
    references into a cluster do not lower here (jax 0.11.2), so that the reading is done in PTX.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=[scalar] * sums
    )
    def add_up(context: Any, shared: Any, slot: Any) -> list[Any]:
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        row_bytes = WARPS * warpgroups * 4
        start = arith.muli(slot.registers.item(), utils.c(sums * row_bytes, i32))
        start = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(shared)), start)
        units = blocks * warpgroups
        lanes = min(WARP, 2 ** math.ceil(math.log2(units)))  # that read different units
        lane = arith.remui(utils.thread_idx(), utils.c(lanes, i32))
        totals = [utils.c(0.0, f32)] * sums
        for first in range(0, units, lanes):
            unit = arith.addi(lane, utils.c(first, i32))
            exists = arith.cmpi(arith.CmpIPredicate.ult, unit, utils.c(units, i32))
            unit = arith.minui(unit, utils.c(units - 1, i32))
            offset = arith.muli(
                arith.remui(unit, utils.c(warpgroups, i32)), utils.c(WARPS * 4, i32)
            )
            remote = utils.inline_ptx(
                "mapa.shared::cluster.u32 $0, $1, $2;",
                arith.addi(start, offset),
                arith.divui(unit, utils.c(warpgroups, i32)),
                result_types=i32,
                has_side_effects=True,
            )
            for j in range(sums):
                a, b, c, d = utils.inline_ptx(
                    f"ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [$4+{j * row_bytes}];",
                    remote,
                    result_types=[f32] * WARPS,
                    has_side_effects=True,
                )
                part = arith.addf(arith.addf(a, b), arith.addf(c, d))
                part = arith.select(exists, part, utils.c(0.0, f32))
                totals[j] = arith.addf(totals[j], part)
        distance = 1
        while distance < lanes:
            totals = [arith.addf(t, utils.shfl_bfly(t, distance)) for t in totals]
            distance *= 2
        return [mosaic_gpu.FragmentedArray.splat(total, ()) for total in totals]

    return add_up(shared, slot)
