"""memory_report's advice on Hugging Face's models reduces the saved bytes as it states.

The tests follow the advice without changing the model's code. While the model is traced, the tests
replace some of the functions that it calls, and the results of some of its modules.
"""

import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from advice_cases import assert_true, functions_of, told
from test_models import CONFIGURATIONS, hugging_face, transformers

import jaxnorm
from jaxnorm import memory_report

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # Old packages cause warnings.
]
__all__ = ["transformers"]  # a fixture

# There are so many tokens that an activation is larger than a parameter. Saved casts of parameters
# are then small compared with saved activations.
BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN = 16, 64, 256, 64, 256
OF_GPT2 = {"n_embd": WIDTH, "n_positions": LENGTH, "n_inner": HIDDEN}
OF_OTHERS = {"hidden_size": WIDTH, "intermediate_size": HIDDEN}
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")


def of_optax(hidden, weight, labels):
    logits = (hidden @ weight).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def report_of(model, loss=of_optax):
    """Return the report of a model with a head and a next-token loss. No computation runs."""

    def whole(params, head, tokens):
        hidden = model(tokens, params=params).last_hidden_state
        return loss(hidden[:, :-1], head.astype(hidden.dtype), tokens[:, 1:])

    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model.params)
    head = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), "float32")
    return memory_report(whole, params, head, TOKENS, argnums=(0, 1))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[*CONFIGURATIONS])
def model(request, transformers, dtype):
    sizes = OF_GPT2 if request.param == "GPT2" else OF_OTHERS
    return hugging_face(transformers, request.param, dtype, **sizes)


@pytest.fixture(scope="module")
def before(model):
    return report_of(model)


def check(before, after, function):
    assert_true(before, after, function)
    assert sum(row.saves for row in told(before, function)) > 0.01 * before.total


def test_all_advice_is_of_these_functions(before):
    """The report recommends only functions that are tested in this file.

    Other tests of this file replace parts of the models by these functions, and check the advice.
    Each recommendation refers to a source line of the model or of the loss.
    """
    linear = {"gated_linear", "activation_linear", "linear_softmax_cross_entropy"}
    assert functions_of(before) <= {*linear, "rms_norm", "layer_norm", "softmax"}
    lines = [row.source for row in told(before)]
    assert all(re.match(r"modeling_flax_\w+\.py:|test_memory", line) for line in lines)


def test_what_is_printed(before):
    lines = str(before).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100


@contextlib.contextmanager
def intercepted(take):
    """Replace calls of flax.linen's modules by ``take(module, *arguments)``.

    A call is unchanged if `take` returns None.
    """
    from flax import linen as nn

    def call(call, arguments, keywords, context):
        result = None
        if context.method_name == "__call__":
            result = take(context.module, *arguments)
        return call(*arguments, **keywords) if result is None else result

    with nn.intercept_methods(call):
        yield


def parameter(module, name):
    return module.get_variable("params", name)


def by_activation_linear(module, x, *_):
    """Return the result of `module`, computed with activation_linear, or None.

    `activation_linear` replaces the activation and the second linear layer in the MLPs of GPT-2 and
    BERT. Return None if the module is not a part of such an MLP.
    """
    name = type(module).__name__
    if name == "FlaxGPT2MLP":
        weight, bias = (parameter(module.c_proj, n) for n in ("kernel", "bias"))
        h, act = module.c_fc(x), module.act
        return jaxnorm.activation_linear(h, weight.T, bias=bias, activation=act, dtype=h.dtype)
    if name == "FlaxBertIntermediate":  # The next layer applies the activation.
        return module.dense(x)
    if module.path[-2:] == ("output", "dense") and x.shape[-1] == HIDDEN:
        weight, bias = parameter(module, "kernel"), parameter(module, "bias")
        gelu = functools.partial(jax.nn.gelu, approximate=False)
        return jaxnorm.activation_linear(x, weight, bias=bias, activation=gelu, dtype=x.dtype)
    return None


def by_gated_linear(module, x, *_):
    if type(module).__name__ not in ("FlaxLlamaMLP", "FlaxGemmaMLP"):
        return None
    weight = parameter(module.down_proj, "kernel")
    gate, up = module.gate_proj(x), module.up_proj(x)
    return jaxnorm.gated_linear(gate, up, weight, activation=module.act, dtype=module.dtype)


def by_rms_norm(module, x, *_):
    name = type(module).__name__
    if name not in ("FlaxLlamaRMSNorm", "FlaxGemmaRMSNorm"):
        return None
    offset = float(name == "FlaxGemmaRMSNorm")
    return jaxnorm.rms_norm(x, module.weight, epsilon=module.epsilon, scale_offset=offset)


def is_gated(model):
    return "Llama" in type(model).__name__ or "Gemma" in type(model).__name__


def test_mlps(model, before):
    follow = by_gated_linear if is_gated(model) else by_activation_linear
    with intercepted(follow):
        after = report_of(model)
    check(before, after, follow.__name__.removeprefix("by_"))


def test_norms(model, before):
    from jaxnorm.linen import converted

    with intercepted(by_rms_norm) if is_gated(model) else converted():
        after = report_of(model)
    check(before, after, "rms_norm" if is_gated(model) else "layer_norm")


def test_softmax(model, before, monkeypatch):
    rows = told(before, "softmax")
    if "Bert" in type(model).__name__:
        # The matmul after the softmax saves a transposed copy of the attention weights. With
        # jaxnorm's softmax, this copy would still be saved, and the softmax would save its result,
        # too. So there is no gain and no advice.
        assert not rows
        return
    (result,) = {(re.findall(r"with dtype=(\w+)", row.advice) or [None])[0] for row in rows}

    def weights(query, key, bias=None, *, dtype, **_):
        """Compute attention weights with jaxnorm's softmax, otherwise as Flax does."""
        query, key, bias = (None if a is None else a.astype(dtype) for a in (query, key, bias))
        logits = jnp.einsum("...qhd,...khd->...hqk", query / query.shape[-1] ** 0.5, key)
        return jaxnorm.softmax(logits, bias=bias, dtype=result)

    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "dot_product_attention_weights", weights)
    check(before, report_of(model), "softmax")


def test_losses(model, before):
    after = report_of(model, jaxnorm.linear_softmax_cross_entropy)
    check(before, after, "linear_softmax_cross_entropy")
