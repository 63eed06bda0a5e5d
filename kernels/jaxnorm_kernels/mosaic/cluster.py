"""Rows spread over the blocks of a cluster, which read each other's shared memory.

The interpreter knows no clusters, and Pallas' own references into a cluster do not lower here (jax
0.11.2), so that the reading is done in PTX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mosaic_gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

from jaxnorm_kernels.mosaic.launch import CLUSTER as CLUSTER
from jaxnorm_kernels.mosaic.launch import launch
from jaxnorm_kernels.mosaic.layouts import WARPS


def launch_clusters(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    outputs: Sequence[tuple[tuple[int, ...], np.dtype]],
    clusters: int,
    cluster: int,
    warpgroups: int,
    scratch: Sequence[Any],
    auto_barriers: bool,
) -> tuple[jax.Array, ...]:
    """As `launch.launch`, on `clusters` clusters of `cluster` blocks."""
    return launch(
        body,
        operands,
        name=name,
        outputs=outputs,
        blocks=clusters,
        cluster=cluster,
        warpgroups=warpgroups,
        scratch=scratch,
        auto_barriers=auto_barriers,
    )


def cluster_totals(shared: Any, slot: Any, sums: int, warpgroups: int, blocks: int) -> list[Any]:
    """The sums of ``shared[slot, :, :]``, over all warps of all blocks; in every thread alike.

    `shared` is ``(slots, sums, 4 * warpgroups)`` in the shared memory of each block.
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
        parts: list[list[Any]] = [[] for _ in range(sums)]
        for block in range(blocks):
            remote = utils.inline_ptx(
                "mapa.shared::cluster.u32 $0, $1, $2;",
                start,
                utils.c(block, i32),
                result_types=i32,
                has_side_effects=True,
            )
            for j in range(sums):
                for warpgroup in range(warpgroups):
                    at = j * row_bytes + warpgroup * WARPS * 4
                    parts[j] += utils.inline_ptx(
                        f"ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [$4+{at}];",
                        remote,
                        result_types=[f32] * WARPS,
                        has_side_effects=True,
                    )
        totals = [_pairwise(arith.addf, values) for values in parts]
        return [mosaic_gpu.FragmentedArray.splat(total, ()) for total in totals]

    return add_up(shared, slot)


def _pairwise(add: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    """The sum of `values`, in pairs."""
    while len(values) > 1:
        values = [add(*pair) if len(pair) == 2 else pair[0] for pair in _pairs(values)]
    return values[0]


def _pairs(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[i : i + 2] for i in range(0, len(values), 2)]
