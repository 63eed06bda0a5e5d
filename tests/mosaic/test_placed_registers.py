"""The kernels of softmaxes with a mask, a bias or `causal`, compiled for an H100.

As in `test_registers`.
"""

import re

import jax
import pytest
from forward_cases import BF16, F32
from logits_cases import KINDS, of_width, operand_types

import jaxnorm

SPILLED = 32  # bytes of a thread: a few words


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [1024, 2048, 4096, 8192, 16384])
def test_registers(cols, kind, dtype, compiler):
    case = of_width(kind, 2048, cols)
    for op in ("softmax", "log_softmax"):
        for call in (case.call(op, dtype), case.backward(op, dtype)):
            (kernel, *_) = compiler.compile(call.kernel("mosaic"), operand_types(call))
            assert kernel.spilled <= SPILLED


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["mask", "bias", "causal"])
def test_a_program_holds_two_kernels_and_nothing_else(kind, compiler):
    """With dbias, which no other array of its size leads to."""
    case = KINDS[kind]

    def typed(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=compiler.sharding)

    def run(x, mask, bias, d):
        def softmax(x, bias):
            return jaxnorm.softmax(
                x, -1, mask, bias=bias, causal=case.causal, implementation="mosaic"
            )

        y, vjp = jax.vjp(softmax, x, bias)
        return y, vjp(d)

    x = typed(case.shape, BF16)
    mask = None if case.mask is None else typed(case.mask, bool)
    bias = None if case.bias is None else typed(case.bias, BF16)
    text = jax.jit(run).lower(x, mask, bias, x).compile().as_text()
    ops = re.findall(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", text[text.index("ENTRY") :])
    free = {"parameter", "bitcast", "get-tuple-element", "tuple"}
    assert [op for op in ops if op not in free] == ["custom-call"] * 2
