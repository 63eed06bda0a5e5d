"""Rematerialisation with both of JAX's implementations: the present and the next (``jax_remat3``).

Saved residuals are counted in the list of `jax.ad_checkpoint.print_saved_residuals`. The function's
arguments are not counted. Recomputed operations are counted in jaxprs and in compiled programs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import FUNCTIONS, Sizes, call_of, scalar
from jax._src.ad_checkpoint import saved_residuals
from programs import equations, names
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


def saved(rows, named, numbers):
    """Return a dict from each policy to counts of saved arrays, in the format of `SAVED`.

    The key "plain" means that there is no `jax.checkpoint`. The other three keys are policies of
    `jax.checkpoint`. "save_policy" and "names" save only arrays that have a name. "all but out"
    saves no results of functions.

    Args:
      rows: the number of arrays with several numbers per row that "plain" saves.
      named: the number of these arrays that have a name.
      numbers: the number of saved arrays that have one number per row.
    """
    by_name = dict.fromkeys(("save_policy", "names"), (named, numbers, 0))
    return {"plain": (rows, numbers, 0), **by_name, "all but out": (0, numbers, 0)}


def named_again(plain, save_policy):
    """Return the counts of a function whose named arrays `save_policy` computes again."""
    return {"save_policy": save_policy} | dict.fromkeys(("plain", "names", "all but out"), plain)


CROSS_ENTROPY = "softmax_cross_entropy_with_integer_labels"
# Pairs of counts of saved arrays, and the functions that save so many. The counts are a dict from
# each policy to three numbers: how many arrays have several numbers per row (columns, features or
# classes), how many have one number per row, and how many have the shape of the weight.
_SAVED = [
    (saved(1, 1, 1), "rms_norm", "layer_norm", "layer_norm of samples", "add_rms_norm"),
    (saved(1, 1, 1), "add_layer_norm", "rms_norm_rope", "rms_norm_rope of constant tables"),
    (saved(1, 0, 1), "rms_norm from input", "rms_norm_rope from input", "rms_norm_add"),
    (saved(1, 0, 2), "layer_norm from input", "layer_norm silu"),
    (saved(1, 1, 0), "layer_norm of groups"),  # its statistics have another shape
    (saved(2, 1, 1), "add_layer_norm with a gate", "add_layer_norm of which h alone is used"),
    (saved(2, 1, 1), "add_rms_norm with a gate"),
    (saved(2, 1, 2), "rms_norm_add_rms_norm", "add_layer_norm of which y alone is used"),
    (saved(2, 0, 1), "rms_norm_gated", "rms_norm_gated gate first", "rms_norm_gated of heads"),
    (named_again((1, 0, 0), (0, 0, 0)), "softmax", "softmax with a mask", "softmax with a bias"),
    (named_again((1, 0, 0), (0, 0, 0)), "log_softmax"),
    (saved(1, 0, 2), CROSS_ENTROPY, *(f"{CROSS_ENTROPY} {of}" for of in ("of classes", "capped"))),
    (saved(1, 0, 3), "log_prob_and_entropy", "log_prob_and_entropy of several"),
    (saved(2, 0, 5), "kl_divergence", "kl_divergence reverse"),
    (saved(1, 0, 1) | {"plain": (1, 1, 0)}, "rms_norm_linear"),
    (
        saved(2, 2, 1) | {"save_policy": (1, 1, 0), "all but out": (1, 1, 0)},
        "rms_norm_linear silu",  # it saves the residual, and the argument of its activation
    ),
    (saved(2, 0, 0), "gated_linear"),
    (saved(1, 0, 0), "activation_linear", "linear_loss of rows"),
    (saved(1, 0, 0), "linear_softmax_cross_entropy of rows"),
    (named_again((1, 0, 1), (0, 0, 0)), "linear_softmax_cross_entropy", "linear_loss"),
    (saved(1, 0, 0) | {"plain": (1, 3, 0)}, "linear_log_prob_and_entropy"),
    (saved(1, 0, 0) | {"plain": (1, 3, 0)}, "linear_log_prob_and_entropy of several"),
]
SAVED = {name: counts for counts, *functions in _SAVED for name in functions}
# The names of the saved arrays, for functions whose arrays have other names than those of norms.
NAMES = {
    "softmax": {"jaxnorm_softmax_out"},
    "log_softmax": {"jaxnorm_softmax_out"},
    **{name: {"jaxnorm_lse"} for name in (CROSS_ENTROPY, "log_prob_and_entropy", "kl_divergence")},
    "linear_softmax_cross_entropy": {"jaxnorm_linear_gradient"},
    "linear_loss": {"jaxnorm_linear_gradient"},
    "rms_norm_linear": {"jaxnorm_rstd"},
    "rms_norm_linear silu": {"jaxnorm_out", "jaxnorm_rstd", "jaxnorm_preactivation"},
    "linear_log_prob_and_entropy": set(),
    "gated_linear": set(),
    "activation_linear": set(),
}
# Policies that save the same arrays as `save_policy`. An exception is "both", which also saves the
# results of matmuls. So it is not tested with functions that have matmuls.
SAME = ("both", "offload", "nested", "jit inside")
CASES = [
    (name, policy, counts[policy if policy in counts else "save_policy"])
    for name, counts in SAVED.items()
    for policy in (*counts, *(() if " " in name else SAME))
    if not (policy == "both" and "linear" in name)
] + [(name, "checkpoint", (0, 0, 0)) for name in SAVED]
SIZES = Sizes()
ROWS, WEIGHT = SIZES.rows, (SIZES.cols, SIZES.features)


def block(name):
    """Return a call of the table of functions, and its floating-point operands.

    The call multiplies the operands that have the shape of x by 3. These products are computed
    inside, so they count if they are saved. Arguments do not count.
    """
    function, operands = call_of(name)
    shape = operands[0].shape
    return lambda *a: function(*(3 * b if b.shape == shape else b for b in a)), operands


def saved_shapes(f, *arrays):
    found = [a for a, why in saved_residuals(f, *arrays) if not re.search("argument|constant", why)]
    return [a.shape for a in found if jnp.issubdtype(a.dtype, jnp.floating)]


def test_each_function_has_counts():
    """The other calls of the table close over arrays, which JAX's list counts in some cases."""
    others = {f"{CROSS_ENTROPY} of scales", "linear_loss in plain JAX"}
    others |= {n for n in FUNCTIONS if "linear_kl" in n}
    assert SAVED.keys() | others == FUNCTIONS.keys()


@pytest.mark.parametrize(("name", "policy", "saved"), CASES)
def test_what_is_saved(name, policy, saved):
    f, operands = block(name)
    shapes = saved_shapes(AROUND[policy](f), *operands)
    rows = sum(map(shapes.count, ((*ROWS, SIZES.cols), (*ROWS, SIZES.features))))
    assert (rows, shapes.count(ROWS), shapes.count(WEIGHT)) == saved


# ------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("name", [name for name in SAVED if "linear" not in name])
def test_what_runs_again(name):
    """A function is recomputed only if the policy does not save what its backward needs."""
    f, operands = block(name)
    for policy in ("plain", "save_policy", "names", "all but out", "checkpoint", "jit inside"):
        step = jax.grad(scalar(AROUND[policy](f)), argnums=tuple(range(len(operands))))
        without_out = policy == "all but out" and SAVED[name]["names"][0] > 0
        again = policy == "checkpoint" or (without_out and "softmax" not in name)
        again |= "jaxnorm_softmax_out" in NAMES.get(name.split()[0], ()) and policy in (
            "save_policy", "jit inside"
        )  # fmt: skip
        assert calls(step, *operands) == [name.split()[0]] * (1 + again), policy


@pytest.mark.parametrize("name", [name for name in SAVED if " " not in name or name in NAMES])
def test_names(name):
    """The arrays that each function saves have the documented names, which policies see."""
    f, operands = block(name)
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(f, *a)[0])(*operands)
    assert {*names(jaxpr)} == NAMES.get(name, {"jaxnorm_out", "jaxnorm_rstd"})


def calls(f, *arrays):
    """Return the names of our forward primitives in a jaxpr, including loops and nested jaxprs."""
    names = [e.primitive.name for e in equations(jax.make_jaxpr(f)(*arrays))]
    passes = [name.removeprefix("jaxnorm.") for name in names if name.startswith("jaxnorm.")]
    return [name for name in passes if not name.endswith(("_backward", "_tangent"))]


COLS, LAYERS = 16, 3
LABELS = jnp.arange(6) % COLS


def matrices():
    """Return x, and a square weight."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(n, COLS)) / 2) for n in (len(LABELS), COLS))


def layer(x, w):
    """Compute a norm between two matmuls, with elementwise code after it."""
    return x + jnp.tanh(jaxnorm.rms_norm(x @ w, 1 + w[0]) @ w)


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
    x, w = matrices()
    step, weights = jax.grad(functools.partial(stack, AROUND[policy]), (0, 1)), jnp.stack([w] * 3)
    expected = (LAYERS if stack is unrolled else 1) * (2 if policy == "checkpoint" else 1)
    assert calls(jax.jit(step), x, weights).count("rms_norm") == expected
    compiled = jax.jit(step).lower(x, weights).compile().as_text()
    assert len(re.findall(r" = \S+ rsqrt\(", compiled)) == expected


def test_the_gradient_of_a_frozen_weight_is_not_computed():
    x, w = matrices()
    f = AROUND["names"](lambda x: jaxnorm.linear_softmax_cross_entropy(jnp.sin(x), w, LABELS))
    assert saved_shapes(f, x) == [x.shape]
    text = jax.jit(jax.grad(f)).lower(x).as_text()
    assert text.count("stablehlo.dot_general") == 2  # one for the logits, one for dx, none for dw


def test_a_policy_of_products_sees_the_product_of_rms_norm_linear():
    x, w = matrices()
    block = functools.partial(jaxnorm.rms_norm_linear, activation="silu")
    f = jax.checkpoint(block, policy=POLICIES.dots_saveable)
    assert saved_shapes(f, x, w, w[0]).count(x.shape) == 1
    text = jax.jit(jax.grad(scalar(f), (0, 1, 2))).lower(x, w, w[0]).as_text()
    assert text.count("stablehlo.dot_general") == 3


def test_names_inside_a_custom_vjp(remat3):
    """Policies see names inside a `jax.custom_vjp` only with certain JAX settings.

    docs/transformations.md lists them.
    """
    f, operands = block("rms_norm")
    f = AROUND["save_policy"](custom_vjp(f))
    assert (ROWS in saved_shapes(f, *operands)) == (not remat3)
    if remat3:
        before = jax.config.jax_custom_vjp3
        jax.config.update("jax_custom_vjp3", True)
        try:
            assert saved_shapes(f, *operands).count(ROWS) == 1
        finally:
            jax.config.update("jax_custom_vjp3", before)


SCALED = {
    "softmax": lambda x, s, w: jaxnorm.softmax(x, scale=s),
    "cross_entropy": lambda x, s, w: jaxnorm.softmax_cross_entropy_with_integer_labels(
        x, LABELS, logits_scale=s, where=LABELS > 1
    ),
    "kl_divergence": lambda x, s, w: jaxnorm.kl_divergence(
        x, jnp.where(jnp.isinf(x), x, w[: len(x)]), logits_scale=s
    ),
    "linear_log_prob": lambda x, s, w: jaxnorm.linear_log_prob_and_entropy(
        x, w, LABELS, logits_scale=s
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_forward_mode_beside_an_array_as_scale(name, remat3):
    """The derivative of a checkpointed function does not depend on whether the scale is an array.

    With ``jax_remat3``, `jax.checkpoint` passes zeros as the scale's tangent in forward mode. The
    logits of one class are -inf, so a product of these zeros and the logits would be NaN.
    """
    with jax.enable_x64(True):
        x, w = (a.astype("float64") for a in matrices())
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
                assert_within(ours, exact(theirs), (x.shape[0] * COLS**2) ** 2 * 2.0**-53 * largest)
        with pytest.raises(TypeError, match="is differentiated, and has no derivative"):
            jax.grad(jax.checkpoint(total), 1)(x, half)
        if remat3:  # A derivative with respect to the scale must not be 0.
            assert jnp.isnan(jax.jvp(lambda scale: total(x, scale), (half,), (half,))[1])
