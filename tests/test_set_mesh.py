"""Calls inside `jax.set_mesh`: arrays that are not sharded, and batches that a mesh axis splits.

Frameworks set a mesh even on a single device. Arrays are then replicated over the mesh, or
uncommitted; the types of uncommitted arrays do not contain the mesh.
"""

import functools

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


def has_kernel(name):
    return name not in ("gated_linear", "activation_linear")


MESHES = {
    "eight": ((8,), ("data",), (AxisType.Explicit,)),
    "one": ((1,), ("data",), (AxisType.Explicit,)),
    "explicit-auto": ((4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto)),
    "auto-explicit": ((4, 2), ("data", "model"), (AxisType.Auto, AxisType.Explicit)),
}
PLACES = ("replicated", "uncommitted", "first", "others")


def with_gradients(name):
    """Return two things: a function that computes results and gradients, and its operands.

    `name` is an entry of `FUNCTIONS`.
    """
    return step_of(name), operands_of(name, sizes=SIZES)


@functools.cache
def on_one_device(name):
    return analyse(step_of(name), *operands_of(name, sizes=SIZES))


def mesh_of(name):
    sizes, names, types = MESHES[name]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def placed(operands, mesh, place):
    """Replicate some operands over the mesh and leave the others uncommitted.

    `place` names the operands to replicate: all for "replicated", the first for "first", all but
    the first for "others", and none for "uncommitted".
    """

    def is_committed(i):
        return place == "replicated" or (place == "first" and not i) or (place == "others" and i)

    whole = NamedSharding(mesh, P())
    return [jax.device_put(a, whole) if is_committed(i) else a for i, a in enumerate(operands)]


@eight_devices
@pytest.mark.parametrize(("name", "mesh", "place"), pairwise(BASIC, [*MESHES], PLACES))
def test_no_axis_is_named(name, mesh, place):
    expected, (run, operands) = on_one_device(name), with_gradients(name)
    devices = mesh_of(mesh)
    with as_default(Kernels()) as kernels, jax.set_mesh(devices):
        assert_analysed(jax.jit(run)(*placed(operands, devices, place)), expected)
        # In this test, a mesh with two axes has an Auto axis of several devices. Kernels cannot run
        # on such a mesh, so XLA's code runs.
        assert bool(kernels.shapes) == (len(MESHES[mesh][0]) == 1 and has_kernel(name))


@eight_devices
@pytest.mark.parametrize("place", ["replicated", "uncommitted"])
@pytest.mark.parametrize("name", BASIC)
def test_outside_of_jit(name, place):
    mesh = mesh_of("eight")
    function, operands = FUNCTIONS[name].ours, operands_of(name, sizes=SIZES)
    expected = analyse(function, *operands)
    with as_default(Kernels()) as kernels, jax.set_mesh(mesh):
        assert_analysed(function(*placed(operands, mesh, place)), expected)
        assert bool(kernels.shapes) == has_kernel(name)


@eight_devices
@pytest.mark.parametrize("name", BASIC)
def test_a_part_with_automatic_axes(name):
    """Inside `jax.sharding.auto_axes` on an Explicit mesh, XLA's code runs.

    XLA cannot split kernels.
    """
    run, operands = with_gradients(name)
    mesh = mesh_of("eight")
    part, expected = jax.sharding.auto_axes(run, out_sharding=P()), on_one_device(name)
    first, *others = operands
    with as_default(Kernels()), jax.set_mesh(mesh):
        for spec in (P(), P("data")):
            arrays = *in_shards([first], mesh, [spec]), *others
            assert_analysed(jax.jit(part)(*arrays), expected)


def inside_last_axis(function, mesh):
    """Run `function` in `jax.shard_map` over the mesh axis "last", with whole operands."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"last"})
    )


def mesh_with_each_kind(kinds="Auto Explicit Explicit"):
    types = [getattr(AxisType, kind) for kind in kinds.split()]
    return jax.make_mesh((2, 2, 2), ("data", "model", "last"), axis_types=tuple(types))


@eight_devices
@pytest.mark.parametrize("name", BASIC)
def test_explicit_axes_before_a_manual_one(name):
    """A call runs in the user's `jax.shard_map` over the last axis of a mesh with Auto axes.

    A nested `jax.shard_map` over the Explicit axis before it would abort the process.
    """
    run, (first, *others) = with_gradients(name)
    mesh, expected = mesh_with_each_kind(), on_one_device(name)
    with jax.set_mesh(mesh):
        inside = inside_last_axis(run, mesh)
        assert_analysed(inside(*in_shards([first], mesh, [P("model")]), *others), expected)


@eight_devices
@pytest.mark.parametrize("over", [P(), P("data")], ids=["replicated", "split"])
@pytest.mark.parametrize("name", BASIC)
def test_what_is_not_compiled(name, over):
    """`jax.disable_jit` works inside a mesh, for split and for replicated rows."""
    # Every iteration of a loop compiles its operations again. So there are only 8 rows, for which
    # the loops of linear layers have three iterations.
    sizes = Sizes((8, 1), COLS, CLASSES)
    function, operands = FUNCTIONS[name].ours, operands_of(name, sizes=sizes)
    expected = analyse(function, *operands)
    mesh = mesh_of("eight")
    first, *others = operands
    with jax.set_mesh(mesh), jax.disable_jit():
        assert_analysed(
            function(jax.device_put(first, NamedSharding(mesh, over)), *others), expected
        )


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
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BASIC)
def test_kernels_on_a_mesh_of_gpus(name, place):
    """Kernels run on a mesh of all GPUs of this machine, even if there is only one."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    (run, operands), expected = with_gradients(name), on_one_device(name)
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
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded = in_shards(operands, mesh, split(operands, batched, weight_over))
        assert_analysed(jax.jit(program)(*sharded), expected)


@eight_devices
def test_a_batch_in_shards_before_a_manual_axis():
    program, operands, expected = of_batch(LINEAR[0], (0, 1), "gradients of each")
    mesh = mesh_with_each_kind("Explicit Auto Auto")
    with jax.set_mesh(mesh):
        inside = inside_last_axis(program, mesh)
        sharded = in_shards(operands[:2], mesh, [P("data")] * 2)
        assert_analysed(inside(*sharded, *operands[2:]), expected)
