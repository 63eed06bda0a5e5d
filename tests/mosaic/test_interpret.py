"""Values of the forward kernels in Pallas' interpreter, for every schedule and dtype.

The interpreter runs on the CPU. It models neither layouts nor alignment. `test_lowering` tests
layouts.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from forward_cases import CASES, OPS, Case, call, interpret, make_operands, make_spec, reference
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from pairs import pairwise
from program_error import assert_computes
from specs import BF16, F16, F32, changed
from test_logits import check_overflowing_rows

from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Shared, Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

BY_NAME = {case.name: case for case in CASES}


def check(spec: Spec, schedule: TileSchedule | None, *operands: Any) -> None:
    """Assert that outputs and statistics are accurate.

    They may differ from a float64 reference by at most the bounds that `reference` returns.
    """
    outputs = interpret(spec, *operands, schedule=schedule)
    expected, errors = reference(spec, *operands, outputs=outputs)
    assert len(outputs) == len(expected)
    assert outputs[0].dtype == spec.y_dtype
    assert not spec.normalises_h or outputs[1].dtype == spec.norm.residual_dtype
    for output, value, error in zip(outputs, expected, errors):
        assert output.shape == value.shape
        excess = np.abs(output.astype(np.float64) - value) - error
        assert np.max(excess) <= 0, np.max(excess / error)


def check_case(op: str, case: Case, x: np.dtype, y: np.dtype, **fields: Any) -> None:
    """Check a call with the schedule and the shape of `case`."""
    spec = make_spec(op, case.rows, case.cols, x, y, **fields)
    dtypes = [*map(spec.dtype, ("residual", "scale", "bias"))]
    check(spec, case.schedule_for(x, y, *dtypes), *make_operands(spec))


# Pairwise testing: there are three parameters (function, dtype and schedule). For any two of them,
# every pair of their values occurs in some case.
@pytest.mark.parametrize(
    ("op", "dtype", "case"),
    [
        pytest.param(op, dtype, case, id=f"{op}-{dtype}-{case.name}")
        for op, dtype, case in pairwise(OPS, [BF16, F32], CASES)
    ],
)
def test_values(op: str, case: Case, dtype: np.dtype) -> None:
    check_case(op, case, dtype, dtype)


RESIDUAL_CALLS = [
    ("add_rms_norm", BF16, BF16, BF16),
    ("add_layer_norm", BF16, F32, BF16),
    ("rms_norm_add", F32, BF16, BF16),
    ("rms_norm_add_rms_norm", BF16, BF16, F32),
]


def in_turn(cases: Sequence[Case], calls: Sequence[Any]) -> list[tuple[Any, Case]]:
    """Return pairs of a call and a case, such that each kind of schedule runs every call.

    `CASES` has two successive cases for each kind of schedule. One of them runs the calls with even
    indices, and the other runs the calls with odd indices. Which of the two comes first changes
    from kind to kind.
    """
    found = [
        (call, case)
        for case in cases
        for i in [CASES.index(case)]
        for call in calls[(i + i // 2) % 2 :: 2]
    ]
    kinds = {case.schedule.kind for case in cases}
    assert {(call, case.schedule.kind) for call, case in found} == {
        *itertools.product(calls, kinds)
    }
    return found


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_multiples_that_overflow(op: str, dtype: np.dtype) -> None:
    spec = changed(make_spec(op, 4, 256, dtype, dtype), logits_scale=2.0)
    check_overflowing_rows(op, lambda x: interpret(spec, x)[0], str(dtype), cols=256)


# `test_residual_variants` runs the same functions on rows whose last two tiles overlap.
@pytest.mark.parametrize(
    ("op", "x", "residual", "y", "case"),
    [
        pytest.param(*call, case, id=f"{'-'.join(map(str, call))}-{case.name}")
        for call, case in in_turn(CASES, RESIDUAL_CALLS)
    ],
)
def test_residuals(op: str, x: np.dtype, residual: np.dtype, y: np.dtype, case: Case) -> None:
    check_case(op, case, x, y, residual_dtype=residual)


@pytest.mark.parametrize("name", ["rows_in_warps_tail", "split_row_tail", "pipelined_row_tail"])
@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("add_rms_norm", {"want_stats": False}),
        ("add_rms_norm", {"residual_dtype": F16, "scale_dtype": None, "saved": "input"}),
        ("add_layer_norm", {"saved": "input", "bias_dtype": None, "scale_offset": 1.0}),
        ("rms_norm_add", {"scale_offset": 1.0, "want_stats": False}),
        ("rms_norm_add", {"scale_dtype": None, "residual_dtype": F32}),
        ("layer_norm_add", {}),
        ("rms_norm_add_rms_norm", {"scale_offset": 1.0, "want_stats": False}),
        ("rms_norm_add_rms_norm", {"scale_dtype": None, "residual_dtype": F32}),
        ("rms_norm_add_rms_norm", {"next_scale_dtype": None, "residual_dtype": F16}),
        ("layer_norm_add_layer_norm", {"saved": "input"}),
    ],
    ids=str,
)
def test_residual_variants(op: str, change: dict[str, Any], name: str) -> None:
    case = BY_NAME[name]
    spec = make_spec(op, case.rows, case.cols, BF16, F16, **change)
    schedule = case.schedule_for(spec.x_dtype, spec.dtype("residual"))
    check(spec, dataclasses.replace(schedule, params_first=True), *make_operands(spec))


# The schedules of `CASES` take the three functions in turn: the first schedule is tested with the
# first function, the second with the second function, and so on. Schedules of the same kind are
# next to each other in `CASES`. So each kind is tested with several functions.
@pytest.mark.parametrize(
    ("op", "case"),
    [*zip(itertools.cycle(["layer_norm", "add_layer_norm", "rms_norm_add_rms_norm"]), CASES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_groups_of_rows(op: str, case: Case) -> None:
    """Values are correct if each group of rows has its own scale or bias.

    The schedule must ensure that all rows of a tile, and all rows of a block, belong to one group.
    """
    schedule, groups = dataclasses.replace(case.schedule_for(F32), params_first=True), 3
    rows = 2 * schedule.rows * max(1, schedule.tiles)
    shared = {"bias_groups": groups} if op == "add_layer_norm" else {"scale_groups": groups}
    spec = make_spec(op, groups * rows, case.cols, F32, F32, **shared)
    check(spec, schedule, *make_operands(spec))


def test_groups_that_no_tile_can_have() -> None:
    of_rows = make_spec("rms_norm", 30, 512, F32, F32, scale_groups=5)
    for schedule in (
        TileSchedule("row_tile", 4, rows=4),  # rows 4 to 7 would span two groups
        TileSchedule("pipelined_row", 4, slots=1, tiles=4, params_first=True),
    ):
        with pytest.raises(ValueError, match="of one group for rows of another"):
            schedule.rows_of(of_rows)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name.endswith(("tail", "rows"))],
    ids=lambda case: case.name,
)
def test_with_64_bit_types(case: Case) -> None:
    """Kernels are correct if 64-bit types are enabled.

    JAX then traces Python integers as int64. Kernels must use 32-bit integers nevertheless.
    """
    with jax.enable_x64(True):
        check_case("layer_norm", case, BF16, BF16)


@pytest.mark.parametrize(
    ("x", "y", "scale", "bias"),
    [
        (BF16, F32, BF16, BF16),
        (F32, BF16, F16, F32),
        (F16, F16, BF16, F16),
        (F16, BF16, F32, F16),
        (BF16, BF16, BF16, F32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["rows_in_warps_tail", "split_row", "pipelined_row"])
def test_dtypes(name: str, x: np.dtype, y: np.dtype, scale: np.dtype, bias: np.dtype) -> None:
    check_case("softmax", BY_NAME[name], x, y)
    check_case("layer_norm", BY_NAME[name], x, y, scale_dtype=scale, bias_dtype=bias)


@pytest.mark.parametrize("name", ["pipelined_tile", "split_row_tail"])
@pytest.mark.parametrize(
    "change",
    [
        {"saved": "input"},
        {"saved": "input", "want_stats": False},
        {"scale_offset": 1.0},
        {"scale_dtype": None},
        {"bias_dtype": None},
        {"subtract_mean": False},
        {"scale_dtype": None, "bias_dtype": None, "want_stats": False},
    ],
    ids=str,
)
def test_norm_variants(name: str, change: dict[str, Any]) -> None:
    case = BY_NAME[name]
    spec = make_spec("layer_norm", case.rows, case.cols, BF16, F32, **change)
    schedule = case.schedule_for(F32)
    check(spec, dataclasses.replace(schedule, params_first=True), *make_operands(spec))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_variance_of_large_means(case: Case) -> None:
    """The variance is accurate for a mean of 1e4 and a standard deviation of 1.

    Computed as E[x^2] - E[x]^2 in float32, it would be wrong.
    """
    spec = make_spec("layer_norm", case.rows, case.cols, F32, F32, saved="input")
    _, scale, bias = make_operands(spec)
    x = np.random.default_rng(1).normal(1e4, 1, (case.rows, case.cols)).astype(np.float32)
    x[1, : case.cols // 8] -= np.float32(100)
    check(spec, case.schedule_for(F32), x, scale, bias)


@pytest.mark.parametrize("y_dtype", [BF16, F16, F32], ids=str)
def test_scale_floor(y_dtype: np.dtype) -> None:
    """A scale near 0 is replaced by a floor (2**-60), so that x_hat can be recovered from y.

    If y is float16, there is no floor: ``floor * x_hat`` would underflow in float16, so x_hat could
    not be recovered from y anyway.
    """
    case = BY_NAME["warpgroup_row"]
    spec = make_spec("rms_norm", case.rows, case.cols, F32, y_dtype)
    x, scale, _ = make_operands(spec)
    assert x is not None
    assert scale is not None
    scale[::3], scale[1::3] = 0, -1e-30
    (y, *_) = interpret(spec, x, scale, None, schedule=case.schedule_for(F32))
    assert np.all((y == 0)[:, ::3] == (y_dtype == F16))
    assert_computes(y, lambda x, scale: call(spec, x, scale, None, module=xla)[0], x, scale)


SPECIAL = {
    "nan": lambda x: x.__setitem__((1, 7), np.nan),
    "inf": lambda x: x.__setitem__((1, 7), np.inf),
    "-inf": lambda x: x.__setitem__((1, 7), -np.inf),
    "all -inf": lambda x: x.__setitem__((1, slice(None)), -np.inf),
    "first half -inf": lambda x: x.__setitem__((1, slice(x.shape[1] // 2)), -np.inf),
    "one finite": lambda x: x.__setitem__((1, slice(1, None)), -np.inf),
    "lowest": lambda x: x.__setitem__((1, slice(None)), np.finfo(np.float32).min),
}


SPECIAL_CASES = [
    Case("row_tile", 3, 440, TileSchedule("row_tile", 4, rows=1)),
    Case("warpgroup_row", 3, 600, TileSchedule("warpgroup_row", 4)),
    Case("split_row", 3, 1024, TileSchedule("split_row", 4, warpgroups=2)),
    Case("split_row_tail", 3, 1100, TileSchedule("split_row", 4, warpgroups=2)),
    Case("pipelined_row", 3, 2500, TileSchedule("pipelined_row", 4, slots=2, tiles=2)),
]


def special_calls() -> list[Any]:
    """Return test parameters for each pair of a schedule and a special value (a key of `SPECIAL`).

    The function is "softmax" or "layer_norm", in turn.
    """
    found = []
    for case, special, op in pairwise(SPECIAL_CASES, [*SPECIAL], ["softmax", "layer_norm"]):
        # A norm of a row whose sum overflows has no defined result.
        if special == "lowest" and op == "layer_norm":
            op = "log_softmax"
        found.append(pytest.param(case, special, op, id=f"{case.name}-{special}-{op}"))
    return found


@pytest.mark.parametrize(("case", "special", "op"), special_calls())
def test_special_values_stay_in_their_row(op: str, case: Case, special: str) -> None:
    """A row with NaN or infinities has the result of XLA's code, and other rows are unaffected."""
    spec = make_spec(op, 3, case.cols, F32, F32)
    x, *params = make_operands(spec)
    SPECIAL[special](x)
    with np.errstate(all="ignore"):
        outputs = interpret(spec, x, *params, schedule=case.schedule)
    assert_computes(outputs, lambda *a: call(spec, *a, module=xla), x, *params)


@pytest.mark.parametrize(
    ("op", "case"),
    in_turn([case for case in CASES if case.rows > 2], ["log_softmax", "layer_norm"]),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_row_does_not_depend_on_others(op: str, case: Case) -> None:
    """A row's results are bitwise independent of other rows, even where tiles overlap."""
    spec = make_spec(op, case.rows, case.cols, F32, F32)
    x, *params = make_operands(spec)
    kept = [0, case.rows - 1]
    expected = interpret(spec, x, *params, schedule=case.schedule_for(F32))
    x[1:-1] = np.nan
    outputs = interpret(spec, x, *params, schedule=case.schedule_for(F32))
    for output, value in zip(outputs, expected):
        np.testing.assert_array_equal(output[kept], value[kept])


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (1, 2),
        (3, 3),
        (2, 31),
        (5, 64),
        (130, 7),
        (1, 130),
        (2, 300),
        (1, 1023),
        (4, 1025),
        (1, 4100),
    ],
)
def test_default_schedule_of_small_arrays(rows: int, cols: int) -> None:
    for op in ("log_softmax", "layer_norm", "add_rms_norm", "rms_norm_add_rms_norm"):
        spec = make_spec(op, rows, cols, BF16, BF16, scale_dtype=BF16)
        check(spec, None, *make_operands(spec))


@pytest.mark.parametrize(
    ("groups", "rows", "cols"), [(4, 32, 16), (4, 4, 64), (2, 10, 200), (3, 9, 1104)]
)
def test_default_schedule_of_groups(groups: int, rows: int, cols: int) -> None:
    for op in ("layer_norm", "add_layer_norm"):
        given = {"scale_groups": groups, "bias_groups": groups}
        spec = make_spec(op, rows, cols, BF16, BF16, **given)
        assert mosaic.why_unsupported(spec) is None
        check(spec, None, *make_operands(spec))


# Where fragments of a row overlap ("tail"), two warpgroups store the same value. The race detector
# would report this harmless race, so it does not run these cases.
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.endswith("tail")], ids=lambda case: case.name
)
@pytest.mark.parametrize("op", ["softmax", "layer_norm", "rms_norm_add_rms_norm"])
def test_no_races(op: str, case: Case) -> None:
    # The number of rows is a multiple of the number of rows per block. Otherwise, the last block
    # would start at an earlier row and process some rows a second time.
    rows = -(-case.rows // case.schedule.rows) * case.schedule.rows
    spec = make_spec(op, rows, case.cols, BF16, BF16, scale_dtype=BF16)
    params = plgpu.InterpretGPUParams(detect_races=True)
    interpret(spec, *make_operands(spec), params=params, schedule=case.schedule)
    assert not interpret_pallas_call.get_races().races_found


def test_deterministic() -> None:
    """Two runs give the same bits, although the order of the stores is undefined.

    In this test, two warpgroups store the same values to the same columns.
    """
    case = BY_NAME["split_row_tail"]
    spec = make_spec("softmax", case.rows, case.cols, F32, F32)
    (x,) = make_operands(spec)
    first, second = (interpret(spec, x, schedule=case.schedule)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


SUPPORTED = {op: make_spec(op, 4, 128, BF16, F32) for op in ("layer_norm", "softmax")}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x_dtype": np.dtype(np.float64)}, "float64"),
        ({"rows": 0}, "size 0"),
        ({"cols": 0}, "size 0"),
        ({"cols": 1}, "8 elements"),
        ({"rows": 2**31}, "32-bit indices"),
        ({"rows": "b"}, "symbolic"),
        ({"op": "softmax", "has_mask": True}, "some normalised axes but not all"),
        ({"op": "softmax", "has_mask": True, "mask_rows": Shared(((4, True),), True)}, None),
        ({"op": "softmax", "logits_bias_dtype": BF16}, "some normalised axes but not all"),
        ({"op": "softmax", "logits_bias_dtype": np.dtype(np.float64)}, "float64"),
        ({"op": "softmax", "causal": True, "queries": 4}, None),
        ({"op": "softmax", "causal": True, "queries": 4, "queries_over": ("i",)}, "are sharded"),
        ({"direction": "bwd", "rows": 256, "cols": 4096}, None),
        ({"direction": "bwd", "rows": 8, "cols": 64}, "this short"),
        ({"scale_groups": 2, "bias_groups": 2}, None),
        ({"scale_groups": 2, "bias_groups": 4}, "different sizes"),
        ({"scale_groups": 2, "direction": "bwd", "rows": 256, "cols": 4096}, None),
        ({"adds_dh": True, "direction": "bwd", "rows": 256, "cols": 4096}, None),
        ({"cols": 2**18}, None),
        ({"cols": 2**18 + 8}, "no rows of this length"),
        ({"direction": "bwd", "rows": 256, "cols": 2**17}, None),
        ({"direction": "bwd", "rows": 256, "cols": 2**17 + 8}, "no rows of this length"),
        ({"direction": "bwd", "rows": 256, "cols": 50256}, None),
        ({"direction": "bwd", "rows": 256, "cols": 50257}, "multiple of 16 bytes"),
        ({"op": "softmax", "direction": "bwd", "rows": 256, "cols": 2**18}, None),
        ({"op": "softmax", "direction": "bwd", "rows": 256, "cols": 2**19}, "of this length"),
        ({"op": "add_norm", "residual_dtype": BF16}, None),
        ({"op": "add_norm", "residual_dtype": np.dtype(np.float64)}, "float64"),
        ({"op": "norm_add", "residual_dtype": F32, "cols": 2**17}, None),
        ({"op": "norm_add", "residual_dtype": F32, "cols": 2**17 + 8}, "no rows of this length"),
    ],
    ids=str,
)
def test_supports(change: dict[str, Any], reason: str | None) -> None:
    spec = SUPPORTED["softmax" if change.get("op") == "softmax" else "layer_norm"]
    refusal = mosaic.why_unsupported(changed(spec, **change))
    assert refusal is None if reason is None else reason in str(refusal)
