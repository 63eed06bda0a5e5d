"""rms_norm_gated under transformations; what its programs keep; what it refuses."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from gated_cases import plain
from program_error import assert_batches, assert_computes
from test_norm import normal

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SHAPE = BATCH, LENGTH, COLS = 4, 6, 16
X, GATE = normal(SHAPE, "float32", 0), normal(SHAPE, "float32", 1)
SCALE = normal((COLS,), "float32", 2, scale=0.3, shift=1.0)
ALL = X, GATE, SCALE
ORDERS = {"norm first": True, "gate first": False}
each_order = pytest.mark.parametrize("before", ORDERS.values(), ids=list(ORDERS))


def gated(before):
    return functools.partial(jaxnorm.rms_norm_gated, norm_before_gate=before)


def loss_of(function):
    """A sum with another cotangent of each element."""

    def loss(*operands):
        y = function(*operands)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return loss


def gradients(function):
    return jax.grad(loss_of(function), (0, 1, 2))


# ------------------------------------------------------------------------------------------- vmap

# Which operands have a batch axis, and where; beside an x of (length, cols).
DIMS = {
    "rows": (0, 0, None),
    "rows, elsewhere": (1, 2, None),
    "x": (0, None, None),
    "gate": (None, 0, None),
    "scale": (None, None, 0),
    "x and scale": (0, None, 1),
    "all": (0, 0, 0),
}


@each_order
@pytest.mark.parametrize("dims", DIMS)
def test_vmap(dims, before):
    """Values and gradients of each example, against a loop over them."""
    dims, size = DIMS[dims], 3
    operands = [
        a if dim is None else jnp.stack([(1 + i / 8) * a for i in range(size)], axis=dim)
        for a, dim in zip((X[0], GATE[0], SCALE), dims)
    ]
    for f in (gated(before), gradients(gated(before))):
        assert_batches(f, dims, size, *operands)


@each_order
def test_gradient_of_a_batch(before):
    def batched(x, gate, scale):
        return jax.vmap(gated(before), (0, 0, None))(x, gate, scale)

    assert_computes(gradients(batched)(*ALL), gradients(gated(before)), *ALL)


# --------------------------------------------------------------------- control flow, and programs


@pytest.mark.remat
@each_order
def test_scan_over_layers(before):
    scales = jnp.stack([SCALE, 2 - SCALE, SCALE / 2])

    def scanned(x, gate, scales):
        def layer(x, scale):
            return x + gated(before)(x, jnp.cos(x) + gate, scale), None

        return jax.lax.scan(layer, x, scales)[0]

    def unrolled(x, gate, scales):
        for scale in scales:
            x = x + plain(x, jnp.cos(x) + gate, scale, norm_before_gate=before)
        return x

    operands = X, GATE, scales
    ours = gradients(scanned)
    assert_computes(ours(*operands), gradients(unrolled), *operands, like=ours)


WRAPPED = {
    "plain": lambda block: block,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
}


@pytest.mark.remat
@each_order
@pytest.mark.parametrize("around", WRAPPED)
def test_what_is_made_again(around, before):
    """By the policy of the library, nothing; without one, all of a checkpointed block."""
    block = WRAPPED[around](gated(before))
    text = str(jax.make_jaxpr(gradients(block))(*ALL))
    found = {
        name: len(re.findall(rf"jaxnorm\.rms_norm_gated{name}\[", text))
        for name in ("", "_backward", "_tangent")
    }
    assert found == {"": 1 + (around == "remat"), "_backward": 1, "_tangent": 0}
    names = {"jaxnorm_out", "jaxnorm_rstd"}
    if around == "remat" and getattr(jax.config, "jax_remat3", False):
        # It drops what is recomputed without need: y.
        names.remove("jaxnorm_out")
    assert set(re.findall(r"\[name=(jaxnorm_\w+)", text)) == names
    expected, ours = gradients(functools.partial(plain, norm_before_gate=before)), gradients(block)
    assert_computes(ours(*ALL), expected, *ALL, like=ours)


@pytest.mark.remat
@each_order
@pytest.mark.parametrize("around", WRAPPED)
def test_what_is_kept(around, before):
    """x, the gate and a number of each row: no array of x's size beside them.

    x and the gate are 3 u and 3 v, so that they are none of the arguments.
    """
    block = WRAPPED[around](lambda u, v, scale: gated(before)(3 * u, 3 * v, scale))

    def kept(*operands):
        y, vjp = jax.vjp(block, *operands)
        return y, jax.tree.leaves(vjp)

    jaxpr = jax.make_jaxpr(kept)(*ALL).jaxpr
    y, *residuals = jaxpr.outvars
    residuals = {id(v): v for v in residuals if isinstance(v, jax.extend.core.Var)}
    shapes = sorted(v.aval.shape for v in residuals.values() if v not in jaxpr.invars)
    rows, of_rows = [SHAPE, SHAPE], [SHAPE[:-1]]
    expected = {
        "remat": [],  # All is made again, from the arguments.
        # Of these x and the gate are made again; y is there for a product that takes it.
        "save_policy": of_rows,
    }
    assert shapes == sorted(expected.get(around, of_rows + rows))
    assert id(y) not in residuals


@pytest.mark.remat
@each_order
def test_what_the_policy_keeps_for_the_next_product(before):
    """y, so that a block which is made again makes the products before the gate, and no norm."""
    weight = jnp.eye(COLS)

    def block(x, gate, scale, weight):
        return gated(before)(x @ weight, gate @ weight, scale) @ weight

    policy = jaxnorm.save_policy

    def loss(*operands):
        return jnp.sum(jnp.sin(jax.checkpoint(block, policy=policy)(*operands)))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*ALL, weight))
    assert text.count("jaxnorm.rms_norm_gated[") == 1
    # Three forward, the first two again, and two for each of three in the backward.
    assert text.count("dot_general[") == 3 + 2 + 6


@pytest.mark.parametrize("before", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_outside_of_jit(activation, before):
    """The same bits, in the value; what is compiled is found again."""
    function = functools.partial(gated(before), activation=activation)
    reference = functools.partial(plain, activation=activation, norm_before_gate=before)
    y = function(*ALL)
    np.testing.assert_array_equal(y, jax.jit(function)(*ALL))
    assert_computes(y, reference, *ALL, like=function)
    ours = gradients(function)
    assert_computes(ours(*ALL), gradients(reference), *ALL, like=ours)
    with jax.disable_jit():
        uncompiled = function(*ALL)
    assert_computes(uncompiled, function, *ALL)
    np.testing.assert_array_equal(function(*map(np.asarray, ALL)), y)


# ----------------------------------------------------------------------------------------- errors


def call(x=X, gate=GATE, scale=SCALE, **options):
    return jaxnorm.rms_norm_gated(x, gate, scale, **options)


T = jnp.ones
REFUSED = {
    "gate": ({"gate": T((4, 6, 8))}, r"gate has shape \(4, 6, 8\); expected \(4, 6, 16\), the sha"),
    "broadcast gate": ({"gate": T(16)}, r"gate has shape \(16,\); .*broadcast gate, e.g."),
    "short scale": ({"scale": T(8)}, r"scale has shape \(8,\); expected \(16,\)"),
    "other groups": (
        {"scale": T((3, 16))},
        r"scale has shape \(3, 16\); expected \(16,\).*or none",
    ),
    "x without axes": ({"x": T(()), "gate": T(())}, r"x with shape \(\).*x\[None\]"),
    "activation": (
        {"activation": "tanh"},
        "activation='tanh'; expected one of 'silu', 'gelu', 'relu', 'leaky_relu', 'sigmoid'",
    ),
    "function": ({"activation": jax.nn.silu}, "activation=.*silu.*; expected one of 'silu'"),
    "no activation": ({"activation": None}, "activation=None; expected one of 'silu'"),
    "epsilon": ({"epsilon": -1.0}, "epsilon=-1.0; expected a finite number of at least 0"),
    "implementation": ({"implementation": "cudnn"}, "implementation='cudnn'; expected one of"),
}
WRONG_TYPES = {
    "integers": ({"x": T(SHAPE, int)}, "x has dtype int32.*cast it"),
    "integer gate": ({"gate": T(SHAPE, int)}, "gate has dtype int32.*cast it"),
    "integer scale": ({"scale": T(16, int)}, "scale has dtype int32"),
    "no gate": ({"gate": None}, "gate is a NoneType; expected an array"),
    "order": ({"norm_before_gate": "no"}, "norm_before_gate='no' is a str; expected True or False"),
    "dtype": ({"dtype": "int8"}, "dtype=int8; expected one of bfloat16"),
    "float64": ({"dtype": "float64"}, "jax_enable_x64"),
    "offset": ({"scale_offset": "1"}, "scale_offset is a str; expected a number"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", [*REFUSED, *WRONG_TYPES])
def test_errors(name, jit):
    error = ValueError if name in REFUSED else TypeError
    arguments, message = (REFUSED | WRONG_TYPES)[name]
    function = (lambda: jax.jit(lambda: call(**arguments))()) if jit else lambda: call(**arguments)
    with pytest.raises(error, match=rf"^rms_norm_gated: .*{message}"):
        function()


@pytest.mark.parametrize("name", ["epsilon", "scale_offset", "norm_before_gate"])
def test_traced_options(name):
    with pytest.raises(TypeError, match=f"^rms_norm_gated: {name} is a traced value"):
        jax.jit(lambda v: call(**{name: v}))(1.0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
def test_a_kernel_on_a_cpu():
    x = jnp.ones((4, 64, 8, 128))
    run = jaxnorm.rms_norm_gated
    for function in (run, jax.jit(run, static_argnames="implementation")):
        with pytest.raises(ValueError, match=r"^rms_norm_gated: implementation='mosaic' cannot"):
            function(x, x, implementation="mosaic")


def test_implementation_for():
    """The gate is as x is, where none is given; float64 ones and Mamba 2's groups are XLA's."""
    shape = (4, 2048, 32, 128)
    scale = jax.ShapeDtypeStruct((128,), "float32")
    asked = functools.partial(jaxnorm.implementation_for, "rms_norm_gated", shape, "bfloat16")
    plan = asked(scale=scale, platform="cpu")
    assert (plan.forward.name, plan.backward.name) == ("xla", "xla")
    gate = jax.ShapeDtypeStruct(shape, "bfloat16")
    plan = asked(scale=scale, platform="cuda")
    assert plan == asked(scale=scale, gate=gate, norm_before_gate=False, platform="cuda")
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    groups = asked(scale=jax.ShapeDtypeStruct((32, 128), "float32"), platform="cuda")
    for choice in (groups.forward, groups.backward):
        assert choice.name == "xla"
        assert "groups of rows that are not consecutive" in choice.reason
    with pytest.raises(ValueError, match=r"^rms_norm_gated: activation='tanh'"):
        asked(activation="tanh")


def test_a_wide_gate_has_no_kernel(x64):
    x = jax.ShapeDtypeStruct((8192, 1024), "float32")
    gate = jax.ShapeDtypeStruct((8192, 1024), "float64")
    plan = jaxnorm.implementation_for(
        "rms_norm_gated", x.shape, x.dtype, gate=gate, platform="cuda"
    )
    assert plan.forward.name == plan.backward.name == "xla"
    assert "float64 arrays ask for more" in plan.forward.reason
