"""Launches a kernel body with a given grid, warpgroups and output types.

On the CPU, the body runs in the interpreter.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from jaxnorm_kernels import launching
from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.specs import Spec

#: Names of the axes of a grid, for ``lax.axis_index`` in a kernel body. If blocks form clusters,
#: `BLOCK` numbers the clusters and `CLUSTER` the blocks of one; otherwise `CLUSTER` does not exist.
BLOCK, CLUSTER, WARPGROUP = "block", "cluster", "warpgroup"

_interpreted = contextvars.ContextVar("interpreted", default=False)
#: Return True while a kernel is traced for the interpreter.
is_interpreted = _interpreted.get


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams | None = None) -> Iterator[None]:
    """Run every kernel that is traced in this context on the CPU, in Pallas' interpreter.

    The interpreter checks values, barriers and races, but neither layouts nor alignment. It takes
    about 10 ms for each warpgroup and row.
    """
    token = _interpreted.set(True)
    try:
        # Use JAX's own setting: it is part of `jax.jit`'s cache key, so no trace for the GPU is
        # reused.
        with plgpu.force_gpu_interpret_mode(params or plgpu.InterpretGPUParams()):
            yield
    finally:
        _interpreted.reset(token)


def required[T](schedule: T | None, spec: Spec) -> T:
    """Return the schedule of a call. Raise ValueError if `why_unsupported` refuses the call."""
    if schedule is None:
        raise ValueError(f"no kernel takes the rows of {spec}")
    return schedule


def launch(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    outputs: Sequence[tuple[tuple[int, ...], np.dtype]],
    overwritten: int = 0,
    blocks: int,
    cluster: int = 1,
    warpgroups: int = 1,
    scratch: Sequence[Any] = (),
) -> tuple[jax.Array, ...]:
    """Run ``body(*operand_refs, *output_refs, *scratch_refs)`` on `blocks` blocks.

    Pallas' automatic barriers are off, because Pallas would put a barrier around each vector store.
    Where one thread reads what another has written, the body has its own barrier.

    Args:
      cluster: if above 1, launch `blocks` clusters of this many blocks. The blocks of a cluster run
        at the same time and can access each other's shared memory.
      outputs: shape and dtype of each output.
      overwritten: the number of leading operands that the body overwrites. These operands are also
        the first results and take no additional memory; XLA copies an operand that is still needed.
        Pallas cannot overwrite arrays that vary over mesh axes (jax 0.11.2 and 0.12.0). Such
        operands get separate output refs before those of `outputs`.
      warpgroups: warpgroups (of 128 threads) per block; all of them run the body.
      scratch: shared memory and barriers of a block.
    """
    # Inside `jax.shard_map`, an output varies over the same mesh axes as the input.
    axes = jax.typeof(operands[0]).manual_axis_type
    if axes.varying:
        outputs = [*((a.shape, a.dtype) for a in operands[:overwritten]), *outputs]
        overwritten = 0
    kernel = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in outputs
        ),
        scratch_types=tuple(scratch),
        grid=(blocks,),
        grid_names=(BLOCK,),
        **({"cluster": (cluster,), "cluster_names": (CLUSTER,)} if cluster > 1 else {}),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    with launching.settings():
        refs = [jax.new_ref(operand) for operand in operands[:overwritten]]
        results = kernel(*refs, *operands[overwritten:])
        return (*[jax.freeze(ref) for ref in refs], *results)


def split(refs: Sequence[Any], *sizes: int) -> tuple[Sequence[Any], ...]:
    """Return consecutive parts of `refs` with these sizes, and then the refs that are left."""
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)


# ---------------------------------------------------------------------------------------- barriers


def warpgroup_barrier() -> None:
    """Wait for all warps of the warpgroup; Pallas' automatic barriers are off in these kernels."""
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
    """Wait until every warp has stored all results computed from a stage of shared memory.

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
