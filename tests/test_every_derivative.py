"""Derivatives of every function, of each order and mode and under transformations, as plain JAX's.

XLA's code runs in float64. Kernels do not support float64, so they run in float32 on a GPU and are
compared with the same float64 results.
"""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from functions import (
    BASIC,
    VARIANTS,
    Function,
    Sizes,
    losses,
    norm_of,
    of_floats,
    operands_of,
    rms_norm,
    scalar,
)
from functions import FUNCTIONS as TABLE
from jax.experimental import jet
from pairs import KERNELS, pairwise
from program_error import analyse, assert_analysed, values_of
from programs import primitives

import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("x64", "quick_to_compile")]


def some_zeros(s):
    return jnp.where(jnp.arange(s.shape[-1]) % 2 == 0, 0, s)


def weights_of(labels):
    """Return one weight per position. Some weights are negative, and some are 0."""
    return jnp.cos(2.0 * labels) * (labels % 5 != 1)


def plain_weighted(x, w, b, labels):
    weights = weights_of(labels)
    each = losses(1.5 * (x @ w + b), labels, weights, smoothing=0.1, z_loss=1e-2, cap=2.0)
    return each.sum() / weights.sum()


def weighted(x, w, b, labels):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_scale": 1.5, "logit_softcap": 2.0}
    given = {"bias": b, "where": weights_of(labels), "chunk": 2}
    return jaxnorm.linear_softmax_cross_entropy(x, w, labels, **given, **options)


MASKS = {"causal": np.tri(2, 2, dtype=bool), "masked": np.array([[True, False], [False, False]])}


def attention(kind, bias=0.0):
    """Return the `Function` of attention over positions that are the first axis of its operands."""

    def ours(q, k, v):
        mask = None if kind == "causal" else jnp.asarray(MASKS[kind])[None]
        given = {"is_causal": kind == "causal", "mask": mask, "bias": jnp.asarray(bias, q.dtype)}
        return jaxnorm.nnx.dot_product_attention(q, k, v, **given)

    def plain(q, k, v):
        z = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) + bias
        # If all keys of a query are masked, it attends to all of them.
        z = jnp.where(MASKS[kind], z, -1e30)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(z), v)

    return Function(ours, plain, "x residual gate")


# Calls with other axes, masks and options than those of the table, and attention.
MORE = {
    "attention causal": attention("causal"),
    "attention masked": attention("masked", np.arange(4.0).reshape(2, 1, 2)),
    "softmax of all axes": Function(
        functools.partial(jaxnorm.softmax, axis=None),
        functools.partial(jax.nn.softmax, axis=None),
        "x",
    ),
    "log_softmax masked": Function(
        lambda x, b, m: jnp.where(m, jaxnorm.log_softmax(x, scale=0.7, bias=b, where=m), 0),
        lambda x, b, m: jnp.where(m, jax.nn.log_softmax(0.7 * x + b, where=m), 0),
        "x logits_bias mask",
    ),
    "layer_norm of all axes": norm_of("layer_norm", "x", axis=(-3, -2, -1))._replace(
        ours=functools.partial(jaxnorm.layer_norm, axis=None)
    ),
    "rms_norm with scales of 0": Function(
        lambda x, s: jaxnorm.rms_norm(x, some_zeros(s), save="input"),
        lambda x, s: rms_norm(x, some_zeros(s)),
        "x scale",
    ),
    "rms_norm with an offset": norm_of("rms_norm", "x scale", "x bias", scale_offset=1.0),
    "rms_norm_gated sigmoid": norm_of(
        "rms_norm_gated", "x gate scale", norm_before_gate=False, activation="sigmoid"
    ),
    "linear loss with weights": Function(weighted, plain_weighted, "x weight feature_bias labels"),
    # The activation is a Python function that closes over an array.
    "activation_linear of a function": Function(
        lambda x, w, s: jaxnorm.activation_linear(
            x, w, activation=lambda x: jnp.tanh(s * x), product=jnp.matmul
        ),
        lambda x, w, s: jnp.tanh(s * x) @ w,
        "x weight scale",
    ),
}
FUNCTIONS = TABLE | MORE
# Functions whose kernels run for these operands. Other kernels need wider rows, or tables without
# gradients.
WITH_KERNELS = [
    name
    for name, function in TABLE.items()
    if not {"logits", "mask", "of_groups", "of_heads"} & {*function.kinds.split()}
    and "linear" not in name
]
# Most functions differ from one of these only in a formula. The others are tested with fewer cases.
MAIN = [
    *("softmax", "softmax with a bias", "log_softmax", "layer_norm", "rms_norm"),
    *("rms_norm_add_rms_norm", "rms_norm_rope", "rms_norm_gated", "rms_norm_linear silu"),
]
REST = [name for name in FUNCTIONS if name not in MAIN]


def along(operands):
    return tuple(map(jnp.cos, operands))


def every(operands):
    return tuple(range(len(operands)))


def jvp(f):
    return lambda *a: jax.jvp(f, a, along(a))


def gradient(f):
    return lambda *a: jax.grad(scalar(f), every(a))(*a)


def forward_over_reverse(f):
    return lambda *a: jax.jvp(gradient(f), a, along(a))[1]


def reverse_over_reverse(f):
    return gradient(gradient(f))


def few(f):
    """Return a function that computes the first eight elements of each result of f."""
    return lambda *a: jax.tree.map(lambda y: y.ravel()[:8], f(*a))


def twice(a, axis=0):
    return jnp.stack([a, 2 * a], axis)


def batch(f, *axes):
    """Return `jax.vmap` of f over two variants of each operand that has an axis in `axes`.

    The last of the axes is that of all further operands.
    """

    def run(*a):
        dims = (*axes, *axes[-1:] * len(a))[: len(a)] if len(a) > 1 else (0,)
        given = [v if dim is None else twice(v, dim) for v, dim in zip(a, dims, strict=True)]
        return jax.vmap(f, dims)(*given)

    return run


# The values of this dict are transformations. A transformation takes a function of arrays of
# floats, and returns a function that computes one of its derivatives.
DERIVATIVES = {
    "jvp": jvp,
    "jvp along the last operand": lambda f: (
        lambda *a: jax.jvp(lambda s: f(*a[:-1], s), a[-1:], along(a[-1:]))
    ),
    "jacfwd": lambda f: lambda *a: jax.jacfwd(few(f), every(a))(*a),
    "jacrev": lambda f: lambda *a: jax.jacrev(few(f), every(a))(*a),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*along(a)),
    "transpose of linearize": lambda f: (
        lambda *a: jax.linear_transpose(jax.linearize(f, *a)[1], *a)(jax.tree.map(jnp.cos, f(*a)))
    ),
    "transpose of vjp": lambda f: (
        lambda *a: jax.linear_transpose(jax.vjp(f, *a)[1], f(*a))(along(a))
    ),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": lambda f: (
        lambda *a: jax.grad(lambda *a: jvp(scalar(f))(*a)[1], every(a))(*a)
    ),
    "reverse over reverse": reverse_over_reverse,
    "forward over forward": lambda f: lambda *a: jvp(lambda *a: jvp(scalar(f))(*a)[1])(*a)[1],
    "hessian of the last operand": lambda f: (
        lambda *a: jax.hessian(lambda s: scalar(f)(*a[:-1], s))(a[-1])
    ),
    "frozen parameters": lambda f: lambda *a: jax.grad(scalar(f))(*a),
    "third derivative": lambda f: (
        lambda *a: jax.grad(jax.grad(jax.grad(lambda t: scalar(f)(*(t * v for v in a)))))(
            jnp.asarray(1.1, a[0].dtype)
        )
    ),
    "gradients of a batch": lambda f: batch(gradient(f), 0, None),
    "batches of batches": lambda f: batch(batch(gradient(f), 0, None), None, 0, None),
    "forward over reverse of a batch of parameters": lambda f: batch(
        forward_over_reverse(f), None, 0
    ),
    "gradient of a batch of parameters": lambda f: gradient(batch(f, None, 0)),
}
TRANSFORMATIONS = {
    "scan": lambda f: (
        lambda x, *a: jax.lax.scan(
            lambda c, x: (c + scalar(f)(x, *a), f(jnp.cos(c) * x, *a)), jnp.zeros_like(x, shape=()),
            twice(x),
        )
    ),
    "checkpoint": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
    "jit": jax.jit,
    "vmap": lambda f: batch(f, 0, None),
}  # fmt: skip
SIZES = {"xla": Sizes((2, 2), 6, 5), **dict.fromkeys(KERNELS, Sizes((35, 2), 64))}


def call_of(function, name, implementation):
    """Return `function` as a function of its floating-point operands, and these operands."""
    dtype = "float64" if implementation == "xla" else "float32"
    given = operands_of(name, dtype, SIZES[implementation], FUNCTIONS)
    return of_floats(function, given), [a for a in given if jnp.issubdtype(a.dtype, jnp.floating)]


@functools.cache
def expected_of(name, derivative, transformation, implementation):
    """Return the derivatives of the plain formula, with error bounds."""
    function, operands = call_of(FUNCTIONS[name].plain, name, implementation)
    return analyse(
        derivative(TRANSFORMATIONS.get(transformation, lambda f: f)(function)), *operands
    )


def check(name, derivative, transformation, implementation, compiled=True):
    """Compare a derivative of our function with the same derivative of the plain formula.

    The bounds follow from the operations of both. If `compiled` is False, our program is traced,
    and its equations are evaluated in float64.
    """
    ours = FUNCTIONS[name].ours
    if implementation in KERNELS:
        ours = functools.partial(ours, implementation=implementation)
    function, operands = call_of(ours, name, implementation)
    # Only `scan` and `vmap` change values. So only these two transformations are applied to the
    # plain formula.
    repeated = transformation if transformation in ("scan", "vmap") else None
    expected = expected_of(name, derivative, repeated, implementation)
    program = derivative(TRANSFORMATIONS.get(transformation, lambda f: f)(function))
    analysed = analyse(program, *operands)
    got = jax.jit(program)(*operands) if compiled else values_of(analysed)
    types = jax.eval_shape(program, *operands)
    assert {a.dtype for a in jax.tree.leaves(types)} == {operands[0].dtype}
    assert_analysed(got, expected, analysed)


# Kernels are tested with every derivative of every function, and so is XLA's code of the functions
# in MAIN. Of the other functions, XLA's code is tested with every fourth derivative.
#
# A third of the programs with XLA's code is compiled. The other programs are traced, and their
# equations are evaluated in float64. This shows errors in the rules of differentiation and batching
# equally well.
@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS)
@pytest.mark.parametrize(
    ("derivative", "name", "implementation"),
    [
        pytest.param(derivative, name, implementation, marks=KERNELS.get(implementation, ()))
        for i, derivative in enumerate(DERIVATIVES)
        for name in FUNCTIONS
        for implementation in ("xla", *(KERNELS if name in WITH_KERNELS else ()))
        if implementation in KERNELS or name in MAIN or (i + REST.index(name)) % 4 == 0
    ],
    indirect=["implementation"],
)
def test_derivatives(name, derivative, implementation):
    at = [*DERIVATIVES].index(derivative) + [*FUNCTIONS].index(name)
    compiled = implementation in KERNELS or at % 3 == 0
    check(name, DERIVATIVES[derivative], None, implementation, compiled)


IN_TURN = {
    "jvp": jvp,
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
}


def with_own_rule(f):
    """Return f with its tangents as a custom rule, in which constants have tangents of zeros."""
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(functools.partial(jax.jvp, f))
    return wrapped


def of_each_operand(derivative):
    """Return a transformation that computes ``derivative(f, i, *operands)`` for each operand i."""
    return lambda f: lambda *a: [derivative(f, i, *a) for i in every(a)]


def cosines(f, *a):
    return jax.tree.map(jnp.cos, f(*a))


def transposed(f, i, *a):
    """Transpose f's JVP with respect to one tangent. The others are constants that are not 0."""

    def tangent(t):
        return jax.jvp(f, a, (*along(a)[:i], t, *along(a)[i + 1 :]))[1]

    return jax.linear_transpose(tangent, a[i])(cosines(f, *a))[0]


# Rules for some of the arguments, and rules of the JVP and of the gradient, which are linear.
IN_STEPS = {
    "custom_jvp": of_each_operand(lambda f, i, *a: jax.grad(scalar(with_own_rule(f)), i)(*a)),
    "transpose of one tangent": of_each_operand(transposed),
    "tangent of a tangent": lambda f: (
        lambda *a: jax.jvp(lambda *t: jax.jvp(f, a, t)[1], along(a), a)[1]
    ),
    "tangent of a gradient": lambda f: (
        lambda *a: jax.jvp(jax.vjp(f, *a)[1], (cosines(f, *a),), (f(*a),))[1]
    ),
}


@pytest.mark.parametrize("derivative", IN_STEPS)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name in {*BASIC, *MAIN}])
def test_rules_in_steps(name, derivative):
    check(name, IN_STEPS[derivative], None, "xla", compiled=False)


@pytest.mark.remat
# The cases contain every pair of a function in MAIN and a transformation, and every pair of a
# transformation and a derivative. The other functions have one case each.
@pytest.mark.parametrize(
    ("derivative", "transformation", "name"),
    [
        *pairwise([*IN_TURN], [*TRANSFORMATIONS], MAIN),
        *(
            ([*IN_TURN][i % 3], [*TRANSFORMATIONS][i % 5], name)
            for i, name in enumerate(REST)
            if name not in VARIANTS
        ),
    ],
)
def test_under_transformations(name, transformation, derivative):
    check(name, IN_TURN[derivative], transformation, "xla", transformation in ("jit", "scan"))


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_kernels_under_transformations(name, transformation, kernels):
    check(name, forward_over_reverse, transformation, kernels)


# Outside of `jax.jit`, the loops of linear losses are slow. `test_programs` runs their gradients.
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if not n.startswith("linear")])
def test_outside_jit(name):
    """Functions in MAIN are tested with three derivatives, the others with one."""
    turn = [*FUNCTIONS].index(name) % 3
    function, operands = call_of(FUNCTIONS[name].ours, name, "xla")
    for derivative in [*IN_TURN.values()] if name in MAIN else [[*IN_TURN.values()][turn]]:
        program = derivative(function)
        expected = expected_of(name, derivative, None, "xla")
        assert_analysed(program(*operands), expected, analyse(program, *operands))


@pytest.mark.parametrize(("save", "bound"), [("output", 2.2e-2), ("input", 2e-3)])
def test_a_tangent_has_the_accuracy_of_what_is_saved(save, bound):
    """For both values of `save`, the tangent of y has at most the error that the docs state.

    The call is a bfloat16 LayerNorm with a bias of 10, and only its scale has a tangent.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(256, 1024)), jnp.bfloat16)
    scale, bias = jnp.ones(1024, jnp.float32), jnp.full(1024, 10, jnp.float32)
    direction = jnp.asarray(rng.normal(size=1024), jnp.float32)
    _, tangent = jax.jvp(lambda s: jaxnorm.layer_norm(x, s, bias, save=save), [scale], [direction])
    exact = x.astype("float64")
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True) * direction
    error = np.linalg.norm(tangent.astype("float64") - exact) / np.linalg.norm(exact)
    assert error < bound


# --------------------------------------------------------------------------- contents of programs


def test_the_jaxpr_of_a_gradient_is_short():
    x, scale = jnp.ones((4, 16), jnp.float32), jnp.ones(16, jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, s: jaxnorm.rms_norm(x, s).sum(), (0, 1)))(x, scale)
    assert len(str(jaxpr).splitlines()) <= 45
    found = primitives(jaxpr)
    assert "jit" not in found
    passes = [name for name in found if name.startswith("jaxnorm.")]
    assert passes == ["jaxnorm.rms_norm", "jaxnorm.rms_norm_backward"]


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_primitives_are_named_after_the_functions(name):
    """Primitives have the public functions' names, in jaxprs and in profilers' metadata."""
    public = name.split()[0]
    function, arrays = call_of(FUNCTIONS[name].ours, name, "xla")
    found = primitives(jax.make_jaxpr(jvp(function))(*arrays))
    assert {f"jaxnorm.{public}", f"jaxnorm.{public}_tangent"} <= {*found}
    hlo = jax.jit(gradient(function)).lower(*arrays).compile().as_text()
    assert f"/jaxnorm.{public}/" in hlo
    assert f"/jaxnorm.{public}_backward/" in hlo


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rms_norm", jaxnorm.rms_norm),
        ("softmax", jaxnorm.softmax),
        (
            "linear_softmax_cross_entropy",
            lambda x: jaxnorm.linear_softmax_cross_entropy(x, jnp.ones((4, 5)), jnp.zeros(3, int)),
        ),
        ("log_prob_and_entropy", lambda x: jaxnorm.log_prob_and_entropy(x, jnp.zeros(3, int))),
    ],
)
def test_taylor_mode_is_refused(name, function):
    x = jnp.ones((3, 4))
    with pytest.raises(NotImplementedError, match=rf"^{name}: .*jet has no rule.*nest jax.jvp"):
        jet.jet(function, (x,), ((x, x),))
