"""Calls on arrays that XLA's partitioner shards automatically (Auto axes of a mesh).

`custom_partitioning` gives the partitioner the same call on a shard. Otherwise, the partitioner
would gather all operands of a kernel.

The program contains this rule only as the address of a Python function, which differs between
processes. So JAX's persistent compilation cache misses, unless a JAX flag removes such addresses
from the cache's keys. With that flag, calls are distinguished by the name of a function in the
program, which contains a digest of the call.
"""

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from jaxnorm.calls import backends
from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes.sharding import Factors, Shards

# Modules that compile Triton kernels. They are loaded if the triton implementation can be imported.
_COMPILERS = ("triton", "jax_triton")


def are_whole(axes: Any) -> bool:
    """Return True if the code being lowered sees whole arrays: one device, or `jax.shard_map`."""
    if isinstance(axes, mlir.SPMDAxisContext):
        return all(size == 1 or name in axes.manual_axes for name, size in axes.mesh.shape.items())
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def can_partition(axes: Any) -> bool:
    """Return True if the partitioner can pass the mesh axes of its shards to our rule.

    The partitioner cannot if the mesh has Explicit axes that `jax.sharding.auto_axes` makes
    automatic in part of a program: JAX would lower the code of a shard with the Explicit mesh, and
    fail.
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
    """Return `whole`, which computes a call, with a partitioning rule for its shards.

    `call` is the static part, which determines everything else. Its `repr` must be the same in
    every process, and differ between calls.
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
    """Return a digest of a call and of everything else that determines its code.

    The program itself does not contain these. The digest, in a function's name, makes JAX's
    persistent cache distinguish the programs.
    """
    kernels = backends.importable(backends.local_platform())
    # Triton compiles its kernels itself. JAX's cache keys include the versions of other compilers.
    compilers = [sys.modules[name].__version__ for name in _COMPILERS if "triton" in kernels]
    decides = (
        *(static, jax.__version__, jax.config.jax_enable_x64, _sources()),
        *(kernels, backends.preferred(), compilers),
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    """Return a digest of the source files of both packages, which change in a checkout."""
    files = [
        file
        for package in ("jaxnorm", "jaxnorm_kernels")
        if (spec := importlib.util.find_spec(package)) is not None
        for place in spec.submodule_search_locations or ()
        for file in sorted(Path(place).rglob("*.py"))
    ]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
