"""On a mesh: values, shardings and collectives, for every kind of mesh axis.

Eight virtual CPU devices. What runs on a shard is xla, or a stand-in for a kernel: xla's functions
on two-dimensional arrays, which the partitioner cannot look into.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KINDS,
    SHAPE,
    Case,
    check_values,
    collectives,
    in_shards,
    mesh_of,
    on_mesh,
    operands,
    specs_of,
    step,
)
from program_error import assert_computes
from sharding_cases import CASES, moved, which_kernels  # noqa: F401

import jaxnorm

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile"),
]


# Shardings of an array with three axes, or with one, over the two axes of a mesh.
X_SPECS, PARAMETER_SPECS = (specs_of(("data", "seq"), axes) for axes in (3, 1))
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("lead", [(8, 1), (1, 1), (8, 16)])
def test_parameters_of_groups_on_a_mesh(kernels, lead, kind):
    """Each device has its groups; a gradient is summed over the devices that share a group."""
    d, x, _ = operands("rms_norm")
    scale = 1 + 0.3 * jnp.asarray(np.random.default_rng(2).normal(size=(*lead, SHAPE[-1])))
    specs = (
        P("data", "seq"),
        P(*[n if size > 1 else None for n, size in zip(("data", "seq"), lead)]),
    )
    mesh = mesh_of(Case("", {"data": 4, "seq": 2}, P()), kind)
    function = step("rms_norm")
    if kind == "manual":
        ins = (specs[0], specs[0], specs[1])
        function = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=ins)
    sharded = in_shards((d, x, scale), mesh, (specs[0], *specs))
    compiled = jax.jit(function).lower(*sharded).compile()
    assert_computes(compiled(*sharded), step("rms_norm"), d, x, scale)
    assert kernels is None or len(kernels.shapes) == 2


@pytest.mark.parametrize("params", PARAMETER_SPECS, ids=str)
@pytest.mark.parametrize("x_spec", X_SPECS, ids=str)
def test_every_pair_of_explicit_specs(x_spec, params):
    """For any sharding on a mesh of two axes, gradients are sharded like their arrays."""
    mesh = {"data": 4, "seq": 2}
    case = Case("", mesh, x_spec, params)
    shape = (8, 8, 16)
    compiled, sharded = on_mesh(step("layer_norm"), operands("layer_norm", shape), case, "explicit")
    check_values(compiled, sharded, "layer_norm")
    y, dx, dscale, dbias = (jax.typeof(a).sharding.spec for a in compiled(*sharded))
    x, scale = (jax.typeof(sharded[i]).sharding.spec for i in (1, 2))
    assert (y, dx, dscale, dbias) == (x, x, scale, scale)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_other_axes(kernels, axis, kind):
    """The function's axes are not the last one, which is sharded."""
    mesh = mesh_of(Case("", {"data": 8}, P()), kind)
    x = operands("softmax")[1]
    sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, "data")))
    for function in (jaxnorm.softmax, jaxnorm.layer_norm):
        of_axis = functools.partial(function, axis=axis)
        compiled = jax.jit(of_axis).lower(sharded).compile()
        assert not collectives(compiled)
        assert_computes(compiled(sharded), of_axis, x)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("mask_shape", [SHAPE, (1, 16, 64), (8, 1, 1), (64,)])
def test_a_mask_broadcasts_against_shards(kernels, mask_shape, kind):
    mesh = mesh_of(CASES[0], kind)
    x = operands("softmax")[1]
    mask = jnp.asarray(np.random.default_rng(1).random(mask_shape) < 0.7)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    where = jax.device_put(mask, NamedSharding(mesh, P("data" if mask_shape[0] == 8 else None)))

    def masked(x, where):
        return jaxnorm.softmax(x, where=where)

    compiled = jax.jit(masked).lower(sharded, where).compile()
    assert not moved(compiled)
    assert_computes(compiled(sharded, where), masked, x, mask)
