"""A norm of residual + branch_scale x against float64 numpy: Triton's interpreter, or a GPU."""

import functools

import ml_dtypes
import numpy as np
import pytest
import scaled_sum_cases
from needs import INTERPRETED
from pairs import pairwise
from scaled_sum_cases import make_spec
from test_schedules import SCHEDULES, make_schedule

from benchmarks import contract

pytestmark = pytest.mark.triton

BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))
SHAPE = (9, 100)
# x, residual, y
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
CHANGES = [
    {"scale_dtype": None, "bias_dtype": None},
    {"scale_offset": 1.0, "branch_scale_dtype": BF16},
    {"groups": (1, 1, 3)},
    {"groups": (3, 1, 1)},
    {"groups": (9, 9, 1)},
]


@pytest.fixture
def call(monkeypatch):
    """``call(spec, *operands)`` runs that pass, by the schedule of a name or of the tables."""
    from jaxnorm_kernels import triton

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)

    def run(spec, *operands, schedule=None):
        assert triton.why_unsupported(spec) is None
        options = {} if schedule is None else {"schedule": make_schedule(schedule)}
        return contract.call(triton, spec, *operands, **options)

    return run


def check(call, mix, schedule=None, saved="output", **given):
    """Both passes."""
    call = functools.partial(call, schedule=schedule)
    scaled_sum_cases.check_forward(call, make_spec("fwd", *SHAPE, mix, saved=saved, **given))
    scaled_sum_cases.check_backward(call, make_spec("bwd", *SHAPE, mix, saved=saved, **given))


@pytest.mark.parametrize(
    ("schedule", "mix", "kind", "saved", "groups"),
    pairwise(
        [None, *SCHEDULES],
        MIXES,
        ["layer_norm", "rms_norm"],
        ["output", "input"],
        [(1, 1, 1), (3, 3, 3)],
    ),
    ids=str,
)
def test_values_and_gradients(schedule, mix, kind, saved, groups, call):
    groups = groups if kind == "layer_norm" else (groups[0], 1, groups[2])
    check(call, mix, schedule, saved, kind=kind, groups=groups)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change, call):
    check(call, MIXES[1], **change)
