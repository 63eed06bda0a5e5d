"""The backward kernels lower for an NVIDIA GPU without one at hand: every schedule and dtype.

As `test_lowering` for the forward: this goes through Mosaic's layout inference and its lowering to
vector and LLVM operations. What comes after (LLVM, ptxas) needs a GPU.
"""

import numpy as np
import pytest
from backward_cases import (
    BF16,
    CLUSTER_CASES,
    F16,
    F32,
    NORM_CASES,
    SOFTMAX_CASES,
    Case,
    lower,
    make_spec,
)

from jaxnorm_kernels.mosaic.ring import Ring

MIXES = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, F16)]


@pytest.mark.parametrize(("x", "y"), MIXES, ids=str)
@pytest.mark.parametrize("case", [*NORM_CASES, *CLUSTER_CASES], ids=lambda case: case.name)
def test_norm_schedules_lower(case: Case, x: np.dtype, y: np.dtype) -> None:
    saved = "input" if x == F32 else "output"
    for op in ("rms_norm", "layer_norm"):
        spec = make_spec(op, case.rows, case.cols, x, y, saved=saved, scale_dtype=BF16)
        assert "mosaic_gpu" in lower(spec, case.schedule_for(x, y))


@pytest.mark.parametrize(("x", "y"), MIXES, ids=str)
@pytest.mark.parametrize("case", [*SOFTMAX_CASES, *CLUSTER_CASES], ids=lambda case: case.name)
def test_softmax_schedules_lower(case: Case, x: np.dtype, y: np.dtype) -> None:
    if isinstance(case.schedule, Ring) and case.schedule.columns != "registers":
        pytest.skip("a softmax has nothing to keep for its columns")
    for op in ("softmax", "log_softmax"):
        spec = make_spec(op, case.rows, case.cols, x, y)
        assert "mosaic_gpu" in lower(spec, case.schedule_for(x, y))
