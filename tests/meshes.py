"""Helpers for tests on meshes: shardings, operands, and the collectives of compiled programs."""

import dataclasses
import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program_error import analyse, assert_analysed

import jaxnorm
from jaxnorm_kernels import operations
from jaxnorm_kernels.operations import OPERATIONS

SHAPE = (8, 16, 64)
FUNCTIONS = ["softmax", "log_softmax", "rms_norm", "layer_norm"]
KINDS = ["auto", "explicit", "manual"]
#: The mark of tests that need the eight virtual devices that the CPU has in tests.
eight_devices = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices")


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh (the size of each axis), and how x and the parameters are sharded over it."""

    name: str
    mesh: dict[str, int]
    x: P
    params: P = dataclasses.field(default=P())

    @property
    def shards(self):
        return math.prod(self.mesh[a] for a in jax.tree.leaves(tuple(self.x)))


def step(name, save="output", **options):
    """Return a function of (cotangent, x, *params) that computes `name` and its gradients."""

    def function(x, *params):
        if OPERATIONS[operations.FUNCTIONS[name].op].family == "softmax":
            return getattr(jaxnorm, name)(x, **options)
        return getattr(jaxnorm, name)(x, *params, save=save, **options)

    def run(d, *operands):
        y, vjp = jax.vjp(function, *operands)
        return y, *vjp(d)

    return run


def operands(name, shape=SHAPE, dtype="float32"):
    """Return the cotangent, x and the parameters (scale, bias) of a function."""
    rng = np.random.default_rng(0)
    params = {"rms_norm": 1, "layer_norm": 2}.get(name, 0)
    x, d = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return d, x, *(jnp.asarray(rng.normal(size=shape[-1:]), jnp.float32) for _ in range(params))


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


def on_mesh(function, arrays, case, kind):
    """Compile a function for the mesh of a case. Return the program and its sharded operands.

    Results with x's shape are sharded like x.
    """
    mesh = mesh_of(case, kind)
    are_arrays = [a.shape == arrays[1].shape for a in arrays]
    specs = [case.x if is_array else case.params for is_array in are_arrays]
    if kind == "manual":
        shapes = jax.tree.leaves(jax.eval_shape(function, *arrays))
        out_specs = [case.x if a.shape == arrays[1].shape else P() for a in shapes]
        inner = function

        def run(*shards):
            return jax.tree.leaves(inner(*shards))

        specs = [case.x if is_array else P() for is_array in are_arrays]
        function = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs)
    sharded = in_shards(arrays, mesh, specs)
    return jax.jit(function).lower(*sharded).compile(), sharded


def collectives(compiled):
    """Return a dict from each kind of collective in the program to the shapes of its results."""
    found = {}
    for each in hlo.collectives(compiled.as_text(), len(jax.devices())):
        found.setdefault(each.name, []).append(re.search(r"\[([\d,]*)\]", each.array)[1])
    return found


@functools.cache
def expected_of(name, save, shape):
    """Return the results of `step` on one device, each with a bound on its rounding error."""
    return analyse(step(name, save), *operands(name, shape))


def check_values(compiled, sharded, name, save="output"):
    """Assert that a program on several devices has the same results as `step` on one device.

    The program, `compiled`, is `step` compiled for a mesh. It runs on the operands `sharded`, which
    are split over the mesh. The results may differ by the bounds that `expected_of` returns.
    """
    assert_analysed(compiled(*sharded), expected_of(name, save, sharded[1].shape))
