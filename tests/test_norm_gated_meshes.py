"""rms_norm_gated on meshes: rows and columns in shards; what travels; what kernels see."""

import functools
import math

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, in_shards, mesh_of, on_mesh
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

SHAPE = (8, 16, 4, 32)
X, GATE, D = (normal(SHAPE, "float32", seed) for seed in range(3))
SCALE = normal(SHAPE[-1:], "float32", 3, scale=0.3, shift=1.0)
MESH = {"data": 4, "model": 2}
CASES = [
    Case("rows", MESH, P("data")),
    Case("heads", MESH, P("data", None, "model")),
    Case("over two", MESH, P(("data", "model"))),
    Case("replicated", MESH, P()),
    Case("columns", MESH, P("data", None, None, "model")),
    Case("scale in shards", MESH, P("data"), P("model")),
]
# Inside `jax.shard_map` a shard of columns is a row of its own, and a scale is whole.
OF_SHARDS = CASES[:4]
each_order = pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
each_case_and_kind = pytest.mark.parametrize(
    ("case", "kind"),
    [(c, k) for c in CASES for k in KINDS if k != "manual" or c in OF_SHARDS],
    ids=lambda a: getattr(a, "name", a),
)


def step(before):
    def run(d, *operands):
        function = functools.partial(jaxnorm.rms_norm_gated, norm_before_gate=before)
        y, vjp = jax.vjp(function, *operands)
        return y, *vjp(d)

    return run


@functools.cache
def on_one_device(before):
    return analyse(step(before), D, X, GATE, SCALE)


def check(results, before):
    assert_analysed(results, on_one_device(before))


@each_order
@each_case_and_kind
def test_meshes(case, kind, before):
    """All arrays lie as x does; sums and the scale travel."""
    compiled, sharded = on_mesh(step(before), (D, X, GATE, SCALE), case, kind)
    results = compiled(*sharded)
    check(results, before)
    # On automatic axes XLA may bring x to where the scale is.
    for a in results[:3] if case.name != "scale in shards" or kind != "auto" else ():
        assert a.sharding.is_equivalent_to(sharded[1].sharding, a.ndim)
    sizes = [
        math.prod(map(int, filter(None, shape.split(","))))
        for shapes in collectives(compiled).values()
        for shape in shapes
    ]
    # The gradient of the scale, and of split rows sums of each.
    assert max(sizes, default=0) <= max(SHAPE[-1], 3 * X.size // SHAPE[-1])
    assert bool(sizes) == (case.name != "replicated")


@each_order
@each_case_and_kind
def test_kernels_on_shards(case, kind, before):
    """Whole rows alone, and as many as a shard has."""
    on_one_device(before)  # by no stand-in
    with as_default(Kernels()) as kernels:
        compiled, sharded = on_mesh(step(before), (D, X, GATE, SCALE), case, kind)
        check(compiled(*sharded), before)
        if case.name == "columns":
            assert not kernels.shapes
        else:
            rows = X.size // SHAPE[-1] // case.shards
            assert kernels.shapes == [(rows, SHAPE[-1])] * 2


@each_order
def test_a_gate_that_lies_otherwise(before):
    """On explicit axes it is brought to where x is, and its gradient back."""
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    specs = (P("data"), P("data"), P(None, "model"), P())
    sharded = in_shards((D, X, GATE, SCALE), mesh, specs)
    results = jax.jit(step(before))(*sharded)
    check(results, before)
    y, dx, dgate, _ = (jax.typeof(a).sharding.spec[:2] for a in results)
    assert (y, dx, dgate) == (("data", None), ("data", None), (None, "model"))


@each_order
@pytest.mark.parametrize("place", ["replicated", "uncommitted", "x", "others"])
def test_inside_set_mesh(place, before):
    """Arrays that name no axis of the mesh, or that are not committed to it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, P())
    arrays = [
        jax.device_put(a, whole)
        if place == "replicated" or ((place == "x") == (i < 2) and place != "uncommitted")
        else a
        for i, a in enumerate((D, X, GATE, SCALE))
    ]
    on_one_device(before)
    with as_default(Kernels()) as kernels, jax.set_mesh(mesh):
        check(jax.jit(step(before))(*arrays), before)
        assert kernels.shapes == [(X.size // SHAPE[-1], SHAPE[-1])] * 2


@each_order
def test_groups_on_a_mesh(before):
    """Mamba 2's: each device has its groups, whose gradient is the sum over rows alone."""
    scale = normal(SHAPE[-2:], "float32", 4, scale=0.3, shift=1.0)
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    specs = (*[P("data", None, "model")] * 3, P("model"))
    sharded = in_shards((D, X, GATE, scale), mesh, specs)
    assert_computes(jax.jit(step(before))(*sharded), step(before), D, X, GATE, scale)
