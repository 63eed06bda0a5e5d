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
    """In two cases, the report does not recommend fusing the matmul with the loss.

    In one case, teacher and student are both trained. In the other, the logits are used twice.
    """

    def both_trained(x, weight, teacher_x, teacher_weight):
        log_q, log_p = jax.nn.log_softmax(x @ weight), jax.nn.log_softmax(x @ (2 * weight))
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean()

    def used_elsewhere(x, weight, teacher_x, teacher_weight):
        logits = x @ weight
        return kl(logits, teacher_x @ teacher_weight) + jnp.sum(jnp.tanh(logits))

    for loss in (both_trained, used_elsewhere):
        assert not told(reports(loss, loss)[0], "linear_kl_divergence")
