"""Calls on arrays that XLA spreads over devices by itself (Auto axes of a mesh).

The partitioner asks what to do with the shards it has in hand (`custom_partitioning`), and gets the
same call on a shard. Without that it would gather what a kernel reads.

The program holds no more of that than the address of a Python function, which differs from process
to process. So JAX's persistent compilation cache misses, or, by a flag of JAX's, leaves the address
out of its keys: then the name of a function in the program tells the calls apart.
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
from jaxnorm.meshes.shards import Factors, Shards

# Modules that the triton implementation has imported, where it can be.
_COMPILERS = ("triton", "jax_triton")


def are_whole(axes: Any) -> bool:
    """Whether arrays are whole where code is lowered: on one device, or inside `jax.shard_map`."""
    if isinstance(axes, mlir.SPMDAxisContext):
        return all(size == 1 or name in axes.manual_axes for name, size in axes.mesh.shape.items())
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def can_partition(axes: Any) -> bool:
    """Whether the partitioner will name the mesh axes of the shards it has.

    On a mesh with Explicit axes, which `jax.sharding.auto_axes` makes automatic in a part of a
    program, it fails: JAX lowers what runs on a shard with that mesh.
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
    """`whole`, which computes a call, on the shards that XLA's partitioner has in hand.

    `call`: the static part, which decides all else. Its `repr` is the same in every process, and of
    another call another one.
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
    """Of a call, and of what makes code of it: our own code is not in the program."""
    kernels = backends.importable(backends.local_platform())
    # Triton's are compiled before the program is; of what compiles others the key itself tells.
    compilers = [sys.modules[name].__version__ for name in _COMPILERS if "triton" in kernels]
    decides = (
        *(static, jax.__version__, jax.config.jax_enable_x64, _sources()),
        *(kernels, backends.preferred(), compilers),
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    """A digest of both packages: in a checkout, more changes than the version's number."""
    files = [
        file
        for package in ("jaxnorm", "jaxnorm_kernels")
        if (spec := importlib.util.find_spec(package)) is not None
        for place in spec.submodule_search_locations or ()
        for file in sorted(Path(place).rglob("*.py"))
    ]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
