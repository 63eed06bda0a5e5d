"""memory_report's advice on Hugging Face's models reduces the saved bytes as it states."""

import jax
import jax.numpy as jnp
import optax
import pytest
from advice_cases import assert_true, functions_of
from test_models import CONFIGURATIONS, hugging_face

import jaxnorm
from jaxnorm import memory_report

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # Old packages cause warnings.
]

# There are so many tokens that an activation is larger than a parameter. Saved casts of parameters
# are then small compared with saved activations.
BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN = 16, 64, 256, 64, 256
OF_GPT2 = {"n_embd": WIDTH, "n_positions": LENGTH, "n_inner": HIDDEN}
OF_OTHERS = {"hidden_size": WIDTH, "intermediate_size": HIDDEN}
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")


def of_optax(hidden, weight, labels):
    logits = (hidden @ weight).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def report_of(model, loss=of_optax, remat=lambda f: f):
    """Return the report of a model with a head and a next-token loss. No computation runs."""

    def whole(params, head, tokens):
        hidden = model(tokens, params=params).last_hidden_state
        return loss(hidden[:, :-1], head.astype(hidden.dtype), tokens[:, 1:])

    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model.params)
    head = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), "float32")
    return memory_report(remat(whole), params, head, TOKENS, argnums=(0, 1))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[*CONFIGURATIONS])
def model(request, dtype):
    sizes = OF_GPT2 if request.param == "GPT2" else OF_OTHERS
    return hugging_face(request.param, dtype, **sizes)


@pytest.fixture(scope="module")
def before(model):
    return report_of(model)


def test_the_advice_is_true(model, before):
    """The report advises a linear loss, and states what it and auto_remat save."""
    after = report_of(model, jaxnorm.linear_softmax_cross_entropy)
    assert functions_of(before) == {"linear_softmax_cross_entropy"}
    assert_true(before, after, "linear_softmax_cross_entropy")
    least = report_of(model, jaxnorm.linear_softmax_cross_entropy, jaxnorm.auto_remat)
    assert before.total - least.total == pytest.approx(before.saves, rel=0.1)


def test_what_is_printed(before):
    lines = str(before).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
