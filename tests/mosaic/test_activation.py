"""The kernels of a norm and an activation after it: interpreted, lowered, compiled for an H100."""

from collections.abc import Sequence
from typing import Any

import backward_cases
import forward_cases
import jax
import numpy as np
import pytest
import test_group_norm
from backward_cases import NORM_CASES
from forward_cases import BF16, CASES, F16, F32
from h100 import Compiler
from pairs import pairwise
from specs import changed
from test_group_norm import STRIPS

from benchmarks import contract
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ACTIVATIONS = ("silu", "gelu", "relu")
NORMS = ("layer_norm", "rms_norm")
# x, y
MIXES = [(BF16, BF16), (F32, F32), (BF16, F32), (F32, F16)]
COMBINATIONS = pairwise(NORMS, MIXES, ACTIVATIONS)


def make_spec(direction: str, norm: str, rows: int, cols: int, mix: Any, **given: Any) -> Spec:
    cases = forward_cases if direction == "fwd" else backward_cases
    given = {"activation": "silu", "saved": "input", **given}
    return cases.make_spec(norm, rows, cols, *mix, **given)


def check_forward(spec: Spec, schedule: Any) -> None:
    operands = forward_cases.make_operands(spec)
    outputs = forward_cases.interpret(spec, *operands, schedule=schedule)
    held(outputs, *forward_cases.norm_reference(spec, *operands))


def check_backward(spec: Spec, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    operands = backward_cases.make_operands(spec)
    outputs = backward_cases.interpret(spec, *operands, schedule=schedule)
    held(outputs, *backward_cases.reference(spec, *operands))


def held(outputs: Sequence[Any], values: Sequence[Any], errors: Sequence[Any]) -> None:
    for output, value, error in zip(outputs, values, errors, strict=True):
        assert (output is None) == (value is None)
        if value is not None:
            test_group_norm.within(output, value, error)


def in_turn(cases: Sequence[Any], all_of: str) -> list[Any]:
    """Each schedule with one norm, mix and activation after the other; one of them with all."""
    each = [(case, COMBINATIONS[i % len(COMBINATIONS)]) for i, case in enumerate(cases)]
    (quick,) = (case for case in cases if case.name == all_of)
    return [
        pytest.param(case, *combination, id="-".join([case.name, *map(str, combination)]))
        for case, combination in dict.fromkeys([*each, *((quick, c) for c in COMBINATIONS)])
    ]


@pytest.mark.parametrize(
    ("case", "norm", "mix", "activation"), in_turn(CASES, "rows_in_warps_tail")
)
def test_forward(case: Any, norm: str, mix: Any, activation: str) -> None:
    spec = make_spec("fwd", norm, case.rows, case.cols, mix, activation=activation)
    check_forward(spec, case.schedule_for(*mix))


@pytest.mark.parametrize(
    ("case", "norm", "mix", "activation"), in_turn(NORM_CASES, "rows_ring_tail")
)
def test_backward(
    case: Any, norm: str, mix: Any, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("bwd", norm, case.rows, case.cols, mix, activation=activation)
    check_backward(spec, case.schedule_for(*mix), monkeypatch)


CHANGES: list[dict[str, Any]] = [
    {"scale_dtype": None},
    {"bias_dtype": None},
    {"scale_dtype": None, "bias_dtype": None},
    {"scale_offset": 1.0, "bias_dtype": BF16},
    {"scale_groups": 2, "bias_groups": 2},
    {"adds_dh": True},
]
ROW_TILE = ForwardSchedule("row_tile", 4, rows=8, params_first=True)
RINGS = (
    (8, 1024, PipelinedRows(4, 1, stages=2)),
    (16, 440, PipelinedNarrowRows(4, 32, rows=4, stages=2)),
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "adds_dh" not in change:
        check_forward(make_spec("fwd", "layer_norm", 16, 440, MIXES[1], **change), ROW_TILE)
    for rows, cols, ring in RINGS:
        spec = make_spec("bwd", "layer_norm", rows, cols, MIXES[1], **change)
        check_backward(spec, ring, monkeypatch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_64_bit_types(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas stay in float32, whatever `1.0` is."""
    given = {"activation": activation}
    with jax.enable_x64(True):
        check_forward(make_spec("fwd", "layer_norm", 16, 440, MIXES[0], **given), ROW_TILE)
        for rows, cols, ring in RINGS:
            spec = make_spec("bwd", "layer_norm", rows, cols, MIXES[0], **given)
            check_backward(spec, ring, monkeypatch)


@pytest.mark.parametrize(
    ("strips", "dtype", "activation", "changes"),
    [
        ("a_vector", F32, "silu", {}),
        ("part_of_a_vector", BF16, "gelu", {}),
        ("several_threads", F32, "relu", {"param_groups": 2, "subtract_mean": False}),
        ("several_threads", F32, "silu", {"params": (), "adds_dh": True}),
        ("ten", BF16, "silu", {}),
        ("no_group", F32, "silu", {"params": ("bias",)}),
        ("no_group", F32, "gelu", {"params": ("scale",), "scale_offset": 1.0}),
    ],
)
def test_groups_of_channels(
    strips: str,
    dtype: Any,
    activation: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = STRIPS[strips]
    monkeypatch.setattr(strip_schedule, "strips_of", lambda spec: chosen)
    shape = (chosen.outer, chosen.cols, chosen.inner)
    given = {"saved": "input", "activation": activation, **changes}
    spec = test_group_norm.make_spec("fwd", shape, chosen.group, dtype, **given)
    test_group_norm.check(spec, adds_dh="adds_dh" in changes)


# ------------------------------------------------------------------------------- for a GPU

SHAPES = [(131072, 64), (65536, 256), (32768, 1000), (32768, 1024), (16384, 2048), (8191, 4088)]
SHAPES += [(8192, 4096), (8192, 5120), (8192, 8192), (4096, 16384), (2048, 65536), (300, 2992)]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("shape", "norm", "mix", "activation"),
    [(s, *COMBINATIONS[i % len(COMBINATIONS)]) for i, s in enumerate(SHAPES)],
    ids=str,
)
def test_lowers_for_a_gpu(shape: tuple[int, int], norm: str, mix: Any, activation: str) -> None:
    """In one kernel each way."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(direction, norm, *shape, mix, activation=activation)
        assert mosaic.why_unsupported(spec) is None
        call = jax.jit(lambda *a, spec=spec: contract.call(mosaic, spec, *a))
        program = call.trace(*types_of(spec)).lower(lowering_platforms=("cuda",)).as_text()
        assert program.count("mosaic_gpu_v2") == 1


def types_of(spec: Spec) -> tuple[Any, ...]:
    """Of the operands of a pass."""
    if spec.direction == "bwd":
        return backward_cases.abstract_operands(spec)
    return tuple(forward_cases.operand_types(spec).values())


SPILLED = 32  # bytes of a thread: a few words


@pytest.mark.parametrize("mix", MIXES[:3], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_registers(shape: tuple[int, int], norm: str, mix: Any, compiler: Compiler) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(direction, norm, *shape, mix, activation="gelu")
        (kernel,) = compiler.compile(
            lambda *a, spec=spec: contract.call(mosaic, spec, *a), types_of(spec)
        )
        assert kernel.spilled <= SPILLED
        schedule = schedules.norm_schedule(spec) if direction == "bwd" else None
        if isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
            threads = 128 * getattr(schedule, "warpgroups", 1)
            registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
            assert registers * threads * schedule.blocks_per_sm <= schedules.REGISTERS


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sizes", test_group_norm.SIZES + test_group_norm.UNEVEN[:2], ids=str)
def test_registers_of_strips(
    sizes: tuple[int, ...], dtype: np.dtype, direction: str, compiler: Compiler
) -> None:
    outer, cols, inner, groups = sizes
    given = {"saved": "input", "activation": "gelu"}
    spec = test_group_norm.make_spec(
        direction, (outer, cols, inner), inner // groups, dtype, **given
    )
    (kernel,) = compiler.compile(test_group_norm.call_of(spec), test_group_norm.types(spec))
    assert kernel.spilled == 0
    # Two blocks at a time.
    threads = 128 * strip_schedule.strips_of(spec).warpgroups
    assert -(-kernel.registers // 8) * 8 * threads * 2 <= schedules.REGISTERS


def test_refusals() -> None:
    spec = make_spec("bwd", "layer_norm", 8192, 1024, MIXES[0])
    for change, sentence in (
        ({"rows": 32, "cols": 64}, "takes rows this short only by 64 and more"),
        ({"stat_cotangents": True}, "plain JAX's"),
    ):
        assert sentence in (mosaic.why_unsupported(changed(spec, **change)) or "")
