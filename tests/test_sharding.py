"""Calls on meshes: values, shardings, collectives, training steps, exports, manual axes.

The mesh has eight virtual CPU devices. A shard runs XLA's code, or a stand-in for a kernel. The
stand-in calls XLA's functions on two-dimensional arrays, and the partitioner cannot split it.
`test_meshes` covers every function.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    SHAPE,
    Case,
    collectives,
    eight_devices,
    mesh_of,
    operands,
    step,
)
from program_error import analyse, assert_analysed, assert_computes
from stand_in import Kernels, as_default

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]


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


DATA = Case("data", {"data": 8}, P("data"))


def moved(compiled):
    """Return the shapes of all exchanged arrays that are at least as large as a shard of x."""
    found = collectives(compiled)
    return [s for v in found.values() for s in v if s and math.prod(map(int, s.split(","))) >= 512]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_other_axes(kernels, axis, kind):
    """A softmax or norm over axes that are not sharded exchanges nothing."""
    mesh = mesh_of(Case("", {"data": 8}, P()), kind)
    x = operands("softmax")[1]
    sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, "data")))
    for function in (jaxnorm.softmax, jaxnorm.layer_norm):
        of_axis = functools.partial(function, axis=axis)
        compiled = jax.jit(of_axis).lower(sharded).compile()
        assert not collectives(compiled)
        assert_computes(compiled(sharded), of_axis, x)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_gradient_of_a_16_bit_softmax_over_sharded_columns(kind):
    """In 16 bits, the backward pass divides by the sum of y over the columns of all shards."""
    d, x = operands("softmax", dtype="bfloat16")

    def gradient(x, d):
        return jax.vjp(jaxnorm.softmax, x)[1](d)[0]

    columns = NamedSharding(mesh_of(DATA, kind), P(None, None, "data"))
    assert_computes(jax.jit(gradient)(*jax.device_put((x, d), columns)), gradient, x, d)


def loss(transform, x, params, **options):
    """Compute the loss of a few pre-norm layers in a scan."""

    def layer(x, p):
        scale, w = p
        return x + jnp.tanh(jaxnorm.rms_norm(x, scale, **options) @ w), None

    return jnp.sum(jax.lax.scan(transform(layer), x, params)[0] ** 2)


def gradient_of(transform, **options):
    return jax.jit(jax.grad(functools.partial(loss, transform, **options), argnums=(0, 1)))


def training_operands():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=SHAPE), jnp.float32), (
        jnp.asarray(1 + 0.1 * rng.normal(size=(3, 64)), jnp.float32),
        jnp.asarray(0.1 * rng.normal(size=(3, 64, 64)), jnp.float32),
    )


@functools.cache
def trained_on_one_device():
    return analyse(gradient_of(lambda f: f), *training_operands())


@pytest.mark.remat
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.checkpoint, functools.partial(jax.checkpoint, policy=jaxnorm.save_policy)],
    ids=["scan", "checkpoint", "save_policy"],
)
def test_training_through_scanned_layers(kernels, transform, kind):
    mesh = mesh_of(Case("", {"data": 4, "seq": 2}, P()), kind)
    x, params = training_operands()
    gradient = gradient_of(transform)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data", "seq")))
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    compiled = gradient.lower(put(x), replicated).compile()
    found = collectives(compiled)
    assert set(found) <= {"all-reduce"}
    assert_analysed(compiled(put(x), replicated), trained_on_one_device())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_of_a_sharded_call(kernels, kind):
    """Under `jax.vmap`, batch entries become rows. Each device runs one call on its shard."""
    mesh = mesh_of(Case("", {"data": 4, "seq": 2}, P()), kind)
    _, x, scale = operands("rms_norm")
    sharded = jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
    function = jax.vmap(jaxnorm.rms_norm, (0, None))
    compiled = jax.jit(function).lower(sharded, scale).compile()
    assert not collectives(compiled)
    assert_computes(compiled(sharded, scale), jaxnorm.rms_norm, x, scale)
    assert kernels is None or kernels.shapes == [(16, 64)]


def test_manual_axes_without_checks(kernels):
    """With check_vma=False, the caller sums parameters' gradients, as for any JAX function."""
    mesh = mesh_of(DATA, "manual")
    arrays = operands("layer_norm")

    def local(*arrays):
        y, dx, *dparams = step("layer_norm")(*arrays)
        return y, dx, *(jax.lax.psum(g, "data") for g in dparams)

    spec = P("data")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, spec, P(), P()),
        out_specs=(spec, spec, P(), P()),
        check_vma=False,
    )
    assert_computes(jax.jit(mapped)(*arrays), step("layer_norm"), *arrays)


def test_some_axes_manual_and_others_not(kernels):
    """If only some mesh axes are manual, XLA's code runs.

    XLA partitions the call along the other mesh axes, and XLA cannot partition a kernel. If the
    user requests a kernel, an error is raised.
    """
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    _, x, scale = operands("rms_norm")

    def mapped(implementation=None):
        mapped = jax.shard_map(
            functools.partial(jaxnorm.rms_norm, implementation=implementation),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
        )
        return jax.jit(mapped)

    sharded = jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
    compiled = mapped().lower(sharded, scale).compile()
    assert not moved(compiled)
    assert_computes(compiled(sharded, scale), jaxnorm.rms_norm, x, scale)
    if kernels is not None:
        message = "^rms_norm: implementation='stand_in' cannot run on .* neither all manual nor"
        with pytest.raises(ValueError, match=message):
            mapped("stand_in").lower(sharded, scale)


def test_shards_of_unequal_size(kernels):
    """If shards have unequal sizes, XLA's code runs.

    XLA pads such shards, and a kernel would treat the padding as rows.
    """
    mesh = mesh_of(DATA, "auto")
    x = jnp.ones((10, 64))

    @jax.jit
    def run(x):
        spread = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        return jaxnorm.softmax(spread)

    if kernels is None:
        assert_computes(run(x), jaxnorm.softmax, x)
        return
    with pytest.raises(Exception, match=r"\(10, 64\).*10 is no multiple of the 8 shards.*pad x"):
        run(x)


@pytest.mark.parametrize("kernels", ["kernel"], indirect=True)
def test_a_forced_kernel_never_gathers(kernels):
    x = operands("softmax")[1]
    features = jax.device_put(x, NamedSharding(mesh_of(DATA, "explicit"), P(None, None, "data")))
    with pytest.raises(ValueError, match=r"^softmax: .* over an axis that is sharded.*leave"):
        jaxnorm.softmax(features, implementation="stand_in")
    rows = jax.device_put(x, NamedSharding(mesh_of(DATA, "auto"), P("data")))
    compiled = (
        jax.jit(functools.partial(jaxnorm.softmax, implementation="stand_in")).lower(rows).compile()
    )
    assert not collectives(compiled)


def test_an_export_for_a_mesh_holds_no_kernel(kernels):
    mesh = mesh_of(DATA, "auto")
    x, sharding = operands("softmax")[1], NamedSharding(mesh, P("data"))
    exported = jax.export.export(jax.jit(jaxnorm.softmax, in_shardings=sharding))(x)
    assert exported.nr_devices == 8
    restored = jax.export.deserialize(exported.serialize())
    y = jax.jit(restored.call)(jax.device_put(x, sharding))
    assert_computes(y, jaxnorm.softmax, x)
    assert kernels is None or not kernels.shapes
