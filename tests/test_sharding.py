"""On a mesh: values, shardings and collectives, for every kind of mesh axis.

Eight virtual CPU devices. What runs on a shard is xla, or a stand-in for a kernel: xla's functions
on two-dimensional arrays, which the partitioner cannot look into.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    FUNCTIONS,
    KINDS,
    RESIDUAL_FUNCTIONS,
    SHAPE,
    Case,
    check_values,
    collectives,
    expected_of_residual,
    in_shards,
    mesh_of,
    on_mesh,
    operands,
    residual_operands,
    residual_step,
    specs_of,
    step,
)
from pairs import pairwise
from program_error import analyse, assert_analysed, assert_computes
from sharding_cases import CASES, moved, which_kernels  # noqa: F401

import jaxnorm

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile"),
]


SPLIT_ROWS = Case("features", {"data": 4, "model": 2}, P("data", None, "model"), P("model"))
# Where the two axes of a mesh may split one of three axes, or one of one.
X_SPECS, PARAMETER_SPECS = (specs_of(("data", "seq"), axes) for axes in (3, 1))
# Of a function and its primals, with a cotangent.
MIXED_DERIVATIVES = {
    "jvp": lambda f, d, *a: jax.jvp(f, a, tuple(map(jnp.cos, a)))[1],
    "forward over reverse": lambda f, d, *a: jax.jvp(
        lambda *a: jax.vjp(f, *a)[1](d), a, tuple(map(jnp.cos, a))
    )[1],
    "transpose of linearize": lambda f, d, *a: jax.linear_transpose(jax.linearize(f, *a)[1], *a)(d),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def in_turn(names, cases, kinds):
    """Each function in each case on each kind of axis, by xla and by a kernel in turn.

    Both meet every case on every kind, and every function.
    """
    places = [
        (case, kind)
        for case, kind in itertools.product(cases, kinds)
        # There the axis that a call normalises is its own.
        if not (case is SPLIT_ROWS and kind == "manual")
    ]
    return pytest.mark.parametrize(
        ("kernels", "name", "case", "kind"),
        [
            pytest.param(runs, name, case, kind, id=f"{runs}-{name}-{case.name}-{kind}")
            for runs, name, (case, kind) in pairwise(["xla", "kernel"], names, places)
        ],
        indirect=["kernels"],
    )


@in_turn(FUNCTIONS, CASES, KINDS)
def test_rows_split_over_a_mesh(kernels, name, case, kind):
    compiled, sharded = on_mesh(step(name), operands(name), case, kind)
    check_values(compiled, sharded, name)
    x = sharded[1]
    for y in compiled(*sharded)[:2]:
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    found = collectives(compiled)
    gathered = found.pop("all-gather", [])
    assert all(size == str(SHAPE[-1]) for size in gathered)
    assert not gathered or case.params != P()
    params = len(sharded) - 2
    if case.params == P():
        # One sum for each parameter, and no other collective. Left to itself, XLA sums over one
        # axis of x after the other.
        if kernels is None and kind == "auto":
            params *= sum(axes is not None for axes in case.x)
        expected = {"all-reduce": [str(SHAPE[-1])] * params} if params and case.shards > 1 else {}
        assert found == expected
    if kernels is not None:
        rows = math.prod(SHAPE[:-1]) // case.shards
        assert kernels.shapes == [(rows, SHAPE[-1])] * 2


# From the output, `test_rows_split_over_a_mesh` has them all.
@each_kind
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_from_the_input(kernels, name, kind):
    compiled, sharded = on_mesh(step(name, "input"), operands(name), CASES[1], kind)
    check_values(compiled, sharded, name, "input")


@in_turn(RESIDUAL_FUNCTIONS, [CASES[1], CASES[3], SPLIT_ROWS], KINDS)
def test_norms_with_a_residual(kernels, name, case, kind):
    """The residual and h lie as x does; nothing of their size moves."""
    compiled, sharded = on_mesh(residual_step(name), residual_operands(name), case, kind)
    x = sharded[1]
    results = compiled(*sharded)
    assert_analysed(results, expected_of_residual(name))
    for ours in results:
        if ours.shape == x.shape:
            assert ours.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert not moved(compiled)
    if case is not SPLIT_ROWS and kernels is not None:
        assert kernels.shapes == [(math.prod(SHAPE[:-1]) // case.shards, SHAPE[-1])] * 2


def test_a_residual_that_lies_otherwise():
    """On explicit axes it is brought to where x is, and its gradient back."""
    mesh = mesh_of(Case("", {"data": 4, "seq": 2}, P()), "explicit")
    d, x, residual, scale = residual_operands("add_rms_norm")
    specs = (P("data"), P("data"), P(None, "seq"), P())
    sharded = in_shards((d, x, residual, scale), mesh, specs)
    results = jax.jit(residual_step("add_rms_norm"))(*sharded)
    y, h, dx, dresidual, _ = results
    assert [jax.typeof(a).sharding.spec[:2] for a in (y, h, dx, dresidual)] == [
        *[("data", None)] * 3,
        (None, "seq"),
    ]
    assert_computes(results, residual_step("add_rms_norm"), d, x, residual, scale)


@each_kind
@pytest.mark.parametrize("lead", [(8, 1), (1, 1), (8, 16)])
def test_parameters_of_groups_on_a_mesh(kernels, lead, kind):
    """Each device has its groups; a gradient is summed over the devices that share one."""
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


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@each_function
def test_a_sharded_normalised_axis(kernels, name, kind):
    """Statistics are summed over the mesh; x stays as it lies, and at most parameters move."""
    compiled, sharded = on_mesh(step(name), operands(name), SPLIT_ROWS, kind)
    check_values(compiled, sharded, name)
    found = collectives(compiled)
    assert all(size == str(SHAPE[-1]) for size in found.pop("all-gather", []))
    assert set(found) == {"all-reduce"}
    x = sharded[1]
    for y in compiled(*sharded)[:2]:
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert kernels is None or not kernels.shapes


@pytest.mark.parametrize("params", PARAMETER_SPECS, ids=str)
@pytest.mark.parametrize("x_spec", X_SPECS, ids=str)
def test_every_pair_of_explicit_specs(x_spec, params):
    """However x and the parameters lie on a mesh of two axes, gradients lie as what they are of."""
    mesh = {"data": 4, "seq": 2}
    case = Case("", mesh, x_spec, params)
    shape = (8, 8, 16)
    compiled, sharded = on_mesh(step("layer_norm"), operands("layer_norm", shape), case, "explicit")
    check_values(compiled, sharded, "layer_norm")
    y, dx, dscale, dbias = (jax.typeof(a).sharding.spec for a in compiled(*sharded))
    x, scale = (jax.typeof(sharded[i]).sharding.spec for i in (1, 2))
    assert (y, dx, dscale, dbias) == (x, x, scale, scale)


@functools.cache
def derivative_on_one_device(name, derivative):
    """A function, its operands, and its analysed results."""
    derive, arrays = MIXED_DERIVATIVES[derivative], operands(name, (8, 8, 16))

    def run(d, *primals):
        return derive(lambda *a: step(name)(d, *a)[0], d, *primals)

    return run, arrays, analyse(run, *arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_spec", [P("data", "seq"), P("data", None, "seq")], ids=str)
@pytest.mark.parametrize("derivative", MIXED_DERIVATIVES)
@each_function
def test_forward_mode_on_a_mesh(name, derivative, x_spec, kind):
    if kind == "manual" and x_spec[-1] == "seq":
        return  # There the axis that a call normalises is its own.
    case = Case("", {"data": 4, "seq": 2}, x_spec)
    run, arrays, expected = derivative_on_one_device(name, derivative)
    compiled, sharded = on_mesh(run, arrays, case, kind)
    assert_analysed(compiled(*sharded), expected)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_other_axes(kernels, axis, kind):
    """Axes that are moved to be rows, with another one sharded."""
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
