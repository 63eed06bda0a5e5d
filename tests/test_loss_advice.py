"""memory_report's advice on logits is true: linear losses that compute the same, and save less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from advice_cases import assert_true, functions_of, told
from pairs import each_pair

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

TOKENS, WIDTH, CLASSES = 128, 16, 512
FIRST = np.zeros(TOKENS, "int32")
LABELS = jax.ShapeDtypeStruct((TOKENS,), "int32")
OURS = jaxnorm.softmax_cross_entropy_with_integer_labels
LINEAR = jaxnorm.linear_softmax_cross_entropy
NAME = LINEAR.__name__
LOG_PROB = "linear_log_prob_and_entropy"


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_log_softmax(logits, labels):
    """Compute the loss from log_softmax: select each label's log-probability by indexing."""
    return -jax.nn.log_softmax(logits)[jnp.arange(TOKENS), labels].mean()


def of_one_hot(logits, labels):
    one_hot = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits), -1).mean()


def of_products_of_rows(logits, labels):
    one_hot = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    return -jnp.einsum("nv,nv->n", one_hot, jax.nn.log_softmax(logits)).mean()


def of_optax_s_one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


def of_logsumexp(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def of_softmax(logits, labels):
    """Compute the loss from a softmax. Its probabilities are saved for the backward pass."""
    p = jax.nn.softmax(logits)
    return -jnp.log(jnp.take_along_axis(p, labels[:, None], -1)).mean()


def of_all_logarithms(logits, labels):
    p = jax.nn.softmax(logits)
    return -jnp.take_along_axis(jnp.log(p), labels[:, None], -1).mean()


def ours(logits, labels):
    return OURS(logits, labels).mean()


def ratios(results):
    log_prob, entropy = results
    return jnp.mean(jnp.exp(log_prob) - 0.01 * entropy)


LOSSES = (
    of_optax, of_log_softmax, of_one_hot, of_optax_s_one_hot, of_logsumexp, of_softmax,
    of_all_logarithms, of_products_of_rows, ours,
)  # fmt: skip


def operands(*dtypes):
    shapes = (TOKENS, WIDTH), (WIDTH, CLASSES)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]


def report_of(loss, x, weight, *rows):
    """Return the memory report of a function that computes a loss from x, a weight and labels.

    It gets an x that is computed inside the differentiated function, because arguments are not
    counted as saved.
    """

    def whole(x, weight, *rows):
        return loss(jnp.sin(x), weight, *rows)

    return memory_report(whole, x, weight, *(rows or [LABELS]), argnums=(0, 1))


def names_of(loss, *rows):
    """Return the functions that the report of a loss of logits advises."""
    whole = lambda x, weight, *rows: loss(x @ weight, *rows)  # noqa: E731
    return functions_of(report_of(whole, *operands("float32", "float32"), *rows))


def check(before, after, function, *dtypes, rows=()):
    """Assert that a report advises only to use `function`, and that the advice is true.

    `dtypes` are the dtypes of x and of the weight. Return the advice.
    """
    both = operands(*(dtypes or ("float32", "float32")))
    reports = [report_of(loss, *both, *rows) for loss in (before, after)]
    assert functions_of(reports[0]) == {function}
    assert_true(*reports, function)
    assert not told(reports[1])
    (advice,) = {row.advice for row in told(reports[0])}
    return advice


@each_pair("loss is_wide dtype", [*LOSSES], [True, False], ["float32", "bfloat16"])
def test_a_linear_layer_and_its_loss(loss, is_wide, dtype):
    """A matmul followed by a loss gets the advice.

    The logits between them may be cast to float32.
    """

    def before(x, weight, labels):
        logits = x @ weight
        return loss(logits.astype(jnp.float32) if is_wide else logits, labels)

    check(before, LINEAR, NAME, dtype, dtype)


def of_jax(logits, labels):
    """Compute log-probabilities and entropies as GRPO with an entropy bonus does."""
    log_p = jax.nn.log_softmax(logits)
    return (
        jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0],
        -jnp.sum(jnp.exp(log_p) * log_p, -1),
    )


def capped(logits):
    return 30 * jnp.tanh(logits / 30)


def capped_in_float32(logits):
    """Cap logits as Gemma 2 does: divide, take the tanh and multiply in float32."""
    return jnp.tanh(logits.astype(jnp.float32) / 30) * 30


@each_pair(
    "loss is_wide is_capped dtype",
    [of_jax, jaxnorm.log_prob_and_entropy],
    [True, False],
    [True, False],
    ["float32", "bfloat16"],
)
def test_log_probabilities(loss, is_wide, is_capped, dtype):
    def before(x, weight, labels):
        logits = capped(x @ weight) if is_capped else x @ weight
        return ratios(loss(logits.astype(jnp.float32) if is_wide else logits, labels))

    def after(x, weight, labels):
        cap = 30.0 if is_capped else None
        return ratios(jaxnorm.linear_log_prob_and_entropy(x, weight, labels, logit_softcap=cap))

    assert ("logit_softcap=30" in check(before, after, LOG_PROB, dtype, dtype)) == is_capped


# Functions of logits, a weight and labels that return the logits of a loss, the option of
# linear_softmax_cross_entropy that does the same, and its value.
OPTIONS = {
    "temperature": (lambda z, w, labels: z / 0.5, "logits_scale", lambda w, labels: 2.0),
    "traced temperature": (
        lambda z, w, labels: z / jnp.exp(labels[0].astype(z.dtype)),
        "logits_scale",
        lambda w, labels: jnp.exp(-labels[0].astype("float32")),
    ),
    "temperatures": (
        lambda z, w, labels: z / (1 + labels[:, None]).astype(z.dtype),
        "logits_scale",
        lambda w, labels: 1 / (1 + labels),
    ),
    "bias": (lambda z, w, labels: z + w[0], "bias", lambda w, labels: w[0]),
    "Flax's bias": (lambda z, w, labels: z + w[0].reshape(1, -1), "bias", lambda w, labels: w[0]),
    "softcap": (lambda z, w, labels: capped(z), "logit_softcap", lambda w, labels: 30.0),
    "wide softcap": (
        lambda z, w, labels: capped_in_float32(z), "logit_softcap", lambda w, labels: 30.0
    ),
}  # fmt: skip


@each_pair("loss option dtype", [of_optax, of_softmax, ours], [*OPTIONS], ["float32", "bfloat16"])
def test_options(loss, option, dtype):
    """The advice names the options with which the linear loss computes the same."""
    logits_of, name, value = OPTIONS[option]

    def before(x, weight, labels):
        return loss(logits_of(x @ weight, weight, labels).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, **{name: value(weight, labels)})

    advice = check(before, after, NAME, dtype, dtype)
    written = {"temperature": "2 ", "bias": "the added vector", "softcap": "30"}
    assert f"{name}={written.get(option, '')}" in advice


# ------------------------------------------------------------------------------ divergences


def of_optax_s_divergence(logits, teacher):
    return optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(teacher)).mean()


def reverse_divergence(logits, teacher):
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    return jnp.sum(jax.nn.softmax(logits) * (log_q - log_p), -1).mean()


def capped_teacher(logits):
    return 60 * jnp.tanh(logits / 60)


@pytest.mark.parametrize("is_capped", [True, False])
@pytest.mark.parametrize("loss", [of_optax_s_divergence, reverse_divergence])
def test_a_teacher_with_a_linear_layer(loss, is_capped):
    """The teacher's logits are the result of a matmul, too, of arrays that are not trained."""
    is_reverse = loss is reverse_divergence
    names = ("logit_softcap", "teacher_logit_softcap")

    def before(x, weight, teacher_x, teacher_weight):
        logits, teacher = x @ weight, teacher_x @ teacher_weight
        return loss(capped(logits), capped_teacher(teacher)) if is_capped else loss(logits, teacher)

    def after(*operands):
        caps = dict(zip(names, (30.0, 60.0))) if is_capped else {}
        return jaxnorm.linear_kl_divergence(*operands, reverse=is_reverse, **caps)

    both = operands("float32", "float32")
    reports = [report_of(f, *both, *both) for f in (before, after)]
    assert functions_of(reports[0]) == {"linear_kl_divergence"}
    assert_true(*reports, "linear_kl_divergence")
    (advice,) = {row.advice for row in told(reports[0])}
    assert ("reverse=True" in advice) == is_reverse
    assert all((name in advice) == is_capped for name in names)


# ------------------------------------------------------------------------------- any loss


def hard(z, label):
    return optax.softmax_cross_entropy_with_integer_labels(z, label)


def log_prob(z, label):
    return jnp.take_along_axis(jax.nn.log_softmax(z), label[..., None], -1)[..., 0]


def picked(z, label):
    return jnp.take_along_axis(z, label[..., None], -1)[..., 0]


def one_hot(label):
    return jax.nn.one_hot(label, CLASSES)


def soft(label):
    """Return the probabilities of a teacher."""
    return jax.nn.softmax(jnp.sin(jnp.arange(CLASSES) + 1.0 * label[..., None]))


def soft_and_hard(z, label):
    """Distil from soft labels, and learn the hard label, both from the same logits."""
    return hard(z, label) + optax.kl_divergence(jax.nn.log_softmax(z / 2), soft(label))


def jensen_shannon(z, label):
    p, q = jax.nn.softmax(z), soft(label)
    mean = 0.5 * (p + q)
    return jnp.sum(p * jnp.log(p / mean) + q * jnp.log(q / mean), -1)


def nucleus(z, label):
    largest = jnp.sort(z, -1)[..., ::-1][..., :40]
    return jax.nn.logsumexp(largest, -1) - picked(z, label)


def without_the_gradient_of_log_p(z, label):
    log_p = jax.nn.log_softmax(z)
    return -jnp.sum(one_hot(label) * jax.lax.stop_gradient(log_p), -1) + 0 * jnp.sum(log_p, -1)


SCALES = 1 + np.arange(CLASSES) / np.float32(CLASSES)

# Losses of one position or of several ones that no linear loss with a name computes. Many of them
# are almost a cross-entropy.
ANY = {
    "smoothed labels": lambda z, i: optax.softmax_cross_entropy(
        z, optax.smooth_labels(one_hot(i), 0.1)
    ),
    "z-loss": lambda z, i: hard(z, i) + 1e-4 * jax.nn.logsumexp(z, -1) ** 2,
    "mean of classes": lambda z, i: -jnp.mean(jax.nn.log_softmax(z), -1) - log_prob(z, i),
    "soft and hard": soft_and_hard,
    "padded classes": lambda z, i: hard(jnp.where(jnp.arange(CLASSES) < CLASSES - 5, z, -1e9), i),
    "Brier": lambda z, i: jnp.sum((jax.nn.softmax(z) - one_hot(i)) ** 2, -1),
    "sine": lambda z, i: hard(30 * jnp.sin(z / 30), i),
    "half the label": lambda z, i: jax.nn.logsumexp(z, -1) - 0.5 * picked(z, i),
    "label of others": lambda z, i: jax.nn.logsumexp(z, -1) - picked(jnp.sin(z), i),
    "some classes": lambda z, i: jax.nn.logsumexp(z[..., :-1], -1) - picked(z, i),
    "epsilon": lambda z, i: -jnp.log(jnp.exp(log_prob(z, i)) + 1e-3 * jax.nn.softmax(z)[..., 0]),
    "several caps": lambda z, i: hard(SCALES * jnp.tanh(z / 30), i),
    "reciprocal": lambda z, i: hard(30 / jnp.tanh(z / 30), i),
    "several scales": lambda z, i: hard(SCALES * z, i),
    "label without gradient": lambda z, i: hard(z, i) + picked(z - jax.lax.stop_gradient(z), i),
    "no gradient": without_the_gradient_of_log_p,
    "two labels": lambda z, i: 0.7 * hard(z, i) + 0.3 * hard(z, (i + 1) % CLASSES),
    "standardised": lambda z, i: hard(jax.nn.standardize(z), i),
    "masked others": lambda z, i: hard(jnp.where(one_hot(i) > 0, z, z - 1), i),
    "entropy": lambda z, i: jnp.sum(jax.nn.softmax(z) * jax.nn.log_softmax(z), -1),
    "confidence": lambda z, i: -jnp.max(jax.nn.log_softmax(z), -1),
    "soft labels": lambda z, i: optax.softmax_cross_entropy(z, soft(i)),
    "divergence": lambda z, i: optax.kl_divergence(jax.nn.log_softmax(z), soft(i)),
    "Jensen-Shannon": jensen_shannon,
    "sigmoid": lambda z, i: optax.sigmoid_binary_cross_entropy(z, one_hot(i)).mean(-1),
    "sigmoid focal": lambda z, i: optax.sigmoid_focal_loss(z, one_hot(i)).sum(-1),
    "poly": lambda z, i: optax.losses.poly_loss_cross_entropy(z, one_hot(i)),
    "hinge": lambda z, i: jnp.sum(jax.nn.relu(1 + z - picked(z, i)[..., None]), -1),
    "squared error": lambda z, i: jnp.mean(optax.squared_error(z, soft(i)), -1),
    "cosine": lambda z, i: optax.cosine_distance(z, soft(i)),
    "nucleus": nucleus,
}


@pytest.mark.parametrize("name", [*ANY])
def test_any_loss_that_is_summed(name):
    loss, dtype = ANY[name], ["float32", "bfloat16"][[*ANY].index(name) % 2]

    def before(x, weight, labels):
        return loss((x @ weight).astype(jnp.float32), labels).mean()

    def after(x, weight, labels):
        return jaxnorm.linear_loss(loss, x, weight, labels)

    check(before, after, "linear_loss", dtype, dtype)


SOFT = np.sin(np.arange(TOKENS)[:, None] * np.arange(CLASSES, dtype="float32"))


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, i: 0.7 * hard(z, i) + 0.3 * hard(z, i[::-1]),
        lambda z, i: hard(z + jnp.sin(1.0 * i[:, None] * jnp.arange(CLASSES)), i),
        lambda z, i: hard(z + SOFT, i),
    ],
    ids=["labels of other positions", "biases of positions", "array of biases"],
)
def test_inputs_that_linear_losses_with_a_name_do_not_have(loss):
    assert names_of(lambda *given: loss(*given).mean()) == {"linear_loss"}


# Functions of the label's log-probability.
OF_LOG_PROB = {
    "focal": lambda log_p: -jnp.mean((1 - jnp.exp(log_p)) ** 2 * log_p),
    "generalised": lambda log_p: jnp.mean((1 - jnp.exp(0.7 * log_p)) / 0.7),
    "probability": lambda log_p: jnp.mean(1 - jnp.exp(log_p)),
    "epsilon": lambda log_p: -jnp.mean(jnp.log(jnp.exp(log_p) + 1e-3)),
    # DPO uses the sums of the sequences' log-probabilities, in a function that is not linear.
    "DPO": lambda log_p: -jax.nn.log_sigmoid(log_p.reshape(8, -1).sum(-1)).mean(),
    "pairs": lambda log_p: -jax.nn.log_sigmoid(log_p[: TOKENS // 2] - log_p[TOKENS // 2 :]).sum(),
}


@pytest.mark.parametrize("name", [*OF_LOG_PROB])
def test_functions_of_the_label_s_probability(name):
    def before(x, weight, labels):
        return OF_LOG_PROB[name](jax.nn.log_softmax(x @ weight)[jnp.arange(TOKENS), labels])

    def after(x, weight, labels):
        return OF_LOG_PROB[name](jaxnorm.linear_log_prob_and_entropy(x, weight, labels)[0])

    check(before, after, LOG_PROB)


# ----------------------------------------------------------------------- layouts and weights


def hidden(x, embedding, labels):
    return x + embedding.astype(jnp.bfloat16)[labels]


def batch(a, is_sliced=False):
    return a.reshape(8, 16, *a.shape[1:])[:, : -1 if is_sliced else None]


def reshaped(x, weight, labels, is_sliced=False):
    """Reshape the logits of a batch of sequences to rows before the loss, as MaxText does."""
    logits = (batch(x) @ weight)[:, : -1 if is_sliced else None]
    logits = logits.reshape(-1, CLASSES).astype(jnp.float32)
    return of_optax(logits, batch(labels, is_sliced).ravel())


def of_tunix(z, label, mask):
    """Multiply one-hot labels by a mask, as Tunix's default loss does."""
    return -jnp.sum(jax.nn.log_softmax(z) * one_hot(label) * mask.astype(z.dtype)[..., None], -1)


def of_all_axes(x, weight, labels, mask):
    """Sum over classes and positions at once, as Tunix does."""
    logits, labels, mask = (batch(x) @ weight)[:, :-1], batch(labels)[:, 1:], batch(mask)[:, 1:]
    products = jax.nn.log_softmax(logits) * one_hot(labels) * mask.astype(x.dtype)[..., None]
    return -jnp.sum(products) / (jnp.sum(mask) + 1e-8)


def of_advantages(z, label, old, advantage):
    """Clip a ratio of probabilities, as PPO and GRPO do."""
    ratio = jnp.exp(log_prob(z, label) - old)
    clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
    return -jnp.minimum(ratio * advantage, clipped) - 0.01 * jnp.max(jax.nn.log_softmax(z), -1)


def with_metrics(z, label):
    return hard(z, label), jnp.argmax(z, -1) == label


def of_metrics(results):
    losses, is_right = results
    return losses.mean() * (1 + 0 * jax.lax.stop_gradient(is_right.mean()))


def two_results(z):
    return jax.nn.logsumexp(z, -1), jax.nn.log_softmax(z)[..., 0]


def of_all_rows(results):
    """Compute weights that depend on all rows."""
    return jnp.sum(jnp.sin(jax.nn.softmax(results[0]) * results[1]))


ANY_LOSS = jaxnorm.linear_loss
# Code before and after the advice is followed, its function, a part of its text, dtypes of x and of
# the weight, and rows other than the labels.
CHANGES = {
    # jaxnorm's losses have no gradient with respect to their scale; linear_loss has one.
    "trained temperature": (
        lambda x, w, i: of_optax(x @ w * jnp.exp(w[0, 0]), i),
        lambda x, w, i: ANY_LOSS(lambda z, i: hard(jnp.exp(w[0, 0]) * z, i), x, w, i),
        "linear_loss", "fun, x, weight", "float32", "float32",
    ),
    "cast weight": (
        lambda x, w, i: of_optax((x @ w.astype(x.dtype)).astype(jnp.float32), i),
        lambda x, w, i: LINEAR(x, w, i, dtype=jnp.bfloat16),
        NAME, "dtype=bfloat16", "bfloat16", "float32",
    ),
    # The table of a tied embedding is transposed and cast, and a bias is added.
    "tied embedding": (
        lambda x, w, i: of_optax(
            (hidden(x, w.T, i) @ w.astype(x.dtype)).astype(jnp.float32) + jnp.arange(1.0 * CLASSES),
            i,
        ),
        lambda x, w, i: LINEAR(
            hidden(x, w.T, i), w.astype(x.dtype), i, bias=jnp.arange(1.0 * CLASSES)
        ),
        NAME, "bias=", "bfloat16", "float32",
    ),
    "last position": (
        lambda x, w, i: of_optax((x @ w)[:-1].astype(jnp.float32), i[1:]),
        lambda x, w, i: LINEAR(x[:-1], w, i[1:]),
        NAME, "slice the matmul's input", "bfloat16", "bfloat16",
    ),
    "last position, capped": (
        lambda x, w, i: of_optax(capped(x @ w)[:-1].astype(jnp.float32), i[1:]),
        lambda x, w, i: LINEAR(x[:-1], w, i[1:], logit_softcap=30.0),
        NAME, "slice the matmul's input", "bfloat16", "bfloat16",
    ),
    "reshaped": (
        reshaped,
        lambda x, w, i: LINEAR(batch(x), w, batch(i)),
        NAME, "where=", "bfloat16", "bfloat16",
    ),
    "reshaped and sliced": (
        lambda x, w, i: reshaped(x, w, i, is_sliced=True),
        lambda x, w, i: LINEAR(batch(x)[:, :-1], w, batch(i)[:, :-1]),
        NAME, "slice the matmul's input", "bfloat16", "bfloat16",
    ),
    # A constant is added to a cross-entropy, which is multiplied by weights.
    "weights of rows": (
        lambda x, w, i: jnp.sum(jnp.where(i > 0, hard(x @ w, i) + 0.5, 0)) / jnp.sum(i > 0),
        lambda x, w, i: LINEAR(x, w, i, where=i > 0) + 0.5,
        NAME, "it returns the mean: masks and weights go into where=", "float32", "float32",
    ),
    # A top-k teacher has several labels for each position.
    "several labels": (
        lambda x, w, _, i: jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(x @ w), i, -1) ** 2),
        lambda x, w, _, i: jnp.sum(jaxnorm.linear_log_prob_and_entropy(x, w, i)[0] ** 2),
        LOG_PROB, "its operands", "float32", "float32",
        jax.ShapeDtypeStruct((TOKENS, 5), "int32"),
    ),
    "all axes": (
        of_all_axes,
        lambda x, w, i, mask: ANY_LOSS(
            of_tunix, batch(x)[:, :-1], w, batch(i)[:, 1:], batch(mask)[:, 1:]
        ),
        "linear_loss", "where=", "float32", "float32",
        jax.ShapeDtypeStruct((TOKENS,), "bool"),
    ),
    "advantages": (
        lambda x, w, *rows: of_advantages(x @ w, *rows).mean(),
        lambda x, w, *rows: ANY_LOSS(of_advantages, x, w, *rows),
        "linear_loss", "where=", "float32", "float32",
        *[jax.ShapeDtypeStruct((TOKENS,), "float32")] * 2,
    ),
    # Metrics under `stop_gradient` are further results of the function of a row.
    "metrics": (
        lambda x, w, i: of_metrics(with_metrics(x @ w, i)),
        lambda x, w, i: of_metrics(ANY_LOSS(with_metrics, x, w, i, reduction="none")),
        "linear_loss", 'reduction="none"', "float32", "float32",
    ),
    "weights of all rows": (
        lambda x, w, i: of_all_rows(two_results(x @ w)),
        lambda x, w, i: of_all_rows(ANY_LOSS(two_results, x, w, reduction="none")),
        "linear_loss", 'reduction="none"', "float32", "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHANGES])
def test_changes(name):
    before, after, function, text, x, weight, *rows = CHANGES[name]
    assert text in check(before, after, function, x, weight, rows=(LABELS, *rows))


# -------------------------------------------------------------------------------- frozen operands


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("is_closed_over", [True, False])
def test_frozen_operands(argnums, is_closed_over):
    """If an operand is frozen, its gradient is neither computed nor saved."""
    x, weight = (jnp.ones(s, "bfloat16") for s in ((TOKENS, WIDTH), (WIDTH, CLASSES)))

    def report(loss):
        if is_closed_over and argnums in (0, 1):
            given = (x, weight)[argnums]
            whole = lambda a: loss(*((jnp.sin(a), weight) if argnums == 0 else (jnp.sin(x), a)))  # noqa: E731
            return memory_report(whole, given)
        return memory_report(lambda x, w: loss(jnp.sin(x), w), x, weight, argnums=argnums)

    before = report(lambda x, w: of_optax(x @ w, FIRST))
    after = report(lambda x, w: LINEAR(x, w, FIRST))
    assert functions_of(before) == {NAME}
    assert_true(before, after, NAME)


@pytest.mark.remat
@pytest.mark.parametrize("is_used_twice", [True, False])
def test_a_frozen_operand_that_is_cast(is_used_twice):
    """An array that is saved only for the matmul is freed, even if the matmul takes a cast of it.

    Here, `jax.checkpoint` saves a float32 array, and recomputes its cast. The array is not freed if
    another operation needs it.
    """
    x, weight = operands("float32", "bfloat16")

    def loss(x, weight, labels):
        hidden = jnp.sin(x)
        logits = jax.checkpoint(lambda h, w: h.astype(w.dtype) @ w)(hidden, weight)
        other = jnp.sum(hidden * weight[:, 0]) if is_used_twice else 0.0
        return of_optax(logits.astype(jnp.float32), labels) + other

    rows = told(memory_report(loss, x, weight, LABELS, argnums=1), NAME)
    made = {row.made_by for row in rows if row.dtype == jnp.float32 and row.shape[1:] != (1,)}
    assert made & {"exp", "sin"} == ({"exp"} if is_used_twice else {"exp", "sin"})


# -------------------------------------------------------------------------------- near misses


def over_positions(z, i):
    total, _ = jax.lax.scan(lambda a, row: (jnp.logaddexp(a, row), None), 0 * z[0], z)
    return total.sum()


def transposed(z):
    return z.reshape(8, 16, -1).swapaxes(0, 1).reshape(TOKENS, -1)


# Losses that use logits of several positions together, or the logits of other positions.
NEAR_MISSES = {
    "softmax of positions": lambda z, i: -jax.nn.log_softmax(z, 0)[jnp.arange(TOKENS), i].mean(),
    "normaliser of positions": lambda z, i: jax.nn.logsumexp(z, 0).mean() + of_optax(z, i),
    "contrastive": lambda z, i: of_optax(z, i) + of_optax(z.T, jnp.arange(CLASSES) % TOKENS),
    "sums of positions": lambda z, i: of_optax(z, i) + jnp.sum(jnp.sum(jnp.sin(z), 0) ** 2),
    "centred": lambda z, i: of_optax(z - z.mean(0), i),
    "cumulative": lambda z, i: of_optax(jnp.cumsum(z, 0), i),
    "sorted positions": lambda z, i: of_optax(jnp.sort(z, 0), i),
    "top positions": lambda z, i: jax.lax.top_k(jnp.sin(z).T, 3)[0].sum() + of_optax(z, i),
    "scan": over_positions,
    "associative scan": lambda z, i: jax.lax.associative_scan(jnp.logaddexp, z)[-1].sum(),
    "groups of positions": lambda z, i: jax.nn.log_softmax(z.reshape(8, 16, -1), 1)[..., 0].mean(),
    "all logits": lambda z, i: -jax.nn.log_softmax(z.ravel()).mean(),
    "largest logit": lambda z, i: of_optax(z / jnp.max(z), i),
    "norm of all logits": lambda z, i: of_optax(z / jnp.sqrt(jnp.mean(z**2)), i),
    "neighbours": lambda z, i: of_optax(z[:-1] + z[1:], i[1:]),
    "pairs": lambda z, i: jnp.sum(jax.nn.softmax(z[:-1]) * jax.nn.log_softmax(z[1:]), -1).mean(),
    "even and odd": lambda z, i: of_optax(z[::2] - z[1::2], i[::2]),
    "rolled": lambda z, i: of_optax(z + jnp.roll(z, 1, 0), i),
    "joined": lambda z, i: of_optax(z + jnp.concatenate([z[64:], z[:64]]), i),
    "reversed": lambda z, i: of_optax(z * z[::-1], i),
    "transposed": lambda z, i: of_optax(z + transposed(z), i),
    "permuted": lambda z, i: of_optax(z[jnp.argsort(i)], i),
    "moved": lambda z, i: of_optax(z[(jnp.arange(TOKENS) + i[0]) % TOKENS], i),
    "other rows": lambda z, i: -jax.nn.log_softmax(z)[(jnp.arange(TOKENS) + 1) % TOKENS, i].mean(),
    "window": lambda z, i: of_optax(jax.lax.dynamic_slice_in_dim(z, i[0], 64) + z[:64], i[:64]),
    "similarities": lambda z, i: jnp.sum(jax.nn.softmax(z) @ jax.nn.softmax(z).T),
}


@pytest.mark.parametrize("name", [*NEAR_MISSES])
def test_what_needs_all_logits(name):
    """There is no advice if logits of several positions are used together, or out of order."""
    assert not names_of(NEAR_MISSES[name])


def several_groups(x, weight, labels):
    """Groups of tokens have different weights."""
    groups = x.reshape(2, -1, WIDTH) @ jnp.stack([weight, 2 * weight])
    return of_optax(groups.reshape(TOKENS, CLASSES), labels)


def into_a_matmul(x, weight, labels):
    return jnp.sum((jax.nn.softmax(x @ weight) @ weight.T)[:, 0])


@pytest.mark.parametrize("loss", [several_groups, into_a_matmul])
def test_matmuls_without_a_linear_loss(loss):
    assert not told(report_of(loss, *operands("float32", "float32")))


def test_logits_that_are_returned():
    """There is no advice if the logits are returned, because they must exist."""
    x, weight = operands("bfloat16", "bfloat16")

    def loss(x, weight, labels):
        logits = x @ weight
        return of_optax(logits.astype(jnp.float32), labels), logits

    report = memory_report(loss, x, weight, LABELS, argnums=(0, 1), has_aux=True)
    assert not told(report)


@pytest.mark.parametrize("shape", [(4, 256, 64), (2 * TOKENS, 256, 64), (4, 16, 512)])
def test_a_small_vocabulary(shape):
    """There is no advice if the weight's gradient is larger than the logits, or classes are few."""
    rows, features, classes = shape
    x = jax.ShapeDtypeStruct((rows, features), "float32")
    weight = jax.ShapeDtypeStruct((features, classes), "float32")
    labels = jax.ShapeDtypeStruct((rows,), "int32")
    loss = lambda x, weight, labels: of_optax(x @ weight, labels)  # noqa: E731
    assert not told(memory_report(loss, x, weight, labels, argnums=(0, 1)))


@pytest.mark.parametrize("stack", ["scan", "checkpoint"])
def test_chunks_of_rows(stack):
    """Code that computes chunks of logits in a rematerialised scan needs no advice."""

    def loss(x, weight, labels):
        def chunk(total, rows):
            part, of_part = rows
            return total + of_optax(part @ weight, of_part), None

        rows = x.reshape(2, -1, WIDTH), labels.reshape(2, -1)
        return jax.lax.scan(jax.checkpoint(chunk) if stack == "checkpoint" else chunk, 0.0, rows)[0]

    rows = told(report_of(loss, *operands("float32", "float32")))
    assert bool(rows) == (stack == "scan")
    assert all(row.layers == 2 for row in rows)


def test_a_report_inside_a_traced_function():
    reports = []
    whole = lambda x, weight, labels: of_optax(x @ weight, labels)  # noqa: E731
    jax.eval_shape(lambda: reports.append(report_of(whole, *operands("float32", "float32"))))
    assert functions_of(reports[0]) == {NAME}


def test_the_line_is_the_user_s():
    x, weight = operands("bfloat16", "bfloat16")

    def loss(x, weight, labels):
        return of_optax((x @ weight).astype(jnp.float32), labels)

    row, *_ = told(memory_report(loss, x, weight, LABELS))
    assert row.source.startswith("test_loss_advice.py:")
    assert row.source.endswith("(of_optax)")
    text = str(memory_report(loss, x, weight, LABELS))
    assert f"{NAME} saves" in text
    assert max(map(len, text.splitlines())) <= 100
