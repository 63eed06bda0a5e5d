"""rms_norm_linear on a mesh: rows split, and weight over d or n."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, mesh_of
from norm_linear_cases import operands
from stand_in import StandIn, as_default

from jaxnorm import rms_norm_linear
from jaxnorm_kernels import xla

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile", "x64"),
]

MESH = {"data": 4, "model": 2}
SUMS, GATHERED = {"all-reduce"}, {"all-reduce", "all-gather"}
# How x's axes and weight's are split, and what the compiled step exchanges.
LAYOUTS = {
    "rows": (P("data", "model"), P(), SUMS),
    "rows and n": (P("data"), P(None, "model"), SUMS),
    "FSDP over d": (P(("data", "model")), P(("data", "model")), GATHERED),
    "FSDP over d, and n": (P("data"), P("data", "model"), GATHERED),
    "FSDP over n": (P("data"), P(None, "data"), GATHERED),
    "x over d": (P("data", None, "model"), P("model"), SUMS),
}
ORDER = ("x", "residual", "weight", "scale", "bias")


def arrays():
    given = operands(6, 16, 32, "float64", lead=(8,))
    return [given[name] for name in ORDER]


def loss(x, residual, weight, scale, bias):
    y, h = rms_norm_linear(x, weight, scale, bias=bias, residual=residual, activation="gelu")
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(h))


def step(*arrays):
    return jax.value_and_grad(loss, range(5))(*arrays)


def second_order(*arrays):
    return jax.jvp(jax.grad(loss, range(5)), arrays, tuple(map(jnp.cos, arrays)))


@functools.cache
def expected(function):
    return jax.tree.leaves(jax.jit(function)(*arrays()))


def check(results, function):
    for ours, theirs in zip(jax.tree.leaves(results), expected(function), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def placed(mesh, x, weight):
    specs = [x, x, weight, P(*weight[:1]), P(*weight[1:2])]
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays(), specs)], specs


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "explicit") for layout in LAYOUTS),
        *((layout, "auto") for layout in ("rows and n", "FSDP over d, and n", "x over d")),
    ],
)
def test_layouts(layout, kind):
    """Gradients lie as what they are of; no array of rows crosses the mesh."""
    x, weight, names = LAYOUTS[layout]
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, x, weight)
    outs = NamedSharding(mesh, P()), tuple(NamedSharding(mesh, s) for s in specs)
    jitted = jax.jit(step, out_shardings=outs if kind == "auto" else None)
    compiled = jitted.lower(*sharded).compile()
    results = compiled(*sharded)
    check(results, step)
    for gradient, spec in zip(results[1], specs, strict=True):
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, spec), gradient.ndim)
    assert {*collectives(compiled)} <= names


@pytest.mark.parametrize("layout", ["FSDP over d, and n", "x over d"])
def test_second_order(layout):
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    sharded, _ = placed(mesh, *LAYOUTS[layout][:2])
    check(jax.jit(second_order)(*sharded), second_order)


class Kernel(StandIn):
    """The stand-in for a kernel: xla's function of two-dimensional arrays."""

    def rms_norm_linear_fwd(self, x, weight, scale, bias, spec):
        assert x.shape == (spec.rows, spec.cols), "not seen as rows"
        assert weight.shape == (spec.cols, spec.features)
        assert not spec.cols_over
        self.shapes.append((x.shape, weight.shape))
        return xla.rms_norm_linear_fwd(x, weight, scale, bias, spec)

    def supports(self, spec):
        return None if spec.op == "rms_norm_linear" else "it has no other"


@pytest.fixture
def kernel():
    expected(step)  # by xla's code
    with as_default(Kernel()) as module:
        yield module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows and n", "FSDP over d"])
def test_a_kernel_gets_shards(kernel, layout, kind):
    x, weight, _ = LAYOUTS[layout]
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, x, weight)
    function = loss
    if kind == "manual":
        # What FSDP gathers is whole inside.
        if layout == "FSDP over d":
            specs = [x, x, P(), P(), P()]

        def function(*shards):
            x, residual, weight, scale, bias = shards
            y, h = rms_norm_linear(
                x, weight, scale, bias=bias, residual=residual, activation="gelu"
            )
            of_h = jnp.sum(jnp.sin(h))
            if layout == "rows and n":
                of_h = jax.lax.psum(of_h, "data")
                return jax.lax.psum(jnp.sum(jnp.sin(y)), ("data", "model")) + of_h
            return jax.lax.psum(jnp.sum(jnp.sin(y)) + of_h, ("data", "model"))

        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    check(jax.jit(jax.value_and_grad(function, range(5)))(*sharded), step)
    rows, features = (12, 16) if layout == "rows and n" else (6, 32)
    assert {*kernel.shapes} == {((rows, 16), (16, features))}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_kernel_gets_no_part_of_x_s_columns(kernel, kind):
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, _ = placed(mesh, *LAYOUTS["x over d"][:2])
    check(jax.jit(step)(*sharded), step)
    assert not kernel.shapes
    x, _, weight, *_ = sharded
    named = jax.jit(functools.partial(rms_norm_linear, implementation="stand_in"))
    with pytest.raises(Exception, match=r"rms_norm_linear: .* cannot run over an axis that"):
        named(x, weight)
