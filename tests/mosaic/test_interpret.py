"""Values of the kernels in Pallas' interpreter, for every kind of call, schedule and dtype.

The interpreter models neither layouts nor alignment nor clusters. `test_lowering` tests layouts and
clusters. The tests run over the table `cases.FAMILIES`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import norms
import numpy as np
import pytest
from cases import (
    BACKWARD,
    BY_NAME,
    FAMILIES,
    FORWARD,
    Case,
    check,
    check_call,
    each_pass,
    grouped,
    make_spec,
    operands_of,
    passes,
    run,
    schedules_of,
    two_blocks,
)
from contract import call as call_pass
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from pairs import pairwise
from program_error import assert_computes
from reference import ACTIVATIONS
from specs import BF16, F16, F32, changed
from test_logits import check_overflowing_rows

from jaxnorm_kernels import xla
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile", "two_blocks")
__all__ = ["two_blocks"]  # a pytest fixture

#: Cases that the interpreter runs quickly.
QUICK = {"fwd": "rows_in_warps_tail", "bwd": "rows_ring_tail"}


def in_turn() -> Iterator[Any]:
    """Yield each pass of each family with each schedule, and with all combinations of options.

    One fast schedule runs all combinations. Every other schedule runs only one combination. This is
    enough, because the options do not change a schedule's loop over rows. Several schedules use the
    same kind of loop, so each kind of loop still runs with several combinations.
    """
    for family, direction in each_pass():
        combinations = FAMILIES[family].combinations()
        cases = schedules_of(FAMILIES[family].spec(direction, 8, 64))
        quick = next((case for case in cases if case.name == QUICK[direction]), cases[1])
        found = [(case, combinations[5 * i % len(combinations)]) for i, case in enumerate(cases)]
        found += [(quick, given) for given in combinations if (quick, given) not in found]
        for case, given in found:
            name = "-".join([family, direction, case.name, *map(str, given.values())])
            yield pytest.param(family, direction, case, given, id=name)


@pytest.mark.parametrize(("family", "direction", "case", "given"), [*in_turn()])
def test_values(family: str, direction: str, case: Case, given: dict[str, Any]) -> None:
    spec = FAMILIES[family].spec(direction, case.rows, case.cols, **given)
    check(spec, case.schedule_for(spec))


#: For each pass, schedules that load parameters before and after x, and both kinds of loop over
#: rows, each with the shape of x.
OF_PASS = {
    "fwd": [
        ((16, 440), TileSchedule("row_tile", 4, rows=8, params_first=True)),
        ((4, 2571), TileSchedule("split_row", 1, warpgroups=4)),
    ],
    "bwd": [
        ((8, 1024), PipelinedRows(4, 1, stages=2)),
        ((16, 440), PipelinedNarrowRows(4, 32, rows=4, stages=2)),
    ],
}


def variants() -> Iterator[Any]:
    """Yield a family, options of its calls, and True if 64-bit types are enabled."""
    for family, of in FAMILIES.items():
        activations = [{"activation": name} for name in of.options.get("activation", ())]
        for given in of.changes:
            yield pytest.param(family, given, False, id=f"{family}-{given}")
        for given in activations or [{}]:
            yield pytest.param(family, given, True, id=f"{family}-{given}-64-bit")


@pytest.mark.parametrize(("family", "given", "wide"), [*variants()])
def test_variants(family: str, given: dict[str, Any], wide: bool) -> None:
    """Each option is correct in several schedules.

    If 64-bit types are enabled, kernels still use 32-bit indices and float32 arithmetic. This needs
    a test because Python numbers such as `1` and `1.0` are then traced as 64-bit numbers.
    """
    of = FAMILIES[family]
    for direction in passes(family):
        if direction == "fwd" and "adds_dh" in given:
            continue
        options = {
            name: a for name, a in given.items() if direction == "fwd" or name != "want_stats"
        }
        for shape, schedule in OF_PASS[direction]:
            spec = of.spec(direction, *shape, mix=of.mixes[1], **options)
            with jax.enable_x64(wide):
                check(spec, schedule if spec.is_norm or direction == "fwd" else None)


def default_calls() -> Iterator[Spec]:
    """Yield small calls, calls with groups of rows, and calls with unaligned rows.

    The length of an unaligned row is not a multiple of 16 bytes. The widths are such that a row is
    processed by a part of a warp, by one warpgroup, or by several warpgroups.
    """
    small = [(1, 2), (3, 3), (2, 31), (5, 64), (130, 7), (1, 130), (2, 300), (4, 1025), (1, 4100)]
    for i, shape in enumerate(small):
        for function in ("log_softmax", "layer_norm", "add_rms_norm", "rms_norm_add_rms_norm"):
            yield make_spec(function, "fwd", *shape, (BF16, [BF16, F32][i % 2]))
    for groups, *shape in [(4, 32, 16), (4, 4, 64), (2, 10, 200), (3, 9, 1104)]:
        for function in ("layer_norm", "add_layer_norm with a gate"):
            spec = make_spec(function, "fwd", *shape, (BF16, BF16))
            yield changed(spec, **grouped(spec, groups))
    for function, direction, *shape, dtype in [
        *(("softmax", d, 8, 1999, BF16) for d in ("fwd", "bwd")),
        *(("log_softmax", d, 4, 9001, F32) for d in ("fwd", "bwd")),
        *(("softmax", "fwd", 20, 131, F32), ("log_softmax", "bwd", 16, 1031, BF16)),
        *(("rms_norm", "fwd", 8, 1999, BF16), ("layer_norm", "fwd", 4, 9001, BF16)),
        *(("add_layer_norm", "fwd", 20, 131, F32), ("rms_norm_gated", "fwd", 8, 1031, BF16)),
    ]:
        yield make_spec(function, direction, *shape, (dtype, dtype))


@pytest.mark.parametrize(
    "spec", [*default_calls()], ids=lambda s: f"{s.op}-{s.direction}-{s.rows}-{s.cols}-{s.y_dtype}"
)
def test_default_schedules(spec: Spec) -> None:
    check(spec)


# ------------------------------------------------------------------------------- groups of rows


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.name)
def test_groups_of_rows(case: Case) -> None:
    """Values are correct if each group of rows has its own scale or bias.

    The schedule must ensure that all rows of a tile, and all rows of a block, belong to one group.
    """
    rows = 2 * case.schedule.rows * max(1, case.schedule.tiles)
    function = ["layer_norm", "add_layer_norm", "rms_norm_add_rms_norm"][FORWARD.index(case) % 3]
    shared = {"bias_groups": 3} if function == "add_layer_norm" else {"scale_groups": 3}
    spec = make_spec(function, "fwd", 3 * rows, case.cols, (F32, F32), **shared)
    check(spec, dataclasses.replace(case.schedule_for(spec), params_first=True))


def test_groups_that_no_tile_can_have() -> None:
    of_rows = make_spec("rms_norm", "fwd", 30, 512, (F32, F32), scale_groups=5)
    for schedule in (
        TileSchedule("row_tile", 4, rows=4),  # rows 4 to 7 would span two groups
        TileSchedule("pipelined_row", 4, slots=1, tiles=4, params_first=True),
    ):
        with pytest.raises(ValueError, match="of one group for rows of another"):
            schedule.rows_of(of_rows)


@pytest.mark.parametrize(
    ("name", "groups", "rows", "change"),
    [
        # In some entries, the number of rows per group is not a multiple of the number of blocks,
        # or of the number of rows that a block processes at once. In other entries, the rows that a
        # block processes at once are exactly one group.
        ("ring", 3, 5, {}),
        ("ring_two_warpgroups_tail", 3, 3, {"bias_groups": 1}),
        ("ring_rows", 2, 9, {"adds_dh": True}),
        ("ring_rows", 3, 4, {}),
        ("ring_rows_tail", 2, 5, {"scale_groups": 1, "saved": "input"}),
        ("ring_more_stages", 2, 5, {"adds_dh": True, "subtract_mean": False}),
        ("rows_ring", 3, 21, {}),
        ("rows_ring_tail", 2, 11, {"bias_groups": 1}),
        ("rows_ring_tail", 3, 13, {"scale_dtype": None, "scale_groups": 1}),
        ("rows_ring_parts_of_warps", 2, 70, {}),
    ],
)
def test_backwards_of_groups(name: str, groups: int, rows: int, change: dict[str, Any]) -> None:
    case = BY_NAME[name]
    given = {"scale_groups": groups, "bias_groups": groups, **change}
    spec = make_spec("layer_norm", "bwd", groups * rows, case.cols, (BF16, BF16), **given)
    check(spec, case.schedule_for(spec))


# ------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_multiples_that_overflow(op: str, dtype: np.dtype) -> None:
    spec = make_spec(op, "fwd", 4, 256, (dtype, dtype), logits_scale=2.0)
    check_overflowing_rows(op, lambda x: run(spec, x)[0], str(dtype), cols=256)


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.name)
def test_variance_of_large_means(case: Case) -> None:
    """The variance is accurate for a mean of 1e4 and a standard deviation of 1.

    Computed as E[x^2] - E[x]^2 in float32, it would be wrong.
    """
    spec = make_spec("layer_norm", "fwd", case.rows, case.cols, (F32, F32), saved="input")
    arrays = norms.make_operands(spec)
    arrays["x"] = (arrays["x"] + 1e4).at[1, : case.cols // 8].add(-100)
    norms.check_forward(lambda *a: run(*a, schedule=case.schedule_for(spec)), spec, arrays)


@pytest.mark.parametrize("y_dtype", [BF16, F16, F32], ids=str)
def test_scale_floor(y_dtype: np.dtype) -> None:
    """A scale near 0 is replaced by a floor (2**-60), so that x_hat can be recovered from y.

    If y is float16, there is no floor: ``floor * x_hat`` would underflow in float16, so x_hat could
    not be recovered from y anyway. In the backward, x_hat is then 0.
    """
    case = BY_NAME["ring"]
    spec = make_spec("rms_norm", "fwd", case.rows, case.cols, (F32, y_dtype))
    x, scale, _ = operands_of(spec)
    scale = scale.at[::3].set(0).at[1::3].set(-1e-30)
    y, stats = run(spec, x, scale, None)
    assert np.all((y == 0)[:, ::3] == (y_dtype == F16))
    assert_computes(y, lambda x, scale: call_pass(xla, spec, x, scale, None)[0], x, scale)
    backward = changed(spec, direction="bwd", want_stats=False)
    dx, dscale, _ = run(
        backward, y, stats, scale, None, jnp.cos(y), schedule=case.schedule_for(backward)
    )
    assert np.all(np.isfinite(dx))
    assert np.all((dscale == 0)[::3] == (y_dtype == F16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_all_sizes(activation: str) -> None:
    """The activation is correct for a gate of 0, and if its exponential over- or underflows."""
    for direction in ("fwd", "bwd"):
        given = {"mix": (F32,) * 3, "activation": activation}
        spec = FAMILIES["gate"].spec(direction, 8, 512, **given)
        gate = np.concatenate([[0.0], *np.outer([-1, 1], np.geomspace(1e-20, 3e4, 255)), [-0.0]])
        arrays = norms.make_operands(spec)
        arrays["gate"] = jnp.asarray(np.broadcast_to(gate, (8, 512)), F32)
        checked = norms.check_forward if direction == "fwd" else norms.check_backward
        checked(lambda *a: run(*a, schedule=None), spec, arrays)


@pytest.mark.parametrize("name", ["ring_two_stages", "rows_ring"])
def test_clip(name: str) -> None:
    """If x_hat is recovered from y, it is clipped to the range from -sqrt(N) to sqrt(N).

    For rows of N columns, no exact x_hat is outside of this range. A recovered x_hat may be outside
    of it because of rounding errors. Here, elements of y that are much too large stand for them. A
    clipped x_hat does not depend on their size.
    """
    case = BY_NAME[name]
    spec = make_spec("layer_norm", "bwd", case.rows, case.cols, (F32, F32))
    saved, stats, scale, bias, d = operands_of(spec)
    d = d.at[1, 3].set(0)
    results = [
        run(spec, saved.at[1, 3].set(y), stats, scale, bias, d, schedule=case.schedule_for(spec))
        for y in (1e4, 1e6)
    ]
    for ours, theirs in zip(*results):
        assert ours is None or np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["ring_two_warpgroups_tail", "rows_ring"])
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "rms_norm_add_rms_norm"])
def test_float16_that_overflows(name: str, function: str) -> None:
    """An infinite y whose cotangent is 0 acts like the largest finite number.

    The cotangent is 0 if, for example, a tanh follows.
    """
    case = BY_NAME[name]
    spec = make_spec(function, "bwd", case.rows, case.cols, (F32, F32, F16))
    names, operands = norms.names_of(spec), list(operands_of(spec))
    saved, dy = names.index("saved"), names.index("dy")
    operands[dy] = operands[dy].at[1, 5].set(0)
    results = []
    for y in (np.inf, np.finfo(F16).max):
        operands[saved] = operands[saved].at[1, 5].set(y)
        results.append(run(spec, *operands, schedule=case.schedule_for(spec)))
    for ours, theirs in zip(*results):
        assert ours is None or (np.array_equal(ours, theirs) and np.all(np.isfinite(ours)))


# ------------------------------------------------------------------------- rows are independent

SPECIAL = {
    "nan": lambda x: x.at[1, 7].set(jnp.nan),
    "inf": lambda x: x.at[1, 7].set(jnp.inf),
    "-inf": lambda x: x.at[1, 7].set(-jnp.inf),
    "all -inf": lambda x: x.at[1].set(-jnp.inf),
    "first half -inf": lambda x: x.at[1, : x.shape[1] // 2].set(-jnp.inf),
    "one finite": lambda x: x.at[1, 1:].set(-jnp.inf),
    "lowest": lambda x: x.at[1].set(jnp.finfo(F32).min),
}
SPECIAL_CASES = [
    Case("row_tile", 3, 440, TileSchedule("row_tile", 4, rows=1)),
    Case("warpgroup_row", 3, 600, TileSchedule("warpgroup_row", 4)),
    Case("split_row", 3, 1024, TileSchedule("split_row", 4, warpgroups=2)),
    Case("split_row_tail", 3, 1100, TileSchedule("split_row", 4, warpgroups=2)),
    Case("pipelined_row", 3, 2500, TileSchedule("pipelined_row", 4, slots=2, tiles=2)),
    Case("unaligned", 3, 1999, None),
]


@pytest.mark.parametrize(
    ("case", "special", "function"),
    pairwise(SPECIAL_CASES, [*SPECIAL], ["softmax", "layer_norm"]),
    ids=lambda value: getattr(value, "name", value),
)
def test_special_values_stay_in_their_row(function: str, case: Case, special: str) -> None:
    """A row with NaN or infinities has the result of XLA's code, and other rows are unaffected."""
    # A norm of a row whose sum overflows has no defined result.
    if special == "lowest" and function == "layer_norm":
        function = "log_softmax"
    spec = make_spec(function, "fwd", 3, case.cols, (F32, F32))
    x, *params = operands_of(spec)
    outputs = run(spec, SPECIAL[special](x), *params, schedule=case.schedule)
    assert_computes(outputs, lambda *a: call_pass(xla, spec, *a), SPECIAL[special](x), *params)


@pytest.mark.parametrize(
    ("function", "case"),
    [
        *((["log_softmax", "layer_norm"][i % 2], c) for i, c in enumerate(FORWARD) if c.rows > 2),
        *(("layer_norm", case) for case in (BACKWARD[0], BACKWARD[-2])),
        ("log_softmax", Case("unaligned", 8, 1031, None)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_row_does_not_depend_on_others(function: str, case: Case) -> None:
    """A row's results are bitwise independent of other rows, even where tiles overlap.

    In a backward, the gradients of parameters depend on all rows.
    """
    direction = "bwd" if case in BACKWARD or case.schedule is None else "fwd"
    spec = make_spec(function, direction, case.rows, case.cols, (F32, F32))
    schedule = case.schedule and case.schedule_for(spec)
    x, *others = operands_of(spec)
    kept = np.array([0, case.rows - 1])
    expected = run(spec, x, *others, schedule=schedule)
    outputs = run(spec, x.at[1:-1, 3].set(jnp.nan), *others, schedule=schedule)
    for output, value in zip(*map(jax.tree.leaves, (outputs, expected))):
        if len(output) == case.rows:
            np.testing.assert_array_equal(output[kept], value[kept])
            assert np.isnan(output[1:-1]).reshape(case.rows - 2, -1).any(1).all()


# ------------------------------------------------------------------------------------ determinism


def races() -> Iterator[Any]:
    """Yield calls whose fragments and rows do not overlap.

    Where they overlap, two threads store the same value. The race detector would report this
    harmless race.
    """
    for case in FORWARD:
        if not case.name.endswith("tail"):
            rows = -(-case.rows // case.schedule.rows) * case.schedule.rows
            for function in ("softmax", "layer_norm", "rms_norm_add_rms_norm"):
                yield make_spec(function, "fwd", rows, case.cols, (BF16, BF16)), case
    for name in ("ring", "ring_two_warpgroups", "ring_rows", "ring_four_warpgroups", "rows_ring"):
        case, rows = BY_NAME[name], 32 if "rows" in name else 4
        for given in ({}, {"scale_groups": 2, "adds_dh": True}):
            yield make_spec("layer_norm", "bwd", rows, case.cols, (BF16, BF16), **given), case


@pytest.mark.parametrize(
    ("spec", "case"), [*races()], ids=lambda a: getattr(a, "name", getattr(a, "op", a))
)
def test_no_races(spec: Spec, case: Case) -> None:
    params = plgpu.InterpretGPUParams(detect_races=True)
    check_call(lambda *a: run(*a, schedule=case.schedule_for(spec), params=params), spec)
    assert not interpret_pallas_call.get_races().races_found
