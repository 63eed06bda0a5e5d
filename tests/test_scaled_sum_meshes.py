"""add_layer_norm with a gate on meshes: rows and columns in shards; what kernels see."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, mesh_of, on_mesh
from program_error import analyse, assert_analysed, assert_computes
from stand_in import as_default
from test_norm import normal
from test_set_mesh import Kernels

import jaxnorm

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile"),
]

SHAPE = (8, 16, 32)
D, X, R = (normal(SHAPE, "float32", seed) for seed in range(3))
MESH = {"data": 4, "model": 2}
CASES = [
    Case("rows", MESH, P("data")),
    Case("both", MESH, P("data", "model")),
    Case("over two", MESH, P(("data", "model"))),
    Case("replicated", MESH, P()),
    Case("columns", MESH, P("data", None, "model")),
]
# How the norm's parameters and the gate lie: those of each sample with the rows, those of all rows
# in shards for storage (FSDP).
PARAMS = {
    "whole": ((32,), (32,), P()),
    "samples": ((8, 1, 32), (8, 1, 32), P("data")),
    "FSDP": ((32,), (32,), P("model")),
    "gate of samples": ((32,), (8, 1, 32), P()),
}
# Inside `jax.shard_map` a shard of columns is a row of its own, and has its own samples'.
OF_SHARDS = ("whole", "FSDP")
each_case = pytest.mark.parametrize(
    ("case", "params", "kind"),
    [
        (case, params, kind)
        for case in CASES
        for params in PARAMS
        for kind in KINDS
        if kind != "manual" or (case.name != "columns" and params in OF_SHARDS)
    ],
    ids=lambda a: getattr(a, "name", a),
)


def step(d, *operands):
    def function(x, residual, scale, bias, gate):
        return jaxnorm.add_layer_norm(x, residual, scale, bias, gate=gate)

    (y, h), vjp = jax.vjp(function, *operands)
    return y, h, *vjp((d, jnp.cos(d)))


@functools.cache
def operands_of(params):
    of_norm, of_gate, _ = PARAMS[params]
    seeds = zip((of_norm, of_norm, of_gate), (3, 4, 5), (1.0, 0.0, 0.5))
    return D, X, R, *(normal(shape, "float32", seed, 0.3, shift) for shape, seed, shift in seeds)


@functools.cache
def on_one_device(params):
    return analyse(step, *operands_of(params))


def check(results, params):
    assert_analysed(results, on_one_device(params))


def placed(params, case):
    """The case with the parameters' place; inside `jax.shard_map` they are whole."""
    return Case(case.name, case.mesh, case.x, PARAMS[params][2])


@each_case
def test_meshes(case, params, kind):
    """All arrays lie as x does; sums and parameters travel."""
    compiled, sharded = on_mesh(step, operands_of(params), placed(params, case), kind)
    results = compiled(*sharded)
    check(results, params)
    # On automatic axes XLA may bring x to where the parameters are.
    for a in results[:4] if params == "whole" or kind != "auto" else ():
        assert a.sharding.is_equivalent_to(sharded[1].sharding, a.ndim)
    if params == "whole":
        assert (collectives(compiled) == {}) == (case.name == "replicated")


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_on_shards(case, kind, params):
    """Whole rows alone, and as many as a shard has."""
    on_one_device(params)  # by no stand-in
    with as_default(Kernels()) as kernels:
        compiled, sharded = on_mesh(step, operands_of(params), placed(params, case), kind)
        check(compiled(*sharded), params)
    if case.name == "columns":
        assert not kernels.shapes
    elif params == "whole":
        assert kernels.shapes == [(X.size // SHAPE[-1] // case.shards, SHAPE[-1])] * 2


def test_samples_with_their_parameters_inside_shard_map():
    mesh = mesh_of(Case("", MESH, P()), "manual")
    specs = (P("data"),) * 6
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"),) * 7)
    check(jax.jit(run)(*operands_of("samples")), "samples")


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_where_the_norm_is_not_used(kind):
    """The gradients of h alone, in plain JAX: sums over the devices that share a gate."""

    def of_h(d, *operands):
        def function(x, residual, gate):
            return jaxnorm.add_layer_norm(x, residual, gate=gate)[1]

        _, vjp = jax.vjp(function, *operands)
        return vjp(d)

    operands = (*operands_of("gate of samples")[:3], operands_of("gate of samples")[-1])
    case = Case("", MESH, P("data", "model"), P("data"))
    compiled, sharded = on_mesh(of_h, operands, case, kind)

    def plain(d, x, _, gate):
        return gate * d, d, (d * x).sum(1, keepdims=True)

    assert_computes(compiled(*sharded), plain, *operands)


@pytest.mark.parametrize("place", ["replicated", "uncommitted"])
def test_inside_set_mesh(place):
    """Arrays that name no axis of the mesh, or that are not committed to it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    operands = operands_of("samples")
    if place == "replicated":
        operands = [jax.device_put(a, NamedSharding(mesh, P())) for a in operands]
    on_one_device("samples")
    with as_default(Kernels()) as kernels, jax.set_mesh(mesh):
        check(jax.jit(step)(*operands), "samples")
        assert kernels.shapes == [(X.size // SHAPE[-1], SHAPE[-1])] * 2
