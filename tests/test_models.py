"""Conversion of Hugging Face's Flax models and of equinox models, whose code is not changed.

These tests do not run by default: ``pip install --group models``, then ``pytest -m models``.
"""

import contextlib
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxnorm

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # Old packages cause warnings.
]

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_S = {
    **SIZES,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGURATIONS = {
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "Bert": {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64},
    "Llama": LLAMA_S,
    "Gemma": {**LLAMA_S, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
}
NORMS = 5  # Each model has five norms: two in each of its two layers, and one more.


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def hugging_face(transformers, name, dtype, **sizes):
    """Return a small model with random parameters. Nothing is downloaded."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options = dropout if name == "GPT2" else {}
    configuration = getattr(transformers, f"{name}Config")(
        **{**CONFIGURATIONS[name], **options, **sizes}
    )
    return getattr(transformers, f"Flax{name}Model")(configuration, seed=0, dtype=jnp.dtype(dtype))


def jittered(parameters):
    """Add noise to parameters, to avoid special values such as the ones and zeros of norms."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: a + 0.1 * generator.normal(size=a.shape).astype(a.dtype), parameters
    )


def gradient(model):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (8, 16)))

    def loss(parameters):
        y = model(tokens, params=parameters).last_hidden_state
        return jnp.sum(jnp.sin(y.astype("float32" if y.dtype != "float64" else y.dtype))), y

    return jax.jit(jax.grad(loss, has_aux=True))


def calls_in(function, *arguments):
    """Return the number of jaxnorm's norms in a program that computes both passes.

    A norm in the body of a scan counts once.
    """
    return len(re.findall(r"jaxnorm\.(?:layer|rms)_norm", str(function.trace(*arguments).jaxpr)))


def kernels_in(function, *arguments):
    """Return True if the function's program for CUDA has kernels."""
    text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return "@mosaic_gpu" in text


def check(transformers, name, dtype, context, of_kernels):
    """Assert that outputs and gradients are as accurate inside `context` as outside of it.

    `context` and `of_kernels` are context managers that convert modules. `of_kernels` is used for a
    second check: inside it, all norms of the model must be jaxnorm's, and the model's program for
    CUDA must contain kernels.
    """
    model = hugging_face(transformers, name, dtype)
    parameters = jittered(model.params)
    theirs = gradient(model)(parameters)
    with jax.enable_x64(True):
        exact = hugging_face(transformers, name, "float64")
        double = jax.tree.map(lambda a: np.asarray(a, "float64"), parameters)
        expected = gradient(exact)(double)
    with context:
        same = hugging_face(transformers, name, dtype).params
        ours = gradient(model)(parameters)
    jax.tree.map(np.testing.assert_array_equal, same, model.params)
    reference.assert_as_accurate(ours, theirs, expected)
    assert calls_in(gradient(model), parameters) == 0
    with of_kernels:
        assert calls_in(gradient(model), parameters) == 2 * NORMS
        assert kernels_in(gradient(model), parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_converted(transformers, name, dtype, caplog):
    from jaxnorm.linen import converted

    check(transformers, name, dtype, converted(), converted(implementation="mosaic"))
    assert not [record for record in caplog.records if record.name == "jaxnorm"]


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_norms_of_a_class_of_their_own_are_not_converted(transformers, name):
    from jaxnorm.linen import converted

    model = hugging_face(transformers, name, "float32")
    with converted():
        assert calls_in(gradient(model), model.params) == 0


@contextlib.contextmanager
def replaced(norm_class, **options):
    """Replace calls of modules of this class by jaxnorm's, as the docs of `converted` suggest."""
    from flax import linen as nn

    def call(call, arguments, keywords, context):
        norm = context.module
        if not (type(norm) is norm_class and context.method_name == "__call__"):
            return call(*arguments, **keywords)
        dtype = jnp.promote_types(norm.weight.dtype, norm.dtype)
        return jaxnorm.rms_norm(
            *arguments, norm.weight, epsilon=norm.epsilon, dtype=dtype, **options
        )

    with nn.intercept_methods(call):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "offset"), [("Llama", 0.0), ("Gemma", 1.0)])
def test_norms_of_a_class_of_their_own_can_be_replaced(transformers, name, offset, dtype):
    module = f"transformers.models.{name.lower()}.modeling_flax_{name.lower()}"
    norm_class = getattr(__import__(module, fromlist=["*"]), f"Flax{name}RMSNorm")
    contexts = (
        replaced(norm_class, scale_offset=offset, **options)
        for options in ({}, {"implementation": "mosaic"})
    )
    check(transformers, name, dtype, *contexts)


def test_the_documented_replacement(transformers):
    """The code in the docstring of `converted` replaces Hugging Face's norms."""
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaRMSNorm

    import jaxnorm.linen

    doc = inspect.getdoc(jaxnorm.linen.converted)
    code = inspect.cleandoc(doc.partition("For Hugging Face's Llama::")[2].partition("Args:")[0])
    model = hugging_face(transformers, "Llama", "float32")
    tokens = jnp.arange(8)[None]

    def applied(tokens, params):
        function = jax.jit(lambda t: model(t, params=params)[0])
        return types.SimpleNamespace(logits=calls_in(function, tokens))

    names = {
        "FlaxLlamaRMSNorm": FlaxLlamaRMSNorm,
        "model": applied,
        "params": model.params,
        "tokens": tokens,
        "jnp": jnp,
        "jaxnorm": jaxnorm,
    }
    exec(compile(code, "converted", "exec"), names)
    assert names["logits"] == NORMS


def test_a_transformer_of_equinox():
    """A transformer that consists of equinox's modules can be converted.

    Its layers are stacked and scanned.
    """
    eqx = pytest.importorskip("equinox")
    from test_memory_report import equinox_block

    import jaxnorm.equinox

    class Transformer(eqx.Module):
        embedding: eqx.nn.Embedding
        layers: eqx.Module
        last: eqx.nn.LayerNorm

        def __init__(self, width, key):
            keys = jax.random.split(key)
            self.embedding = eqx.nn.Embedding(64, width, key=keys[0])
            layers = eqx.filter_vmap(lambda key: equinox_block(key, width, width))
            self.layers = layers(jax.random.split(keys[1], 2))
            self.last = eqx.nn.LayerNorm(width)

        def __call__(self, tokens):
            arrays, static = eqx.partition(self.layers, eqx.is_array)

            def step(x, arrays):
                return eqx.combine(arrays, static)(x), None

            x, _ = jax.lax.scan(step, jax.vmap(self.embedding)(tokens), arrays)
            return jax.vmap(self.last)(x)

    def gradient(model):
        """Return two things: a function that computes gradients, and the model's arrays.

        The gradients are taken with respect to the model's arrays.
        """
        arrays, others = eqx.partition(model, lambda leaf: hasattr(leaf, "dtype"))

        def loss(arrays, tokens):
            y = jax.vmap(eqx.combine(arrays, others))(tokens)
            return jnp.sum(jnp.sin(y)), y

        def leaves(arrays, tokens):
            return jax.tree.leaves(jax.grad(loss, has_aux=True)(arrays, tokens))

        return jax.jit(leaves), arrays

    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 8)))
    model = Transformer(32, jax.random.key(0))
    arrays, others = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jittered(arrays), others)
    theirs, ours = (f(a, tokens) for f, a in map(gradient, (model, jaxnorm.equinox.convert(model))))
    with jax.enable_x64(True):
        function, arrays = gradient(model)
        expected = function(jax.tree.map(lambda a: jnp.asarray(a, "float64"), arrays), tokens)
    reference.assert_as_accurate(ours, theirs, expected)
    # At this size, kernels are the default. The program has three norms: two in the body of the
    # scan, and the last norm. Each has a forward and a backward.
    wide = eqx.filter_eval_shape(Transformer, 1024, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((8, 256), "int32")
    for model, calls in ((wide, 0), (jaxnorm.equinox.convert(wide), 6)):
        function, arrays = gradient(model)
        assert calls_in(function, arrays, tokens) == calls
        assert kernels_in(function, arrays, tokens) == bool(calls)
