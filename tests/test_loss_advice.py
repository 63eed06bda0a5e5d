"""memory_report's advice on cross-entropies is true, and other losses do not get it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from advice_cases import assert_all_true, functions_of, told
from pairs import each_pair

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

TOKENS, WIDTH, CLASSES = 128, 16, 512
FIRST = np.zeros(TOKENS, "int32")
LABELS = jax.ShapeDtypeStruct((TOKENS,), "int32")
OURS = jaxnorm.softmax_cross_entropy_with_integer_labels
LINEAR = jaxnorm.linear_softmax_cross_entropy


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_log_softmax(logits, labels):
    """Compute the loss from log_softmax: select each label's log-probability by indexing."""
    return -jax.nn.log_softmax(logits)[jnp.arange(TOKENS), labels].mean()


def of_one_hot(logits, labels):
    one_hot = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits), -1).mean()


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
    of_all_logarithms,
)  # fmt: skip


def operands(*dtypes):
    shapes = (TOKENS, WIDTH), (WIDTH, CLASSES)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]


def reports(before, after, x, weight):
    """Return the memory reports of two functions that compute a loss from x, a weight and labels.

    Both get an x that is computed inside the differentiated function, because arguments are not
    counted as saved.
    """

    def report(loss):
        def whole(x, weight, labels):
            return loss(jnp.sin(x), weight, labels)

        return memory_report(whole, x, weight, LABELS, argnums=(0, 1))

    return report(before), report(after)


def check(before, after, function, *dtypes):
    """Assert that a report advises only to use `function`, and that the advice is true.

    `dtypes` are the dtypes of x and of the weight. Return the rows of the report with this advice.
    """
    both = reports(before, after, *operands(*dtypes))
    assert_all_true(*both, function)
    return told(both[0])


@each_pair("loss is_wide dtype", [*LOSSES, ours], [True, False], ["float32", "bfloat16"])
def test_a_linear_layer_and_its_loss(loss, is_wide, dtype):
    """A matmul followed by a loss gets the advice.

    The logits between them may be cast to float32.
    """

    def before(x, weight, labels):
        logits = x @ weight
        return loss(logits.astype(jnp.float32) if is_wide else logits, labels)

    check(before, LINEAR, LINEAR.__name__, dtype, dtype)


@each_pair("is_product is_wide dtype", [True, False], [True, False], ["float32", "bfloat16"])
def test_log_probabilities(is_product, is_wide, dtype):
    """With `log_prob_and_entropy`, the logits of a matmul are not saved.

    Logits that no matmul computed are saved, but their cast to float32 is not.
    """

    def logits_of(x, weight):
        return x @ weight if is_product else waves(x @ weight)

    def before(x, weight, labels):
        logits = logits_of(x, weight)
        logits = logits.astype(jnp.float32) if is_wide else logits
        return ratios(jaxnorm.log_prob_and_entropy(logits, labels))

    def after(x, weight, labels):
        if is_product:
            return ratios(jaxnorm.linear_log_prob_and_entropy(x, weight, labels))
        return ratios(jaxnorm.log_prob_and_entropy(logits_of(x, weight), labels))

    both = reports(before, after, *operands(dtype, dtype))
    if is_product:
        assert_all_true(*both, "linear_log_prob_and_entropy")
    elif is_wide and dtype == "bfloat16":
        assert_all_true(*both, "log_prob_and_entropy")
    else:
        assert not told(both[0])


def test_a_tied_embedding_in_float32():
    """The report recommends fusing the matmul with the loss, even if the embedding is tied.

    A tied embedding table is also the weight that computes the logits. In this test, there are
    casts, a transpose and a bias between the table and the loss.
    """

    def hidden(x, embedding, labels):
        return x + embedding.astype(jnp.bfloat16)[labels]

    def before(x, weight, labels):
        logits = hidden(x, weight.T, labels) @ weight.astype(jnp.bfloat16)
        return of_optax(logits.astype(jnp.float32) + jnp.arange(1.0 * CLASSES), labels)

    def after(x, weight, labels):
        bias = jnp.arange(1.0 * CLASSES)
        weight_of_16_bits = weight.astype(jnp.bfloat16)
        return LINEAR(hidden(x, weight.T, labels), weight_of_16_bits, labels, bias=bias)

    check(before, after, LINEAR.__name__, "bfloat16", "float32")


def test_a_bias_with_an_axis_of_size_1():
    """Flax's Dense adds such a bias."""

    def before(x, weight, labels):
        return of_optax(x @ weight + jnp.reshape(weight[0], (1, -1)), labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, bias=weight[0])

    check(before, after, LINEAR.__name__, "float32", "float32")


@pytest.mark.parametrize("loss", [of_optax, of_one_hot, ours])
def test_a_temperature_before_the_loss(loss):
    def before(x, weight, labels):
        return loss(x @ weight / 0.8, labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, logits_scale=1.25)

    rows = check(before, after, LINEAR.__name__, "float32", "float32")
    assert all("logits_scale=1.25" in row.advice for row in rows)


def test_a_weight_that_is_cast():
    """The advice names the dtype of the matmul if the weight is cast to fewer bits for it."""

    def before(x, weight, labels):
        return of_optax((x @ weight.astype(x.dtype)).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, dtype=jnp.bfloat16)

    rows = check(before, after, LINEAR.__name__, "bfloat16", "float32")
    assert all("dtype=bfloat16" in row.advice for row in rows)


def waves(logits):
    """Return logits that are computed without a matmul, but with operations that save arrays."""
    return 30 * jnp.sin(logits / 30)


@pytest.mark.parametrize("loss", [*LOSSES, ours])
def test_logits_that_are_no_product(loss):
    """If no matmul computed the logits, the advice is to use a jaxnorm loss that takes logits.

    This loss accepts 16-bit logits, so no float32 copy of them is saved.
    """

    def before(x, weight, labels):
        return loss(waves(x @ weight).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return ours(waves(x @ weight), labels)

    check(before, after, OURS.__name__, "bfloat16", "bfloat16")


def capped(logits):
    return 30 * jnp.tanh(logits / 30)


def capped_in_float32(logits):
    """Cap logits as Gemma 2 does: divide, take the tanh and multiply in float32."""
    logits = logits.astype(jnp.float32) / 30
    return jnp.tanh(logits) * 30


@each_pair("loss cap dtype", [*LOSSES, ours], [capped, capped_in_float32], ["float32", "bfloat16"])
def test_a_softcap_before_the_loss(loss, cap, dtype):
    def before(x, weight, labels):
        return loss(cap(x @ weight).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return LINEAR(x, weight, labels, logit_softcap=30.0)

    rows = check(before, after, LINEAR.__name__, dtype, dtype)
    assert all("logit_softcap=30" in row.advice for row in rows)


@pytest.mark.parametrize("loss", [of_optax, of_one_hot, ours])
def test_a_softcap_of_logits_that_are_no_product(loss):
    def before(x, weight, labels):
        return loss(capped(waves(x @ weight)).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return OURS(waves(x @ weight), labels, logit_softcap=30.0).mean()

    check(before, after, OURS.__name__, "bfloat16", "bfloat16")


def test_a_softcap_of_log_probabilities():
    def before(x, weight, labels):
        return ratios(jaxnorm.log_prob_and_entropy(capped(x @ weight), labels))

    def after(x, weight, labels):
        return ratios(jaxnorm.linear_log_prob_and_entropy(x, weight, labels, logit_softcap=30.0))

    check(before, after, "linear_log_prob_and_entropy", "float32", "float32")


@pytest.mark.parametrize("is_capped", [True, False])
def test_logits_without_the_last_position(is_capped):
    """The last position may be sliced off the logits before the loss.

    The advice then is to slice it off the linear layer's input instead.
    """

    def before(x, weight, labels):
        logits = x @ weight
        logits = capped(logits) if is_capped else logits
        return of_optax(logits[:-1].astype(jnp.float32), labels[1:])

    def after(x, weight, labels):
        return LINEAR(x[:-1], weight, labels[1:], logit_softcap=30.0 if is_capped else None)

    rows = check(before, after, LINEAR.__name__, "bfloat16", "bfloat16")
    assert all("slice the matmul's input" in row.advice for row in rows)


def test_capped_logits_that_something_else_takes():
    """The report does not recommend fusing a softcap whose result is also used elsewhere."""

    def loss(x, weight, labels):
        logits = capped(x @ weight)
        return of_optax(logits, labels) + jnp.sum(jnp.sin(logits))

    x, weight = operands("float32", "float32")
    report = memory_report(loss, x, weight, LABELS, argnums=(0, 1))
    assert not any("softcap" in row.advice for row in told(report))


@pytest.mark.parametrize(
    "cap",
    [
        lambda logits, caps: caps * jnp.tanh(logits / 30),
        lambda logits, caps: 30 / jnp.tanh(logits / 30),
    ],
    ids=["several caps", "a reciprocal"],
)
def test_what_is_no_softcap(cap):
    """A softcap multiplies the tanh by one number, which is a constant.

    The advice then is to use a loss that takes the logits as they are.
    """

    def before(x, weight, labels):
        return of_optax(cap(x @ weight, weight[0]).astype(jnp.float32), labels)

    def after(x, weight, labels):
        return ours(cap(x @ weight, weight[0]), labels)

    rows = check(before, after, OURS.__name__, "bfloat16", "bfloat16")
    assert not any("softcap" in row.advice for row in rows)


@pytest.mark.parametrize("experts", [1, 2])
def test_a_weight_per_group_of_tokens(experts):
    """A linear loss has one weight for all tokens.

    The report does not recommend it if groups of tokens have different weights.
    """

    def loss(cross_entropy):
        def of_groups(x, weight, labels):
            weights = jnp.stack([weight] * experts) if experts > 1 else weight
            groups = x.reshape(experts, -1, WIDTH) if experts > 1 else x
            return cross_entropy((groups @ weights).reshape(TOKENS, CLASSES), labels)

        return of_groups

    before = loss(lambda logits, labels: of_optax(logits.astype(jnp.float32), labels))
    after, function = (LINEAR, LINEAR) if experts == 1 else (loss(ours), OURS)
    check(before, after, function.__name__, "bfloat16", "bfloat16")


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
    assert_all_true(before, after, "linear_softmax_cross_entropy")


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

    rows = told(memory_report(loss, x, weight, LABELS, argnums=1), LINEAR.__name__)
    assert {row.made_by for row in rows} == ({"exp"} if is_used_twice else {"exp", "sin"})


def test_logits_that_something_else_takes():
    """If an argmax uses the logits, too, softmax_cross_entropy_with_integer_labels is advised.

    A linear loss is not advised, because the logits must be computed for the argmax. The advised
    function avoids saving the exponentials.
    """

    def loss_with(cross_entropy):
        def loss(x, weight, labels):
            logits = x @ weight
            is_right = jnp.argmax(logits, -1) == labels
            return cross_entropy(logits.astype(jnp.float32), labels) * is_right.mean()

        return loss

    def after(x, weight, labels):
        logits = x @ weight
        return ours(logits, labels) * (jnp.argmax(logits, -1) == labels).mean()

    check(loss_with(of_optax), after, OURS.__name__, "bfloat16", "bfloat16")


def test_logits_that_are_returned():
    """There is no advice if the logits are returned, because they must exist."""
    x, weight = operands("bfloat16", "bfloat16")

    def loss(x, weight, labels):
        logits = x @ weight
        return of_optax(logits.astype(jnp.float32), labels), logits

    report = memory_report(loss, x, weight, LABELS, argnums=(0, 1), has_aux=True)
    assert functions_of(report) == {"softmax_cross_entropy_with_integer_labels"}


def test_a_small_vocabulary():
    """The report does not recommend a linear loss if the weight is larger than the logits.

    A linear loss saves the gradient of the weight instead of the logits. This gradient is as large
    as the weight, so a linear loss would need more memory.
    """
    x = jax.ShapeDtypeStruct((4, 256), "float32")
    weight = jax.ShapeDtypeStruct((256, 64), "float32")

    def loss(x, weight, labels):
        return of_optax(x @ weight, labels)

    report = memory_report(loss, x, weight, jax.ShapeDtypeStruct((4,), "int32"), argnums=1)
    assert not told(report)


def with_soft_labels(logits):
    return -jnp.sum(jax.nn.softmax(jnp.cos(logits)) * jax.nn.log_softmax(logits), -1).mean()


def with_its_entropy(logits):
    logp = jax.nn.log_softmax(logits)
    return (jnp.sum(jnp.exp(logp) * logp, -1) - logp[jnp.arange(TOKENS), FIRST]).mean()


def without_a_label(logits):
    return jax.nn.logsumexp(logits, -1).mean()


def with_weights(logits):
    """Return a focal loss: each row's cross-entropy is multiplied by a weight, (1 - p)^2."""
    p = jax.nn.softmax(logits)[jnp.arange(TOKENS), FIRST]
    return -jnp.mean((1 - p) ** 2 * jnp.log(p))


@pytest.mark.parametrize(
    "loss", [with_soft_labels, with_its_entropy, without_a_label, with_weights]
)
def test_other_losses(loss):
    x, weight = operands("float32", "float32")
    report = memory_report(lambda x, w: loss(x @ w), x, weight, argnums=(0, 1))
    assert not any("cross_entropy" in row.advice for row in told(report))


def test_the_line_is_the_user_s():
    x, weight = operands("bfloat16", "bfloat16")

    def loss(x, weight, labels):
        return of_optax((x @ weight).astype(jnp.float32), labels)

    (row,) = told(memory_report(loss, x, weight, LABELS))
    assert row.source.startswith("test_loss_advice.py:")
    assert row.source.endswith("(of_optax)")
