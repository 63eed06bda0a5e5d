"""Barriers of a warpgroup, and shared memory without a swizzle, which Pallas does not offer."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted


def warpgroup_barrier() -> None:
    """Wait for all warps of the warpgroup. The kernels run without automatic barriers."""
    if is_interpreted():
        return  # The interpreter runs a warpgroup as one thread.

    @plgpu.inline_mgpu()
    def barrier(context: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


def release_read() -> None:
    """Wait until every warp has loaded a stage of shared memory, so that copies may overwrite it.

    This needs a fence. With a barrier alone, a warp continues while its loads are in flight, and a
    copy from the L2 cache can overtake them (seen on an H200: wrong first bytes in a few of 30000
    rows, LayerNorm over 3000 columns).
    """
    plgpu.commit_smem()


def release_used() -> None:
    """Wait until every warp has stored all results that depend on a stage of shared memory.

    No loads of the stage are then in flight, so a barrier is enough on a GPU. The interpreter
    requires a fence, as if the stage had been written.
    """
    if is_interpreted():
        plgpu.commit_smem()
    else:
        warpgroup_barrier()


def in_plain_order(*refs: Any) -> None:
    """Prevent Mosaic from choosing a swizzle for these refs, because bulk copies do not swizzle.

    Without this, Mosaic's search for a swizzle also fails on some shapes (jax 0.11.2: an
    IndexError).
    """
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
    def use(context: Any, *refs: Any) -> None:
        del refs

    use(*refs)
