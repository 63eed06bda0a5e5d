"""Training steps of models, compiled for an H100: limits of their temporary memory."""

import dataclasses
import functools

import jax
import pytest

from benchmarks import training
from benchmarks.bars import BARS, VARIANT
from benchmarks.models import MODELS, cell

# The version of cuDNN that h100.py describes. By default, JAX would look for cuDNN on this machine,
# which has none.
CUDNN = 90800
# The memory of 16 scalars in bytes. Each scalar occupies 256 bytes, the smallest allocation.
SCALARS = 4096
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


@pytest.fixture(scope="module")
def temp_bytes(compiler):
    """Return a function that compiles the training step of a benchmark's case (a cell).

    The function returns the number of bytes of temporary memory that the step needs.
    """

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
    """A loss computed in chunks needs no more memory than a loss that computes all logits at once.

    This is not obvious: the chunked loss computes its gradients already in the forward pass, which
    could raise the peak.
    """
    ours = cell(model, "none", "scan", VARIANT)
    whole = dataclasses.replace(ours, provider="jaxnorm-whole-logits")
    assert temp_bytes(ours) <= temp_bytes(whole) + SCALARS
