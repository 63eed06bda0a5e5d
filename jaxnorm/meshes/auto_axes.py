"""Calls on arrays that XLA's partitioner shards automatically (Auto axes of a mesh).

With `custom_partitioning`, a call has a partitioning rule: each device runs the same call on its
shard. Without a rule, the partitioner would gather all operands of a kernel on every device.

In a lowered program, this rule is only the address of a Python function. The address differs
between processes, so JAX's persistent compilation cache misses, unless a JAX flag removes such
addresses from the cache's keys. With that flag, programs whose calls have different options could
get the same key. Therefore each call is lowered inside a function whose name contains a hash of the
call.
"""

import functools
import hashlib
import importlib.resources
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.resources.abc import Traversable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from jaxnorm.calls import backends
from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes.sharding import Factors, Shards

# Modules that compile Triton kernels. The triton implementation imports them.
_COMPILERS = ("triton", "jax_triton")


def are_whole(axes: Any) -> bool:
    """Return True if the partitioner will not split the arrays of the code being lowered.

    This is the case on one device, and inside a `jax.shard_map` over all mesh axes. `axes` is the
    axis context of the lowering.
    """
    if isinstance(axes, mlir.SPMDAxisContext):
        return all(size == 1 or name in axes.manual_axes for name, size in axes.mesh.shape.items())
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def can_partition(axes: Any) -> bool:
    """Return True if a partitioning rule can be used where a call is lowered.

    `axes` is the axis context of the lowering. The devices and the mesh must be known, and the mesh
    must have no Explicit axes.

    The last condition also excludes the inside of `jax.sharding.auto_axes`, where the mesh still
    has Explicit axes. The rule would fail there: when JAX lowers the code of one shard, it does not
    treat these axes as Auto.
    """
    return (
        isinstance(axes, mlir.ShardingContext)
        and axes.device_assignment is not None
        and axes.abstract_mesh is not None
        and AxisType.Explicit not in axes.abstract_mesh.axis_types
    )


def partitioned(
    call: Any,
    whole: Run,
    shards: Callable[[Sequence[Any], Any], Shards],
    factors: Callable[[Arrays], Factors],
) -> Run:
    """Add a partitioning rule to `whole`, a function that computes a call on unsharded arrays.

    Args:
      call: the static description of the call. Its `repr` must be the same in every process, and
        must differ between different calls.
      whole: function of the unsharded operands that returns the results.
      shards: function of the operands' types and the mesh. It returns the sharding of the arrays
        and the function that each device runs.
      factors: function of the operands that returns Shardy's sharding rule.
    """

    def run(*arrays: jax.Array) -> list[jax.Array]:
        @custom_partitioning
        def spread(*arrays: jax.Array) -> list[jax.Array]:
            return whole(*arrays)

        def partition(mesh: Any, given: Any, results: Any) -> tuple[Any, ...]:
            del results
            *specs, run_shard = shards(given, mesh)
            operands, results = ([NamedSharding(mesh, spec) for spec in side] for side in specs)
            return mesh, run_shard, results, tuple(operands)

        operands, results, gathered = factors(arrays)
        spread.def_partition(
            partition,
            sharding_rule=f"{', '.join(operands)} -> {', '.join(results)}",
            need_replication_factors=gathered,
        )

        def named(*arrays: jax.Array) -> list[jax.Array]:
            results: list[jax.Array] = spread(*arrays)
            return results

        named.__name__ = f"jaxnorm_{_digest(call)}"
        outputs: list[jax.Array] = jax.jit(named)(*arrays)
        return outputs

    return run


def _digest(static: Any) -> str:
    """Return a hash of a call and of everything else on which the code of one shard depends.

    The lowered program calls a function, but does not contain the code that this function runs on a
    shard. The hash is part of the function's name, so that JAX's persistent compilation cache can
    distinguish programs whose code for a shard differs.
    """
    kernels = backends.importable(backends.local_platform())
    # Triton compiles its kernels outside XLA, so JAX's cache keys do not include Triton's version.
    # The keys include the versions of the other compilers.
    compilers = [sys.modules[name].__version__ for name in _COMPILERS if "triton" in kernels]
    decides = (
        *(static, jax.__version__, jax.config.jax_enable_x64, _sources()),
        *(kernels, backends.preferred(), compilers),
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    """Return a hash of the code of `jaxnorm` and `jaxnorm_kernels`.

    The version number is not sufficient, because it does not change when files in a checkout are
    edited.
    """
    packages = map(importlib.resources.files, ("jaxnorm", "jaxnorm_kernels"))
    return hashlib.sha256(b"\0".join(itertools.chain(*map(_code_of, packages)))).hexdigest()


def _code_of(folder: Traversable) -> Iterator[bytes]:
    """Yield the contents of all files with code in a folder, which may be in a zip file.

    Compiled files count as code, because a package may be installed without its sources.
    """
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _code_of(entry)
        elif entry.name.endswith((".py", ".pyc")):
            yield entry.read_bytes()
