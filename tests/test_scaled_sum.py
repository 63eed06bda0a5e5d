"""add_layer_norm and add_rms_norm with a gate: values, gradients, transformations, what is kept."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from program_error import assert_computes
from reference import SAFETY, assert_within, exact, rounding
from scaled_sum_cases import ScaledSum
from test_norm import normal

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

FUNCTIONS = {"add_layer_norm": jaxnorm.add_layer_norm, "add_rms_norm": jaxnorm.add_rms_norm}
each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_save = pytest.mark.parametrize("save", ["output", "input"])

# x, residual, parameters, y
MIXES = [
    ("float32", "float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32", "bfloat16"),
    ("float32", "bfloat16", "float32", "float16"),
]
BATCH, LENGTH = 4, 33
# Axes before the columns: of the norm's parameters, and of the gate.
LEADS = {
    "adaLN-zero": ((BATCH, 1), (BATCH, 1)),
    "LayerScale": ((), ()),
    "gate alone": ((), (BATCH, 1)),
    "norm alone": ((BATCH, 1), ()),
    "each row": ((BATCH, LENGTH), (BATCH, LENGTH)),
    "not consecutive": ((), (LENGTH,)),
}


def parameter(lead, cols, dtype, seed, shift=1.0):
    return normal((*lead, cols), dtype, seed, scale=0.3, shift=shift)


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS)
@each_save
@pytest.mark.parametrize("cols", [64, 1024])
@pytest.mark.parametrize(("lead", "mix"), [(n, MIXES[i % 4]) for i, n in enumerate(LEADS)])
@each_function
def test_values_and_gradients(name, lead, mix, cols, save, implementation):
    check(name, LEADS[lead], mix, cols, save, implementation)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@pytest.mark.parametrize("mix", MIXES)
@each_function
def test_mixes(name, mix, save, implementation):
    check(name, LEADS["adaLN-zero"], mix, 768, save, implementation)


def check(name, leads, mix, cols, save, implementation):
    x_dtype, r_dtype, p_dtype, y_dtype = mix
    shape, (of_norm, of_gate) = (BATCH, LENGTH, cols), leads
    x, residual = normal(shape, x_dtype, 0, shift=0.5), normal(shape, r_dtype, 1)
    dy, dh = normal(shape, y_dtype, 2), normal(shape, r_dtype, 3)
    params = {"scale": parameter(of_norm, cols, p_dtype, 4)}
    if name == "add_layer_norm":
        params["bias"] = parameter(of_norm, cols, p_dtype, 5, shift=0.0)
    params["gate"] = parameter(of_gate, cols, p_dtype, 6, shift=0.5)

    def function(x, residual, params):
        options = {"save": save, "dtype": y_dtype, "implementation": implementation}
        return FUNCTIONS[name](x, residual, **params, **options)

    (y, h), vjp = jax.vjp(function, x, residual, params)
    dx, dresidual, gradients = vjp((dy, dh))
    # Norms of one row each, beside each other: sums over the first axis are those of a row.
    whole = [
        np.broadcast_to(exact(p), shape)
        for p in (params["scale"], params.get("bias", np.zeros(cols)), params["gate"])
    ]
    rows = (exact(a)[None] for a in (x, residual, h))
    ref = ScaledSum(
        *rows,
        *whole,
        *(exact(d)[None] for d in (dy, dh)),
        name == "add_layer_norm",
        save,
        (x_dtype, r_dtype, y_dtype),
    )
    ref.check_h(h[None])
    ref.check_y(y[None])
    ref.check_rows(dx[None], dresidual[None])
    sums = ref.sums() | {"gate": ref.sums()["branch_scale"]}
    for key, gradient in gradients.items():
        p = params[key]
        assert (gradient.shape, gradient.dtype) == (p.shape, p.dtype)
        over = tuple(i for i, n in enumerate((*(1,) * (3 - p.ndim), *p.shape)) if n == 1)
        value, bound, magnitude = (
            a.sum(over, keepdims=True).reshape(p.shape) for a in (*sums[key], np.abs(sums[key][0]))
        )
        walk = SAFETY * 2.0**-24 * (np.sqrt(BATCH * LENGTH) + 2) * magnitude
        assert_within(gradient, value, bound + walk + rounding(np.abs(value) + bound, p.dtype.name))


def test_a_gate_of_ones_is_none_and_of_zeros_the_residual():
    x, residual = normal((70, 64), "bfloat16", 0), normal((70, 64), "float32", 1)
    for function in FUNCTIONS.values():
        ours, plain = function(x, residual, gate=jnp.ones(64)), function(x, residual)
        for a, b in zip(ours, plain):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(function(x, residual, gate=jnp.zeros(64))[1], residual)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_stay_alone(bad, implementation):
    x, residual, gate = (normal(s, "float32", i) for i, s in enumerate([(70, 64)] * 2 + [(64,)]))

    def run(x):
        results, vjp = jax.vjp(
            lambda x, r: jaxnorm.add_rms_norm(x, r, gate=gate, implementation=implementation),
            x,
            residual,
        )
        return *results, *vjp(results)

    others = np.arange(70) != 5
    for ours, theirs in zip(run(x.at[5, 3].set(bad)), run(x)):
        np.testing.assert_array_equal(ours[others], theirs[others])


# --------------------------------------------------------------------------------- transformations

SHAPE = (3, 5, 16)
X, RESIDUAL = (np.random.default_rng(i).normal(size=SHAPE) for i in range(2))
SCALE, GATE = (np.random.default_rng(i).uniform(0.5, 2, size=(3, 1, 16)) for i in (2, 3))
ALL = X, RESIDUAL, SCALE, GATE


def ours(x, residual, scale, gate, **options):
    return jaxnorm.add_layer_norm(x, residual, scale, gate / 3, gate=gate, **options)


def plain(x, residual, scale, gate):
    h = residual + gate * x
    centred = h - h.mean(-1, keepdims=True)
    r = jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)
    return centred * r * scale + gate / 3, h


def loss_of(function, used=slice(None)):
    return lambda *a: sum(jnp.sum(jnp.sin(3 * result)) for result in function(*a)[used])


def gradients(function, used=slice(None)):
    return jax.grad(loss_of(function, used), (0, 1, 2, 3))


def tangent(function):
    return lambda *operands: jax.jvp(function, operands, tuple(map(jnp.cos, operands)))


def checkpointed(function):
    return jax.checkpoint(function, policy=jaxnorm.save_policy)


ONLY_Y, ONLY_H = slice(1), slice(1, None)
TRANSFORMED = {
    "value": lambda f: f,
    "gradients": gradients,
    "gradients of y": lambda f: gradients(f, ONLY_Y),
    "gradients of h": lambda f: gradients(f, ONLY_H),
    "gradient of the gate": lambda f: jax.grad(loss_of(f), 3),
    "forward mode": tangent,
    "forward mode along the gate": lambda f: (
        lambda *a: jax.jvp(lambda gate: f(*a[:3], gate), a[3:], a[3:])
    ),
    "outside jit": gradients,
    "checkpoint": lambda f: gradients(checkpointed(f)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "forward over reverse": lambda f: tangent(gradients(f)),
    "forward over reverse of h": lambda f: tangent(gradients(f, ONLY_H)),
    "reverse over reverse": lambda f: gradients(lambda *a: [jnp.sum(g) for g in gradients(f)(*a)]),
    "reverse over reverse of h": lambda f: gradients(
        lambda *a: [jnp.sum(g) for g in gradients(f, ONLY_H)(*a)]
    ),
    "reverse over forward": lambda f: gradients(lambda *a: tangent(f)(*a)[1]),
    "vmap of all": lambda f: jax.vmap(gradients(f)),
    "vmap of h": lambda f: jax.vmap(gradients(f, ONLY_H)),
    "vmap of rows": lambda f: (
        lambda x, r, s, g: jax.vmap(gradients(f), (0, 0, None, None))(x, r, s[0, 0], g[0, 0])
    ),
    "vmap of the gate": lambda f: (
        lambda x, r, s, g: jax.vmap(gradients(f), (None, None, None, 0))(x, r, s[0, 0], g[:, 0])
    ),
    "vmap of the scale": lambda f: (
        lambda x, r, s, g: jax.vmap(tangent(f), (None, None, 0, None))(x, r, s[:, 0], g)
    ),
    "gradient of vmap": lambda f: gradients(jax.vmap(f, (1, 1, None, None), out_axes=1)),
}


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation(name, save, x64):
    """In float64, where a wrong formula is far off."""
    runs = map(TRANSFORMED[name], (functools.partial(ours, save=save), plain))
    if name != "outside jit":
        runs = map(jax.jit, runs)
    operands = [*map(jnp.asarray, ALL)]
    if name == "gradient of vmap":  # Of one row of each example.
        operands[2:] = (a[0, 0] for a in operands[2:])
    run, expected = runs
    results = run(*operands)
    assert {a.dtype for a in jax.tree.leaves(results)} == {np.dtype("float64")}
    assert_computes(results, expected, *operands, like=run)


def test_over_other_axes(x64):
    x, residual = jnp.asarray(X), jnp.asarray(RESIDUAL)
    gate = jnp.asarray(np.random.default_rng(5).normal(size=(3, 1, 5)))
    results = jaxnorm.add_layer_norm(x, residual, gate=gate, axis=1)

    def turned(x, residual, gate):
        y, h = plain(x.swapaxes(1, 2), residual.swapaxes(1, 2), 1.0, gate)
        return (y - gate / 3).swapaxes(1, 2), h.swapaxes(1, 2)

    assert_computes(results, turned, x, residual, gate)


# ----------------------------------------------------------------------- programs, what they keep

WRAPPED = {
    "plain": lambda block: block,
    "remat": jax.checkpoint,
    "save_policy": checkpointed,
    "jit": jax.jit,
}


@pytest.mark.remat
@each_save
@each_function
@pytest.mark.parametrize("around", ["plain", "save_policy"])
def test_what_is_kept(around, name, save):
    """y or h, and x, which is 3 u, so that it is none of the arguments; by the policy, no x."""
    u, vector = jnp.ones((4, 16)), jnp.ones(16)

    def block(u, residual, scale, gate):
        return FUNCTIONS[name](3 * u, 2 * residual, scale, gate=gate, save=save)

    vjp = jax.make_jaxpr(lambda *a: jax.vjp(WRAPPED[around](block), *a)[1])(u, u, vector, vector)
    kept = {v for v in vjp.jaxpr.outvars if isinstance(v, jax.extend.core.Var)}
    large = [v for v in kept - {*vjp.jaxpr.invars} if v.aval.shape == u.shape]
    assert len(large) == (2 if around == "plain" else 1)


@pytest.mark.remat
@each_function
@pytest.mark.parametrize("around", WRAPPED)
def test_what_is_made_again(around, name):
    def loss(*operands):
        block = WRAPPED[around](lambda x, r, s, g: FUNCTIONS[name](x, r, s, gate=g))
        return sum(jnp.sum(jnp.sin(a)) for a in block(*operands))

    operands = [jnp.asarray(a, jnp.float32) for a in ALL]
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*operands))
    found = {
        kind: len(re.findall(rf"jaxnorm\.{name}{kind}\[", text))
        for kind in ("", "_backward", "_tangent")
    }
    assert found == {"": 1 + (around == "remat"), "_backward": 1, "_tangent": 0}
    assert set(re.findall(r"\[name=(jaxnorm_\w+)", text)) == {"jaxnorm_out", "jaxnorm_rstd"}


@pytest.mark.parametrize("groups", [1, 32])
@each_function
def test_a_block_is_a_kernel_each_way(name, groups):
    """Whose backward writes the gradients of x and of the residual, and nothing of their size."""
    rows = jax.ShapeDtypeStruct((32, 1024, 1152), "bfloat16")
    vector = jax.ShapeDtypeStruct((groups, 1, 1152) if groups > 1 else (1152,), "float32")

    def both(x, residual, scale, gate, *cotangents):
        results, vjp = jax.vjp(
            lambda x, r, s, g: FUNCTIONS[name](x, r, s, gate=g), x, residual, scale, gate
        )
        return results, vjp(cotangents)

    traced = jax.jit(both).trace(rows, rows, vector, vector, rows, rows)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert [line.rpartition("->")[2].count("32768x1152xbf16") for line in kernels] == [2, 2]
    assert not re.findall(r"stablehlo\.(?:add|convert|multiply|transpose) .*1024x1152", text)


def test_where_the_norm_is_not_used_a_sum_is_left():
    """Forward no norm is made; backward, of h's cotangent, the products alone."""
    operands = [jnp.asarray(a, jnp.float32) for a in ALL]
    forward = jax.jit(lambda *a: ours(*a)[1])
    assert forward.lower(*operands).as_text().count("rsqrt") == 0
    text = str(jax.make_jaxpr(gradients(ours, ONLY_H))(*operands))
    backward = re.findall(r"add_layer_norm_backward\[\n.*\n *\] ([\w ]+)", text)
    # x, y, rstd, scale, bias, the gate, and dh.
    assert [len(names.split()) for names in backward] == [7]


@each_function
def test_outside_of_jit(name):
    """The same bits; without a compiler, too, and from numpy's arrays."""
    x, residual, scale, gate = (np.asarray(a, np.float32) for a in ALL)

    def run(x, residual, scale, gate):
        return FUNCTIONS[name](x, residual, scale, gate=gate)

    results = run(*map(jnp.asarray, (x, residual, scale, gate)))
    for found in (jax.jit(run), run):
        for a, b in zip(found(x, residual, scale, gate), results):
            np.testing.assert_array_equal(a, b)
    with jax.disable_jit():
        uncompiled = run(x, residual, scale, gate)
    assert_computes(uncompiled, run, x, residual, scale, gate)


# ------------------------------------------------------------------------------------------ errors

REFUSED = {
    "short": (jnp.ones(8), r"gate has shape \(8,\); expected \(16,\)"),
    "of x's rows": (jnp.ones((3, 5)), r"gate has shape \(3, 5\); .*broadcast gate to that shape"),
    "too many axes": (jnp.ones((1, 3, 1, 16)), r"gate has shape \(1, 3, 1, 16\)"),
}
WRONG_TYPES = {
    "integers": (jnp.ones(16, jnp.int32), "gate has dtype int32.*cast it"),
    "a string": ("gate", "gate is a str; expected an array"),
}


@each_function
@pytest.mark.parametrize("case", [*REFUSED, *WRONG_TYPES])
def test_errors(case, name):
    gate, message = (REFUSED | WRONG_TYPES)[case]
    error, x = ValueError if case in REFUSED else TypeError, jnp.ones(SHAPE)
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        FUNCTIONS[name](x, x, gate=gate)
    with pytest.raises(TypeError, match="positional"):
        FUNCTIONS[name](x, x, None, *[None] * (name == "add_layer_norm"), jnp.ones(16))


@each_function
def test_implementation_for(name):
    shape = (32, 1024, 1152)
    asked = functools.partial(jaxnorm.implementation_for, name, shape, "bfloat16", platform="cuda")
    for gate in ((32, 1, 1152), (1152,)):
        plan = asked(gate=jax.ShapeDtypeStruct(gate, "float32"))
        assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
        assert "scaled_add_norm" in plan.forward.reason
    plan = asked(gate=jax.ShapeDtypeStruct((1024, 1152), "float32"))
    assert plan.forward.name == plan.backward.name == "xla"
    assert "not consecutive" in plan.forward.reason
    scale = jax.ShapeDtypeStruct((32, 1024, 1152), "float32")
    plan = asked(scale=scale, gate=jax.ShapeDtypeStruct((32, 1, 1152), "float32"))
    assert "groups of different sizes" in plan.backward.reason
    with pytest.raises(ValueError, match=rf"^{name}: gate has shape"):
        asked(gate=jax.ShapeDtypeStruct((1151,), "float32"))
