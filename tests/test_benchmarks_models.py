"""The models of the training benchmarks: all variants of a model compute the same function."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models, training
from benchmarks.language_models import Model
from benchmarks.models import LOSS_STEPS, MODELS, REMATS, Size, TrainingCell
from benchmarks.variants import VARIANTS

LLAMA = Size("llama", 2, 32, 4, 2, 64, 97, seq=24, batch=4)
TINY = {
    "gpt2": Size("gpt2", 2, 32, 4, 4, 64, 97, seq=24, batch=4),
    "llama": LLAMA,
    "llama-qk": dataclasses.replace(LLAMA, qk_norm=True),
}


# Each case: the kind of model, the variant, remat (a policy), the kind of layers and the dtype.
CASES = [
    ("gpt2", "jaxnorm-norms", "none", "scan", "float32"),
    ("gpt2", "jaxnorm-everything", "dots", "scan", "float32"),
    *(("llama", "jaxnorm-products", remat, "scan", "float32") for remat in REMATS),
    ("gpt2", "jaxnorm-products", "none", "unrolled", "float32"),
    ("llama", "jaxnorm-products", "dots", "unrolled", "float32"),
    ("llama-qk", "jaxnorm-products", "none", "scan", "bfloat16"),
]


@functools.cache
def loss_and_gradients(kind, variant=models.PLAIN, remat="none", layers="scan", dtype="float32"):
    """Return the loss and the gradients of a model; gradients of layers are always stacked."""
    size = TINY[kind]
    model = Model(size, VARIANTS[variant], remat, dtype, layers)
    shape = (size.batch, size.seq + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, size.vocabulary)
    params = model.init(jax.random.key(0))
    loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, tokens)
    if layers == "unrolled":
        gradients |= {"layers": jax.tree.map(lambda *each: jnp.stack(each), *gradients["layers"])}
    return loss, gradients


def bound(size, dtype):
    """Return a bound on the relative error of the loss, and on ||error|| / ||gradient||.

    In both passes together, a layer has some 20 operations. Each operation either rounds its result
    once or is a sum. The number of terms of a sum is at most the largest of three numbers: the
    hidden features, the tokens and the classes. Errors are assumed to be independent, so they add
    up as a random walk.
    """
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[dtype]
    # For bfloat16, sums are computed in float32 and rounded once.
    terms = max(size.hidden, size.batch * size.seq, size.vocabulary) if dtype == "float32" else 1
    return unit * math.sqrt(20 * 2 * (size.layers + 1) * terms)


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(("kind", "variant", "remat", "layers", "dtype"), CASES)
def test_variants_are_one_function(kind, variant, remat, layers, dtype):
    loss, gradients = loss_and_gradients(kind, variant, remat, layers, dtype)
    expected, expected_gradients = loss_and_gradients(kind)
    allowed = bound(TINY[kind], dtype)
    assert abs(loss - expected) <= allowed * expected
    assert abs(expected - math.log(TINY[kind].vocabulary)) < 0.1  # The model is untrained.
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        assert ours.dtype == theirs.dtype == "float32"
        assert np.linalg.norm(theirs) > 0
        error = np.linalg.norm(ours - theirs)
        assert error <= allowed * np.linalg.norm(theirs), jax.tree_util.keystr(path)


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", TINY["llama"])
    return TrainingCell("tiny", "dots", "scan", "float32", 4, "jaxnorm-everything")


@pytest.mark.usefixtures("quick_to_compile")
def test_a_training_step(cell):
    measure = training.prepare("training", cell)
    (small,) = measure.args
    state = jax.tree.leaves(jax.eval_shape(small.initial))
    state_bytes = sum(a.size * a.dtype.itemsize for a in state)
    assert small.peak_bytes >= state_bytes + small.temp_bytes
    figures = measure()
    assert figures["tokens_per_s"] == pytest.approx(4 * 24 / figures["ms"] * 1e3)
    assert figures["temp_bytes"] == small.temp_bytes
    losses = [figures[f"loss_{n}"] for n in LOSS_STEPS]
    assert losses[-1] < losses[0] - 0.05
    assert small.batch(0).min() == 0
    assert 60 < small.batch(0).max() < 97


def test_compile_times(cell, monkeypatch):
    """Without a GPU, a step is lowered for a GPU, and its compilation is not timed."""
    monkeypatch.setattr(training, "_warm_up", lambda variant: None)
    monkeypatch.setitem(models.COMPILED, "tiny scan", ("tiny", "scan", 2))
    named = models.CompileCell("tiny scan", "2x24", "bfloat16", "jaxnorm-norms")
    figures = training.prepare("compile", named)()
    assert figures["total_s"] >= figures["trace_s"] + figures["lower_s"] > 0
    assert figures["compile_s"] is None or jax.default_backend() == "gpu"
