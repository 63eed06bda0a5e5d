"""gated_linear on a mesh: rows split, and weight over f (tensor parallelism) or n; FSDP."""

import functools

import jax
import jax.numpy as jnp
import pytest
from gated_linear_cases import F64, Mix, operands
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import Case, collectives, in_shards, mesh_of
from program_error import analyse, assert_analysed, assert_computes

import jaxnorm

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile", "x64"),
]

MESH = {"data": 4, "model": 2}
SUMS, GATHERED = {"all-reduce"}, {"all-reduce", "all-gather"}
# How gate and up, weight, and bias are split; the product's result, where it must be said; and what
# the compiled step exchanges.
LAYOUTS = {
    "rows": (P("data", "model"), P(), P(), None, SUMS),
    "rows and n": (P("data"), P(None, "model"), P("model"), None, SUMS),
    "f": (P("data", None, "model"), P("model"), P(), P("data"), SUMS),
    "f, of a sequence": (
        *(P("data", None, "model"), P("model"), P(), P("data", "model")),
        GATHERED | {"all-to-all", "collective-permute"},
    ),
    "FSDP over f": (P(("data", "model")), P(("data", "model")), P("model"), None, GATHERED),
    "FSDP over n": (P("data"), P(None, "data"), P("data"), None, GATHERED),
    "f, and FSDP over n": (
        *(P("data", None, "model"), P("model", "data"), P("data"), P("data")),
        GATHERED,
    ),
}


def arrays():
    return [*operands((8, 6, 16), 32, Mix(*[F64] * 7)).values()]


def loss(out_sharding, gate, up, weight, bias):
    y = jaxnorm.gated_linear(gate, up, weight, bias=bias, out_sharding=out_sharding)
    z = jaxnorm.activation_linear(gate, weight, bias=bias, out_sharding=out_sharding)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z))


def step(out_sharding, *arrays):
    return jax.value_and_grad(functools.partial(loss, out_sharding), range(4))(*arrays)


def second_order(out_sharding, *arrays):
    gradients = jax.grad(functools.partial(loss, out_sharding), range(4))
    return jax.jvp(gradients, arrays, tuple(map(jnp.cos, arrays)))


@functools.cache
def expected(function):
    return analyse(functools.partial(function, None), *arrays())


def check(results, function):
    assert_analysed(results, expected(function))


def placed(mesh, layout):
    rows, weight, bias, *_ = LAYOUTS[layout]
    specs = [rows, rows, weight, bias]
    return in_shards(arrays(), mesh, specs), specs


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, kind):
    """Gradients lie as what they are of; no array of rows crosses the mesh but to lie as asked."""
    *_, out_sharding, names = LAYOUTS[layout]
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, layout)
    outs = NamedSharding(mesh, P()), tuple(NamedSharding(mesh, s) for s in specs)
    is_explicit = kind == "explicit"
    function = functools.partial(step, out_sharding if is_explicit else None)
    jitted = jax.jit(function, out_shardings=None if is_explicit else outs)
    compiled = jitted.lower(*sharded).compile()
    results = compiled(*sharded)
    check(results, step)
    for gradient, spec in zip(results[1], specs, strict=True):
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, spec), gradient.ndim)
    if is_explicit:
        assert {*collectives(compiled)} <= names


@pytest.mark.parametrize("layout", ["f", "f, and FSDP over n"])
def test_second_order(layout):
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    sharded, _ = placed(mesh, layout)
    *_, out_sharding, _ = LAYOUTS[layout]
    check(jax.jit(functools.partial(second_order, out_sharding))(*sharded), second_order)


@pytest.mark.parametrize("compiles", [True, False])
def test_where_the_result_lies(compiles):
    """As asked, by a spec of the operands' mesh or by a sharding; else rows as gate's, n as it was.

    Also outside `jax.jit`.
    """
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    for layout, asked, expected in (
        ("f", P("data"), P("data", None, None)),
        ("f", NamedSharding(mesh, P("data", "model")), P("data", "model", None)),
        ("f", P(None, None, "model"), P(None, None, "model")),
        ("rows and n", None, P("data", None, "model")),
        ("rows and n", P(), P(None, None, None)),
        ("FSDP over n", None, P("data", None, None)),
    ):
        (gate, up, weight, bias), _ = placed(mesh, layout)
        for more in ({}, {"bias": bias}):
            call = functools.partial(jaxnorm.gated_linear, out_sharding=asked, **more)
            y = (jax.jit(call) if compiles else call)(gate, up, weight)
            assert jax.typeof(y).sharding.spec == expected


def test_it_must_be_said_where_sums_lie():
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    (gate, up, weight, _), _ = placed(mesh, "f")
    message = (
        r"^gated_linear: the mesh axes \('model',\) split the last axis of .* out_sharding=None; "
        r"expected how the sums lie: give out_sharding="
    )
    for call in (jaxnorm.gated_linear, jax.jit(jaxnorm.gated_linear)):
        with pytest.raises(ValueError, match=message):
            call(gate, up, weight)
    # Nothing of Auto axes is said by types.
    auto, _ = placed(mesh_of(Case("", MESH, P()), "auto"), "f")
    with pytest.raises(ValueError, match=r"^gated_linear: out_sharding=.*with_sharding_constraint"):
        jaxnorm.gated_linear(*auto[:3], out_sharding=P("data"))


def test_up_lies_as_gate_does():
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    (gate, _, weight, _), _ = placed(mesh, "rows")
    up = jax.device_put(arrays()[1], NamedSharding(mesh, P(None, "model")))
    y = jaxnorm.gated_linear(gate, up, weight)
    assert jax.typeof(y).sharding.spec == P("data", "model", None)
    assert_computes(y, jaxnorm.gated_linear, *arrays()[:3])


def test_a_weight_is_kept_in_its_shards():
    """FSDP gathers it again in the backward."""
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    sharded, _ = placed(mesh, "f, and FSDP over n")

    def residuals(*arrays):
        function = functools.partial(jaxnorm.gated_linear, out_sharding=P("data"))
        return jax.tree.leaves(jax.vjp(function, *arrays)[1])

    kept = jax.make_jaxpr(residuals)(*sharded[:3]).jaxpr
    inputs = {*kept.invars, *kept.constvars}
    assert [v for v in kept.outvars if v.aval.ndim and v not in inputs] == []


@pytest.mark.parametrize("layout", ["rows and n", "f"])
def test_on_shards(layout):
    """Inside `jax.shard_map`: weights' gradients are summed over the rows' devices."""
    mesh = mesh_of(Case("", MESH, P()), "manual")
    sharded, specs = placed(mesh, layout)

    def function(gate, up, weight, bias):
        gated = functools.partial(jaxnorm.gated_linear, gate, up, weight)
        ungated = functools.partial(jaxnorm.activation_linear, gate, weight)
        if layout == "f":
            y, z = (jax.lax.psum(f(), "model") + bias for f in (gated, ungated))
            return jax.lax.psum(jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z)), "data")
        y, z = (f(bias=bias) for f in (gated, ungated))
        return jax.lax.psum(jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z)), ("data", "model"))

    function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    check(jax.jit(jax.value_and_grad(function, range(4)))(*sharded), step)


def test_explicit_and_auto_axes():
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    specs = [P("data"), P("data"), P(), P()]
    sharded = in_shards(arrays(), mesh, specs)
    with jax.set_mesh(mesh):
        check(jax.jit(functools.partial(step, None))(*sharded), step)


def test_a_function_on_a_mesh():
    """Its own product says where its result lies."""
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    sharded, _ = placed(mesh, "f")

    def loss(product, gate, up, weight, bias):
        y = jaxnorm.gated_linear(gate, up, weight, bias=bias, product=product, activation=jnp.tanh)
        return jnp.sum(jnp.sin(y))

    def on_shards(h, weight):
        return jnp.matmul(h, weight, out_sharding=NamedSharding(mesh, P("data")))

    ours, theirs = (
        jax.value_and_grad(functools.partial(loss, product), range(4))
        for product in (on_shards, jnp.matmul)
    )
    assert_computes(jax.jit(ours)(*sharded), theirs, *arrays())
