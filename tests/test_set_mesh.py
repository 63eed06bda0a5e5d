"""Calls inside `jax.set_mesh`: arrays that are not sharded, and batches that a mesh axis splits.

Frameworks set a mesh even on a single device. Arrays are then replicated over the mesh, or
uncommitted; the types of uncommitted arrays do not contain the mesh.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from functions import (
    BASIC,
    FUNCTIONS,
    Sizes,
    floats_in,
    gradients,
    of_floats,
    operands_of,
    step_of,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import eight_devices, in_shards
from pairs import pairwise
from program_error import analyse, assert_analysed
from stand_in import Kernels, as_default

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

ROWS, COLS, CLASSES = 16, 64, 1000
SIZES = Sizes((8, 2), COLS, CLASSES)


@functools.cache
def on_one_device(name):
    return analyse(step_of(name), *operands_of(name, sizes=SIZES))


def mesh_of(axes):
    """Return a mesh, given a dict from each axis to its size and the kind of the axis."""
    sizes, kinds = zip(*axes.values())
    types = tuple(getattr(AxisType, kind) for kind in kinds)
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, tuple(axes), axis_types=types, devices=devices)


def placed(operands, mesh, place):
    """Shard or replicate some operands over the mesh, and leave the others uncommitted.

    `place` names the operands to replicate: all for "replicated", the first for "first", all but
    the first for "others", and none for "uncommitted". For "split", the first operand is split over
    the first Explicit axis of the mesh.
    """

    def is_committed(i):
        return place == "replicated" or (place == "first" and not i) or (place == "others" and i)

    arrays = [
        in_shards([a], mesh, [P()])[0] if is_committed(i) else a for i, a in enumerate(operands)
    ]
    if place == "split":
        axis = mesh.axis_names[mesh.axis_types.index(AxisType.Explicit)]
        arrays[:1] = in_shards(arrays[:1], mesh, [P(axis)])
    return arrays


def inside_last_axis(function):
    """Run `function` in `jax.shard_map` over the mesh axis "last", with whole operands."""
    return jax.jit(jax.shard_map(function, in_specs=P(), out_specs=P(), axis_names={"last"}))


def without_jit(function):
    def run(*operands):
        with jax.disable_jit():
            return function(*operands)

    return run


class Way(NamedTuple):
    """A way to run a function.

    Attributes:
      mesh: the size and the kind of each axis of the mesh.
      wrapped: a function that takes the function of the operands, and returns the function to call.
      has_kernels: True if kernels must run, False if none may run, and None if either is right.
      has_gradients: True if gradients are also computed.
    """

    mesh: dict[str, tuple[int, str]]
    wrapped: Callable[..., Any]
    has_kernels: bool | None = None
    has_gradients: bool = True


EIGHT = {"data": (8, "Explicit")}
WITH_EACH_KIND = {"data": (2, "Auto"), "model": (2, "Explicit"), "last": (2, "Explicit")}
WAYS = {
    "eight": Way(EIGHT, jax.jit, True),
    "one": Way({"data": (1, "Explicit")}, jax.jit, True),
    # With an Auto axis of several devices, kernels cannot run on the mesh, so XLA's code runs.
    "explicit-auto": Way({"data": (4, "Explicit"), "model": (2, "Auto")}, jax.jit, False),
    "auto-explicit": Way({"data": (4, "Auto"), "model": (2, "Explicit")}, jax.jit, False),
    "outside of jit": Way(EIGHT, lambda f: f, True, has_gradients=False),
    "without jit": Way(EIGHT, without_jit, has_gradients=False),
    # XLA's code runs, because XLA cannot split kernels.
    "auto_axes": Way(EIGHT, lambda f: jax.jit(jax.sharding.auto_axes(f, out_sharding=P()))),
    # A nested `jax.shard_map` over the Explicit axis before a Manual axis would abort the process.
    "before a manual axis": Way(WITH_EACH_KIND, inside_last_axis),
}
PLACES = ("replicated", "uncommitted", "first", "others", "split")


@eight_devices
@pytest.mark.parametrize(("name", "way", "place"), pairwise(BASIC, [*WAYS], PLACES))
def test_values(name, way, place):
    its, operands = WAYS[way], operands_of(name, sizes=SIZES)
    mesh, (values, derivatives) = mesh_of(its.mesh), on_one_device(name)
    step = step_of(name)
    if not its.has_gradients:
        step, derivatives = lambda *a: (jax.tree.leaves(FUNCTIONS[name].ours(*a)), []), []
    with as_default(Kernels()) as kernels, jax.set_mesh(mesh):
        results = its.wrapped(step)(*placed(operands, mesh, place))
        assert_analysed(results, (values, derivatives))
        if its.has_kernels is not None:
            has_kernel = name not in ("gated_linear", "activation_linear")
            assert bool(kernels.shapes) == (its.has_kernels and has_kernel)


@eight_devices
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_mesh_without_devices(kind, monkeypatch):
    """Programs for an `AbstractMesh` have kernels if its axes are Explicit, and none if Auto.

    With Auto axes, lowering may fail on a machine with several devices: a call may need a
    partitioning rule, and such a rule needs the devices of the mesh.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 8 if kind == "Explicit" else 1)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(getattr(AxisType, kind),))
    x = jax.ShapeDtypeStruct((ROWS, COLS), "float32", sharding=NamedSharding(mesh, P("data")))
    with as_default(Kernels()) as kernels:
        jax.jit(jaxnorm.rms_norm).trace(x).lower(lowering_platforms=("cpu",))
        assert kernels.shapes == ([(ROWS // 8, COLS)] if kind == "Explicit" else [])


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES[:4])
@pytest.mark.parametrize("name", BASIC)
def test_kernels_on_a_mesh_of_gpus(name, place):
    """Kernels run on a mesh of all GPUs of this machine, even if there is only one."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    run, operands, expected = step_of(name), operands_of(name, sizes=SIZES), on_one_device(name)
    with jax.set_mesh(mesh):
        arrays = placed(operands, mesh, place)
        compiled = jax.jit(run).lower(*arrays).compile()
        assert_analysed(compiled(*arrays), expected)
    # The program has as many kernels as a program without a mesh.
    alone = jax.jit(run).lower(*operands).compile()
    assert compiled.as_text().count("mosaic_gpu") == alone.as_text().count("mosaic_gpu")


# --------------------------------------------------------------- batches that a mesh axis splits

BATCH = 8
LINEAR = ["linear_softmax_cross_entropy", "linear_softmax_cross_entropy of rows"]
LINEAR += ["linear_log_prob_and_entropy", "rms_norm_linear"]
# Functions of a batched function and its operands.
RUNS = {
    "gradients of all": lambda f, *a: gradients(f, (*range(len(a)),))(*a),
    "tangents": lambda f, *a: jax.jvp(f, a, a)[1],
}


@functools.cache
def of_batch(name, batched, run):
    """Return a program of a batched function, its operands, and its results with bounds.

    `batched` has the indices of the operands with a batch axis: 0 for x, 1 for the weight.
    """
    operands = operands_of(name, sizes=SIZES)
    dims = [0 if i in batched else None for i in range(len(operands))]
    factors = (1 + np.arange(BATCH) / 8).astype(np.float32)
    operands = [a if d is None else np.multiply.outer(factors, a) for a, d in zip(operands, dims)]
    if run == "gradients of each":
        program = jax.vmap(step_of(name), dims)
    else:
        function = of_floats(jax.vmap(FUNCTIONS[name].ours, dims), operands)
        operands = [operands[i] for i in floats_in(operands)]
        program = functools.partial(RUNS[run], function)
    return program, operands, analyse(program, *operands)


def split(operands, batched, weight_over):
    """Return the shardings of the operands: x, the weight, and others that are replicated."""
    x = P("data") if 0 in batched else P("model")
    weight = weight_over if 1 in batched else P(*weight_over[1:])
    return [x, weight, *[P()] * (len(operands) - 2)]


@eight_devices
@pytest.mark.parametrize(
    ("name", "batched", "run", "weight_over"),
    pairwise(
        LINEAR,
        [(0,), (1,), (0, 1)],
        ["gradients of each", *RUNS],
        [P("data"), P("data", None, "model"), P("data", "model")],
    ),
)
def test_a_batch_in_shards(name, batched, run, weight_over):
    program, operands, expected = of_batch(name, batched, run)
    mesh = mesh_of({"data": (4, "Explicit"), "model": (2, "Explicit")})
    with jax.set_mesh(mesh):
        sharded = in_shards(operands, mesh, split(operands, batched, weight_over))
        assert_analysed(jax.jit(program)(*sharded), expected)


@eight_devices
def test_a_batch_in_shards_before_a_manual_axis():
    program, operands, expected = of_batch(LINEAR[0], (0, 1), "gradients of each")
    mesh = mesh_of({"data": (2, "Explicit"), "model": (2, "Auto"), "last": (2, "Auto")})
    with jax.set_mesh(mesh):
        inside = inside_last_axis(program)
        sharded = in_shards(operands[:2], mesh, [P("data")] * 2)
        assert_analysed(inside(*sharded, *operands[2:]), expected)
