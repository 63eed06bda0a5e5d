"""Softmaxes with a mask, a bias or `causal` compile for every GPU."""

import re

import pytest
from logits_cases import KINDS, of_width
from specs import BF16, F32
from test_compile import GPUS, check, compile_call

from jaxnorm_kernels.triton.support import why_unsupported

# Widths of short rows, of unaligned rows, of rows held in registers, and of rows that need a loop.
WIDTHS = [64, 1000, 4095, 4096, 16384, 32768, 50257]


def specs(kind, cols, dtype):
    """Return two specs, of the forward and of the backward.

    They belong to softmax or log_softmax, depending on the width and the kind.
    """
    op = ["softmax", "log_softmax"][(WIDTHS.index(cols) + list(KINDS).index(kind)) % 2]
    case = of_width(kind, cols, cols)
    calls = case.call(op, dtype), case.backward(op, dtype)
    found = [call.as_seen_by("triton") for call in calls]
    return [spec for spec in found if why_unsupported(spec) is None]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_compile(kind, cols, dtype):
    # The cases take the GPUs in turn. Together, they compile each width for every GPU, and each
    # kind of mask or bias for every GPU.
    gpu = [*GPUS][(WIDTHS.index(cols) + list(KINDS).index(kind)) % len(GPUS)]
    for spec in specs(kind, cols, dtype):
        check(spec, GPUS[gpu])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bias"])
def test_vectors_are_read_up_to_the_diagonal(kind, dtype):
    """Loads near a causal diagonal are 16 bytes wide, even if this loads some masked elements."""
    for spec in specs(kind, 4096, dtype):
        for kernel in compile_call(spec, GPUS["sm_80"]):
            of_rows = re.findall(r"(?:ld|st)\.global[\w.:]*|cp\.async\.\w+\.shared", kernel.ptx)
            assert of_rows
            assert all(".v4.b32" in one or "cp.async.cg" in one for one in of_rows)
