"""Launch a Pallas kernel body on a grid of blocks, or run it in the interpreter on the CPU.

The module also contains the barriers that kernel bodies use.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import lax

from jaxnorm_kernels import launching
from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.specs import Spec

#: Axis names of the grid, for ``lax.axis_index`` in a kernel body. If the launch uses clusters,
#: `BLOCK` is the axis of clusters and `CLUSTER` the axis of the blocks in a cluster. Without
#: clusters, the axis `CLUSTER` does not exist. `WARPGROUP` is the axis of the warpgroups (128
#: threads each) of a block.
BLOCK, CLUSTER, WARPGROUP = "block", "cluster", "warpgroup"

_interpreted = contextvars.ContextVar("interpreted", default=False)
#: A function that returns True if kernels are currently traced for the interpreter.
is_interpreted = _interpreted.get


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams | None = None) -> Iterator[None]:
    """Run every kernel that is traced in this context in Pallas' interpreter, on the CPU.

    The interpreter checks values, barriers and races, but not register layouts or alignment. It
    takes about 10 ms for each row that one warpgroup processes.
    """
    token = _interpreted.set(True)
    try:
        # The next line changes a JAX setting that is part of `jax.jit`'s cache key. So a function
        # that was traced for a GPU before is traced again, now for the interpreter.
        with plgpu.force_gpu_interpret_mode(params or plgpu.InterpretGPUParams()):
            yield
    finally:
        _interpreted.reset(token)


def inline(
    reference: Callable[..., Any], arg_types: Sequence[Any] = (), return_type: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that emits the MLIR operations of a part of a kernel.

    Args:
      reference: a function that takes the same operands and computes the same results with JAX
        operations. The interpreter runs `reference`, because it cannot run MLIR operations.
      arg_types, return_type: as in `plgpu.inline_mgpu`.
    """
    if is_interpreted():
        return lambda emit: reference
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def required[T](schedule: T | None, spec: Spec) -> T:
    """Return `schedule`, or raise ValueError if it is None (no kernel supports the call)."""
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
    If one thread reads a value that another thread has written, the body itself must contain a
    barrier.

    Args:
      body: the kernel body.
      operands: the input arrays.
      name: the kernel's name, which profilers show.
      outputs: shape and dtype of each output.
      overwritten: number of leading operands that the body overwrites in place. They are returned
        before the outputs and need no additional memory. If the program uses such an operand again,
        XLA copies it first. Pallas cannot overwrite operands that vary over mesh axes of
        `jax.shard_map` (jax 0.11.2 and 0.12.0). In this case, the body gets separate output refs
        for them, before the refs of `outputs`.
      blocks: number of blocks, or of clusters if `cluster` is above 1.
      cluster: number of blocks per cluster. The blocks of a cluster run at the same time and can
        access each other's shared memory.
      warpgroups: number of warpgroups (of 128 threads) per block. All of them run the body.
      scratch: shared memory and barriers that a block allocates.
    """
    # Inside `jax.shard_map`, each output must be declared to vary over the same mesh axes as the
    # inputs.
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
        refs = [*map(launching.overwritable, operands[:overwritten])]
        results = kernel(*refs, *operands[overwritten:])
        return (*map(launching.overwritten, refs), *results)


def present[T](*values: T | None) -> list[T]:
    """Return the values that are not None, such as the operands that a call has."""
    return [value for value in values if value is not None]


def warpgroup_index(warpgroups: int, cluster: int) -> Any:
    """Return the index of this warpgroup among all warpgroups of its cluster of blocks."""
    index = lax.axis_index(WARPGROUP)
    if cluster > 1:
        index += lax.axis_index(CLUSTER) * warpgroups
    return index


def split(refs: Sequence[Any], *sizes: int) -> tuple[Sequence[Any], ...]:
    """Split `refs` into consecutive groups of these sizes, and one more group with the rest."""
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)


# ---------------------------------------------------------------------------------------- barriers


def warpgroup_barrier() -> None:
    """Make each warp of the warpgroup wait until all four have arrived.

    Kernels must call this where they need a barrier, because Pallas' automatic barriers are off.
    """

    # The interpreter runs a warpgroup as a single thread, so it needs no barrier.
    @inline(lambda: None)
    def barrier(context: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


def release_read() -> None:
    """Wait until every warp has finished its loads from a pipeline stage.

    A pipeline stage is a buffer in shared memory. After this call, an asynchronous copy may
    overwrite it. A barrier without a fence is not enough: a warp passes the barrier while its loads
    are in flight, and a copy from the L2 cache can overtake these loads. (Seen on an H200: wrong
    first bytes in a few of 30000 rows, LayerNorm over 3000 columns.)
    """
    plgpu.commit_smem()


def release_used() -> None:
    """Wait until every warp has stored the results that it computed from a pipeline stage.

    A pipeline stage is a buffer in shared memory. After this call, an asynchronous copy may
    overwrite it. A result depends on loads from the buffer. So once a warp has stored its results,
    its loads from the buffer have finished. On a GPU, this function therefore needs only a barrier
    (`release_read` also needs a fence). In the interpreter, it needs a fence, too.
    """
    if is_interpreted():
        plgpu.commit_smem()
    else:
        warpgroup_barrier()


def in_plain_order(*refs: Any) -> None:
    """Prevent Mosaic from swizzling (reordering) the elements of these refs in shared memory.

    Asynchronous copies write rows in their plain order, so loads must not expect swizzled rows.
    Without this call, Mosaic's search for a swizzle also fails on some shapes (jax 0.11.2: an
    IndexError).
    """

    @inline(lambda *refs: None, [plgpu.RefType()] * len(refs))
    def use(context: Any, *refs: Any) -> None:
        del refs

    use(*refs)
