"""The docs' recipes, run on random data and compared with plain JAX."""

import functools
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import SAFETY, assert_within, exact, unit_roundoff
from test_readme import ROOT, blocks

import jaxnorm

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="small float32 programs"),
    pytest.mark.usefixtures("quick_to_compile"),
]

VOCABULARY, WIDTH = 40, 24


@functools.cache
def page(name: str) -> dict[str, Any]:
    """Return the namespace that the Python blocks of a page define."""
    namespace: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / f"{name}.md"):
        exec(compile(block, name, "exec"), namespace)
    return namespace


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def labels_of(*shape):
    return jnp.asarray(np.random.default_rng(7).integers(VOCABULARY, size=shape))


def losses_of(hidden, scale, head, labels):
    """Compute the cross-entropy of each position in plain JAX: a norm, a head and a softmax."""
    rstd = jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-6)
    logp = jax.nn.log_softmax(hidden * rstd * scale @ head)
    return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


ROUNDING = SAFETY * math.sqrt(256) * unit_roundoff("float32")


def assert_close(ours, theirs, magnified=1.0):
    """Assert that results differ by at most ``SAFETY * sqrt(256)`` roundings.

    The results are sums of 256 terms. The bound is relative to the largest element, and multiplied
    by `magnified` if the terms are differences of larger numbers.
    """
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert a.dtype == b.dtype
        assert_within(a, exact(b), ROUNDING * magnified * np.abs(exact(b)).max())


def assert_recipe(name, plain, params, *arguments, magnified=1.0, **options):
    """Assert that a loss of docs/recipes.md has the value and the gradient of a loss in plain JAX.

    The recipe takes `params` and the arguments. The plain loss takes only `params`.
    """
    ours = jax.value_and_grad(page("recipes")[name])(params, *arguments, **options)
    assert_close(ours, jax.value_and_grad(plain)(params), magnified)


def normalised(n, scale):
    rstd = jax.lax.rsqrt(jnp.mean(n**2, axis=-1, keepdims=True) + 1e-6)
    return scale * n * rstd


def plain_delta_net(x, gate, scale):  # x: (batch, length, heads, d), scale: (d,)
    y = normalised(x.astype(jnp.float32), scale).astype(x.dtype)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def plain_mamba2(x, gate, scale, groups):  # x: (batch, length, d), scale: (d,)
    gated = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    by_group = gated.reshape(*x.shape[:-1], groups, -1)
    return normalised(by_group, scale.reshape(groups, -1)).reshape(x.shape).astype(x.dtype)


@pytest.mark.parametrize("groups", [1, 4])
def test_norms_with_a_gate(groups):
    """The recipes for gated norms have the results of plain JAX.

    A norm is taken per head (as in gated delta nets) or per group of channels (as in Mamba 2).
    """
    blocks, shape = page("blocks"), (2, 16, 4, WIDTH)

    def both(norm, *arrays, **options):
        y, pullback = jax.vjp(functools.partial(norm, **options), *arrays)
        return y, *pullback(jnp.cos(y))

    x, gate, scale = normal(0, *shape), normal(1, *shape), 1 + 0.1 * normal(2, WIDTH)
    assert_close(both(blocks["delta_net"], x, gate, scale), both(plain_delta_net, x, gate, scale))
    x, gate = (a.reshape(2, 16, -1) for a in (x, gate))
    arrays = x, gate, 1 + 0.1 * normal(2, 4 * WIDTH)
    ours = both(blocks["mamba2"], *arrays, groups=groups)
    assert_close(ours, both(plain_mamba2, *arrays, groups=groups))


def test_arrays_that_a_gated_norm_saves():
    """docs/blocks.md says how many arrays of x's shape a layer saves, and how many in plain JAX."""
    weights = {name: jnp.ones((64, 256), jnp.bfloat16) for name in ("x", "gate")}
    weights |= {"scale": jnp.ones(256, jnp.bfloat16), "out": jnp.ones((256, 64), jnp.bfloat16)}
    inputs = jnp.ones((1024, 64), jnp.bfloat16)

    def saved(norm):
        def layer(weights, inputs):
            y = norm(inputs @ weights["x"], inputs @ weights["gate"], weights["scale"])
            return (y @ weights["out"]).sum()

        return round(jaxnorm.memory_report(layer, weights, inputs).total / (1024 * 256 * 2))

    assert (saved(page("blocks")["delta_net"]), saved(plain_delta_net)) == (3, 17)


def test_a_block_of_a_diffusion_transformer():
    """A block of a diffusion transformer has plain JAX's values and gradients.

    The gradients include those of the operands that condition the block.
    """
    names = [f"{name}_{i}" for i in (1, 2) for name in ("scale", "shift", "gate")]
    m = {name: 0.3 * normal(seed, 2, 1, WIDTH) for seed, name in enumerate(names)}
    x, weights = normal(7, 2, 16, WIDTH), normal(8, 2, WIDTH, WIDTH) / WIDTH**0.5

    def run(block):
        def loss(x, m, weights):
            branches = [lambda y, w=w: jnp.tanh(y @ w) for w in weights]
            return jnp.sum(jnp.sin(block(x, m, *branches)))

        return jax.value_and_grad(loss, (0, 1, 2))(x, m, weights)

    assert_close(run(page("blocks")["dit_block"]), run(page("blocks")["plain_dit_block"]))


def test_what_to_take_where_a_norm_in_its_place_is_slower():
    use, x = page("comparison"), normal(0, 8, 16, WIDTH)
    scales, biases = 1 + 0.1 * normal(1, 2, 8, 1, WIDTH), normal(2, 2, 8, 1, WIDTH)
    pairs = [*zip(scales, biases)]
    by_hand = [jaxnorm.layer_norm(x) * (1 + scale) + bias for scale, bias in pairs]
    assert_close([use["adaptive"](x, *pair) for pair in pairs], by_hand)
    each = [jaxnorm.layer_norm(x, *pair) for pair in pairs]
    assert_close([*use["two_of_one"](x, scales, biases)], each)
    short = jaxnorm.rms_norm(x, epsilon=1e-6 / WIDTH) / WIDTH**0.5
    assert_close(use["l2_normalised"](x), short)


def test_attention_with_qk_norms_and_rope():
    """Attention with QK norms and RoPE has the same results as in plain JAX.

    The recipe has two versions. One is in Flax. The other is ported from Hugging Face's code, in
    which the tables contain each angle twice.
    """
    rope = page("rope")
    attention, width, heads, d = rope["attention"], 128, 4, 32
    x, (cos, sin) = normal(0, 2, 16, width), rope["tables"](16, d)
    scales = {name: 1 + 0.1 * normal(seed, d) for seed, name in enumerate(("q_norm", "k_norm"))}
    for name, scale in scales.items():
        getattr(attention, name)[...] = scale

    def rotated(v, scale):
        n = v * jax.lax.rsqrt(jnp.mean(v**2, -1, keepdims=True) + 1e-6) * scale
        a, b = jnp.split(n, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def plain(x):
        q, k, v = jnp.unstack(jnp.einsum("blw,wnhd->blnhd", x, attention.qkv.kernel[...]), axis=2)
        q, k = rotated(q, scales["q_norm"]), rotated(k, scales["k_norm"])
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.einsum("blhd,hdw->blw", y, attention.out.kernel[...])

    assert_close(attention(x, cos, sin), plain(x))
    projection, (twice_cos, twice_sin) = normal(3, width, heads * d), rope["twice"]
    assert twice_cos.shape == (1, 16, d)
    ours = rope["queries"](x[:1], projection, scales["q_norm"], (twice_cos, twice_sin), d)
    query = (x[:1] @ projection).reshape(1, 16, heads, d)
    assert_close(ours, rotated(query, scales["q_norm"]).transpose(0, 2, 1, 3))


def test_tied_embeddings():
    tokens = labels_of(3, 17)
    params = {"embedding": normal(0, VOCABULARY, WIDTH), "scale": normal(1, WIDTH)}

    def plain(params):
        hidden = params["embedding"][tokens[:, :-1]]
        head = params["embedding"].T
        return losses_of(hidden, params["scale"], head, tokens[:, 1:]).mean()

    assert_recipe("tied_loss", plain, params, tokens)


def test_gradient_accumulation():
    """Gradient accumulation is correct for micro-batches with few or no unmasked positions."""
    x, labels = normal(0, 4, 2, 8, WIDTH), labels_of(4, 2, 8)
    labels = labels.at[0, :, 1:].set(-100).at[2].set(-100)
    params = {"scale": normal(1, WIDTH), "head": normal(2, WIDTH, VOCABULARY)}

    def plain(params):
        counts = labels != -100
        losses = losses_of(x, params["scale"], params["head"], jnp.where(counts, labels, 0))
        return (losses * counts).sum() / counts.sum()

    assert_close(page("recipes")["accumulated"](params, x, labels), jax.grad(plain)(params))
    halves = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    sums = page("recipes")["accumulated"](halves, x.astype(jnp.bfloat16), labels)
    assert {a.dtype.name for a in jax.tree.leaves(sums)} == {"float32"}


def answers(*shape):
    """Return four things: tokens, the mask of the answers' tokens, a policy, and a similar policy.

    A policy is a dict of parameters.
    """
    tokens, lengths = labels_of(*shape, 16), jnp.arange(np.prod(shape)).reshape(*shape, 1)
    answer = (jnp.arange(16) >= 3) & (jnp.arange(16) < 6 + lengths)
    sizes = {"embedding": (VOCABULARY, WIDTH), "scale": (WIDTH,), "head": (WIDTH, VOCABULARY)}
    policy = {name: normal(seed, *sizes[name]) for seed, name in enumerate(sizes)}
    near = {name: p + 0.05 * normal(9, *p.shape) for name, p in policy.items()}
    return tokens, answer, policy, near


def hidden_of(params, tokens):
    x = params["embedding"][tokens]
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["scale"]


def test_several_candidates():
    tokens, _, params, reference = answers(6)
    candidates = jnp.stack([(3 * tokens[:, i] + i) % VOCABULARY for i in range(4)], -1)

    def plain(params):
        log_p = (
            jax.nn.log_softmax(hidden_of(p, tokens[:, -1]) @ p["head"]) for p in (params, reference)
        )
        ours, its = (jnp.take_along_axis(p, candidates, -1) for p in log_p)
        return -jax.nn.log_softmax(0.1 * (ours - its))[:, 0].mean()

    assert_recipe("candidates_loss", plain, params, reference, tokens, candidates)


def log_softmaxes(params, tokens, temperature=1.0):
    return jax.nn.log_softmax(hidden_of(params, tokens[:, :-1]) @ params["head"] / temperature)


def test_on_policy_distillation():
    tokens, answer, params, teacher = answers(6)

    def plain(params):
        log_q, log_p = (log_softmaxes(p, tokens, 2.0) for p in (params, teacher))
        divergences = jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1)
        return (divergences * answer[:, 1:]).sum() / answer[:, 1:].sum()

    # A term of the divergence contains a difference of two log-probabilities. The error of a
    # log-probability is proportional to its magnitude, which may be much larger than the
    # difference. So the difference may have a large relative error.
    log_q, log_p = (exact(log_softmaxes(p, tokens, 2.0)) for p in (params, teacher))
    magnified = (np.abs(log_q) + np.abs(log_p)).max() / np.abs(log_q - log_p).max()
    given = {"temperature": 2.0, "magnified": magnified}
    assert_recipe("distillation_loss", plain, params, teacher, tokens, answer, **given)


# ----------------------------------------------------------------- losses of one position, float64
#
# Each function below computes a loss of each position in float64, from the logits and the arguments
# of the recipe. Classes that are masked by -inf have a probability of 0.


def log_softmax(logits):
    return logits - jax.nn.logsumexp(logits, -1, keepdims=True)


def finite(log_q):
    """Replace log-probabilities of -inf, which are multiplied by a probability of 0."""
    return jnp.where(log_q > -jnp.inf, log_q, 0)


def at(log_q, labels):
    return jnp.take_along_axis(log_q, labels[..., None], -1)[..., 0]


def soft_labels(logits, targets):
    return -jnp.sum(targets * finite(log_softmax(logits)), -1)


def smoothing(logits, labels):
    log_q, allowed = log_softmax(logits), logits > -jnp.inf
    targets = 0.9 * jax.nn.one_hot(labels, VOCABULARY) + 0.1 * allowed / allowed.sum(-1)[..., None]
    return -jnp.sum(targets * finite(log_q), -1)


def focal(logits, labels):
    log_q = at(log_softmax(logits), labels)
    return -((1 - jnp.exp(log_q)) ** 2) * log_q


def grpo(logits, labels, old, reference, advantages):
    log_q = log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_q) * finite(log_q), -1)
    log_prob = at(log_q, labels)
    ratio, r = jnp.exp(log_prob - old), jnp.exp(reference - log_prob)
    bounded = jnp.where(advantages > 0, jnp.minimum(ratio, 1.2), jnp.maximum(ratio, 0.8))
    return 0.04 * (r - 1 - jnp.log(r)) - bounded * advantages - 0.01 * entropy


def jensen_shannon(logits, teacher_logits, b):
    q, p = (jnp.exp(log_softmax(z)) for z in (logits, teacher_logits))
    m = b * p + (1 - b) * q

    def divergence(d):
        of = jnp.where(d > 0, d, 1)
        return jnp.sum(jnp.where(d > 0, of * jnp.log(of / jnp.where(m > 0, m, 1)), 0), -1)

    return b * divergence(p) + (1 - b) * divergence(q)


POSITIONS = (6, 16)
#: Magnitudes of the logits, with and without masked classes.
LOGITS = {"plain": (1.0, 0), "masked": (1.0, 5), "extreme": (1e3, 0), "extreme, masked": (1e3, 5)}


def layer(logits):
    """Return x and a head as float32 arrays, a bias that masks classes, labels and a mask."""
    size, masked = LOGITS[logits]
    x = size * normal(0, *POSITIONS, WIDTH) / math.sqrt(WIDTH)
    bias = jnp.zeros(VOCABULARY).at[:masked].set(-jnp.inf)
    labels = jnp.maximum(labels_of(*POSITIONS), masked)
    return x, normal(1, WIDTH, VOCABULARY), bias, labels, normal(2, *POSITIONS) > 0


def assert_loss(ours, theirs, x, head, bias, where):
    """Assert that a recipe has the mean and the gradients of a loss in float64.

    An error of a logit is proportional to the logit's magnitude, and changes probabilities by a
    factor.

    Args:
      ours: function of x, the head, and the options of the recipe.
      theirs: function of all logits in float64, which returns the losses of the positions.
    """
    invalid = jnp.where(where[..., None], x, jnp.nan)

    def recipe(x, head):
        return ours(x, head, bias=bias, where=where, chunk=7)

    value, gradients = jax.jit(jax.value_and_grad(recipe, (0, 1)))(invalid, head)
    with jax.enable_x64(True):
        x, head, bias = (jnp.asarray(a, jnp.float64) for a in (x, head, bias))

        def mean(x, head):
            return jnp.sum(jnp.where(where, theirs(x @ head + bias), 0)) / where.sum()

        expected = jax.value_and_grad(mean, (0, 1))(x, head)
        logits = np.abs(np.asarray(x @ head)).max()
    for a, b in zip((value, *gradients), (expected[0], *expected[1]), strict=True):
        assert np.all(np.isfinite(b))
        assert_within(a, exact(b), ROUNDING * (1 + logits) * (np.abs(exact(b)).max() + 1 / x.size))


def old_and_reference(log_prob):
    return (log_prob + 0.3 * normal(seed, *POSITIONS) for seed in (4, 5))


def recipe_case(name, logits):
    """Return the arguments of `assert_loss` for a recipe and a kind of logits."""
    x, head, bias, labels, where = layer(logits)
    log_prob = at(jax.nn.log_softmax(x @ head + bias), labels)
    given, theirs = {}, None
    match name:
        case "smoothed_cross_entropy":
            rows, theirs = [labels], smoothing
        case "focal_loss":
            rows, theirs = [labels], focal
        case "soft_cross_entropy":
            rows, theirs = [jax.nn.softmax(normal(3, *POSITIONS, VOCABULARY) + bias)], soft_labels
        case "grpo_loss":
            rows = [labels, *old_and_reference(log_prob), normal(6, *POSITIONS)]
            theirs, given = grpo, {"bonus": 0.01}
        case "jensen_shannon":
            rows = [normal(7, *POSITIONS, 12), normal(8, 12, VOCABULARY), 0.3]

            def theirs(logits, teacher_x, teacher_head, b):
                of_teacher = (a.astype(logits.dtype) for a in (teacher_x, teacher_head))
                return jensen_shannon(logits, jnp.matmul(*of_teacher), b)

        case "dpo_loss":
            x, labels, where = (a.reshape(2, 3, *a.shape[1:]) for a in (x, labels, where))
            log_prob = jnp.where(where, log_prob.reshape(where.shape), 0).sum(-1)
            rows = [labels, log_prob + normal(9, 2, 3), where]

            def theirs(logits, labels, reference, where):
                log_prob = jnp.where(where, at(log_softmax(logits), labels), 0).sum(-1)
                chosen, rejected = log_prob - reference
                loss = jnp.log1p(jnp.exp(-0.1 * (chosen - rejected))).mean()
                return jnp.full(where.shape, loss)

        case "several_heads_loss":
            x, rows = jnp.stack([x, normal(10, *x.shape)]), [labels]
            where = jnp.stack([jnp.arange(16) < 15 - k for k in range(2)])[:, None]
            where = jnp.broadcast_to(where, x.shape[:-1])
            weights = where * jnp.array([1, 0.5])[:, None, None]

            def theirs(logits, tokens):
                labels = jnp.stack([jnp.roll(tokens, -k - 1, -1) for k in range(2)])
                return -at(log_softmax(logits), labels) * weights * where.sum() / weights.sum()

    def ours(x, head, **options):
        if name in ("dpo_loss", "several_heads_loss"):  # They have their own masks.
            del options["where"]
        return page("recipes")[name](x, head, *rows, **given, **options)

    return ours, lambda logits: theirs(logits, *rows), x, head, bias, where


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize(
    "name",
    [
        *("smoothed_cross_entropy", "focal_loss", "soft_cross_entropy", "grpo_loss"),
        *("jensen_shannon", "dpo_loss", "several_heads_loss"),
    ],
)
def test_losses_of_positions(name, logits):
    assert_loss(*recipe_case(name, logits))


@pytest.mark.parametrize("b", [0.0, 1.0])
def test_the_ends_of_the_jensen_shannon_divergence(b):
    """For b = 0 and b = 1, the divergence is 0, even if a class is masked in one of the models."""
    x, head, bias, *_ = layer("masked")
    teacher_x, teacher_head = normal(7, *POSITIONS, 12), normal(8, 12, VOCABULARY)
    ours = functools.partial(page("recipes")["jensen_shannon"], bias=bias)
    value, gradient = jax.value_and_grad(ours, 1)(x, head, teacher_x, teacher_head, b)
    for a in (value, gradient):
        np.testing.assert_array_equal(a, 0)


def top_k_of_a_teacher():
    tokens, answer, params, teacher = answers(6)
    log_p = jnp.pad(log_softmaxes(teacher, tokens), ((0, 0), (1, 0), (0, 0)))
    return tokens, answer, params, *jax.lax.top_k(log_p, 5)


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_the_top_k_of_a_teacher(size):
    """The divergence includes the tail: all classes that are not among the teacher's top k."""
    tokens, answer, params, top_log_prob, top_tokens = top_k_of_a_teacher()
    params |= {"head": size * params["head"]}
    ours = jax.value_and_grad(page("recipes")["top_k_loss"])(
        params, tokens, answer, top_tokens, top_log_prob
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        p = jnp.exp(top_log_prob[:, 1:].astype(jnp.float64))
        p = jnp.append(p, 1 - p.sum(-1, keepdims=True), -1)

        def plain(params):
            log_q = log_softmaxes(params, tokens)
            is_top = jax.nn.one_hot(top_tokens[:, 1:], VOCABULARY).sum(-2) > 0
            tail = jax.nn.logsumexp(jnp.where(is_top, -jnp.inf, log_q), -1, keepdims=True)
            of_top = jnp.take_along_axis(log_q, top_tokens[:, 1:], -1)
            divergences = jnp.sum(p * (jnp.log(p) - jnp.append(of_top, tail, -1)), -1)
            return (divergences * answer[:, 1:]).sum() / answer[:, 1:].sum()

        expected = jax.value_and_grad(plain)(wide)
        magnified = 1 + np.abs(exact(hidden_of(wide, tokens) @ wide["head"])).max()
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        assert_within(a, exact(b), ROUNDING * magnified * np.abs(exact(b)).max())


def test_what_the_top_k_loss_leaves_out():
    """Classes with a probability of 0 and positions that do not count add nothing.

    If no position counts, the loss and the gradients are 0.
    """
    tokens, answer, params, log_p, top_tokens = top_k_of_a_teacher()
    recipe = page("recipes")["top_k_loss"]
    given = jnp.where(answer[..., None], log_p.at[..., 3:].set(-jnp.inf), jnp.nan)
    ours = jax.value_and_grad(recipe)(params, tokens, answer, top_tokens, given)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(ours))
    nothing = jnp.zeros_like(answer)
    for name, arguments in {
        "top_k_loss": (tokens, nothing, top_tokens, given),
        "distillation_loss": (params, tokens, nothing),
    }.items():
        for leaf in jax.tree.leaves(jax.value_and_grad(page("recipes")[name])(params, *arguments)):
            np.testing.assert_array_equal(leaf, 0)


def test_a_norm_class_of_a_model_s_own_in_bfloat16():
    """With float32 parameters, the conversion of docs/adopt.md frees memory."""
    from flax import linen

    adopt = page("adopt")
    kind, function = adopt["LlamaRMSNorm"], adopt["rms_norm"]
    layers = [linen.Dense(512, dtype="bfloat16"), kind(dtype=jnp.bfloat16)]
    model = linen.Sequential([*layers, linen.Dense(8, dtype="bfloat16")])
    x = normal(0, 256, 64).astype("bfloat16")
    params = model.init(jax.random.key(0), x)

    def report():
        return jaxnorm.memory_report(lambda p: model.apply(p, x).astype("float32").sum(), params)

    before = report()
    with adopt["jaxnorm"].linen.converted(calls={kind: function}):
        after = report()
    assert after.total < before.total
    assert after.total - after.saves <= before.total - before.saves


def test_a_layer_of_equinox_in_a_scan():
    """The call for equinox in docs/linear.md saves no transposed weights of scanned layers."""
    text = (ROOT / "docs" / "linear.md").read_text()
    (row,) = re.findall(r"\| equinox \| `.*?` \| `(.*?)` \|", text)
    x, up, down, biases = (
        normal(i, *shape)
        for i, shape in enumerate([(16, WIDTH), (4, WIDTH, 32), (4, WIDTH, 32), (4, WIDTH)])
    )

    def loss(call):
        def step(x, layer):
            up, weight, bias = layer  # weight: (out, in)
            owner = types.SimpleNamespace(down=types.SimpleNamespace(weight=weight, bias=bias))
            return x + call(owner, jnp.sin(x) @ up), None

        return lambda x, *layers: jax.lax.scan(step, x, layers)[0].sum()

    ours = loss(eval(f"lambda self, h: {row}", {"jaxnorm": jaxnorm}))
    plain = loss(lambda self, h: jax.nn.gelu(h) @ self.down.weight.T + self.down.bias)
    arrays = x, up, down, biases
    assert_close(*(jax.value_and_grad(f, (0, 1, 2, 3))(*arrays) for f in (ours, plain)))
    saved = [a.shape for a in jax.tree.leaves(jax.vjp(ours, *arrays)[1])]
    assert (4, WIDTH, 32) in saved
    assert (4, 32, WIDTH) not in saved


def test_outputs_that_are_offloaded():
    """In the offloading recipe, only y of the scanned layers is offloaded to the host."""
    loss = page("transformations")["loss"]
    x, layers = normal(0, 8, 64), (normal(1, 4, 64), normal(2, 4, 64, 64) / 8)

    def plain(layers, x):
        for scale, weight in zip(*layers):
            rstd = jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
            x = x + x * rstd * scale @ weight
        return x.sum()

    assert_close(jax.grad(loss)(layers, x), jax.grad(plain)(layers, x))
    program = str(jax.make_jaxpr(jax.grad(loss))(layers, x))
    assert re.findall(r"f32(<\w+>)?\[4,8,64\]", program) == ["<host>"]


def test_packed_sequences_are_those_apart():
    own = page("attention")["own"]
    length = own.shape[-1]
    logits, v = normal(0, 1, 2, length, length), normal(1, 1, 2, length, 8)
    packed = jaxnorm.softmax(logits, where=own, causal=True) @ v
    for part in (slice(0, 50), slice(50, length)):
        alone = jaxnorm.softmax(logits[..., part, part], causal=True) @ v[..., part, :]
        assert_close(packed[..., part, :], alone)


def test_padding_makes_a_norm_batch_invariant():
    norm, x = page("determinism")["norm_of_up_to"], normal(0, 33, 512)
    expected = np.asarray(norm(64, x))
    for rows in (1, 2, 7, 32):
        np.testing.assert_array_equal(norm(64, x[:rows]), expected[:rows])
