"""rms_norm_rope on meshes: rows, positions and heads in shards; what travels; what kernels see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, in_shards, mesh_of
from norm_rope_cases import ALL, BATCH, COLS, HEADS, LENGTH, SCALE, X, tables
from program_error import analyse, assert_analysed
from stand_in import StandIn, as_default

import jaxnorm
from jaxnorm_kernels import xla

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile"),
]

MESH = {"data": 2, "seq": 2, "model": 2}
# How x and the tables lie.
CASES = {
    "rows": (P("data"), P()),
    "over two": (P(("data", "model")), P()),
    "length": (P("data", "seq"), P("seq")),
    "heads": (P("data", None, "model"), P()),
    "all but columns": (P("data", "seq", "model"), P("seq")),
    "replicated": (P(), P()),
    "tables whole": (P("data", "seq"), P()),
    "tables split": (P("data"), P("seq")),
    "tables otherwise": (P("seq", "data"), P("seq")),
    "columns": (P("data", None, None, "model"), P()),
    "columns and pairs": (P(None, "seq", None, "model"), P("seq", None, "model")),
}
# Inside `jax.shard_map` a shard is an array of its own: of whole heads, with their positions.
OF_SHARDS = ("rows", "over two", "length", "heads", "all but columns", "replicated")


def step(d, *operands):
    y, vjp = jax.vjp(jaxnorm.rms_norm_rope, *operands)
    return y, *vjp(d)


def step_without_tables(d, x, scale, cos, sin):
    y, vjp = jax.vjp(lambda x, scale: jaxnorm.rms_norm_rope(x, scale, cos, sin), x, scale)
    return y, *vjp(d)


@functools.cache
def on_one_device():
    """Of `step`; that of `step_without_tables` are the first three."""
    return analyse(step, jnp.cos(X), *ALL)


def on_mesh(function, name, kind):
    """The compiled function on sharded operands, and those."""
    x_spec, t_spec = CASES[name]
    mesh = mesh_of(Case("", MESH, P()), kind)
    specs = (x_spec, x_spec, P(), t_spec, t_spec)
    if kind == "manual":
        results = (x_spec, x_spec, P(), t_spec, t_spec)
        results = results[: len(jax.eval_shape(function, jnp.cos(X), *ALL))]
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results)
    arrays = in_shards((jnp.cos(X), *ALL), mesh, specs)
    return jax.jit(function).lower(*arrays).compile(), arrays


each_case_and_kind = pytest.mark.parametrize(
    ("case", "kind"),
    [(c, k) for c in CASES for k in KINDS if k != "manual" or c in OF_SHARDS],
)


@each_case_and_kind
def test_meshes(case, kind):
    """Values and gradients, also of the tables; y and dx lie as x does."""
    compiled, sharded = on_mesh(step, case, kind)
    results = compiled(*sharded)
    assert_analysed(results, on_one_device())
    for a in results[:2]:
        # Of automatic axes XLA may bring x to where the tables are, or leave its columns whole.
        if kind != "auto" or case in OF_SHARDS:
            assert a.sharding.is_equivalent_to(sharded[1].sharding, a.ndim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", OF_SHARDS)
def test_what_travels(case, kind):
    """Where heads are whole: the sum of the scale's gradient, and nothing else."""
    compiled, _ = on_mesh(step_without_tables, case, kind)
    found = collectives(compiled)
    assert {*found} <= {"all-reduce"}
    assert {*found.get("all-reduce", [])} <= {str(COLS)}
    assert bool(found) == (case != "replicated")


class Kernels(StandIn):
    """A stand-in, which sees rows and the tables as `NormOptions.table_rows` says."""

    def __init__(self):
        super().__init__()
        self.tables = []

    def __getattr__(self, name):
        function = getattr(xla, name)

        def launch(arrays, *rest):
            (x, *_), spec = arrays, rest[-1]
            assert x.shape == (spec.rows, spec.cols), "not seen as rows"
            assert arrays.cos.shape == (spec.norm.table_rows.rows, spec.norm.rotated // 2)
            self.shapes.append(x.shape)
            self.tables.append(arrays.cos.shape)
            cos, sin = (of_rows(table, spec.norm.table_rows) for table in (arrays.cos, arrays.sin))
            return function(arrays._replace(cos=cos, sin=sin), *rest)

        return launch

    def why_unsupported(self, spec):
        return "plain JAX's" if spec.plain else None


def of_rows(table, shared):
    """A table for each row, of one that `shared` describes."""
    sizes = [size if has_axis else 1 for size, has_axis in shared.segments]
    whole = [size for size, _ in shared.segments]
    table = jnp.broadcast_to(table.reshape(*sizes, -1), (*whole, table.shape[-1]))
    return table.reshape(-1, table.shape[-1])


@each_case_and_kind
def test_kernels_on_shards(case, kind):
    """Whole heads, whatever the mesh, and of each table what the rows of a shard have."""
    expected = on_one_device()[:3]  # by no stand-in
    with as_default(Kernels()) as kernels:
        compiled, sharded = on_mesh(step_without_tables, case, kind)
        assert_analysed(compiled(*sharded), expected)
        if kind == "auto" and case not in OF_SHARDS:
            return  # Of automatic axes XLA may split x as the tables are.
        shards = {None: 1, ("data", "model"): 4}
        over = [shards.get(axes, 2) for axes in CASES[case][0][:3]]
        length = LENGTH // (over[1] if len(over) > 1 else 1)
        assert kernels.shapes[:2] == [(BATCH * LENGTH * HEADS // int(np.prod(over)), COLS)] * 2
        assert kernels.tables[:2] == [(length, COLS // 2)] * 2


@pytest.mark.parametrize(
    "lead", [(8, 1), (), (4, 8, 1), (1, 1, 1), (4, 1, 2), (8, 2), (2,)], ids=str
)
def test_kernels_read_tables_as_they_are(lead):
    cos, sin = tables((*lead, COLS // 2))
    arrays = jnp.cos(X), X, SCALE, cos, sin
    expected = analyse(step_without_tables, *arrays)
    with as_default(Kernels()) as kernels:
        assert_analysed(jax.jit(step_without_tables)(*arrays), expected)
        assert kernels.tables == [(int(np.prod(lead)), COLS // 2)] * 2


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("place", ["replicated", "uncommitted", "x", "others"])
def test_inside_set_mesh(place, kernels):
    """Arrays that name no axis of the mesh, or that are not committed to it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, P())
    arrays = [
        jax.device_put(a, whole)
        if place == "replicated" or ((place == "x") == (i < 2) and place != "uncommitted")
        else a
        for i, a in enumerate((jnp.cos(X), *ALL))
    ]
    expected = on_one_device()
    if not kernels:
        with jax.set_mesh(mesh):
            assert_analysed(jax.jit(step)(*arrays), expected)
            assert_analysed(step(*arrays), expected)
        return
    with as_default(Kernels()) as stand_in, jax.set_mesh(mesh):
        assert_analysed(jax.jit(step_without_tables)(*arrays), expected[:3])
        assert stand_in.shapes == [(BATCH * LENGTH * HEADS, COLS)] * 2
