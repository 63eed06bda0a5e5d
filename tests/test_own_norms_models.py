"""Norm classes of other libraries with ``calls=``: Tunix's Qwen 3 and Gemma, Hugging Face's Llama.

These tests do not run by default: ``pip install --group models``, then ``pytest -m models``. Tunix
has many dependencies, and only its model files are imported here: ``pip install --no-deps
google-tunix``.
"""

import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from advice_cases import functions_of
from test_models import hugging_face, jittered, transformers

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm import memory_report

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # Old packages cause warnings.
]
__all__ = ["transformers"]  # a fixture

BATCH, LENGTH, VOCABULARY, LAYERS = 8, 32, 64, 2
SIZES = {
    "num_layers": LAYERS,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
}


def tunix(name):
    """Import Tunix's models.<name>.model without the training packages that Tunix imports."""
    spec = importlib.util.find_spec("tunix")
    if spec is None:
        pytest.skip("needs google-tunix")
    if "tunix" not in sys.modules:
        package = types.ModuleType("tunix")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["tunix"] = package
    return importlib.import_module(f"tunix.models.{name}.model")


# The functions that docs/adopt.md shows.


def qwen_norm(norm, x):
    return jaxnorm.rms_norm(x, norm.w[...], epsilon=norm.norm_eps, dtype=norm.dtype)


def gemma_norm(norm, x):
    dtype = jnp.promote_types(x.dtype, norm.scale.dtype)
    return jaxnorm.rms_norm(x, norm.scale[...], scale_offset=1.0, dtype=dtype)


def llama_norm(norm, x):
    return jaxnorm.rms_norm(x, norm.weight, epsilon=norm.epsilon, dtype=norm.dtype)


def qwen(dtype):
    from flax import nnx

    model = tunix("qwen3")
    config = model.ModelConfig(
        **SIZES, vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-6, dtype=jnp.dtype(dtype)
    )
    return model.Qwen3(config, rngs=nnx.Rngs(0)), {model.RMSNorm: qwen_norm}, 4 * LAYERS + 1


def gemma(dtype):
    """Return Gemma 2, which has softcaps, and norms after each branch."""
    from flax import nnx

    model = tunix("gemma")
    config = model.ModelConfig(
        **SIZES,
        num_embed=VOCABULARY,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(model.AttentionType.GLOBAL,) * LAYERS,
    )
    return model.Gemma(config, rngs=nnx.Rngs(0)), {model.RMSNorm: gemma_norm}, 4 * LAYERS + 1


TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))
POSITIONS = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
MASK = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))


def loss_of(model):
    from flax import nnx

    graph, state = nnx.split(model)
    state = jax.tree.map(lambda a: jnp.asarray(jittered(a)), state)

    def loss(state):
        logits, _ = nnx.merge(graph, state)(TOKENS, POSITIONS, None, MASK)
        logits = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    return loss, state


@pytest.mark.parametrize("make", [qwen, gemma])
def test_tunix(make, caplog):
    """Converted models of Tunix compute the same values.

    They save fewer bytes for the backward pass.
    """
    model, calls, count = make("float32")
    before, state = loss_of(model)
    model, calls, _ = make("float32")
    jaxnorm.nnx.convert(model, calls=calls)
    (record,) = caplog.records
    assert f"{count} modules call functions of calls: " in record.getMessage()
    after, _ = loss_of(model)
    assert str(jax.make_jaxpr(after)(state)).count("jaxnorm.rms_norm[") == count
    (y, gradient), (expected, theirs) = (
        jax.jit(jax.value_and_grad(loss))(state) for loss in (after, before)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    for ours, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(ours, other, rtol=1e-3, atol=1e-3 * scale)
    reports = memory_report(before, state), memory_report(after, state)
    assert reports[0].total > reports[1].total
    # The loss saves no logits if it is replaced, and auto_remat saves at most as much as the norms.
    assert functions_of(reports[0]) == {"linear_softmax_cross_entropy"}
    assert reports[0].total - reports[0].saves <= reports[1].total
    # check_params finds the parameters of Tunix's norms by their names.
    paths = {norm.path for norm in jaxnorm.check_params(state, "float32")}
    assert len(paths) == count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hugging_face_s_llama(transformers, dtype, caplog):
    model = hugging_face(transformers, "Llama", dtype)
    kind = sys.modules[type(model).__module__].FlaxLlamaRMSNorm
    calls = {kind: llama_norm}

    def result(params):
        return model(TOKENS, params=params).last_hidden_state

    params = jittered(model.params)
    expected = result(params)
    with jaxnorm.linen.converted(calls=calls):
        y = result(params)
        assert str(jax.make_jaxpr(result)(params)).count("jaxnorm.rms_norm[") == 5
    assert y.dtype == dtype
    tolerance = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(
        y.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=tolerance
    )
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jaxnorm"]
    assert "5 modules call functions of calls: " in line
    assert len(jaxnorm.check_params(params, dtype)) == 5
