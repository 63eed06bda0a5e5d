"""The backward kernels with dh or groups of rows, compiled for an H100, as in `test_registers`."""

import numpy as np
import pytest
from backward_cases import BF16, F32, abstract_operands, call, make_spec
from h100 import Compiler

from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.specs import Spec

SPILLED = 32  # bytes of a thread: a few words
WIDTHS = [768, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768]


def check(spec: Spec, compiler: Compiler) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    kernels = compiler.compile(lambda *operands: call(spec, *operands), abstract_operands(spec))
    assert kernels
    assert max(kernel.spilled for kernel in kernels) <= SPILLED
    schedule = schedules.norm_schedule(spec)
    if isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
        assert schedule.stages >= 2
        threads = 128 * getattr(schedule, "warpgroups", 1)
        registers = -(-kernels[0].registers // 8) * 8  # given to a warp by 8 for each thread
        assert registers * threads * schedule.blocks_per_sm <= schedules.REGISTERS


@pytest.mark.parametrize(("op", "saved"), [("layer_norm", "output"), ("rms_norm", "input")])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_with_dh(
    cols: int, x: np.dtype, y: np.dtype, op: str, saved: str, compiler: Compiler
) -> None:
    check(make_spec(op, 8192, cols, x, y, saved=saved, adds_dh=True), compiler)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(8192, 1000), (8192, 2992), (8191, 2992), (8191, 4088)])
def test_tails_with_dh(rows: int, cols: int, dtype: np.dtype, compiler: Compiler) -> None:
    check(make_spec("layer_norm", rows, cols, dtype, dtype, adds_dh=True), compiler)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [768, 1024, 3000, 4096, 8192, 16384])
def test_groups_of_rows(cols: int, dtype: np.dtype, compiler: Compiler) -> None:
    change = {"scale_groups": 16, "bias_groups": 16}
    check(make_spec("layer_norm", 8192, cols, dtype, dtype, **change), compiler)
