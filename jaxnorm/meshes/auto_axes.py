"""Calls on arrays that XLA spreads over devices by itself (Auto axes of a mesh).

The partitioner asks what to do with the shards it has in hand (`custom_partitioning`), and gets the
same call on a shard. Without that it would gather what a kernel reads.

The program holds no more of that than the address of a Python function, which differs from process
to process. So JAX's persistent compilation cache misses, or, by a flag of JAX's, leaves the address
out of its keys: then the name of a function in the program tells the calls apart.
"""

import contextlib
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call, Run
from jaxnorm.meshes.shards import Layout, on_shards
from jaxnorm_kernels.operations import PARAMETERS

Bind = Callable[..., Any]

# Modules that the triton implementation has imported, where it can be.
_COMPILERS = ("triton", "jax_triton")


def needs_devices(primitive: Any) -> None:
    """Has JAX say, when it lowers `primitive`, for which devices.

    JAX's own custom_partitioning asks for it in this way; there is no public one. Without it
    nothing breaks: `can_partition` is then False, and XLA's code runs.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


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


def partitioned(call: Call, bind: Bind) -> Run:
    """The call, partitioned as its first array is; `bind` makes the call on a shard."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        kinds = call.operand_kinds, call.result_kinds
        shapes = [a.shape for a in arrays], [call.view.shape_of(kind) for kind in kinds[1]]

        def partition(mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
            del results
            layout = Layout.of(operands[0].sharding.spec, call.view)
            layout.check(call.function, mesh)
            operand_shardings, result_shardings = (
                [NamedSharding(mesh, layout.spec(*each)) for each in zip(*side)]
                for side in zip(kinds, shapes)
            )
            run_on_shards = on_shards(call, layout, bind)
            return mesh, run_on_shards, result_shardings, tuple(operand_shardings)

        whole = asks_partitioner(call, call.xla, partition, **_propagation(call, kinds, shapes))
        return whole(*arrays)

    return run


def asks_partitioner(
    static: Any, run: Run, partition: Callable[..., Any], **propagation: Any
) -> Run:
    """`run`, which is partitioned as `partition` says; `propagation` says how shardings spread.

    `static`: all else that decides what `partition` returns. Its `repr` is the same in every
    process, and of another call another one.
    """

    @custom_partitioning
    def spread(*arrays: jax.Array) -> list[jax.Array]:
        return run(*arrays)

    spread.def_partition(partition, **propagation)

    def named(*arrays: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = spread(*arrays)
        return results

    named.__name__ = f"jaxnorm_{_digest(static)}"
    return jax.jit(named)


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


def _propagation(call: Call, kinds: Any, shapes: Any) -> dict[str, Any]:
    """Shardy's rule: axis i of x is `xi` everywhere.

    Parameters come whole, as small as they are: however they are stored, x stays as it is. Their
    gradients go wherever they are wanted.
    """

    def factors(prefix: str, kinds: Any, shapes: Any) -> tuple[str, list[str]]:
        unshared: list[str] = []
        arrays = []
        for kind, shape in zip(kinds, shapes):
            names = [f"x{axis}" for axis in call.view.axes_of(kind)]
            for i, size in enumerate(shape):
                if kind in PARAMETERS or size == 1:
                    names[i] = f"{prefix}{len(unshared)}"
                    unshared.append(names[i])
            arrays.append(" ".join(names))
        return ", ".join(arrays), unshared

    operands, whole = factors("p", kinds[0], shapes[0])
    results, _ = factors("g", kinds[1], shapes[1])
    return {
        "sharding_rule": f"{operands} -> {results}",
        "need_replication_factors": tuple(whole),
    }
