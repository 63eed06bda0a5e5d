"""memory_report's advice on logits is true: linear losses that compute the same, and save less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from advice_cases import assert_true, functions_of, told
from pairs import pairwise

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

TOKENS, WIDTH, CLASSES = 128, 16, 512
LABELS = jax.ShapeDtypeStruct((TOKENS,), "int32")
OURS = jaxnorm.softmax_cross_entropy_with_integer_labels
LINEAR = jaxnorm.linear_softmax_cross_entropy
NAME = LINEAR.__name__
LOG_PROB = "linear_log_prob_and_entropy"


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


# ------------------------------------------------------------------------- cross-entropies


def hard(z, label):
    return optax.softmax_cross_entropy_with_integer_labels(z, label)


def of_optax(z, label):
    return hard(z, label).mean()


def picked(z, label):
    return jnp.take_along_axis(z, label[..., None], -1)[..., 0]


def one_hot(label):
    return jax.nn.one_hot(label, CLASSES)


def capped(logits):
    return 30 * jnp.tanh(logits / 30)


LOSSES = {
    "optax": of_optax,
    "log_softmax": lambda z, i: -jax.nn.log_softmax(z)[jnp.arange(TOKENS), i].mean(),
    "one-hot": lambda z, i: -jnp.sum(one_hot(i) * jax.nn.log_softmax(z), -1).mean(),
    "optax's one-hot": lambda z, i: optax.softmax_cross_entropy(z, one_hot(i)).mean(),
    "products of rows": lambda z, i: (
        -jnp.einsum("nv,nv->n", one_hot(i), jax.nn.log_softmax(z)).mean()
    ),
    "logsumexp": lambda z, i: (jax.nn.logsumexp(z, -1) - picked(z, i)).mean(),
    "softmax": lambda z, i: -jnp.log(picked(jax.nn.softmax(z), i)).mean(),
    "all logarithms": lambda z, i: -picked(jnp.log(jax.nn.softmax(z)), i).mean(),
    "ours": lambda z, i: OURS(z, i).mean(),
}
# Functions of logits, a weight and labels that return the logits of a loss, the argument of
# linear_softmax_cross_entropy that does the same, its value, and its text in the advice.
OPTIONS = {
    "temperature": (lambda z, w, i: z / 0.5, "logits_scale", lambda w, i: 2.0, "2 "),
    "traced temperature": (
        lambda z, w, i: z / jnp.exp(i[0].astype(z.dtype)),
        "logits_scale", lambda w, i: jnp.exp(-i[0].astype("float32")), "the scale",
    ),
    "temperatures": (
        lambda z, w, i: z / (1 + i[:, None]).astype(z.dtype),
        "logits_scale", lambda w, i: 1 / (1 + i), "the scale",
    ),
    "bias": (lambda z, w, i: z + w[0], "bias", lambda w, i: w[0], "the added vector"),
    "Flax's bias": (lambda z, w, i: z + w[0].reshape(1, -1), "bias", lambda w, i: w[0], ""),
    "softcap": (lambda z, w, i: capped(z), "logit_softcap", lambda w, i: 30.0, "30"),
    "Gemma's softcap": (
        lambda z, w, i: jnp.tanh(z.astype(jnp.float32) / 30) * 30,
        "logit_softcap", lambda w, i: 30.0, "30",
    ),
}  # fmt: skip
DTYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("loss", "option", "dtype"),
    [
        *pairwise([*LOSSES], ["wide", "narrow"], DTYPES),
        *pairwise(["optax", "softmax", "ours"], [*OPTIONS], DTYPES),
    ],
)
def test_cross_entropies(loss, option, dtype):
    """A matmul followed by a loss gets the advice, which names the options of the linear loss.

    The logits between them may be cast to float32.
    """
    logits_of, name, value, text = OPTIONS.get(option, (lambda z, *_: z, "bias", None, ""))

    def before(x, weight, labels):
        logits = logits_of(x @ weight, weight, labels)
        return LOSSES[loss](logits if option == "narrow" else logits.astype("float32"), labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, **({name: value(weight, labels)} if value else {}))

    advice = check(before, after, NAME, dtype, dtype)
    assert (f"{name}={text}" in advice) == (option in OPTIONS)


# --------------------------------------------------------------- log-probabilities, divergences


def of_jax(z, labels):
    """Compute log-probabilities and entropies as GRPO with an entropy bonus does."""
    log_p = jax.nn.log_softmax(z)
    return picked(log_p, labels), -jnp.sum(jnp.exp(log_p) * log_p, -1)


def ratios(results):
    return jnp.mean(jnp.exp(results[0]) - 0.01 * results[1])


# Functions of the label's log-probability.
OF_LOG_PROB = {
    "focal": lambda log_p: -jnp.mean((1 - jnp.exp(log_p)) ** 2 * log_p),
    "epsilon": lambda log_p: -jnp.mean(jnp.log(jnp.exp(log_p) + 1e-3)),
    # DPO uses the sums of the sequences' log-probabilities, in a function that is not linear.
    "DPO": lambda log_p: -jax.nn.log_sigmoid(log_p.reshape(8, -1).sum(-1)).mean(),
    "pairs": lambda log_p: -jax.nn.log_sigmoid(log_p[: TOKENS // 2] - log_p[TOKENS // 2 :]).sum(),
}


@pytest.mark.parametrize(
    ("loss", "form", "dtype"),
    [
        *pairwise([of_jax, jaxnorm.log_prob_and_entropy], ["wide", "narrow", "capped"], DTYPES),
        *((of_jax, form, "float32") for form in OF_LOG_PROB),
    ],
)
def test_log_probabilities(loss, form, dtype):
    of = (lambda results: OF_LOG_PROB[form](results[0])) if form in OF_LOG_PROB else ratios

    def before(x, weight, labels):
        logits = capped(x @ weight) if form == "capped" else x @ weight
        return of(loss(logits.astype(jnp.float32) if form == "wide" else logits, labels))

    def after(x, weight, labels):
        cap = 30.0 if form == "capped" else None
        return of(jaxnorm.linear_log_prob_and_entropy(x, weight, labels, logit_softcap=cap))

    advice = check(before, after, LOG_PROB, dtype, dtype)
    assert ("logit_softcap=30" in advice) == (form == "capped")


def of_optax_s_divergence(logits, teacher):
    return optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(teacher)).mean()


def reverse_divergence(logits, teacher):
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    return jnp.sum(jax.nn.softmax(logits) * (log_q - log_p), -1).mean()


@pytest.mark.parametrize("is_capped", [True, False])
@pytest.mark.parametrize("loss", [of_optax_s_divergence, reverse_divergence])
def test_a_teacher_with_a_linear_layer(loss, is_capped):
    """The teacher's logits are the result of a matmul, too, of arrays that are not trained."""
    is_reverse = loss is reverse_divergence
    caps = {"logit_softcap": 30.0, "teacher_logit_softcap": 60.0} if is_capped else {}

    def before(x, weight, teacher_x, teacher_weight):
        logits, teacher = x @ weight, teacher_x @ teacher_weight
        return loss(capped(logits), 2 * capped(teacher / 2)) if is_capped else loss(logits, teacher)

    def after(*operands):
        return jaxnorm.linear_kl_divergence(*operands, reverse=is_reverse, **caps)

    rows = operands("float32", "float32")
    advice = check(before, after, "linear_kl_divergence", rows=rows)
    assert ("reverse=True" in advice) == is_reverse
    assert all(f"{name}={cap:.0f}" in advice for name, cap in caps.items())


def test_a_teacher_with_another_temperature():
    """linear_kl_divergence scales the logits of both by the same number."""

    def before(x, weight, teacher_x, teacher_weight):
        temperatures = jnp.exp(teacher_x[0, :2])
        teacher = teacher_x @ teacher_weight / temperatures[1]
        return of_optax_s_divergence(x @ weight / temperatures[0], teacher)

    both = operands("float32", "float32")
    assert functions_of(report_of(before, *both, *both)) == {"linear_loss"}


# ------------------------------------------------------------------------------- any loss


def soft(label):
    """Return the probabilities of a teacher."""
    return jax.nn.softmax(jnp.sin(jnp.arange(CLASSES) + 1.0 * label[..., None]))


def largest(z):
    return jnp.max(jnp.abs(z), -1, keepdims=True)


def nucleus(z, label):
    return jax.nn.logsumexp(jnp.sort(z, -1)[..., ::-1][..., :40], -1) - picked(z, label)


SCALES = 1 + np.arange(CLASSES) / np.float32(CLASSES)

# Losses of one position or of several ones that no linear loss with a name computes. Many of them
# are almost a cross-entropy.
ANY = {
    "soft and hard": lambda z, i: (
        hard(z, i) + optax.kl_divergence(jax.nn.log_softmax(z / 2), soft(i))
    ),
    "padded classes": lambda z, i: hard(jnp.where(jnp.arange(CLASSES) < CLASSES - 5, z, -1e9), i),
    "label of others": lambda z, i: jax.nn.logsumexp(z, -1) - picked(jnp.sin(z), i),
    "some classes": lambda z, i: jax.nn.logsumexp(z[..., :-1], -1) - picked(z, i),
    "several caps": lambda z, i: hard(SCALES * jnp.tanh(z / 30), i),
    "label without gradient": lambda z, i: hard(z, i) + picked(z - jax.lax.stop_gradient(z), i),
    "doubled gradient": lambda z, i: hard(2 * z - jax.lax.stop_gradient(z), i),
    "scale of logits": lambda z, i: hard(z * jax.lax.stop_gradient(largest(z)), i),
    "clipped": lambda z, i: hard(jnp.clip(z, -100, 100), i),
    "two labels": lambda z, i: (
        -jnp.take_along_axis(
            jax.nn.log_softmax(z), (i[..., None] + jnp.arange(2)) % CLASSES, -1
        ).sum(-1)
    ),
    "entropy": lambda z, i: jnp.sum(jax.nn.softmax(z) * jax.nn.log_softmax(z), -1),
    "sigmoid": lambda z, i: optax.sigmoid_binary_cross_entropy(z, one_hot(i)).mean(-1),
    "nucleus": nucleus,
    "table of labels": lambda z, i: optax.softmax_cross_entropy(z, soft(jnp.arange(CLASSES))[i]),
    "stack": lambda z, i: jnp.stack([hard(z, i), jax.nn.logsumexp(z, -1)], -1).max(-1),
    "jaxnorm's divergence": lambda z, i: jaxnorm.kl_divergence(
        z, jnp.cos(z), logit_softcap=3.0, reverse=True
    ),
    "jaxnorm's loss of some classes": lambda z, i: OURS(
        z, i, where=jnp.arange(CLASSES) <= i[..., None]
    ),
}


@pytest.mark.parametrize("name", [*ANY])
def test_any_loss_that_is_summed(name):
    loss, dtype = ANY[name], ["float32", "bfloat16"][[*ANY].index(name) % 2]

    def before(x, weight, labels):
        return loss((x @ weight).astype(jnp.float32), labels).mean()

    def after(x, weight, labels):
        return jaxnorm.linear_loss(loss, x, weight, labels)

    check(before, after, "linear_loss", dtype, dtype)


# ----------------------------------------------------------------------- layouts and weights


def hidden(x, embedding, labels):
    return x + embedding.astype(jnp.bfloat16)[labels]


def long_bias():
    """Return the start of an array that is too long to be evaluated for advice."""
    return jnp.sin(jnp.arange(2.0**22 + 1))[:CLASSES]


def batch(a):
    return a.reshape(8, 16, *a.shape[1:])


def reshaped(x, weight, labels):
    """Reshape the logits of a batch of sequences to rows before the loss, as MaxText does."""
    logits = (batch(x) @ weight)[:, :-1].reshape(-1, CLASSES)
    return of_optax(logits.astype(jnp.float32), batch(labels)[:, :-1].ravel())


def of_tunix(z, label, mask):
    """Multiply one-hot labels by a mask, as Tunix's default loss does."""
    return -jnp.sum(jax.nn.log_softmax(z) * one_hot(label) * mask.astype(z.dtype)[..., None], -1)


def of_all_axes(x, weight, labels, mask):
    """Sum over classes and positions at once, as Tunix does."""
    logits, labels, mask = (batch(x) @ weight)[:, :-1], batch(labels)[:, 1:], batch(mask)[:, 1:]
    products = jax.nn.log_softmax(logits) * one_hot(labels) * mask.astype(x.dtype)[..., None]
    return -jnp.sum(products) / (jnp.sum(mask) + 1e-8)


def with_metrics(z, label):
    return hard(z, label), jnp.argmax(z, -1) == label


def of_metrics(results):
    losses, is_right = results
    return losses.mean() * (1 + 0 * jax.lax.stop_gradient(is_right.mean()))


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
            (hidden(x, w.T, i) @ w.astype(x.dtype)).astype(jnp.float32) + long_bias(), i
        ),
        lambda x, w, i: LINEAR(hidden(x, w.T, i), w.astype(x.dtype), i, bias=long_bias()),
        NAME, "bias=", "bfloat16", "float32",
    ),
    "last position, capped": (
        lambda x, w, i: of_optax(capped(x @ w)[:-1].astype(jnp.float32), i[1:]),
        lambda x, w, i: LINEAR(x[:-1], w, i[1:], logit_softcap=30.0),
        NAME, "slice the matmul's input", "bfloat16", "bfloat16",
    ),
    "reshaped and sliced": (
        reshaped,
        lambda x, w, i: LINEAR(batch(x)[:, :-1], w, batch(i)[:, :-1]),
        NAME, "slice the matmul's input", "bfloat16", "bfloat16",
    ),
    # A constant is added to a cross-entropy, which is multiplied by weights.
    "weights of rows": (
        lambda x, w, i: jnp.sum(jnp.where(i > 0, hard(x @ w, i) + 0.5, 0) / jnp.sum(i > 0)),
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
    # Metrics under `stop_gradient` are further results of the function of a row.
    "metrics": (
        lambda x, w, i: of_metrics(with_metrics(x @ w, i)),
        lambda x, w, i: of_metrics(ANY_LOSS(with_metrics, x, w, i, reduction="none")),
        "linear_loss", 'reduction="none"', "float32", "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHANGES])
def test_changes(name):
    before, after, function, text, x, weight, *rows = CHANGES[name]
    assert text in check(before, after, function, x, weight, rows=(LABELS, *rows))


# -------------------------------------------------------------------------------- frozen operands


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_frozen_operands(argnums):
    """If an operand is frozen, its gradient is neither computed nor saved."""
    x, weight = operands("bfloat16", "bfloat16")
    labels = np.zeros(TOKENS, "int32")

    def report(loss):
        return memory_report(lambda x, w: loss(jnp.sin(x), w, labels), x, weight, argnums=argnums)

    before = report(lambda x, w, labels: of_optax(x @ w, labels))
    assert functions_of(before) == {NAME}
    assert_true(before, report(LINEAR), NAME)


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


@jax.custom_vjp
def damped(z):
    return z


damped.defvjp(lambda z: (z, None), lambda _, g: (jnp.clip(g, -1, 1),))
# Losses that use logits of several positions together, or the logits of other positions.
NEAR_MISSES = {
    "cumulative": lambda z, i: of_optax(jnp.cumsum(z, 0), i),
    "associative scan": lambda z, i: jax.lax.associative_scan(jnp.logaddexp, z)[-1].sum(),
    "groups of positions": lambda z, i: jax.nn.log_softmax(z.reshape(8, 16, -1), 1)[..., 0].mean(),
    "neighbours": lambda z, i: of_optax(z[:-1] + z[1:], i[1:]),
    "pairs": lambda z, i: jnp.sum(jax.nn.softmax(z[:-1]) * jax.nn.log_softmax(z[1:]), -1).mean(),
    "rolled": lambda z, i: of_optax(z + jnp.roll(z, 1, 0), i),
    "permuted": lambda z, i: of_optax(z[jnp.argsort(i)], i),
    "moved": lambda z, i: of_optax(z[(jnp.arange(TOKENS) + i[0]) % TOKENS], i),
    "window": lambda z, i: of_optax(jax.lax.dynamic_slice_in_dim(z, i[0], 64) + z[:64], i[:64]),
    "similarities": lambda z, i: jnp.sum(jax.nn.softmax(z) @ jax.nn.softmax(z).T),
}
SOFT = np.sin(np.arange(TOKENS)[:, None] * np.arange(CLASSES, dtype="float32"))
# Losses with inputs or gradients that losses with a name do not have.
WITHOUT_NAME = {
    "labels of other positions": lambda z, i: 0.7 * hard(z, i) + 0.3 * hard(z, i[::-1]),
    "biases": lambda z, i: hard(z + jnp.sin(1.0 * i[:, None] * jnp.arange(CLASSES)), i),
    "array of biases": lambda z, i: hard(z + SOFT, i),
    "custom gradient": lambda z, i: hard(damped(z), i),
}


@pytest.mark.parametrize("name", [*NEAR_MISSES, *WITHOUT_NAME])
def test_near_misses(name):
    """There is no advice if logits of several positions are used together, or out of order."""
    if name in NEAR_MISSES:
        assert not names_of(NEAR_MISSES[name])
    else:
        assert names_of(lambda *given: WITHOUT_NAME[name](*given).mean()) == {"linear_loss"}


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
