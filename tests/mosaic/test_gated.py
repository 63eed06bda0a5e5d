"""The kernels of a norm and a gate: interpreted, lowered, and compiled for an H100."""

import functools
from collections.abc import Sequence
from typing import Any

import gated_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backward_cases import NORM_CASES
from forward_cases import BF16, CASES, F16, F32
from gated_cases import ACTIVATIONS, make_operands, make_spec, references_of, types_of
from h100 import Compiler
from pairs import pairwise
from reference import assert_within
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
# x, gate, y
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
ORDERS = pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])


def run(spec: Spec, *operands: Any, schedule: Any) -> Any:
    with mosaic.interpreted():
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, schedule=schedule))(*operands)


def check_forward(spec: Spec, schedule: Any) -> None:
    gated_cases.check_forward(functools.partial(run, schedule=schedule), spec)


def check_backward(spec: Spec, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    gated_cases.check_backward(functools.partial(run, schedule=schedule), spec)


COMBINATIONS = pairwise(MIXES, [True, False], ACTIVATIONS)


def in_turn(cases: Sequence[Any], all_of: str) -> list[Any]:
    """Each schedule in both orders, with mixes and activations in turn; all of them with one."""
    orders = [[c for c in COMBINATIONS if c[1] == before] for before in (True, False)]
    each = [(case, of[i % len(of)]) for i, case in enumerate(cases) for of in orders]
    (quick,) = (case for case in cases if case.name == all_of)
    return [
        pytest.param(case, *combination, id="-".join([case.name, *map(str, combination)]))
        for case, combination in dict.fromkeys([*each, *((quick, c) for c in COMBINATIONS)])
    ]


@pytest.mark.parametrize(
    ("case", "mix", "before", "activation"), in_turn(CASES, "rows_in_warps_tail")
)
def test_forward(case: Any, mix: tuple[np.dtype, ...], before: bool, activation: str) -> None:
    given = {"norm_before_gate": before, "activation": activation}
    check_forward(make_spec("fwd", case.rows, case.cols, mix, **given), case.schedule_for(*mix))


@pytest.mark.parametrize(
    ("case", "mix", "before", "activation"), in_turn(NORM_CASES, "rows_ring_tail")
)
def test_backward(
    case: Any,
    mix: tuple[np.dtype, ...],
    before: bool,
    activation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"norm_before_gate": before, "activation": activation}
    spec = make_spec("bwd", case.rows, case.cols, mix, **given)
    check_backward(spec, case.schedule_for(*mix), monkeypatch)


CHANGES = [
    {"scale_dtype": None},
    {"scale_offset": 1.0},
    {"scale_dtype": BF16},
    {"scale_groups": 2},
]


@ORDERS
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change: dict[str, Any], before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"norm_before_gate": before, **change}
    row_tile = ForwardSchedule("row_tile", 4, rows=8, params_first=True)
    check_forward(make_spec("fwd", 16, 440, MIXES[1], **given), row_tile)
    rings = (
        (8, 1024, PipelinedRows(4, 1, stages=2)),
        (16, 440, PipelinedNarrowRows(4, 32, rows=4, stages=2)),
    )
    for rows, cols, ring in rings:
        check_backward(make_spec("bwd", rows, cols, MIXES[1], **given), ring, monkeypatch)


@ORDERS
def test_with_64_bit_types(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count in 32 bits, and a gate's formulas stay in float32, whatever `1.0` is."""
    given = {"norm_before_gate": before}
    with jax.enable_x64(True):
        row_tile = ForwardSchedule("row_tile", 4, rows=8, params_first=True)
        check_forward(make_spec("fwd", 16, 440, MIXES[0], **given), row_tile)
        rings = (
            (8, 1024, PipelinedRows(4, 1, stages=2)),
            (16, 440, PipelinedNarrowRows(4, 32, rows=4, stages=2)),
        )
        for rows, cols, ring in rings:
            check_backward(make_spec("bwd", rows, cols, MIXES[0], **given), ring, monkeypatch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_all_sizes(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exponentials overflow or vanish; and 0."""
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    spec = make_spec("fwd", 8, 512, MIXES[1], activation=activation)
    x, gate, scale, dy = make_operands(spec)
    gate = jnp.asarray(np.concatenate([[0.0], *np.outer([-1, 1], np.geomspace(1e-20, 3e4, 255))]))
    gate = jnp.broadcast_to(jnp.append(gate, -0.0), (8, 512)).astype(F32)
    y, stats = run(spec, x, gate, scale, schedule=ForwardSchedule("row_tile", 4, rows=8))
    ((_, ref),) = references_of(spec, x, gate, scale, dy)
    y_bound, dx_bound, dgate_bound, _ = ref.bounds()
    assert_within(y, ref.y, y_bound)
    spec = changed(spec, direction="bwd", want_stats=False)
    ring = PipelinedNarrowRows(4, 32, rows=4, stages=2)
    dx, dgate, _ = run(spec, x, stats, gate, scale, dy, schedule=ring)
    assert_within(dx, ref.dx, dx_bound)
    assert_within(dgate, ref.dgate, dgate_bound)


# ------------------------------------------------------------------------------- for a GPU

SHAPES = [(131072, 64), (131072, 128), (65536, 256), (32768, 1000), (32768, 1024), (16384, 2048)]
SHAPES += [(8191, 4088), (8192, 4096), (8192, 5120), (8192, 8192), (8192, 8184), (4096, 16384)]
SHAPES += [(2048, 65536), (300, 2992)]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("shape", "mix", "before", "activation"),
    [(s, *COMBINATIONS[i % len(COMBINATIONS)]) for i, s in enumerate(SHAPES + SHAPES)],
    ids=str,
)
def test_lowers_for_a_gpu(
    shape: tuple[int, int], mix: tuple[np.dtype, ...], before: bool, activation: str
) -> None:
    """In one kernel each way."""
    for direction in ("fwd", "bwd"):
        given = {"norm_before_gate": before, "activation": activation}
        spec = make_spec(direction, *shape, mix, **given)
        assert mosaic.why_unsupported(spec) is None
        call = jax.jit(lambda *a, spec=spec: contract.call(mosaic, spec, *a))
        program = call.trace(*types_of(spec)).lower(lowering_platforms=("cuda",)).as_text()
        assert program.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": 32, "cols": 64}, "takes rows this short only by 64 and more"),
        ({"cols": 7}, "rows of 8 elements or more"),
        ({"scattered": True}, "not consecutive"),
        ({"stat_cotangents": True}, "plain JAX's"),
        ({"gate_dtype": np.dtype("float64")}, "float64"),
        ({"cols": 2**19}, "hold no rows of this length"),
        ({"cols": 8191}, "in multiples of 16 bytes"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    spec = changed(make_spec("bwd", 8191, 1024, MIXES[0]), **change)
    assert sentence in (mosaic.why_unsupported(spec) or "")


@ORDERS
@pytest.mark.parametrize("mix", MIXES[:3], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_registers(
    shape: tuple[int, int], mix: tuple[np.dtype, ...], before: bool, compiler: Compiler
) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(direction, *shape, mix, norm_before_gate=before, activation="gelu")
        (kernel,) = compiler.compile(
            lambda *a, spec=spec: contract.call(mosaic, spec, *a), types_of(spec)
        )
        assert kernel.spilled <= SPILLED
        schedule = schedules.norm_schedule(spec) if direction == "bwd" else None
        if isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
            threads = 128 * getattr(schedule, "warpgroups", 1)
            registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
            assert registers * threads * schedule.blocks_per_sm <= schedules.REGISTERS
