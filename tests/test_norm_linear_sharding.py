"""rms_norm_linear on a mesh: rows split, and weight over d or n."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, in_shards, mesh_of
from norm_linear_cases import operands
from program_error import analyse, assert_analysed
from stand_in import StandIn, as_default

from jaxnorm import rms_norm_linear
from jaxnorm_kernels import xla
from jaxnorm_kernels.implementation import Implementation

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
    return analyse(function, *arrays())


def check(results, function):
    assert_analysed(results, expected(function))


def placed(mesh, x, weight):
    specs = [x, x, weight, P(*weight[:1]), P(*weight[1:2])]
    return in_shards(arrays(), mesh, specs), specs


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
    """The stand-in for the norm's kernels: xla's functions of two-dimensional arrays."""

    def forward(self, operands, spec):
        assert operands.x.shape == (spec.rows, spec.cols), "not seen as rows"
        assert not spec.cols_over
        self.shapes.append(operands.x.shape)
        return xla.forward(operands, spec)

    def backward(self, residuals, cotangents, spec):
        self.shapes.append(residuals.saved.shape)
        return xla.backward(residuals, cotangents, spec)

    def why_unsupported(self, spec):
        return None if spec.op == "norm" else "it has no other"


@pytest.fixture
def kernel():
    expected(step)  # by xla's code
    with as_default(Kernel()) as module:
        yield module


def on_shards(**options):
    """The loss, inside `jax.shard_map`, where weight's columns are split over "model"."""

    def function(x, residual, weight, scale, bias):
        y, h = rms_norm_linear(
            x, weight, scale, bias=bias, residual=residual, activation="gelu", **options
        )
        of_h = jax.lax.psum(jnp.sum(jnp.sin(h)), "data")
        return jax.lax.psum(jnp.sum(jnp.sin(y)), ("data", "model")) + of_h

    return function


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows and n", "FSDP over d"])
def test_the_norm_s_kernel_gets_shards(kernel, layout, kind):
    x, weight, _ = LAYOUTS[layout]
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, x, weight)
    function = loss
    if kind == "manual":
        # What FSDP gathers is whole inside.
        if layout == "FSDP over d":
            specs = [x, x, P(), P(), P()]

        def function(*shards):
            if layout == "rows and n":
                return on_shards()(*shards)
            return jax.lax.psum(loss(*shards), ("data", "model"))

        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    check(jax.jit(jax.value_and_grad(function, range(5)))(*sharded), step)
    rows = 12 if layout == "rows and n" else 6
    assert {*kernel.shapes} == {(rows, 16)}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_kernel_gets_no_part_of_x_s_columns(kernel, kind):
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, _ = placed(mesh, *LAYOUTS["x over d"][:2])
    check(jax.jit(step)(*sharded), step)
    assert not kernel.shapes


# ------------------------------------------------------------ the kernel of norm and product


@pytest.fixture
def product_kernel(monkeypatch):
    """The shapes that Mosaic's kernel, asked for by name, gets: the composition in its place."""
    shapes = []

    def kernel(x, weight, scale, bias, spec):
        assert (x.shape, weight.shape) == ((spec.rows, spec.cols), (spec.cols, spec.features))
        shapes.append((x.shape, weight.shape))
        return rms_norm_linear(x, weight, scale, bias=bias, activation=spec.activation)

    from jaxnorm_kernels import mosaic

    monkeypatch.setattr(mosaic, "rms_norm_linear_fwd", kernel)
    here = Implementation(mosaic.forward, mosaic.backward, platforms=lambda: ("cpu",))
    monkeypatch.setattr(mosaic, "IMPLEMENTATION", here)
    return shapes


def test_the_kernel_of_norm_and_product_on_shards(product_kernel):
    """Inside `jax.shard_map`; its derivative is the composition's."""
    x, weight, _ = LAYOUTS["rows and n"]
    mesh = mesh_of(Case("", MESH, P()), "manual")
    sharded, specs = placed(mesh, x, weight)
    function = jax.shard_map(
        on_shards(implementation="mosaic"), mesh=mesh, in_specs=tuple(specs), out_specs=P()
    )
    check(jax.jit(jax.value_and_grad(function, range(5)))(*sharded), step)
    assert {*product_kernel} == {((12, 16), (16, 16))}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_kernel_of_norm_and_product_is_not_partitioned(product_kernel, kind):
    mesh = mesh_of(Case("", MESH, P()), kind)
    (x, _, weight, *_), _ = placed(mesh, *LAYOUTS["rows and n"][:2])
    named = functools.partial(rms_norm_linear, implementation="mosaic")
    message = (
        r"^rms_norm_linear: implementation='mosaic' is a kernel of whole arrays, .* a mesh with "
        r"axes {'data': 4, 'model': 2}; expected one device, or shards; call it inside "
        r"jax.shard_map over these axes, or leave implementation out"
    )
    for call in (named, jax.jit(named)):
        with pytest.raises(ValueError, match=message):
            call(x, weight)
    assert not product_kernel
