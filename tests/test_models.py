"""Models of Hugging Face and Tunix, converted without a change of their code.

These tests do not run by default: ``pip install --group models``, then ``pytest -m models``. Tunix
has many dependencies, and only its model files are imported here: ``pip install --no-deps
google-tunix``.
"""

import functools
import importlib
import importlib.util
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from advice_cases import functions_of

import jaxnorm
from jaxnorm import memory_report

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # Old packages cause warnings.
]


def jittered(parameters):
    """Add noise to parameters, to avoid special values such as the ones and zeros of norms."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jnp.asarray(a + 0.1 * generator.normal(size=a.shape).astype(a.dtype)), parameters
    )


def calls_in(function, *arguments):
    """Return the number of calls of jaxnorm's norms in a program."""
    return len(
        re.findall(r"jaxnorm\.(?:layer|rms)_norm", str(jax.make_jaxpr(function)(*arguments)))
    )


# ------------------------------------------------------------------------------------ Hugging Face

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_S = {
    **SIZES,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGURATIONS = {
    "GPT2": {
        **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "Bert": {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64},
    "Llama": LLAMA_S,
    "Gemma": {**LLAMA_S, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
}
OFFSETS = {"Llama": 0.0, "Gemma": 1.0}  # Both models define a norm class.
NORMS = 5  # Each model has five norms: two in each of its two layers, and one more.


def hugging_face(name, dtype, **sizes):
    """Return a small model with random parameters. Nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    configuration = getattr(transformers, f"{name}Config")(**CONFIGURATIONS[name] | sizes)
    return getattr(transformers, f"Flax{name}Model")(configuration, seed=0, dtype=jnp.dtype(dtype))


def gradient(model):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (8, 16)))

    def loss(parameters):
        y = model(tokens, params=parameters).last_hidden_state
        return jnp.sum(jnp.sin(y.astype("float32" if y.dtype != "float64" else y.dtype))), y

    return jax.jit(jax.grad(loss, has_aux=True))


def own_norm(norm, x, **options):
    """The function that the docs of `converted` show for Llama's norms."""
    dtype = jnp.promote_types(norm.weight.dtype, norm.dtype)
    return jaxnorm.rms_norm(x, norm.weight, epsilon=norm.epsilon, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hugging_face(name, dtype, caplog):
    """Outputs and gradients of a converted model are as accurate as before.

    All its norms are jaxnorm's, and its program for CUDA has kernels if they are requested.
    """
    from jaxnorm.linen import converted

    model = hugging_face(name, dtype)
    parameters = jittered(model.params)
    theirs = gradient(model)(parameters)
    with jax.enable_x64(True):
        exact = hugging_face(name, "float64")
        expected = gradient(exact)(jax.tree.map(lambda a: np.asarray(a, "float64"), parameters))

    def context(**options):
        if name not in OFFSETS:
            return converted(**options)
        kind = getattr(sys.modules[type(model).__module__], f"Flax{name}RMSNorm")
        function = functools.partial(own_norm, scale_offset=OFFSETS[name], **options)
        return converted(calls={kind: function})

    with context():
        same = hugging_face(name, dtype).params
        ours = gradient(model)(parameters)
    jax.tree.map(np.testing.assert_array_equal, same, model.params)
    reference.assert_as_accurate(ours, theirs, expected)
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxnorm"]
    assert len(lines) == (name in OFFSETS)
    assert all(f"{NORMS} modules call functions of calls: " in line for line in lines)
    assert calls_in(gradient(model), parameters) == 0
    with context(implementation="mosaic"):
        program = gradient(model).trace(parameters)
        assert calls_in(gradient(model), parameters) == 2 * NORMS
        assert "@mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()
    if name in OFFSETS:
        assert len(jaxnorm.check_params(parameters, dtype)) == NORMS


# ------------------------------------------------------------------------------------------- Tunix

BATCH, LENGTH, VOCABULARY, LAYERS = 8, 32, 64, 2
TUNIX_S = {
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


def qwen():
    from flax import nnx

    model = tunix("qwen3")
    config = model.ModelConfig(
        **TUNIX_S, vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-6, dtype=jnp.float32
    )

    def norm(norm, x):  # as in docs/adopt.md
        return jaxnorm.rms_norm(x, norm.w[...], epsilon=norm.norm_eps, dtype=norm.dtype)

    return model.Qwen3(config, rngs=nnx.Rngs(0)), {model.RMSNorm: norm}


def gemma():
    """Return Gemma 2, which has softcaps, and norms after each branch."""
    from flax import nnx

    model = tunix("gemma")
    config = model.ModelConfig(
        **TUNIX_S,
        num_embed=VOCABULARY,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(model.AttentionType.GLOBAL,) * LAYERS,
    )

    def norm(norm, x):
        dtype = jnp.promote_types(x.dtype, norm.scale.dtype)
        return jaxnorm.rms_norm(x, norm.scale[...], scale_offset=1.0, dtype=dtype)

    return model.Gemma(config, rngs=nnx.Rngs(0)), {model.RMSNorm: norm}


def loss_of(model):
    from flax import nnx

    graph, state = nnx.split(model)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))
    positions = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    mask = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))

    def loss(state):
        logits, _ = nnx.merge(graph, state)(tokens, positions, None, mask)
        logits = logits[:, :-1].astype(jnp.result_type(logits, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, jittered(state)


@pytest.mark.parametrize("make", [qwen, gemma])
def test_tunix(make, caplog):
    """Converted models of Tunix compute the same, and save fewer bytes for the backward pass."""
    import jaxnorm.nnx

    (plain, _), (model, calls) = make(), make()
    before, state = loss_of(plain)
    jaxnorm.nnx.convert(model, calls=calls)
    (record,) = caplog.records
    count = 4 * LAYERS + 1
    assert f"{count} modules call functions of calls: " in record.getMessage()
    after, _ = loss_of(model)
    assert calls_in(after, state) == count
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, "float64"), state)
        expected = jax.value_and_grad(before)(double)
    ours, theirs = (jax.jit(jax.value_and_grad(loss))(state) for loss in (after, before))
    reference.assert_as_accurate(ours, theirs, expected)
    reports = memory_report(before, state), memory_report(after, state)
    assert reports[0].total > reports[1].total
    # The loss saves no logits if it is replaced, and auto_remat saves at most as much as the norms.
    assert functions_of(reports[0]) == {"linear_softmax_cross_entropy"}
    assert reports[0].total - reports[0].saves <= reports[1].total
    # check_params finds the parameters of Tunix's norms by their names.
    assert len({norm.path for norm in jaxnorm.check_params(state, "float32")}) == count
