"""Training steps of models, compiled for an H100: limits of their memory and their launches."""

import dataclasses
import functools
import re

import hlo
import jax
import pytest

from benchmarks import training
from benchmarks.models import MODELS, PLAIN, Size, cell

VARIANT = "jaxnorm-products"
# The version of cuDNN that h100.py describes. By default, JAX would look for cuDNN on this machine,
# which has none.
CUDNN = 90800
# The memory of 16 scalars in bytes. Each scalar occupies 256 bytes, the smallest allocation.
SCALARS = 4096
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


@pytest.fixture(scope="module")
def compiled(compiler):
    """Return a function that compiles the training step of a benchmark's case (a cell)."""

    @functools.cache
    def of_cell(cell):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CHECK, lambda: CUDNN)
            patch.setattr(jax, "default_backend", lambda: "gpu")
            step = training.Step(cell, cell.batch, lambda state: (compiler.sharding,) * 2)
            _ = step.run
            return step

    return of_cell


@pytest.fixture
def temp_bytes(compiled):
    """Return a function of a cell: the number of bytes of temporary memory that its step needs."""
    return lambda cell: compiled(cell).temp_bytes


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("model", "plain_remat", "most"),
    [
        *(("llama-1b", "none", 0.45), ("llama-1b", "dots", 1.05)),
        *(("gpt2-small", "none", 0.25), ("gpt2-small", "dots", 0.54)),
    ],
)
def test_temp_memory(model, plain_remat, most, temp_bytes):
    """A step with jaxnorm needs at most this share of the temporary memory of plain JAX's step."""
    ours, plain = cell(model, "none", "scan", VARIANT), cell(model, plain_remat, "scan", PLAIN)
    assert temp_bytes(ours) <= most * temp_bytes(plain)


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


@pytest.mark.compiles
@pytest.mark.parametrize("variant", ["jaxnorm-norms", "jaxnorm-everything"])
def test_small_models_launch_no_more_than_plain_jax(variant, compiled, monkeypatch):
    """A step of a small model takes as long as the host needs to launch its kernels.

    The layers are scanned. If a matmul or a kernel reads a layer's slice of a stacked array in
    place, XLA makes it a `dynamic-slice-fusion`: the host waits for the loop's index, from which it
    computes the slice's address. Kernels of norms would add such waits to those of plain JAX.
    """
    tiny = Size("llama", 4, 256, 4, 4, 1024, 512, seq=128, batch=4)
    monkeypatch.setitem(MODELS, "tiny", tiny)
    steps = {name: compiled(cell("tiny", "none", "scan", name)) for name in ("jnp", variant)}
    texts = {name: step.run.as_text() for name, step in steps.items()}
    launched = {
        name: sum(
            op in ("fusion", "fusion-start", "custom-call", "copy") for op in hlo.made(text, 1)
        )
        for name, text in texts.items()
    }
    assert launched[variant] < launched["jnp"]
    waits = {
        name: len(re.findall(r"^%dynamic-slice-fusion", text, re.MULTILINE))
        for name, text in texts.items()
    }
    assert 0 < waits[variant] <= waits["jnp"]
