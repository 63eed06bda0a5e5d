"""The kernels of softmaxes with a mask, a bias or `causal`, compiled for an H100.

As in `test_registers`.
"""

import pytest
from forward_cases import BF16, F32
from h100 import Compiler
from logits_cases import KINDS, of_width, operand_types

SPILLED = 32  # bytes of a thread: a few words


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return Compiler(tmp_path_factory.mktemp("ptxas"))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [1024, 2048, 4096, 8192, 16384])
def test_registers(cols, kind, dtype, compiler):
    case = of_width(kind, 2048, cols)
    for op in ("softmax", "log_softmax"):
        for call in (case.call(op, dtype), case.backward(op, dtype)):
            (kernel, *_) = compiler.compile(call.kernel("mosaic"), operand_types(call))
            assert kernel.spilled <= SPILLED
