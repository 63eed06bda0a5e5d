"""How a kernel body becomes a call: grid, warpgroups, output types, and the interpreter for CPU."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from jaxnorm_kernels import launching
from jaxnorm_kernels.specs import Spec

#: Names of the axes that a kernel body can ask its place in (``lax.axis_index``). Where blocks form
#: clusters, `BLOCK` counts those, and `CLUSTER` the blocks in one; elsewhere there is no `CLUSTER`.
BLOCK, CLUSTER, WARPGROUP = "block", "cluster", "warpgroup"

_interpreted = contextvars.ContextVar("interpreted", default=False)
#: Whether the kernel that is being traced is for the interpreter.
is_interpreted = _interpreted.get


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams | None = None) -> Iterator[None]:
    """Runs every kernel that is traced inside on the CPU, in Pallas' interpreter.

    The interpreter sees values, barriers and races; it sees neither layouts nor alignment. Slow:
    some 10 ms for each warpgroup and row.
    """
    token = _interpreted.set(True)
    try:
        # JAX's own setting, because `jax.jit` knows it and does not reuse a trace for the GPU.
        with plgpu.force_gpu_interpret_mode(params or plgpu.InterpretGPUParams()):
            yield
    finally:
        _interpreted.reset(token)


def required[T](schedule: T | None, spec: Spec) -> T:
    """The schedule for a call; `why_unsupported` refuses those that have none."""
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
    """Runs ``body(*operand_refs, *output_refs, *scratch_refs)`` on `blocks` blocks.

    Pallas would put a barrier around each vector store. The kernels go without: what one thread
    reads of another has a barrier in the body.

    Args:
      cluster: above 1, there are `blocks` clusters of this many blocks, which run at the same time
        and see each other's shared memory.
      outputs: shape and dtype of each output.
      overwritten: how many operands, the first ones, the body writes to. They are results, too, the
        first ones, and no memory is taken for these: XLA copies an operand that is still needed.
        Where operands vary over mesh axes they have refs of their own, before those of `outputs`:
        Pallas takes no array that varies so as one to write to (jax 0.11.2 and 0.12.0).
      warpgroups: warpgroups (of 128 threads) in a block; they all run the body.
      scratch: shared memory and barriers of a block.
    """
    # Inside `jax.shard_map` an output varies over the mesh axes that the input varies over.
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
    """`refs` in parts of these sizes, and the rest."""
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)
