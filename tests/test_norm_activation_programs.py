"""Norms with an activation under transformations and on meshes; what is kept; what is refused."""

import functools
import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, on_mesh
from program_error import analyse, assert_analysed, assert_batches, assert_computes
from stand_in import as_default
from test_norm import normal
from test_set_mesh import Kernels

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SHAPE = BATCH, LENGTH, COLS = 8, 6, 16
X, D = normal(SHAPE, "float32", 0), normal(SHAPE, "float32", 1)
SCALE = normal((COLS,), "float32", 2, scale=0.3, shift=1.0)
BIAS = normal((COLS,), "float32", 3, scale=0.3)
ALL = X, SCALE, BIAS
ACTIVATIONS = ("silu", "gelu", "relu")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def plain(x, scale, bias, *, activation="silu", epsilon=1e-6):
    mean = x.mean(-1, keepdims=True)
    xh = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    return getattr(jax.nn, activation)(xh * scale + bias)


ours = functools.partial(jaxnorm.layer_norm, activation="silu")


def gradients(function):
    def loss(*operands):
        y = function(*operands)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.grad(loss, (0, 1, 2))


# Which operands have a batch axis, and where; beside an x of (length, cols).
DIMS = {
    "rows": (0, None, None),
    "rows, elsewhere": (1, None, None),
    "scale": (None, 0, None),
    "x and bias": (0, None, 1),
    "all": (0, 0, 0),
}


@pytest.mark.parametrize("dims", DIMS)
def test_vmap(dims):
    """Values and gradients of each example, against a loop over them."""
    dims, size = DIMS[dims], 3
    operands = [
        a if dim is None else jnp.stack([(1 + i / 8) * a for i in range(size)], axis=dim)
        for a, dim in zip((X[0], SCALE, BIAS), dims)
    ]
    for f in (ours, gradients(ours)):
        assert_batches(f, dims, size, *operands)


@each_activation
def test_forward_over_reverse_over_forward(activation):
    """Tangents, and a Hessian's product either way round, beside those of plain JAX."""
    tangents = tuple(jnp.cos(3 * a) for a in ALL)

    def products(function):
        def run(*operands):
            of_gradient = jax.jvp(gradients(function), operands, tangents)[1]
            along = jax.grad(
                lambda *a: jnp.sum(jnp.sin(jax.jvp(function, a, tangents)[1])), (0, 1, 2)
            )
            return jax.jvp(function, operands, tangents), of_gradient, along(*operands)

        return run

    derived, expected = (
        products(functools.partial(f, activation=activation)) for f in (jaxnorm.layer_norm, plain)
    )
    assert_computes(derived(*ALL), expected, *ALL, like=derived)


def test_a_second_cotangent_of_x():
    """x goes on beside the norm: a residual branch."""
    derived, expected = (
        gradients(lambda x, s, b, f=f: x + f(jnp.sin(x), s, b)) for f in (ours, plain)
    )
    assert_computes(derived(*ALL), expected, *ALL, like=derived)


def test_scan_over_layers():
    scales = jnp.stack([SCALE, 2 - SCALE, SCALE / 2])

    def scanned(x, scales, bias):
        def layer(x, scale):
            return x + ours(x, scale, bias), None

        return jax.lax.scan(layer, x, scales)[0]

    def unrolled(x, scales, bias):
        for scale in scales:
            x = x + plain(x, scale, bias)
        return x

    operands = X, scales, BIAS
    derived = gradients(scanned)
    assert_computes(derived(*operands), gradients(unrolled), *operands, like=derived)


WRAPPED = {
    "plain": lambda block: block,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
}


@pytest.mark.remat
@pytest.mark.parametrize("around", WRAPPED)
def test_what_is_made_again(around):
    """By the policy of the library, nothing; without one, all of a checkpointed block."""
    block = WRAPPED[around](ours)
    text = str(jax.make_jaxpr(gradients(block))(*ALL))
    found = {
        name: len(re.findall(rf"jaxnorm\.layer_norm{name}\[", text))
        for name in ("", "_backward", "_tangent")
    }
    assert found == {"": 1 + (around == "remat"), "_backward": 1, "_tangent": 0}
    assert "activation=silu" in text
    derived = gradients(block)
    assert_computes(derived(*ALL), gradients(plain), *ALL, like=derived)


@pytest.mark.parametrize("save", ["output", "input"])
def test_what_is_kept(save):
    """x and two numbers of each row, whatever `save` says: neither y nor the norm itself."""

    def kept(u, scale, bias):
        x = 3 * u  # none of the arguments
        y, vjp = jax.vjp(functools.partial(ours, save=save), x, scale, bias)
        return x, y, jax.tree.leaves(vjp)

    jaxpr = jax.make_jaxpr(kept)(*ALL).jaxpr
    x, y, *residuals = jaxpr.outvars
    residuals = {id(v): v for v in residuals if isinstance(v, jax.extend.core.Var)}
    shapes = sorted(v.aval.shape for v in residuals.values() if v not in jaxpr.invars)
    assert shapes == [SHAPE[:-1], SHAPE[:-1], SHAPE]
    assert id(x) in residuals
    assert id(y) not in residuals


@each_activation
def test_outside_of_jit(activation):
    """The same bits, in the value; what is compiled is found again, for each activation."""
    function = functools.partial(jaxnorm.layer_norm, activation=activation)
    reference = functools.partial(plain, activation=activation)
    y = function(*ALL)
    np.testing.assert_array_equal(y, jax.jit(function)(*ALL))
    assert_computes(y, reference, *ALL, like=function)
    derived = gradients(function)
    assert_computes(derived(*ALL), gradients(reference), *ALL, like=derived)
    with jax.disable_jit():
        uncompiled = function(*ALL)
    assert_computes(uncompiled, function, *ALL)
    np.testing.assert_array_equal(function(*map(np.asarray, ALL)), y)


# ----------------------------------------------------------------------------------------- meshes

MESH = {"data": 4, "model": 2}
CASES = [
    Case("rows", MESH, P("data")),
    Case("over two", MESH, P(("data", "model"))),
    Case("replicated", MESH, P()),
    Case("columns", MESH, P("data", None, "model")),
    Case("scale in shards", MESH, P("data"), P("model")),
]
each_case_and_kind = pytest.mark.parametrize(
    ("case", "kind"),
    # Inside `jax.shard_map` a shard of columns is a row of its own, and a scale is whole.
    [(c, k) for c in CASES for k in KINDS if k != "manual" or c in CASES[:3]],
    ids=lambda a: getattr(a, "name", a),
)
needs_eight_devices = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="for eight CPU devices"
)


def step(d, *operands):
    y, vjp = jax.vjp(ours, *operands)
    return y, *vjp(d)


@needs_eight_devices
@each_case_and_kind
def test_meshes(case, kind):
    """Sums and parameters travel, no rows do; kernels see whole rows, as many as a shard has."""
    expected = analyse(step, D, *ALL)
    compiled, sharded = on_mesh(step, (D, *ALL), case, kind)
    assert_analysed(compiled(*sharded), expected)
    sizes = [
        math.prod(map(int, filter(None, shape.split(","))))
        for shapes in collectives(compiled).values()
        for shape in shapes
    ]
    # Gradients of the parameters; of split rows, sums of each.
    assert max(sizes, default=0) <= max(2 * COLS, 4 * BATCH * LENGTH)
    with as_default(Kernels()) as kernels:
        compiled, sharded = on_mesh(step, (D, *ALL), case, kind)
        assert_analysed(compiled(*sharded), expected)
        rows = [(BATCH * LENGTH // case.shards, COLS)] * 2
        assert kernels.shapes == ([] if case.name == "columns" else rows)


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "activation",
    ["tanh", "sigmoid", "", "SiLU", jax.nn.silu, 1],
    ids=["tanh", "sigmoid", "empty", "case", "function", "number"],
)
def test_errors(activation, name, jit):
    norm = getattr(jaxnorm, name)
    call = functools.partial(norm, X, SCALE, activation=activation)
    expected = "expected one of None, 'silu', 'gelu', 'relu'"
    with pytest.raises(ValueError, match=rf"^{name}: activation=.*; {expected}"):
        (jax.jit(call) if jit else call)()


def test_what_is_saved_is_still_checked():
    with pytest.raises(ValueError, match=r"^layer_norm: save='x'; expected one of"):
        ours(X, save="x")


def test_positional_arguments_are_as_before():
    with pytest.raises(TypeError, match="positional"):
        jaxnorm.layer_norm(X, SCALE, BIAS, "silu")


def test_implementation_for():
    asked = functools.partial(
        jaxnorm.implementation_for, "layer_norm", (8192, 1024), "bfloat16", platform="cuda"
    )
    plan = asked(scale=jax.ShapeDtypeStruct((1024,), "float32"), activation="silu")
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    images = (32, 64, 64, 32, 8)
    param = jax.ShapeDtypeStruct((32, 1, 1, 8), "float32")
    plan = jaxnorm.implementation_for(
        "layer_norm",
        images,
        "bfloat16",
        scale=param,
        bias=param,
        axis=(1, 2, 4),
        activation="silu",
        platform="cuda",
    )
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    with pytest.raises(ValueError, match=r"^layer_norm: activation='tanh'"):
        asked(activation="tanh")
