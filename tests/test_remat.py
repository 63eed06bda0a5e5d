"""Rematerialisation with both of JAX's implementations: the present and the next (``jax_remat3``).

Saved residuals are counted in the list of `jax.ad_checkpoint.print_saved_residuals`. The function's
arguments are not counted. Recomputed operations are counted in jaxprs and in compiled programs.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import teacher_of
from jax._src.ad_checkpoint import saved_residuals
from programs import equations, names, text_for_cuda
from reference import assert_within, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


@pytest.fixture(autouse=True, params=[False, True], ids=["remat2", "remat3"])
def remat3(request):
    """Run a test with each of JAX's implementations of `jax.checkpoint`."""
    if jax.__version_info__ < (0, 12):
        if request.param:
            pytest.skip("jax 0.11 has an unfinished one, without rules of this form")
        yield False
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


ROWS, COLS = 6, 16
FULL, PER_ROW = (ROWS, COLS), (ROWS,)
LABELS = jnp.arange(ROWS) % COLS
TABLES = jnp.cos(jnp.arange(8.0)), jnp.sin(jnp.arange(8.0))


def custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *arrays: jax.vjp(f, *arrays), lambda backward, dy: backward(dy))
    return g


POLICIES = jax.checkpoint_policies
OURS = (
    *("jaxnorm_out", "jaxnorm_rstd", "jaxnorm_lse", "jaxnorm_softmax_out"),
    *("jaxnorm_preactivation", "jaxnorm_linear_gradient"),
)
named = POLICIES.save_only_these_names
AROUND = {
    "plain": lambda f: f,
    "checkpoint": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
    "names": functools.partial(jax.checkpoint, policy=named(*OURS)),
    "all but out": functools.partial(
        jax.checkpoint, policy=POLICIES.save_any_names_but_these("jaxnorm_out")
    ),
    "both": functools.partial(
        jax.checkpoint,
        policy=POLICIES.save_from_both_policies(jaxnorm.save_policy, POLICIES.dots_saveable),
    ),
    "offload": functools.partial(
        jax.checkpoint,
        policy=POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=["jaxnorm_rstd", "jaxnorm_lse"],
            names_which_can_be_offloaded=["jaxnorm_out"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
AROUND["nested"] = lambda f: AROUND["save_policy"](AROUND["save_policy"](f))
AROUND["custom_vjp inside"] = lambda f: AROUND["names"](custom_vjp(f))
AROUND["jit inside"] = lambda f: AROUND["save_policy"](jax.jit(f))

# `FUNCTIONS` maps a name to two things. The first is a function of an array, a vector and a matrix.
# The second maps each policy to three numbers: how many saved arrays have the shape (rows, cols),
# how many have one number per row, and how many have the shape of the weights, (cols, cols).


def saved(rows, named, numbers):
    """Return a dict from each policy to a triple of counts, in the format of `FUNCTIONS`.

    The key "plain" means that there is no `jax.checkpoint`. The other three keys are policies of
    `jax.checkpoint`. "save_policy" and "names" save only arrays that have a name. "all but out"
    saves no arrays of shape (rows, cols).

    Args:
      rows: the number of arrays of shape (rows, cols) that "plain" saves.
      named: the number of these arrays that have a name.
      numbers: the number of saved arrays that have one number per row.
    """
    by_name = dict.fromkeys(("save_policy", "names"), (named, numbers, 0))
    return {"plain": (rows, numbers, 0), **by_name, "all but out": (0, numbers, 0)}


def norm_of(name, **options):
    """Return the norm `name` as a function of x and a vector s.

    Each parameter of the norm is s. A residual or a gate, if the norm takes one, is 2 * x.
    """
    function = getattr(jaxnorm, name)
    takes = inspect.signature(function).parameters
    rows = 1 + ("residual" in takes or name == "rms_norm_gated")
    vectors = 1 + ("next_scale" in takes or "layer" in name)

    def call(x, s, w):
        given = {k: s if v == "s" else v for k, v in options.items()}
        return sum(jax.tree.leaves(function(*(x, 2 * x)[:rows], *[s] * vectors, **given)))

    return call


FUNCTIONS = {
    "rms_norm": (lambda x, s, w: jaxnorm.rms_norm(x, s), saved(1, 1, 1)),
    "rms_norm from input": (norm_of("rms_norm", save="input"), saved(1, 0, 1)),
    "layer_norm": (lambda x, s, w: jaxnorm.layer_norm(x, s, s), saved(1, 1, 1)),
    "layer_norm from input": (norm_of("layer_norm", save="input"), saved(1, 0, 2)),
    "layer_norm silu": (norm_of("layer_norm", activation="silu"), saved(1, 0, 2)),
    "add_rms_norm": (norm_of("add_rms_norm"), saved(1, 1, 1)),
    "add_rms_norm from input": (norm_of("add_rms_norm", save="input"), saved(1, 1, 1)),
    "add_layer_norm": (norm_of("add_layer_norm"), saved(1, 1, 1)),
    "add_layer_norm from input": (norm_of("add_layer_norm", save="input"), saved(1, 1, 2)),
    "add_rms_norm with a gate": (norm_of("add_rms_norm", gate="s"), saved(2, 1, 1)),
    "add_layer_norm with a gate": (
        norm_of("add_layer_norm", gate="s", save="input"),
        saved(2, 1, 2),
    ),
    "rms_norm_add": (norm_of("rms_norm_add"), saved(1, 0, 1)),
    "rms_norm_add_rms_norm": (norm_of("rms_norm_add_rms_norm"), saved(2, 1, 2)),
    "rms_norm_add_rms_norm from input": (
        norm_of("rms_norm_add_rms_norm", save="input"),
        saved(2, 1, 2),
    ),
    "rms_norm_rope": (lambda x, s, w: jaxnorm.rms_norm_rope(x, s, *TABLES), saved(1, 1, 1)),
    "rms_norm_rope from input": (
        lambda x, s, w: jaxnorm.rms_norm_rope(x, s, *TABLES, save="input"),
        saved(1, 0, 1),
    ),
    "rms_norm_gated": (norm_of("rms_norm_gated"), saved(2, 0, 1)),
    "rms_norm_gated gate first": (
        norm_of("rms_norm_gated", norm_before_gate=False),
        saved(2, 0, 1),
    ),
    "softmax": (
        lambda x, s, w: jaxnorm.softmax(x),
        {
            "plain": (1, 0, 0),
            "save_policy": (0, 0, 0),
            "names": (1, 0, 0),
            "all but out": (1, 0, 0),
        },
    ),
    "softmax_cross_entropy_with_integer_labels": (
        lambda x, s, w: jaxnorm.softmax_cross_entropy_with_integer_labels(x, LABELS),
        saved(1, 0, 2),
    ),
    "log_prob_and_entropy": (
        lambda x, s, w: jaxnorm.log_prob_and_entropy(x, LABELS)[1],
        saved(1, 0, 3),
    ),
    "log_prob_and_entropy of several": (
        lambda x, s, w: jaxnorm.log_prob_and_entropy(x, LABELS[:, None])[1],
        saved(1, 0, 3),
    ),
    "kl_divergence": (lambda x, s, w: jaxnorm.kl_divergence(x, teacher_of(x)), saved(2, 0, 5)),
    "kl_divergence reverse": (
        lambda x, s, w: jaxnorm.kl_divergence(x, teacher_of(x), reverse=True),
        saved(2, 0, 5),
    ),
    "linear_softmax_cross_entropy": (
        lambda x, s, w: jaxnorm.linear_softmax_cross_entropy(x, w, LABELS),
        dict.fromkeys(("plain", "names", "all but out"), (1, 0, 1)) | {"save_policy": (0, 0, 0)},
    ),
    "rms_norm_linear": (
        lambda x, s, w: jaxnorm.rms_norm_linear(x, w, s),
        dict.fromkeys(("save_policy", "names", "all but out"), (0, 1, 0)) | {"plain": (1, 1, 0)},
    ),
    "rms_norm_linear silu": (
        lambda x, s, w: jaxnorm.rms_norm_linear(x, w, s, activation="silu"),
        dict.fromkeys(("names", "all but out"), (1, 1, 0))
        | {"save_policy": (0, 1, 0), "plain": (2, 1, 0)},
    ),
    "gated_linear": (
        lambda x, s, w: jaxnorm.gated_linear(x @ w, x, w),
        dict.fromkeys(("save_policy", "names", "all but out"), (0, 0, 0)) | {"plain": (2, 0, 0)},
    ),
}
NAMES = {
    "softmax": {"jaxnorm_softmax_out"},
    "softmax_cross_entropy_with_integer_labels": {"jaxnorm_lse"},
    "log_prob_and_entropy": {"jaxnorm_lse"},
    "log_prob_and_entropy of several": {"jaxnorm_lse"},
    "kl_divergence": {"jaxnorm_lse"},
    "kl_divergence reverse": {"jaxnorm_lse"},
    "linear_softmax_cross_entropy": {"jaxnorm_linear_gradient"},
    "rms_norm_linear": {"jaxnorm_rstd"},
    "rms_norm_linear silu": {"jaxnorm_rstd", "jaxnorm_preactivation"},
    "gated_linear": set(),
}
# Policies that save the same arrays as `save_policy`. An exception is "both", which also saves the
# results of matmuls. So it is not tested with functions that have matmuls.
SAME = ("both", "offload", "nested", "jit inside")
CASES = [
    (name, policy, saved[policy if policy in saved else "save_policy"])
    for name, (_, saved) in FUNCTIONS.items()
    for policy in (*saved, *SAME)
    if not (policy == "both" and "linear" in name)
] + [(name, "checkpoint", (0, 0, 0)) for name in FUNCTIONS]


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    x, s, w = rng.normal(size=FULL), 1 + rng.normal(size=COLS) / 8, rng.normal(size=(COLS, COLS))
    return tuple(jnp.asarray(a, dtype) for a in (x, s, w / 4))


def block(name):
    """Return a function of x, s and w that calls the function `name` with 3 * x, s and w.

    The operand 3 * x is computed inside, so it counts if it is saved. If the operand were an
    argument, it would not count.
    """
    function = FUNCTIONS[name][0]
    return lambda x, s, w: function(3 * x, s, w)


def loss(f):
    """Return a function that calls `f` and reduces its result to one number.

    Its derivative passes a different cotangent to each element of the result of `f`.
    """

    def summed(*arrays):
        y = f(*arrays)
        return jnp.sum(jnp.sin(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))))

    return summed


def saved_shapes(f, *arrays):
    found = [a for a, why in saved_residuals(f, *arrays) if "argument" not in why]
    return [a.shape for a in found if jnp.issubdtype(a.dtype, jnp.floating)]


@pytest.mark.parametrize(("name", "policy", "saved"), CASES)
def test_what_is_saved(name, policy, saved):
    shapes = saved_shapes(AROUND[policy](block(name)), *operands())
    assert tuple(map(shapes.count, (FULL, PER_ROW, (COLS, COLS)))) == saved


# Each function runs with two of the five policies, in turn.
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        (name, ("checkpoint", "save_policy", "custom_vjp inside", "names", "nested")[(i + j) % 5])
        for i, name in enumerate(FUNCTIONS)
        for j in (0, 2)
    ],
)
def test_gradients_are_those_without(name, policy):
    """With a policy, float64 gradients are the same as without one, up to rounding errors.

    An element of a gradient is a sum of at most rows * cols^2 rounded terms.
    """
    with jax.enable_x64(True):
        arrays = operands("float64")
        expected = jax.jit(jax.grad(loss(block(name)), (0, 1, 2)))(*arrays)
        got = jax.jit(jax.grad(loss(AROUND[policy](block(name))), (0, 1, 2)))(*arrays)
    for ours, theirs in zip(got, expected):
        largest = np.abs(exact(theirs)).max()
        assert_within(ours, exact(theirs), ROWS * COLS**2 * 2.0**-53 * largest)


# ------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "linear" not in name])
def test_what_runs_again(name):
    """A function is recomputed only if the policy does not save what its backward needs."""
    for policy in ("plain", "save_policy", "names", "all but out", "checkpoint", "jit inside"):
        step = jax.grad(loss(AROUND[policy](block(name))), argnums=(0, 1, 2))
        without_out = policy == "all but out" and FUNCTIONS[name][1]["names"][0] > 0
        again = policy == "checkpoint" or (without_out and name != "softmax")
        again = again or (name == "softmax" and policy in ("save_policy", "jit inside"))
        assert calls(step, *operands()) == [name.split()[0]] * (1 + again), policy


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names(name):
    """The arrays that each function saves have the documented names, which policies see."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(block(name), *a)[0])(*operands())
    assert {*names(jaxpr)} == NAMES.get(name, {"jaxnorm_out", "jaxnorm_rstd"})


def calls(f, *arrays):
    """Return the names of our forward primitives in a jaxpr, including loops and nested jaxprs."""
    names = [e.primitive.name for e in equations(jax.make_jaxpr(f)(*arrays))]
    passes = [name.removeprefix("jaxnorm.") for name in names if name.startswith("jaxnorm.")]
    return [name for name in passes if not name.endswith(("_backward", "_tangent"))]


def compiled_calls(f, *arrays):
    """Return the number of forward norms in the compiled program: each has one rsqrt."""
    text = jax.jit(f).lower(*arrays).compile().as_text()
    return len(re.findall(r" = \S+ rsqrt\(", text))


def layer(x, w):
    """Compute a norm between two matmuls, with elementwise code after it."""
    return x + jnp.tanh(jaxnorm.rms_norm(x @ w, 1 + w[0]) @ w)


LAYERS = 3


def unrolled(around, x, weights):
    for w in weights:
        x = around(layer)(x, w)
    return jnp.sum(x**2)


def scanned(around, x, weights):
    return jnp.sum(jax.lax.scan(lambda x, w: (around(layer)(x, w), None), x, weights)[0] ** 2)


@pytest.mark.parametrize("stack", [unrolled, scanned])
@pytest.mark.parametrize(
    "policy", ["plain", "save_policy", "offload", "nested", "jit inside", "checkpoint"]
)
def test_no_norm_runs_twice(stack, policy):
    """Each norm runs once, except with `jax.checkpoint` but no policy.

    Without a policy, each norm is recomputed in the backward. This shows that the test counts norms
    that are recomputed.
    """
    x, _, w = operands()
    weights = jnp.stack([w] * LAYERS)
    step = jax.grad(functools.partial(stack, AROUND[policy]), argnums=(0, 1))
    expected = (LAYERS if stack is unrolled else 1) * (2 if policy == "checkpoint" else 1)
    assert calls(jax.jit(step), x, weights).count("rms_norm") == expected
    assert compiled_calls(step, x, weights) == expected


@pytest.mark.parametrize(("policy", "kernels"), [("save_policy", 2), ("checkpoint", 3)])
def test_kernels_in_a_program_for_a_gpu(policy, kernels):
    """With a policy, the program has one forward kernel and one backward kernel.

    Without a policy, it has a second forward kernel, which recomputes the norm.
    """
    x = jax.ShapeDtypeStruct((8192, 1024), "bfloat16")
    weights = jax.ShapeDtypeStruct((LAYERS, 1024, 1024), "bfloat16")
    step = jax.grad(functools.partial(scanned, AROUND[policy]), argnums=(0, 1))
    text = text_for_cuda(step, x, weights)
    called = re.findall(r"call @(jaxnorm\.rms_norm\w*)\(", text)
    assert len(called) == kernels
    assert text.count("custom_call @mosaic_gpu") >= 2


# ------------------------------------------------------------------------------- derivatives


def test_the_gradient_of_a_frozen_weight_is_not_computed():
    x, _, w = operands()
    f = AROUND["names"](lambda x: jaxnorm.linear_softmax_cross_entropy(jnp.sin(x), w, LABELS))
    assert saved_shapes(f, x) == [FULL]
    text = jax.jit(jax.grad(f)).lower(x).as_text()
    assert text.count("stablehlo.dot_general") == 2  # one for the logits, one for dx, none for dw


@pytest.mark.parametrize("stack", [unrolled, scanned])
@pytest.mark.parametrize("policy", ["plain", "checkpoint", "save_policy", "names", "offload"])
def test_memory_report(stack, policy):
    """For each policy, memory_report lists as many bytes as JAX's own list of residuals.

    In the report, arrays have the names of the operations that computed them.
    """
    x, _, w = operands()
    f = functools.partial(stack, AROUND[policy])
    weights = jnp.stack([w] * LAYERS)
    report = jaxnorm.memory_report(f, x, weights, argnums=(0, 1))
    expected = [
        a.size * a.dtype.itemsize
        for a, why in saved_residuals(f, x, weights)
        if "argument" not in why and "constant" not in why
    ]
    assert report.total == sum(expected)
    makers = {row.made_by for row in report}
    assert not any("hi_primitive" in maker for maker in makers)
    assert ("jaxnorm.rms_norm" in makers) == (policy != "checkpoint")


def test_a_policy_of_products_sees_the_product_of_rms_norm_linear():
    arrays = operands()
    block = FUNCTIONS["rms_norm_linear silu"][0]
    f = jax.checkpoint(block, policy=POLICIES.dots_saveable)
    assert saved_shapes(f, *arrays).count(FULL) == 1
    text = jax.jit(jax.grad(loss(f), (0, 1, 2))).lower(*arrays).as_text()
    assert text.count("stablehlo.dot_general") == 3


def test_names_inside_a_custom_vjp(remat3):
    """Policies see names inside a `jax.custom_vjp` only with certain JAX settings.

    docs/transformations.md lists them.
    """
    f = AROUND["save_policy"](custom_vjp(block("rms_norm")))
    assert (PER_ROW in saved_shapes(f, *operands())) == (not remat3)
    if remat3:
        before = jax.config.jax_custom_vjp3
        jax.config.update("jax_custom_vjp3", True)
        try:
            assert saved_shapes(f, *operands()).count(PER_ROW) == 1
        finally:
            jax.config.update("jax_custom_vjp3", before)


SCALED = {
    "softmax": lambda x, s, w: jaxnorm.softmax(x, scale=s),
    "cross_entropy": lambda x, s, w: jaxnorm.softmax_cross_entropy_with_integer_labels(
        x, LABELS, logits_scale=s, where=LABELS > 1
    ),
    "log_prob": lambda x, s, w: jaxnorm.log_prob_and_entropy(x, LABELS, logits_scale=s),
    "kl_divergence": lambda x, s, w: jaxnorm.kl_divergence(
        x, jnp.where(jnp.isinf(x), x, w[:ROWS]), logits_scale=s
    ),
    "linear_cross_entropy": lambda x, s, w: jaxnorm.linear_softmax_cross_entropy(
        x, w, LABELS, logits_scale=s
    ),
    "linear_log_prob": lambda x, s, w: jaxnorm.linear_log_prob_and_entropy(
        x, w, LABELS, logits_scale=s
    ),
    "linear_kl_divergence": lambda x, s, w: jaxnorm.linear_kl_divergence(
        *(x, w, jnp.sin(x), w), logits_scale=s, reduction="none"
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_forward_mode_beside_an_array_as_scale(name, remat3):
    """The derivative of a checkpointed function does not depend on whether the scale is an array.

    With ``jax_remat3``, `jax.checkpoint` passes zeros as the scale's tangent in forward mode. The
    logits of one class are -inf, so a product of these zeros and the logits would be NaN.
    """
    with jax.enable_x64(True):
        x, _, w = operands("float64")
        x = x if "linear" in name else x.at[:, 9].set(-jnp.inf)
        along, half = jnp.where(jnp.isinf(x), 0, jnp.cos(x)), jnp.asarray(0.5)

        def total(x, scale):
            leaves = jax.tree.leaves(SCALED[name](x, scale, w))
            return sum(jnp.sum(jnp.sin(a)) for a in leaves)

        def derivatives(x, scale):
            f = jax.checkpoint(lambda x: total(x, scale))
            return jax.jvp(jax.value_and_grad(f), (x,), (along,)), jax.jvp(f, (x,), (along,))

        expected = jax.tree.leaves(derivatives(x, 0.5))
        for got in derivatives(x, half), jax.jit(lambda x: derivatives(x, half))(x):
            for ours, theirs in zip(jax.tree.leaves(got), expected, strict=True):
                largest = np.abs(exact(theirs)).max()
                assert_within(ours, exact(theirs), (ROWS * COLS**2) ** 2 * 2.0**-53 * largest)
        with pytest.raises(TypeError, match="is differentiated, and has no derivative"):
            jax.grad(jax.checkpoint(total), 1)(x, half)
        if remat3:  # A derivative with respect to the scale must not be 0.
            assert jnp.isnan(jax.jvp(lambda scale: total(x, scale), (half,), (half,))[1])
