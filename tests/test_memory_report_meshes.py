"""memory_report on meshes counts the bytes of one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

SHAPES = {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
X = (1024, 64)


def plain(w, x):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def one(mlp):
    return lambda w, x: jnp.sum(mlp(w, x))


def scanned(mlp):
    return lambda w, x: jnp.sum(
        jax.lax.scan(lambda x, _: (x + mlp(w, x), None), x, None, length=3)[0]
    )


def of_shards(mlp):
    rows = PartitionSpec("data")

    def shard(w, x):
        return jnp.sum(mlp(w, x))[None]

    def loss(w, x):
        mapped = jax.shard_map(shard, in_specs=(PartitionSpec(), rows), out_specs=rows)
        return jnp.sum(jax.jit(mapped)(w, x))

    return loss


def arguments(mesh=None):
    def shape(shape, *spec):
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    return {n: shape(s) for n, s in SHAPES.items()}, shape(X, "data")


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("program", [one, scanned, of_shards])
def test_bytes_of_one_device(program, kind):
    whole = memory_report((scanned if program is scanned else one)(plain), *arguments())
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(AxisType, kind),))
    with jax.set_mesh(mesh):
        before = memory_report(program(plain), *arguments(mesh))
        after = memory_report(jaxnorm.auto_remat(program(plain)), *arguments(mesh))
    assert before.total == pytest.approx(whole.total / 4, rel=0.01)
    assert before.saves == pytest.approx(whole.saves / 4, rel=0.01)
    assert before.total - after.total == pytest.approx(before.saves, rel=0.1)
    for row in before:
        assert row.bytes == jnp.dtype(row.dtype).itemsize * (
            jnp.prod(jnp.array(row.shape)) * row.count // row.layers
        )


def test_copies_for_other_axes_of_a_mesh():
    """In `jax.shard_map`, an array that varies over one more axis is a copy: XLA saves it once."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def layer(x, w):
        y = jaxnorm.rms_norm(x)
        return x + jax.lax.psum(jnp.sin(y @ w[0]) * jnp.sin(y @ w[1]), "model"), None

    specs = PartitionSpec(None, "model"), PartitionSpec("data")

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    def loss(w, x):
        return jax.lax.psum(jax.lax.scan(layer, x, w)[0].sum(), "data")

    report = memory_report(loss, jnp.ones((3, 4, 64, 64)), jnp.ones((64, 64)))
    rows = [r for r in report if r.made_by == "jaxnorm.rms_norm" and r.shape[-1] == 64]
    assert sum(row.count for row in rows) == 3


def test_shardings_inside():
    """Sharding constraints inside a function are respected, even if no argument is sharded."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss(w, x):
        return jnp.sum(plain(w, jax.lax.with_sharding_constraint(x, rows)))

    whole = memory_report(one(plain), *arguments())
    report = memory_report(loss, *arguments())
    constrained = X[0] * X[1] * 4  # counted because, unlike x, it is no argument
    assert report.total == pytest.approx((whole.total + constrained) / 4, rel=0.01)
