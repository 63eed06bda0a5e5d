"""memory_report's advice to use jaxnorm's divergences.

Following the advice reduces the saved bytes by the number that it states. Functions other than
divergences do not get this advice.
"""

import jax
import jax.numpy as jnp
import pytest
from advice_cases import assert_all_true, told
from test_loss_advice import CLASSES, TOKENS, WIDTH, waves

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax


def kl(logits, teacher):
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(jax.lax.stop_gradient(teacher))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean()


def reverse_kl(logits, teacher):
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(jax.lax.stop_gradient(teacher))
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1).mean()


OPERANDS = [
    jax.ShapeDtypeStruct(shape, "float32")
    for shape in [(TOKENS, WIDTH), (WIDTH, CLASSES), (TOKENS, WIDTH), (WIDTH, CLASSES)]
]


def reports(before, after):
    def report(loss):
        return memory_report(
            lambda x, w, tx, tw: loss(jnp.sin(x), w, jnp.sin(tx), tw), *OPERANDS, argnums=(0, 1)
        )

    return report(before), report(after)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", [kl, reverse_kl])
def test_linear_layers(loss, temperature):
    options = {"reverse": loss is reverse_kl, "logits_scale": 1 / temperature}

    def before(x, weight, teacher_x, teacher_weight):
        return loss(x @ weight / temperature, teacher_x @ teacher_weight / temperature)

    def after(*operands):
        return jaxnorm.linear_kl_divergence(*operands, **options)

    both = reports(before, after)
    assert_all_true(*both, "linear_kl_divergence")
    assert ("logits_scale=0.5" in told(both[0])[0].advice) == (temperature == 2)


@pytest.mark.parametrize("loss", [kl, reverse_kl])
def test_other_logits(loss):
    """For 16-bit logits that no matmul computed, the advice is to call `kl_divergence`.

    Plain JAX casts these logits to float32 and saves two arrays: the exponentials of the student's
    and of the teacher's logits.
    """

    def logits_of(x, weight, teacher_x, teacher_weight):
        pairs = (x, weight), (teacher_x, teacher_weight)
        return [waves((x @ weight).astype("bfloat16")) for x, weight in pairs]

    def before(*operands):
        return loss(*(logits.astype("float32") for logits in logits_of(*operands)))

    def after(*operands):
        reverse = loss is reverse_kl
        return jaxnorm.kl_divergence(*logits_of(*operands), reverse=reverse).mean()

    assert_all_true(*reports(before, after), "kl_divergence")


def test_what_is_no_divergence():
    """In four cases, the report does not recommend fusing the matmul with the loss.

    In one case, teacher and student are both trained. In another, the logits are used twice. In the
    others, an array is subtracted from the logits, or they are divided by an array.
    """

    def both_trained(x, weight, teacher_x, teacher_weight):
        log_q, log_p = jax.nn.log_softmax(x @ weight), jax.nn.log_softmax(x @ (2 * weight))
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean()

    def used_elsewhere(x, weight, teacher_x, teacher_weight):
        logits = x @ weight
        return kl(logits, teacher_x @ teacher_weight) + jnp.sum(jnp.tanh(logits))

    def of_shifted_classes(x, weight, teacher_x, teacher_weight):
        return kl(x @ weight - jnp.sin(weight[0]), teacher_x @ teacher_weight)

    def of_temperatures(x, weight, teacher_x, teacher_weight):
        temperatures = 2 + jnp.sin(x[:, :1])
        return kl(x @ weight / temperatures, teacher_x @ teacher_weight / temperatures)

    for loss in (both_trained, used_elsewhere, of_shifted_classes, of_temperatures):
        assert not told(reports(loss, loss)[0], "linear_kl_divergence")


@pytest.mark.parametrize("is_given", [True, False])
def test_teacher_logits_that_are_given(is_given):
    """If the teacher's logits are an argument, `kl_divergence` saves only the student's logits.

    Plain JAX saves two arrays of exponentials. So `kl_divergence` saves one array less if the
    teacher's logits are an argument, and no array less if the program computes them.
    """
    shapes = [(TOKENS, WIDTH), (WIDTH, CLASSES), (TOKENS, CLASSES)]
    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def logits_of(x, weight, teacher):
        return jnp.sin(x) @ weight, teacher if is_given else jnp.sin(teacher)

    def report(loss):
        return memory_report(lambda *a: loss(*logits_of(*a)).mean(), *operands, argnums=(0, 1))

    rows = told(report(kl), "kl_divergence")
    assert sum(row.saves for row in rows) == is_given * TOKENS * CLASSES * 4
    of_logits = [row for row in report(jaxnorm.kl_divergence).rows if row.shape[-1:] == (CLASSES,)]
    assert sum(row.count for row in of_logits) == 2 - is_given


def trained(logits, teacher, shifts):
    """Subtract a trained number from all logits of a row. This does not change their softmax."""
    return reverse_kl(jnp.cos(logits) - shifts, teacher)


def frozen(logits, teacher, shifts):
    return reverse_kl(jnp.cos(teacher) - shifts, teacher)


def of_no_softmax(logits, teacher, shifts):
    """Compute the divergence from an array that need not be the logarithm of probabilities."""
    log_q = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_q) * (log_q - jax.lax.stop_gradient(teacher)), -1).mean()


def with_labels(logits, teacher, shifts):
    """Add a cross-entropy, which selects elements of the student's log-probabilities."""
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(jax.lax.stop_gradient(teacher))
    divergence = jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1)
    return (divergence - log_q[:, 0]).mean()


@pytest.mark.parametrize("loss", [trained, frozen, of_no_softmax, with_labels])
def test_which_losses_are_divergences(loss):
    """Only `trained` gets advice: a divergence between the softmaxes of two arrays of logits.

    In `frozen`, the student's logits need no gradient. The other losses compute something else.
    """

    def of_products(x, weight, teacher_x, teacher_weight):
        return loss(x @ weight, teacher_x @ teacher_weight, jnp.sum(x, -1, keepdims=True))

    report, _ = reports(of_products, of_products)
    assert any("kl_divergence" in row.advice for row in told(report)) == (loss is trained)
