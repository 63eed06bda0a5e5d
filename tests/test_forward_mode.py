"""Forward mode, also combined with reverse mode and all transformations, compared with plain JAX.

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
from functions import gated as plain_gated
from functions import layer_norm, log_prob_and_entropy, losses
from functions import rms_norm as plain_rms_norm
from functions import rope as plain_rope
from jax.experimental import jet
from pairs import KERNELS, pairwise
from program_error import analyse, assert_analysed, assert_computes, values_of
from programs import equations, primitives

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("x64", "quick_to_compile")]


def rms_norm(x, scale, bias):
    return plain_rms_norm(x, scale)


def residual(x):
    return jnp.sin(x) / 2


def two_norms(x, s, b):
    h = residual(x) + rms_norm(x, s, None)
    return rms_norm(h, b, None) + h / 4


def with_residual(function, **options):
    """Return a function of x, scale and bias that calls `function` with a residual.

    Its result is computed from both results of `function`, y and h.
    """

    def both(x, *parameters, **more):
        y, h = function(x, residual(x), *parameters, **options, **more)
        return y + h / 4

    return both


def rotated(function, **options):
    """Return a function of x, scale and bias that calls `function` with rotary tables.

    The tables cos and sin are computed from the bias. They are not true cosines and sines: each
    entry of cos is at least 1, so that cos and sin are never both near 0.
    """

    def call(x, scale, bias, **more):
        cos, sin = halves(bias)
        return function(x, scale, 2 + jnp.sin(cos), sin, **options, **more)

    return call


def gated(function, **options):
    """Return a function of x, scale and bias that calls `function` with the gate sin(x) + bias."""
    return lambda x, s, b, **more: function(x, jnp.sin(x) + b, s, **options, **more)


def halves(a):
    return a.reshape(*a.shape[:-1], 2, -1)


def causal_softmax(x, s, b):
    logits = 0.7 * halves(x) + halves(s + b)
    reached = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(logits, where=reached).reshape(x.shape)


def our_causal_softmax(x, s, b, **options):
    y = jaxnorm.softmax(halves(x), scale=0.7, bias=halves(s + b), causal=True, **options)
    return y.reshape(x.shape)


# Maps a name to two functions of x, scale and bias: a formula in plain JAX, and a call of our
# function.
FUNCTIONS = {
    "softmax causal": (causal_softmax, our_causal_softmax),
    "log_softmax with a bias": (
        lambda x, s, b: jax.nn.log_softmax(0.7 * x + s + b),
        lambda x, s, b, **o: jaxnorm.log_softmax(x, scale=0.7, bias=s + b, **o),
    ),
    "softmax": (lambda x, s, b: jax.nn.softmax(x), lambda x, s, b, **o: jaxnorm.softmax(x, **o)),
    "log_softmax": (
        lambda x, s, b: jax.nn.log_softmax(x),
        lambda x, s, b, **o: jaxnorm.log_softmax(x, **o),
    ),
    "layer_norm": (layer_norm, jaxnorm.layer_norm),
    "layer_norm from input": (layer_norm, functools.partial(jaxnorm.layer_norm, save="input")),
    "rms_norm": (rms_norm, lambda x, s, b, **o: jaxnorm.rms_norm(x, s, **o)),
    "rms_norm from input": (
        rms_norm,
        lambda x, s, b, **o: jaxnorm.rms_norm(x, s, save="input", **o),
    ),
    "layer_norm silu": (
        lambda x, s, b: jax.nn.silu(layer_norm(x, s, b)),
        functools.partial(jaxnorm.layer_norm, activation="silu"),
    ),
    "add_layer_norm": (
        lambda x, s, b: layer_norm(x + residual(x), s, b) + (x + residual(x)) / 4,
        with_residual(jaxnorm.add_layer_norm),
    ),
    "add_rms_norm from input": (
        lambda x, s, b: rms_norm(x + residual(x), s, b) + (x + residual(x)) / 4,
        lambda x, s, b, **o: with_residual(jaxnorm.add_rms_norm, save="input")(x, s, **o),
    ),
    "add_layer_norm with a gate": (
        lambda x, s, b: layer_norm(s * x + residual(x), s, b) + (s * x + residual(x)) / 4,
        lambda x, s, b, **o: with_residual(jaxnorm.add_layer_norm, gate=s)(x, s, b, **o),
    ),
    "rms_norm_add": (
        lambda x, s, b: residual(x) + rms_norm(x, s, b),
        lambda x, s, b, **o: jaxnorm.rms_norm_add(x, residual(x), s, **o),
    ),
    "rms_norm_add_rms_norm": (two_norms, with_residual(jaxnorm.rms_norm_add_rms_norm)),
    "rms_norm_rope": (rotated(plain_rope), rotated(jaxnorm.rms_norm_rope)),
    "rms_norm_rope from input": (
        rotated(plain_rope, interleaved=True),
        rotated(jaxnorm.rms_norm_rope, interleaved=True, save="input"),
    ),
    "rms_norm_gated": (gated(plain_gated), gated(jaxnorm.rms_norm_gated)),
    "rms_norm_gated gate first": (
        gated(plain_gated, before=False, activation=jax.nn.gelu),
        gated(jaxnorm.rms_norm_gated, norm_before_gate=False, activation="gelu"),
    ),
}


def matrix(s, b):
    """Return a weight for a matmul, computed from the scale s and the bias b."""
    return jnp.outer(jnp.sin(s), jnp.cos(b)) / s.size


def labels_of(x):
    return jnp.arange(x[..., 0].size).reshape(x.shape[:-1]) % x.shape[-1]


def of_rows(function, **options):
    """Return a function `call` of x, scale and bias, whose result has x's shape.

    `call` computes one or two numbers per row with `function`. It then computes one factor per row
    from these numbers, and multiplies x by these factors.
    """

    def call(x, s, b):
        y = function(x, s, b, labels_of(x), **options)
        y = jnp.sin(y[0]) - 0.7 * y[1] ** 2 if isinstance(y, tuple) else y
        return x * jnp.sin(y[..., None] if y.ndim else y)

    return call


def plain_losses(x, s, b, labels, scale=1.0, **options):
    return losses(scale * (x * s + b), labels, 1.0, **options)


def our_losses(x, s, b, labels, **options):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(x * s + b, labels, **options)


def plain_log_prob(x, s, b, labels, scale=1.0, cap=None):
    return log_prob_and_entropy(scale * (x * s + b), labels, 1.0, cap)


def our_log_prob(x, s, b, labels, **options):
    return jaxnorm.log_prob_and_entropy(x * s + b, labels, **options)


def weights_of(labels):
    """Return one weight per position. Some weights are negative, and some are 0."""
    return jnp.cos(2.0 * labels) * (labels % 5 != 1)


def plain_linear_losses(x, s, b, labels, mean=False):
    weights = weights_of(labels)
    logits = 1.5 * (x @ matrix(s, b) + b)
    each = losses(logits, labels, weights, smoothing=0.1, z_loss=1e-2, cap=2.0)
    return each.sum() / weights.sum() if mean else each


def our_linear_losses(x, s, b, labels, **options):
    options |= {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_scale": 1.5, "logit_softcap": 2.0}
    given = {"bias": b, "where": weights_of(labels), "chunk": 2}
    return jaxnorm.linear_softmax_cross_entropy(x, matrix(s, b), labels, **given, **options)


def plain_linear_log_prob(x, s, b, labels):
    return log_prob_and_entropy(1.5 * (x @ matrix(s, b) + b), labels, labels % 3 > 0, cap=2.0)


def our_linear_log_prob(x, s, b, labels):
    given = {"bias": b, "where": labels % 3 > 0, "chunk": 2}
    options = {"logits_scale": 1.5, "logit_softcap": 2.0}
    return jaxnorm.linear_log_prob_and_entropy(x, matrix(s, b), labels, **given, **options)


def our_norm_linear(x, s, b):
    given = {"bias": b, "residual": residual(x), "activation": "gelu"}
    y, h = jaxnorm.rms_norm_linear(x, matrix(s, b), s, **given)
    return y + h / 4


def plain_norm_linear(x, s, b):
    h = x + residual(x)
    return jax.nn.gelu(plain_rms_norm(h, s) @ matrix(s, b) + b) + h / 4


def masked(function):
    """Return a function of x, scale and bias that calls `function` with every third entry masked.

    The results of masked entries are set to 0, because log_softmax returns -inf for them.
    """

    def call(x, s, b):
        kept = jnp.arange(x.size).reshape(x.shape) % 3 > 0
        return jnp.where(kept, function(x * s, where=kept), 0)

    return call


def some_zeros(s):
    return jnp.where(jnp.arange(s.shape[-1]) % 2 == 0, 0, s)


# More entries in the format of `FUNCTIONS`: functions that reduce over other axes, functions with
# masks or scales, and functions with two results of which only one is used. There are also losses
# and linear layers, whose operands have other shapes.
OTHERS = {
    "softmax of all axes": (
        lambda x, s, b: jax.nn.softmax(x * s, axis=None),
        lambda x, s, b: jaxnorm.softmax(x * s, axis=None),
    ),
    "softmax masked": (masked(jax.nn.softmax), masked(jaxnorm.softmax)),
    "log_softmax masked": (masked(jax.nn.log_softmax), masked(jaxnorm.log_softmax)),
    "layer_norm of all axes": (
        lambda x, s, b: layer_norm(x * s, axis=None) + b,
        lambda x, s, b: jaxnorm.layer_norm(x * s, axis=None) + b,
    ),
    "rms_norm with scales of 0": (
        lambda x, s, b: plain_rms_norm(x, some_zeros(s)),
        lambda x, s, b: jaxnorm.rms_norm(x, some_zeros(s), save="input"),
    ),
    "rms_norm with an offset": (
        lambda x, s, b: plain_rms_norm(x, s + 1),
        lambda x, s, b: jaxnorm.rms_norm(x, s, scale_offset=1.0),
    ),
    "rms_norm_gated gelu": (
        gated(plain_gated, activation=jax.nn.gelu),
        gated(jaxnorm.rms_norm_gated, activation="gelu"),
    ),
    "rms_norm_gated sigmoid, gate first": (
        gated(plain_gated, before=False, activation=jax.nn.sigmoid),
        gated(jaxnorm.rms_norm_gated, norm_before_gate=False, activation="sigmoid"),
    ),
    "add_layer_norm, h alone": (
        lambda x, s, b: s * x + residual(x),
        lambda x, s, b: jaxnorm.add_layer_norm(x, residual(x), s, b, gate=s)[1],
    ),
    "add_layer_norm, y alone": (
        lambda x, s, b: layer_norm(s * x + residual(x), s, b),
        lambda x, s, b: jaxnorm.add_layer_norm(x, residual(x), s, b, gate=s, save="input")[0],
    ),
    "cross_entropy": (
        of_rows(plain_losses, smoothing=0.2, z_loss=1e-2),
        of_rows(our_losses, label_smoothing=0.2, z_loss=1e-2),
    ),
    "cross_entropy capped": (
        of_rows(plain_losses, scale=0.7, smoothing=0.1, z_loss=1e-3, cap=10.0),
        of_rows(our_losses, logits_scale=0.7, label_smoothing=0.1, z_loss=1e-3, logit_softcap=10.0),
    ),
    "log_prob": (of_rows(plain_log_prob), of_rows(our_log_prob)),
    "log_prob capped": (
        of_rows(plain_log_prob, scale=0.7, cap=3.0),
        of_rows(our_log_prob, logits_scale=0.7, logit_softcap=3.0),
    ),
    "linear loss": (of_rows(plain_linear_losses, mean=True), of_rows(our_linear_losses)),
    "linear losses": (
        of_rows(plain_linear_losses),
        of_rows(our_linear_losses, reduction="none"),
    ),
    "linear log_prob": (of_rows(plain_linear_log_prob), of_rows(our_linear_log_prob)),
    "rms_norm_linear": (plain_norm_linear, our_norm_linear),
    "gated_linear": (
        lambda x, s, b: (jax.nn.gelu(x) * jnp.sin(x)) @ matrix(s, b) + b,
        lambda x, s, b: jaxnorm.gated_linear(
            x, jnp.sin(x), matrix(s, b), bias=b, activation="gelu"
        ),
    ),
    # The activations are Python functions. One of them closes over an array.
    "activation_linear": (
        lambda x, s, b: jnp.tanh(s * x) @ matrix(s, b) + b,
        lambda x, s, b: jaxnorm.activation_linear(
            x, matrix(s, b), bias=b, activation=lambda x: jnp.tanh(s * x), product=jnp.matmul
        ),
    ),
}


def along(operands):
    return tuple(map(jnp.cos, operands))


def loss(f):
    def weighted(x, s, b):
        return jnp.sum(jnp.sin(f(x, s, b)) * jnp.cos(jnp.arange(x.shape[-1], dtype=x.dtype)))

    return weighted


def jvp(f):
    return lambda *a: jax.jvp(f, a, along(a))


def gradient(f):
    return jax.grad(loss(f), (0, 1, 2))


def forward_over_reverse(f):
    return lambda *a: jax.jvp(gradient(f), a, along(a))[1]


def reverse_over_reverse(f):
    return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(g)) for g in gradient(f)(*a)), (0, 1, 2))


# The values of this dict are transformations. A transformation takes a function of x, scale and
# bias, and returns a function that computes one of its derivatives.
DERIVATIVES = {
    "jvp": jvp,
    "jvp along scale": lambda f: lambda x, s, b: jax.jvp(lambda s: f(x, s, b), (s,), along((s,))),
    "jacfwd": lambda f: jax.jacfwd(lambda x, s, b: f(x, s, b)[:2], (0, 1, 2)),
    "jacrev": lambda f: jax.jacrev(lambda x, s, b: f(x, s, b)[:2], (0, 1, 2)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*along(a)),
    "transpose of linearize": lambda f: (
        lambda *a: jax.linear_transpose(jax.linearize(f, *a)[1], *a)(jnp.cos(a[0]))
    ),
    "transpose of vjp": lambda f: (
        lambda *a: jax.linear_transpose(jax.vjp(f, *a)[1], a[0])(along(a))
    ),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": lambda f: jax.grad(lambda *a: jnp.sum(jvp(loss(f))(*a)[1]), (0, 1, 2)),
    "reverse over reverse": reverse_over_reverse,
    "forward over forward": lambda f: lambda *a: jvp(lambda *a: jvp(loss(f))(*a)[1])(*a)[1],
    "hessian of parameters": lambda f: (
        lambda x, s, b: jax.hessian(lambda s, b: loss(f)(x, s, b), (0, 1))(s, b)
    ),
    "frozen parameters": lambda f: lambda x, s, b: jax.grad(lambda x: loss(f)(x, s, b))(x),
    "third derivative": lambda f: (
        lambda *a: jax.grad(jax.grad(jax.grad(lambda t: loss(f)(*(t * v for v in a)))))(
            jnp.asarray(1.1, a[0].dtype)
        )
    ),
    "per-example gradients": lambda f: (
        lambda x, s, b: jax.vmap(gradient(f), (0, None, None))(x, s, b)
    ),
    "batches of batches": lambda f: (
        lambda x, s, b: jax.vmap(jax.vmap(gradient(f), (0, None, None)), (None, 0, None))(
            jnp.stack([x, 2 * x]), jnp.stack([s, 2 * s]), b
        )
    ),
    "forward over reverse of a batch of parameters": lambda f: (
        lambda x, s, b: jax.vmap(forward_over_reverse(f), (None, 0, 1))(
            x, jnp.stack([s, 2 * s]), jnp.stack([b, 2 * b], axis=1)
        )
    ),
    "gradient of a batch of parameters": lambda f: (
        lambda x, s, b: jax.grad(
            lambda s: jnp.sum(jnp.sin(jax.vmap(f, (None, 0, None), 1)(x, jnp.stack([s, 2 * s]), b)))
        )(s)
    ),
}
TRANSFORMATIONS = {
    "scan": lambda f: (
        lambda x, s, b: jax.lax.scan(lambda x, _: (x + f(x, s, b), None), x, None, length=3)[0]
    ),
    "checkpoint": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, (0, None, None)),
}


def operands(dtype, rows, cols):
    rng = np.random.default_rng(0)
    x, scale, bias = (rng.normal(size=shape) for shape in ((rows, cols), cols, cols))
    return tuple(jnp.asarray(a, dtype) for a in (x, 1 + 0.3 * scale, bias))


def transformed(function, derivative, transformation):
    """Return a derivative of `function`.

    If `transformation` is not None, it is applied to the function before the derivative is taken.
    """
    if transformation is not None:
        function = TRANSFORMATIONS[transformation](function)
    return derivative(function)


@functools.cache
def expected_of(reference, derivative, transformation, *of):
    """Return the derivatives of the reference function, with error bounds.

    They are cached, because functions that differ only in `save` have the same reference.
    """
    return analyse(transformed(reference, derivative, transformation), *operands(*of))


def check(name, derivative, transformation, implementation, compiled=True):
    """Compare a derivative of our function with the same derivative of the reference.

    The bounds follow from the operations of both. If `compiled` is False, our program is traced,
    and its equations are evaluated in float64.
    """
    reference, function = (FUNCTIONS | OTHERS)[name]
    if name in FUNCTIONS:
        function = functools.partial(function, implementation=implementation)
    of = ("float64", 4, 6) if implementation == "xla" else ("float32", 70, 64)
    # Only `scan` and `vmap` change values. So only these two transformations are applied to the
    # reference. Under `vmap`, all rows are copies of the first row and have its label.
    repeated = transformation if transformation in ("scan", "vmap") else None
    expected = expected_of(reference, derivative, repeated, *of)
    program = transformed(function, derivative, transformation)
    analysed = analyse(program, *operands(*of))
    got = jax.jit(program)(*operands(*of)) if compiled else values_of(analysed)
    types = jax.eval_shape(program, *operands(*of))
    assert {a.dtype for a in jax.tree.leaves(types)} == {np.dtype(of[0])}
    assert_analysed(got, expected, analysed)


each_function = pytest.mark.parametrize("name", FUNCTIONS)

# For each of these functions, there is a function outside of this list that has the same
# differentiation rules. The two functions differ only in one formula.
VARIANTS = [
    "log_softmax with a bias",
    "layer_norm from input",
    "rms_norm from input",
    "layer_norm silu",
    "add_layer_norm",
    "add_rms_norm from input",
    "add_layer_norm with a gate",
    "rms_norm_add",
    "rms_norm_rope from input",
    "rms_norm_gated gate first",
    *OTHERS,
]
IN_TURN = ["jvp", "forward over reverse", "reverse over reverse"]


# Kernels are tested with every derivative of every function. XLA's code is tested with every
# derivative of the functions that are not in VARIANTS. For a function in VARIANTS, XLA's code is
# tested only with every third derivative. Each of the three thirds has derivatives of first and of
# second order, and a batch or a Jacobian.
#
# A third of the programs with XLA's code is compiled: of each function, programs of first and of
# second order. The other programs are traced, and their equations are evaluated in float64. This
# shows errors in the rules of differentiation and batching equally well.
#
# A case is skipped if a kernel does not support its call, for one of two reasons. Some kernels need
# at least 64 rows if the rows are short. Some kernels of rotary norms need the same scale for all
# rows, but per-example gradients have one scale for each row.
@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS)
@pytest.mark.parametrize(
    ("derivative", "name", "implementation"),
    [
        pytest.param(derivative, name, implementation, marks=KERNELS.get(implementation, ()))
        for i, derivative in enumerate(DERIVATIVES)
        for name in FUNCTIONS | OTHERS
        for implementation in ("xla", *(KERNELS if name in FUNCTIONS else ()))
        if implementation in KERNELS or name not in VARIANTS or (i + VARIANTS.index(name)) % 3 == 0
    ],
    indirect=["implementation"],
)
def test_derivatives(name, derivative, implementation):
    at = [*DERIVATIVES].index(derivative) + [*FUNCTIONS, *OTHERS].index(name)
    compiled = implementation in KERNELS or at // 3 % 3 == 0
    check(name, DERIVATIVES[derivative], None, implementation, compiled)


@pytest.mark.remat
# The cases contain every pair of a function and a transformation, every pair of a function and a
# derivative, and every pair of a transformation and a derivative. The functions in VARIANTS have
# fewer cases: two of the derivatives, each under only one transformation.
@pytest.mark.parametrize(
    ("derivative", "transformation", "name"),
    [
        *pairwise(IN_TURN, [*TRANSFORMATIONS], [n for n in FUNCTIONS if n not in VARIANTS]),
        *(
            (derivative, [*TRANSFORMATIONS][(i + 2 * j + i // 5) % len(TRANSFORMATIONS)], name)
            for i, name in enumerate(VARIANTS)
            for j, derivative in enumerate(IN_TURN)
            if (i + j) % 3
        ),
    ],
)
def test_under_transformations(name, transformation, derivative):
    check(name, DERIVATIVES[derivative], transformation, "xla")


@refused.expect(refused.FEW_SHORT_ROWS)
@each_function
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_kernels_under_transformations(name, transformation, kernels):
    check(name, forward_over_reverse, transformation, kernels)


@pytest.mark.parametrize("name", FUNCTIONS | OTHERS)
def test_outside_jit(name):
    """Each function in VARIANTS is tested with one derivative, all others with every derivative."""
    reference, function = (FUNCTIONS | OTHERS)[name]
    of = "float64", 4, 6
    derivatives = [jvp, gradient, forward_over_reverse]
    if name in VARIANTS:
        derivatives = [derivatives[VARIANTS.index(name) % 3]]
    for derivative in derivatives:
        program = derivative(function)
        expected = expected_of(reference, derivative, None, *of)
        assert_analysed(program(*operands(*of)), expected, analyse(program, *operands(*of)))


def test_hutchinson_s_estimator():
    """optax estimates the diagonal of a Hessian equally for our norm and for a norm in plain JAX.

    It differentiates a gradient in forward mode.
    """
    optax = pytest.importorskip("optax")
    x, scale, _ = operands("float64", 4, 6)

    def estimate_of(norm):
        def objective(scale):
            return jnp.mean((norm(x, scale, None) - jnp.sin(x)) ** 4)

        estimator = optax.contrib.hutchinson_estimator_diag_hessian(jax.random.key(0))
        return lambda scale: estimator.update(None, estimator.init(scale), scale, obj_fn=objective)[
            0
        ]

    expected, ours = map(estimate_of, FUNCTIONS["rms_norm"])
    estimate = ours(scale)
    assert np.abs(estimate).max() > 0.1
    assert_computes(estimate, expected, scale, like=ours)


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


@each_function
def test_primitives_are_named_after_the_functions(name):
    """Primitives have the public functions' names, in jaxprs and in profilers' metadata."""
    function = FUNCTIONS[name][1]
    public = name.split()[0]
    arrays = operands("float32", 4, 16)
    found = primitives(jax.make_jaxpr(jvp(function))(*arrays))
    assert {f"jaxnorm.{public}", f"jaxnorm.{public}_tangent"} <= {*found}
    hlo = jax.jit(gradient(function)).lower(*arrays).compile().as_text()
    assert f"/jaxnorm.{public}/" in hlo
    assert f"/jaxnorm.{public}_backward/" in hlo


def jaxprs(jaxpr):
    """Yield a jaxpr and all jaxprs nested in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from jaxprs(inner)


@pytest.mark.parametrize("around", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_x_is_not_kept(name, around):
    """The derivative does not save x, under any transformation.

    Arguments of the transformed function do not count as saved. So the function computes x = 3 * u
    from its argument u. The derivative of this product saves no array.
    """
    u, scale, bias = operands("float32", 4, 16)
    block = TRANSFORMATIONS[around](lambda u, s, b: FUNCTIONS[name][1](3 * u, s, b))
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(block, *a)[1])(u, scale, bias).jaxpr
    calls = [e for e in equations(jaxpr) if e.primitive.name == f"jaxnorm.{name}"]
    made = [e for e in equations(jaxpr) if e.primitive.name == "mul"]
    assert calls
    assert {e.invars[0] for e in calls} <= {e.outvars[0] for e in made}, "x goes into the call"
    made = [e.outvars[0] for e in made]
    for each in jaxprs(jaxpr):
        assert not any(kept is x for kept in each.outvars for x in made)


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
