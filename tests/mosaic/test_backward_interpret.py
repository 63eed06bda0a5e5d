"""Values of the backward kernels in Pallas' interpreter, for every schedule and dtype.

The interpreter runs on the CPU. It models neither layouts nor alignment nor clusters.
`test_backward_lowering` tests layouts and clusters.
"""

from typing import Any

import contract
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from backward_cases import NORM_CASES, SOFTMAX_CASES, interpret, make_operands, make_spec, reference
from forward_cases import Case
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from pairs import pairwise
from specs import BF16, F16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

BY_NAME = {case.name: case for case in NORM_CASES}


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels with two persistent blocks.

    Two blocks suffice to test sums over blocks, and take the interpreter little time.
    """
    monkeypatch.setattr(schedules, "persistent_blocks", _two)


def _two(spec: Spec, schedule: Any) -> int:
    """Return 2, the number of blocks.

    All tests use this same function, because it is a part of the keys of the cache of programs. If
    each test had its own function, every program would be compiled again.
    """
    return 2


def check(spec: Spec, schedule: Any, *operands: Any) -> None:
    """Assert that every output is within its error bound of the float64 reference."""
    outputs = interpret(spec, *operands, schedule=schedule)
    expected, errors = reference(spec, *operands)
    dtypes = (spec.x_dtype, spec.dtype("scale"), spec.dtype("bias"))
    for output, dtype, value, error in zip(outputs, dtypes, expected, errors):
        if value is None:
            assert output is None
            continue
        assert output.shape == value.shape
        assert output.dtype == dtype
        excess = np.abs(output.astype(np.float64) - value) - error
        assert np.max(excess) <= 0, np.max(excess / error)


def check_case(op: str, case: Case, x: np.dtype, y: np.dtype, **fields: Any) -> None:
    """Check a call with the schedule of `case` and, unless `fields` say otherwise, its shape."""
    spec = make_spec(op, **{"rows": case.rows, "cols": case.cols, "x": x, "y": y, **fields})
    check(spec, case.schedule_for(x, y), *make_operands(spec))


# Pairwise testing: there are four parameters (function, dtype, saved array and schedule). For any
# two of them, every pair of their values occurs in some case.
@pytest.mark.parametrize(
    ("op", "dtype", "saved", "case"),
    [
        pytest.param(op, dtype, saved, case, id=f"{op}-{dtype}-{saved}-{case.name}")
        for op, dtype, saved, case in pairwise(
            ["rms_norm", "layer_norm"], [BF16, F32], ["output", "input"], NORM_CASES
        )
    ],
)
def test_norm_values(op: str, case: Case, dtype: np.dtype, saved: str) -> None:
    check_case(op, case, dtype, dtype, saved=saved)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        *(
            ("layer_norm", BY_NAME[name])
            for name in ("ring_two_stages", "ring_tail", "rows_ring_tail")
        ),
        *(("softmax", case) for case in SOFTMAX_CASES if case.name.endswith("tail")),
    ],
    ids=str,
)
def test_with_64_bit_types(op: str, case: Case) -> None:
    """Kernels use 32-bit integers, even if 64-bit types are enabled.

    Python integers are then traced as int64.
    """
    with jax.enable_x64(True):
        check_case(op, case, BF16, BF16)


@pytest.mark.parametrize("case", SOFTMAX_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("op", "dtype"), [("softmax", BF16), ("log_softmax", F32)], ids=str)
def test_softmax_values(op: str, case: Case, dtype: np.dtype) -> None:
    check_case(op, case, dtype, dtype)


@pytest.mark.parametrize(
    ("x", "y", "scale", "bias", "saved"),
    [
        (BF16, F32, BF16, BF16, "output"),
        (F32, BF16, F16, F32, "input"),
        (F16, F16, BF16, F16, "output"),
        (F16, BF16, F32, F16, "input"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ring_two_warpgroups_tail", "rows_ring"])
def test_dtypes(
    name: str, x: np.dtype, y: np.dtype, scale: np.dtype, bias: np.dtype, saved: str
) -> None:
    fields = {"scale_dtype": scale, "bias_dtype": bias, "saved": saved}
    check_case("layer_norm", BY_NAME[name], x, y, **fields)


@pytest.mark.parametrize(("op", "x", "y"), [("softmax", F32, BF16), ("log_softmax", F16, F32)])
def test_softmax_dtypes(op: str, x: np.dtype, y: np.dtype) -> None:
    check_case(op, SOFTMAX_CASES[0], x, y)


@pytest.mark.parametrize(
    "change",
    [
        {"subtract_mean": False},
        {"scale_offset": 1.0},
        {"scale_dtype": None},
        {"bias_dtype": None},
        {"scale_dtype": None, "bias_dtype": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ring_tail", "rows_ring_tail"])
def test_norm_variants(name: str, change: dict[str, Any]) -> None:
    check_case("layer_norm", BY_NAME[name], BF16, F32, **change)


# There are two calls: one of rms_norm, one of layer_norm. The schedules of `NORM_CASES` alternate
# between them: the first is tested with rms_norm, the second with layer_norm, and so on. Schedules
# of the same type are next to each other in `NORM_CASES`. So each type is tested with both calls.
@pytest.mark.parametrize(
    ("op", "x", "y", "saved", "case"),
    [
        pytest.param(op, x, BF16, saved, case, id=f"{op}-{x}-{saved}-{case.name}")
        for i, case in enumerate(NORM_CASES)
        for op, x, saved in [[("rms_norm", BF16, "output"), ("layer_norm", F32, "input")][i % 2]]
    ],
)
def test_dh_is_added(op: str, case: Case, x: np.dtype, y: np.dtype, saved: str) -> None:
    """The kernel adds h's cotangent dh to dx and rounds the sum once, to x's dtype.

    x's dtype may be wider than the dtypes of the saved array and of dy.
    """
    check_case(op, case, x, y, saved=saved, adds_dh=True)


@pytest.mark.parametrize(
    ("x", "y", "saved", "scale"),
    [
        (F32, BF16, "output", BF16),
        (BF16, F32, "output", F32),
        (F16, BF16, "input", None),
        (F32, F32, "output", F32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ring_two_warpgroups_tail", "ring_rows_tail", "rows_ring_tail"])
def test_dtypes_of_dh(
    name: str, x: np.dtype, y: np.dtype, saved: str, scale: np.dtype | None
) -> None:
    change = {"scale_dtype": scale, "saved": saved, "adds_dh": True}
    check_case("layer_norm", BY_NAME[name], x, y, **change)


#: Each entry has three items: the name of a schedule, the number of groups, and the number of rows
#: per group. In some entries, the number of rows per group is not a multiple of the number of
#: blocks, or of the number of rows that a block processes at once. In other entries, the rows that
#: a block processes at once are exactly one group.
GROUPED = [
    ("ring", 3, 5),
    ("ring_two_stages", 2, 3),
    ("ring_two_warpgroups_tail", 3, 3),
    ("ring_rows", 2, 9),
    ("ring_rows", 3, 4),
    ("ring_rows_tail", 2, 5),
    ("ring_more_stages", 2, 5),
    ("rows_ring", 3, 21),
    ("rows_ring_tail", 2, 11),
    ("rows_ring_parts_of_warps", 2, 70),
]


@pytest.mark.parametrize(("name", "groups", "rows"), GROUPED)
def test_parameters_of_groups(name: str, groups: int, rows: int) -> None:
    change = {"rows": groups * rows, "scale_groups": groups, "bias_groups": groups}
    check_case("layer_norm", BY_NAME[name], BF16, BF16, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"scale_groups": 3},
        {"bias_groups": 3, "saved": "input"},
        {"scale_groups": 3, "subtract_mean": False, "bias_dtype": None, "adds_dh": True},
        {"bias_groups": 3, "scale_dtype": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ring_tail", "rows_ring_tail"])
def test_one_parameter_of_groups(name: str, change: dict[str, Any]) -> None:
    """One parameter may have a row per group while the other is absent or shared by all rows."""
    case = BY_NAME[name]
    check_case("layer_norm", case, BF16, BF16, rows=3 * case.rows, **change)


@pytest.mark.parametrize("name", ["ring_rows", "rows_ring_tail"])
def test_groups_with_64_bit_types(name: str) -> None:
    case = BY_NAME[name]
    change = {"scale_groups": 3, "bias_groups": 3, "adds_dh": True}
    with jax.enable_x64(True):
        check_case("layer_norm", case, BF16, BF16, rows=3 * case.rows, **change)


# Each group has so many rows that both blocks reuse the stages of their rings.
@pytest.mark.parametrize(("name", "rows"), [("ring_two_warpgroups", 5), ("rows_ring", 17)])
def test_results_are_the_same_again(name: str, rows: int) -> None:
    case = BY_NAME[name]
    change = {"scale_groups": 2, "adds_dh": True}
    spec = make_spec("layer_norm", 2 * rows, case.cols, BF16, F32, **change)
    operands, schedule = make_operands(spec), case.schedule_for(F32)
    once, again = (interpret(spec, *operands, schedule=schedule) for _ in range(2))
    for a, b in zip(once, again):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["ring", "rows_ring_tail"])
def test_nan_stays_in_its_row(name: str) -> None:
    """A NaN in one row of an operand makes only this row of dx NaN.

    dscale and dbias are NaN, too, because they are sums over all rows.
    """
    case = BY_NAME[name]
    spec = make_spec("layer_norm", case.rows, case.cols, F32, F32)
    saved, stats, scale, bias, d = make_operands(spec)
    clean, *_ = interpret(spec, saved, stats, scale, bias, d, schedule=case.schedule_for(F32))
    saved[-1, 3] = np.nan
    dx, dscale, _ = interpret(spec, saved, stats, scale, bias, d, schedule=case.schedule_for(F32))
    np.testing.assert_array_equal(dx[:-1], clean[:-1])
    assert np.all(np.isnan(dx[-1]))
    assert np.flatnonzero(np.isnan(dscale)).tolist() == [3]


@pytest.mark.parametrize("name", ["ring_two_stages", "rows_ring"])
def test_clip(name: str) -> None:
    """If x_hat is recovered from y, it is clipped to the range from -sqrt(N) to sqrt(N).

    For rows of N columns, no exact x_hat is outside of this range. A recovered x_hat may be outside
    of it because of rounding errors. In this test they are large, because some elements of y are
    much larger than their scale.
    """
    case = BY_NAME[name]
    spec = make_spec("layer_norm", case.rows, case.cols, F32, F32)
    saved, stats, scale, bias, d = make_operands(spec)
    saved[1, ::3] *= 1e3
    check(spec, case.schedule_for(F32), saved, stats, scale, bias, d)


def test_float16_has_no_floor() -> None:
    """In float16, x_hat is 0 if the scale is 0 or so small that its reciprocal is infinite."""
    case = BY_NAME["ring"]
    spec = make_spec("rms_norm", case.rows, case.cols, F16, F16)
    saved, stats, scale, bias, d = make_operands(spec)
    scale[1::7] = 1e-40
    saved[:, 1::7] = 0
    dx, dscale, _ = interpret(spec, saved, stats, scale, bias, d, schedule=case.schedule_for(F16))
    assert np.all(np.isfinite(dx))
    assert np.all(dscale[0::7] == 0)
    assert np.all(dscale[1::7] == 0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("name", ["ring_two_warpgroups_tail", "rows_ring"])
def test_float16_that_overflows(name: str, op: str) -> None:
    """An infinite y whose cotangent is 0 does not affect other elements of its row.

    The cotangent is 0 if, for example, a tanh follows.
    """
    case = BY_NAME[name]
    spec = make_spec(op, case.rows, case.cols, F32, F16)
    saved, stats, scale, bias, d = make_operands(spec)
    scale[5], saved[1, 5], saved[2, 5] = 5e4, np.inf, -np.inf
    d[1:3, 5] = 0
    assert np.all(np.isfinite(reference(spec, saved, stats, scale, bias, d)[0][0]))
    check(spec, case.schedule_for(F32), saved, stats, scale, bias, d)


# Where fragments or rows overlap, two threads store the same value. The race detector would report
# this harmless race, so these cases have no overlaps.
@pytest.mark.parametrize(
    "name",
    ["ring", "ring_two_warpgroups", "ring_rows", "ring_four_warpgroups", "rows_ring"],
)
def test_no_races(name: str) -> None:
    case = BY_NAME[name]
    spec = make_spec("layer_norm", 16 if "rows" in name else 4, case.cols, BF16, BF16)
    assert no_races(spec, case)


@pytest.mark.parametrize("name", ["ring_two_warpgroups", "ring_rows", "rows_ring"])
def test_no_races_with_dh_and_groups(name: str) -> None:
    case = BY_NAME[name]
    change = {"scale_groups": 2, "adds_dh": True}
    rows = 32 if "rows" in name else 4
    assert no_races(make_spec("rms_norm", rows, case.cols, F32, BF16, **change), case)


def no_races(spec: Spec, case: Case) -> bool:
    params = plgpu.InterpretGPUParams(detect_races=True)
    schedule = case.schedule_for(spec.x_dtype, spec.y_dtype)
    interpret(spec, *make_operands(spec), params=params, schedule=schedule)
    return not interpret_pallas_call.get_races().races_found


# If the residual is float32 and x is not, the kernel itself stores both gradients. This is tested
# in both kinds of loop over rows (`ring` and `rows_ring`). For other dtypes, x's gradient is cast
# outside the kernel, so testing one kind suffices.
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("ring_two_warpgroups_tail", (BF16, F32)),
        ("rows_ring", (BF16, F32)),
        ("ring_two_warpgroups_tail", (F32, BF16)),
        ("rows_ring", (BF16, BF16)),
        ("rows_ring", (BF16, F16)),
    ],
    ids=str,
)
def test_gradients_of_both_addends(dtypes: tuple[np.dtype, np.dtype], name: str) -> None:
    """For h = x + residual, the gradients of x and of the residual both equal the gradient of h.

    The residual's gradient is stored in the residual's dtype, and x's gradient in x's dtype.
    """
    case, (x, residual) = BY_NAME[name], dtypes
    plain = make_spec("rms_norm", case.rows, case.cols, residual, BF16, adds_dh=True)
    spec = changed(plain, op="add_norm", x_dtype=x, residual_dtype=residual)
    operands, schedule = make_operands(plain), case.schedule_for(x, residual, BF16)
    dh, *sums = interpret(plain, *operands, schedule=schedule)
    with mosaic.interpreted():
        dx, dresidual, *own_sums = jax.jit(
            lambda *operands: contract.call(mosaic, spec, *operands, schedule=schedule)
        )(*operands)
    np.testing.assert_array_equal(dresidual, dh)
    assert dx.dtype == x
    np.testing.assert_array_equal(dx, dresidual.astype(x))
    for ours, theirs in zip(own_sums, sums):
        np.testing.assert_array_equal(ours, theirs)
