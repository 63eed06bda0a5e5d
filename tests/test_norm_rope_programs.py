"""rms_norm_rope under transformations; what its programs keep; what it refuses."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from norm_rope_cases import (
    ALL,
    BATCH,
    COLS,
    COS,
    HEADS,
    LENGTH,
    SCALE,
    SHAPE,
    SIN,
    X,
    plain,
    tables,
)
from program_error import assert_batches, assert_computes

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def loss_of(function, **options):
    """A sum with another cotangent of each element."""

    def loss(*operands):
        y = function(*operands, **options)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return loss


def gradients(function, **options):
    return jax.grad(loss_of(function, **options), (0, 1, 2, 3))


# ------------------------------------------------------------------------------------------- vmap

# Which operands have a batch axis, and where; beside an x of (length, heads, cols) and tables.
DIMS = {
    "x": (0, None, None, None),
    "x, its heads": (2, None, None, None),
    "scale": (None, 0, None, None),
    "tables": (None, None, 0, 0),
    "cos alone": (None, None, 1, None),
    "x and tables": (0, None, 0, 0),
    "all": (0, 0, 0, 0),
    "all but x": (None, 0, 0, 0),
}


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("dims", DIMS)
def test_vmap(dims, save):
    """Values and gradients of each example, against a loop over them."""
    dims, size = DIMS[dims], 3
    single = (X[0], SCALE, COS, SIN)
    operands = [
        a if dim is None else jnp.stack([(1 + i / 8) * a for i in range(size)], axis=dim)
        for a, dim in zip(single, dims)
    ]
    function = functools.partial(jaxnorm.rms_norm_rope, save=save)
    for f in (function, gradients(function)):
        assert_batches(f, dims, size, *operands)


def test_gradient_of_a_batch():
    def batched(x, *others):
        return jax.vmap(jaxnorm.rms_norm_rope, (0, None, None, None))(x, *others)

    assert_computes(gradients(batched)(*ALL), gradients(jaxnorm.rms_norm_rope), *ALL)


# --------------------------------------------------------------------- control flow, and programs


def test_scan_over_layers():
    scales = jnp.stack([SCALE, 2 - SCALE, SCALE / 2])

    def scanned(x, scales, cos, sin):
        def layer(x, scale):
            return x + jaxnorm.rms_norm_rope(x, scale, cos, sin), None

        return jax.lax.scan(layer, x, scales)[0]

    def unrolled(x, scales, cos, sin):
        for scale in scales:
            x = x + plain(x, scale, cos, sin)
        return x

    operands = X, scales, COS, SIN
    ours = gradients(scanned)
    assert_computes(ours(*operands), gradients(unrolled), *operands, like=ours)


def test_scan_keeps_the_tables_once():
    """What is shared by all layers: no array of layers and positions."""
    layers = 3

    def residuals(x, scales, cos, sin):
        def layer(x, scale):
            return jnp.sin(jaxnorm.rms_norm_rope(x, scale, cos, sin)), None

        def scanned(x, scales):
            return jax.lax.scan(layer, x, scales)[0]

        return jax.tree.leaves(jax.vjp(scanned, x, scales)[1])

    kept = [a.shape for a in jax.eval_shape(residuals, X, jnp.stack([SCALE] * layers), COS, SIN)]
    assert kept.count((layers, *SHAPE)) == 2  # y, and the cosine of it
    assert kept.count((1, *COS.shape)) == 2
    assert not [shape for shape in kept if shape[-1] == COLS // 2 and layers in shape]


def calls_in(text):
    return {
        name: len(re.findall(rf"jaxnorm\.{name}\[", text))
        for name in ("rms_norm_rope", "rms_norm_rope_backward", "rms_norm_rope_tangent")
    }


WRAPPED = {
    "plain": lambda block: block,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
}


@pytest.mark.remat
@pytest.mark.parametrize(("around", "forwards"), [("plain", 1), ("remat", 2), ("save_policy", 1)])
def test_what_is_made_again(around, forwards):
    """By the policy of the library, nothing; without one, all of a checkpointed block."""
    block = WRAPPED[around](jaxnorm.rms_norm_rope)
    text = str(jax.make_jaxpr(jax.grad(loss_of(block), (0, 1)))(*ALL))
    found = calls_in(text)
    assert found == {
        "rms_norm_rope": forwards,
        "rms_norm_rope_backward": 1,
        "rms_norm_rope_tangent": 0,
    }
    names = {"jaxnorm_out", "jaxnorm_rstd"}
    assert set(re.findall(r"\[name=(jaxnorm_\w+)", text)) == names
    plain = jax.grad(loss_of(jaxnorm.rms_norm_rope), (0, 1))
    assert_computes(jax.grad(loss_of(block), (0, 1))(*ALL), plain, *ALL)


@pytest.mark.remat
@pytest.mark.parametrize(
    ("around", "save"),
    [*((around, "output") for around in WRAPPED), ("plain", "input"), ("jit", "input")],
)
def test_what_is_kept(around, save):
    """From the output y and a number of each row, and no array of x's size beside it.

    x is 3 u, so that it is none of the arguments. Beside those it keeps tables with x's axes.
    """
    block = WRAPPED[around](lambda u, *others: jaxnorm.rms_norm_rope(3 * u, *others, save=save))

    def kept(u, scale, cos, sin):
        y, vjp = jax.vjp(lambda u, scale: block(u, scale, cos, sin), u, scale)
        return y, jax.tree.leaves(vjp)

    jaxpr = jax.make_jaxpr(kept)(*ALL).jaxpr
    y, *residuals = jaxpr.outvars
    residuals = {id(v): v for v in residuals if isinstance(v, jax.extend.core.Var)}
    shapes = sorted(v.aval.shape for v in residuals.values() if v not in jaxpr.invars)
    if around == "remat":
        assert shapes == []  # All is made again, from the arguments.
        return
    # `jax.checkpoint` makes those again, from the arguments.
    views = [] if around == "save_policy" else [(1, *COS.shape)] * 2
    assert shapes == sorted([SHAPE, SHAPE[:-1], *views])
    assert (id(y) in residuals) == (save == "output"), "y is kept as it is returned"
    of_arguments = {v.aval.shape for v in residuals.values() if v in jaxpr.invars}
    assert of_arguments == {SCALE.shape, *([] if views else [COS.shape])}


@pytest.mark.remat
def test_tables_are_not_broadcast():
    """No array of x's rows and half its columns is made of them, forward or backward."""
    text = jax.jit(jax.grad(loss_of(jaxnorm.rms_norm_rope), (0, 1))).lower(*ALL).as_text()
    arguments = re.search(r"func\.func public @main\((.*?)\) ->", text).group(1)
    assert arguments.count(f"tensor<{LENGTH}x1x{COLS // 2}xf32>") == 2
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_of(jaxnorm.rms_norm_rope), (0, 1)))(*ALL))
    assert f"{BATCH},{LENGTH},{HEADS},{COLS // 2}]" not in jaxpr


def test_outside_of_jit():
    """The same bits, in the value; what is compiled is found again."""
    y = jaxnorm.rms_norm_rope(*ALL)
    np.testing.assert_array_equal(y, jax.jit(jaxnorm.rms_norm_rope)(*ALL))
    assert_computes(y, plain, *ALL, like=jaxnorm.rms_norm_rope)
    ours = gradients(jaxnorm.rms_norm_rope)
    assert_computes(ours(*ALL), gradients(plain), *ALL, like=ours)
    with jax.disable_jit():
        uncompiled = jaxnorm.rms_norm_rope(*ALL)
    assert_computes(uncompiled, jaxnorm.rms_norm_rope, *ALL)
    lists = jaxnorm.rms_norm_rope(
        np.asarray(X), np.asarray(SCALE), np.asarray(COS), np.asarray(SIN)
    )
    np.testing.assert_array_equal(lists, y)


# ----------------------------------------------------------------------------------------- errors


def call(x=X, scale=SCALE, cos=COS, sin=SIN, **options):
    return jaxnorm.rms_norm_rope(x, scale, cos, sin, **options)


T = jnp.ones
REFUSED = {
    "scale of heads": ({"scale": T((2, 16))}, r"scale has shape \(2, 16\); expected \(16,\), the"),
    "short scale": ({"scale": T(8)}, r"scale has shape \(8,\); expected \(16,\)"),
    "unlike tables": ({"sin": T((8, 1, 4))}, r"cos has shape \(8, 1, 8\) and sin \(8, 1, 4\), and"),
    "too many columns": ({"cos": T(9), "sin": T(9)}, r"one column for each pair .* 8 at most"),
    "other length": (
        {"cos": T((7, 1, 8)), "sin": T((7, 1, 8))},
        r"broadcasts to \(4, 8, 2, r / 2\).*give an axis of x that shares them the size 1",
    ),
    "too many axes": ({"cos": T((1, 4, 8, 2, 8)), "sin": T((1, 4, 8, 2, 8))}, "one shape that"),
    "no axes": ({"cos": T(()), "sin": T(())}, r"cos has shape \(\) and sin \(\)"),
    "x without axes": ({"x": T(())}, r"x with shape \(\).*x\[None\]"),
    "save": ({"save": "both"}, r"save='both'; expected one of 'output', 'input'"),
    "epsilon": ({"epsilon": -1.0}, "epsilon=-1.0; expected a finite number of at least 0"),
    "implementation": ({"implementation": "cudnn"}, "implementation='cudnn'; expected one of"),
}
WRONG_TYPES = {
    "integers": ({"x": T((4, 8, 2, 16), int)}, "x has dtype int32.*cast it"),
    "integer scale": ({"scale": T(16, int)}, "scale has dtype int32"),
    "integer cos": ({"cos": T((8, 1, 8), int)}, "cos has dtype int32"),
    "integer sin": ({"sin": T((8, 1, 8), int)}, "sin has dtype int32"),
    "no tables": ({"cos": None}, "cos is a NoneType; expected an array"),
    "interleaved": ({"interleaved": "no"}, "interleaved='no' is a str; expected True or False"),
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
    with pytest.raises(error, match=rf"^rms_norm_rope: .*{message}"):
        function()


@pytest.mark.parametrize("name", ["epsilon", "scale_offset", "interleaved"])
def test_traced_options(name):
    with pytest.raises(TypeError, match=f"^rms_norm_rope: {name} is a traced value"):
        jax.jit(lambda v: call(**{name: v}))(1.0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
def test_a_kernel_on_a_cpu():
    x, (cos, sin) = jnp.ones((4, 64, 8, 128)), tables((64, 1, 64))
    for run in (
        jaxnorm.rms_norm_rope,
        jax.jit(jaxnorm.rms_norm_rope, static_argnames="implementation"),
    ):
        with pytest.raises(ValueError, match=r"^rms_norm_rope: implementation='mosaic' cannot"):
            run(x, None, cos, sin, implementation="mosaic")


def test_implementation_for():
    """Tables are float32 and of all columns, where there are none."""
    shape = (4, 2048, 32, 128)
    scale = jax.ShapeDtypeStruct((128,), "float32")
    plan = jaxnorm.implementation_for("rms_norm_rope", shape, "bfloat16", platform="cpu")
    assert (plan.forward.name, plan.backward.name) == ("xla", "xla")
    table = jax.ShapeDtypeStruct((2048, 1, 64), "float32")
    for platform in ("cpu", "cuda"):
        asked = functools.partial(
            jaxnorm.implementation_for, "rms_norm_rope", shape, "bfloat16", platform=platform
        )
        whole = asked(scale=scale, cos=table, sin=table)
        assert asked(scale=scale) == asked(scale=scale, cos=table) == whole
    for few in ((64,), (8, 64)):
        jaxnorm.implementation_for("rms_norm_rope", few, "float32")
    for wrong, message in [({"cos": jax.ShapeDtypeStruct((5, 1, 64), "float32")}, "cos has shape")]:
        with pytest.raises(ValueError, match=f"^rms_norm_rope: {message}"):
            jaxnorm.implementation_for("rms_norm_rope", shape, "bfloat16", **wrong)
