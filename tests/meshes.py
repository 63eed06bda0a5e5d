"""Helpers for tests on meshes: shardings, operands, and the collectives of compiled programs."""

import dataclasses
import math
import re

import hlo
import jax
import numpy as np
import pytest
from functions import floats_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from stand_in import Kernels, as_default

KINDS = ["auto", "explicit", "manual"]
#: The mark of tests that need the eight virtual devices that the CPU has in tests.
eight_devices = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices")


@pytest.fixture(name="kernels", params=["xla", "kernel"])
def which_kernels(request):
    """Set the default implementation: XLA's code, or the stand-in `Kernels`.

    The fixture's value is the `Kernels` object, or None for XLA's code.
    """
    if request.param == "xla":
        yield None
        return
    with as_default(Kernels()) as module:
        yield module


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh (the size of each axis), and how x and the parameters are sharded over it."""

    name: str
    mesh: dict[str, int]
    x: P
    params: P = dataclasses.field(default=P())


def mesh_of(case, kind):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    sizes, types = tuple(case.mesh.values()), (axis_type,) * len(case.mesh)
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, tuple(case.mesh), axis_types=types, devices=devices)


def in_shards(arrays, mesh, specs):
    """Shard arrays over a mesh.

    The arrays are converted to NumPy arrays first, because JAX would shard a JAX array by running a
    program on its device.
    """
    return [jax.device_put(np.asarray(a), NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]


def on_mesh(step, operands, specs, mesh, kind):
    """Compile a step of `functions.step_of` for a mesh. Return the program and its operands.

    On Manual axes, each shard has whole parameters, that is, whole operands with a single axis.
    """
    if kind == "manual":
        specs = [P() if a.ndim == 1 else s for a, s in zip(operands, specs)]
        results, _ = jax.eval_shape(step, *operands)
        of_results = [P(*specs[0][: a.ndim]) for a in results]
        outs = of_results, [specs[i] for i in floats_in(operands)]
        step = jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=outs)
    sharded = in_shards(operands, mesh, specs)
    return jax.jit(step).lower(*sharded).compile(), sharded


def collectives(compiled):
    """Return a dict from each kind of collective in the program to the shapes of its results."""
    found = {}
    for each in hlo.collectives(compiled.as_text(), len(jax.devices())):
        found.setdefault(each.name, []).append(re.search(r"\[([\d,]*)\]", each.array)[1])
    return found
