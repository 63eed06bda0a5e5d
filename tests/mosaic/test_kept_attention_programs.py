"""The number of cuDNN's attention kernels in programs that save attention's residuals by name."""

import re

import jax
import pytest
from h100 import Compiler
from test_kept_attention import (
    attention_operands,
    cudnn,
    flash,
    kernels_of,
    of_docs,
    with_a_name_outside,
)

pytestmark = pytest.mark.compiles
__all__ = ["cudnn", "of_docs"]  # pytest fixtures


def test_kernels(compiler: Compiler, cudnn, of_docs):
    """Programs contain as many attention kernels as docs/transformations.md says."""

    def counts(attention):
        arrays = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=compiler.sharding)
            for a in attention_operands()
        ]
        text = jax.jit(kernels_of(attention)).lower(*arrays).compile().as_text()
        kernels = re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)
        return [kernels.count(name) for name in ("fmhaSoftmax", "fmhaSoftmaxBackward")]

    assert counts(with_a_name_outside) == [2, 1]
    assert counts(of_docs["named"](flash, "attention")) == [1, 1]
