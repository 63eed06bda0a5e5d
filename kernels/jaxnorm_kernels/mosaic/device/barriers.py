"""What Pallas has no word for: a barrier of a warpgroup, and shared memory without a swizzle."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.launch import is_interpreted


def warpgroup_barrier() -> None:
    """Waits for the warps of the warpgroup, where the kernel has no automatic barriers."""
    if is_interpreted():
        return  # There, a warpgroup is one thread.

    @plgpu.inline_mgpu()
    def barrier(context: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


def release_read() -> None:
    """Every warp has loaded what asynchronous copies brought: they may overwrite it.

    That takes a fence. A barrier alone lets a warp go on while its loads are under way, and a copy
    of what is in the L2 cache can be faster than they are (H200: the first bytes of a few rows in
    30000, LayerNorm over 3000 columns).
    """
    plgpu.commit_smem()


def release_used() -> None:
    """Every warp has stored all that it made of what asynchronous copies brought.

    So no load is under way, and a barrier is enough on a GPU. The interpreter asks for a fence too,
    as if the stage had been written.
    """
    if is_interpreted():
        plgpu.commit_smem()
    else:
        warpgroup_barrier()


def in_plain_order(*refs: Any) -> None:
    """Keeps Mosaic from choosing a swizzle for these refs: a bulk copy fills them as they are.

    The search for one also fails on some shapes (jax 0.11.2: an IndexError).
    """
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
    def use(context: Any, *refs: Any) -> None:
        del refs

    use(*refs)
