"""Training steps of models compiled for an H100: their temp memory reaches what it has to."""

import functools

import jax
import pytest

from benchmarks import training
from benchmarks.bars import BARS

# cuDNN's version in h100.py: JAX asks this machine, which has none.
CUDNN = 90800
CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


@pytest.fixture(scope="module")
def temp_bytes(compiler):
    """Of a cell's step, compiled once."""

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
