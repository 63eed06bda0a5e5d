"""Training steps of models compiled for an H100: their temp memory reaches what it has to."""

import dataclasses
import functools

import jax
import pytest

from benchmarks import training
from benchmarks.bars import BARS, VARIANT
from benchmarks.models import MODELS, cell

# The version of cuDNN in h100.py: JAX queries this machine, which does not have it.
CUDNN = 90800
SCALARS = 4096  # each takes 256 bytes
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


@pytest.fixture(scope="module")
def temp_bytes(compiler):
    """Return a function that compiles a cell's step once, and returns its temp memory."""

    @functools.cache
    def of_cell(cell):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CHECK, lambda: CUDNN)
            patch.setattr(jax, "default_backend", lambda: "gpu")
            step = training.Step(cell, cell.batch, lambda state: (compiler.sharding,) * 2)
            return step.temp_bytes

    return of_cell


@pytest.mark.compiles
@pytest.mark.parametrize("bar", [b for b in BARS if b.figure == "temp_bytes"], ids=str)
def test_temp_memory(bar, temp_bytes):
    ours, plain = map(temp_bytes, bar.cells)
    assert ours <= bar.most * plain


@pytest.mark.compiles
@pytest.mark.parametrize("model", MODELS)
def test_loss_without_logits(model, temp_bytes):
    """A step takes no more memory than with whole logits, though it computes gradients earlier."""
    ours = cell(model, "none", "scan", VARIANT)
    whole = dataclasses.replace(ours, provider="jaxnorm-whole-logits")
    assert temp_bytes(ours) <= temp_bytes(whole) + SCALARS
