"""Kernels of a norm of residual + branch_scale x: interpreted, lowered, compiled for an H100."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import scaled_sum_cases
from backward_cases import NORM_CASES
from forward_cases import BF16, CASES, F16, F32
from h100 import Compiler
from scaled_sum_cases import make_spec, types_of
from specs import changed

from benchmarks import contract
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SPILLED = 32  # bytes of a thread: a few words
# x, residual, y
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
KINDS = ["layer_norm", "rms_norm"]


def run(spec: Spec, *operands: Any, schedule: Any) -> Any:
    with mosaic.interpreted():
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, schedule=schedule))(*operands)


def check_forward(spec: Spec, schedule: Any) -> None:
    scaled_sum_cases.check_forward(functools.partial(run, schedule=schedule), spec)


def check_backward(spec: Spec, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    scaled_sum_cases.check_backward(functools.partial(run, schedule=schedule), spec)


def in_turn(cases: Any) -> list[Any]:
    """Each schedule with two mixes, both norms and both of what is saved, in turn.

    Each mix, too, meets both of them. Schedules know no formula: both norms have each of what is
    saved, and no schedule needs all four.
    """
    return [
        pytest.param(
            case,
            MIXES[(2 * i + k) % 4],
            KINDS[(i // 2 + k) % 2],
            ["output", "input"][(i // 4 + k) % 2],
            id=f"{case.name}-{k}",
        )
        for i, case in enumerate(cases)
        for k in range(2)
    ]


@pytest.mark.parametrize(("case", "mix", "kind", "saved"), in_turn(CASES))
def test_forward(case: Any, mix: tuple[np.dtype, ...], kind: str, saved: str) -> None:
    spec = make_spec("fwd", case.rows, case.cols, mix, kind, saved=saved)
    check_forward(spec, case.schedule_for(*mix))


@pytest.mark.parametrize(("case", "mix", "kind", "saved"), in_turn(NORM_CASES))
def test_backward(
    case: Any, mix: tuple[np.dtype, ...], kind: str, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("bwd", case.rows, case.cols, mix, kind, saved=saved)
    check_backward(spec, case.schedule_for(*mix), monkeypatch)


CHANGES: list[dict[str, Any]] = [
    {"scale_dtype": None, "bias_dtype": None},
    {"scale_offset": 1.0, "branch_scale_dtype": BF16},
    {"groups": (2, 2, 2)},
    {"groups": (1, 1, 2)},
    {"groups": (2, 1, 1)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for schedule in (
        ForwardSchedule("row_tile", 4, rows=8, params_first=True),
        ForwardSchedule("row_tile", 4, rows=8),
    ):
        check_forward(make_spec("fwd", 16, 440, MIXES[1], **change), schedule)
    rings = (
        (8, 1024, PipelinedRows(4, 1, stages=2)),
        (16, 440, PipelinedNarrowRows(4, 32, rows=4, stages=2)),
    )
    for rows, cols, ring in rings:
        check_backward(make_spec("bwd", rows, cols, MIXES[1], **change), ring, monkeypatch)


def test_with_64_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        row_tile = ForwardSchedule("row_tile", 4, rows=8, params_first=True)
        check_forward(make_spec("fwd", 16, 440, MIXES[0]), row_tile)
        ring = PipelinedNarrowRows(4, 32, rows=4, stages=2)
        check_backward(make_spec("bwd", 16, 440, MIXES[0]), ring, monkeypatch)


# ------------------------------------------------------------------------------- for a GPU

# Rows, columns, groups of rows that have parameters of their own.
SHAPES = [(131072, 64, 1), (65536, 256, 1), (32768, 512, 32), (32768, 768, 1), (32768, 1024, 1)]
SHAPES += [(32768, 1152, 32), (32768, 1536, 8), (16384, 2048, 1), (8191, 4088, 1), (8192, 4096, 1)]
SHAPES += [(8192, 5120, 1), (8192, 8192, 8), (8192, 8184, 1), (4096, 16384, 1), (2048, 65536, 1)]
SHAPES += [(300, 2992, 1)]
each_shape = pytest.mark.parametrize(("rows", "cols", "groups"), SHAPES)


def of_gpu(direction: str, rows: int, cols: int, groups: int, mix: Any, **given: Any) -> Spec:
    return make_spec(direction, rows, cols, mix, groups=(groups,) * 3, **given)


@pytest.mark.oldest_jax
@pytest.mark.parametrize("mix", MIXES[:3], ids=str)
@each_shape
def test_lowers_for_a_gpu(rows: int, cols: int, groups: int, mix: tuple[np.dtype, ...]) -> None:
    """In one kernel each way."""
    for direction in ("fwd", "bwd"):
        spec = of_gpu(direction, rows, cols, groups, mix)
        assert mosaic.why_unsupported(spec) is None
        call = jax.jit(lambda *a, spec=spec: contract.call(mosaic, spec, *a))
        program = call.trace(*types_of(spec)).lower(lowering_platforms=("cuda",)).as_text()
        assert program.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": 32, "cols": 64}, "takes rows this short only by 64 and more"),
        # The norm's rows, of float32, are multiples of 16 bytes, and x's are not.
        ({"cols": 100, "saved": "input", "residual_dtype": F32}, "in multiples of 16 bytes"),
        ({"cols": 7}, "rows of 8 elements or more"),
        ({"scattered": True}, "not consecutive"),
        ({"scale_groups": 8, "branch_scale_groups": 4}, "groups of different sizes"),
        ({"stat_cotangents": True}, "plain JAX's"),
        ({"unused": "y"}, "plain JAX's"),
        ({"branch_scale_dtype": np.dtype("float64")}, "float64"),
        ({"cols": 2**19}, "hold no rows of this length"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    spec = changed(make_spec("bwd", 8192, 1024, MIXES[0]), **change)
    assert sentence in (mosaic.why_unsupported(spec) or "")


@pytest.mark.parametrize("saved", ["output", "input"])
@pytest.mark.parametrize("mix", MIXES[:3], ids=str)
@each_shape
def test_registers(
    rows: int, cols: int, groups: int, mix: tuple[np.dtype, ...], saved: str, compiler: Compiler
) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    for direction in ("fwd", "bwd"):
        spec = of_gpu(direction, rows, cols, groups, mix, saved=saved)
        (kernel,) = compiler.compile(
            lambda *a, spec=spec: contract.call(mosaic, spec, *a), types_of(spec)
        )
        assert kernel.spilled <= SPILLED
        schedule = schedules.norm_schedule(spec) if direction == "bwd" else None
        if isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
            threads = 128 * getattr(schedule, "warpgroups", 1)
            registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
            assert registers * threads * schedule.blocks_per_sm <= schedules.REGISTERS
