"""The kernels of norms with fused operations: interpreted, lowered, compiled.

The operations are a gate, an activation, a sum with a scaled branch, and, for the backward only, a
second norm after a residual. The tests run over `FAMILIES`, which lists the options, dtypes and
shapes with which each operation is tested.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import contract
import jax
import jax.numpy as jnp
import norms
import numpy as np
import pytest
import test_group_norm
from backward_cases import NORM_CASES
from forward_cases import CASES
from h100 import Compiler, assert_fits
from pairs import pairwise
from programs import kernels_in
from reference import ACTIVATIONS
from specs import BF16, F16, F32, changed
from test_group_norm import STRIPS

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")


class Family(NamedTuple):
    """The calls with which one fused norm is tested.

    Attributes:
      options: a dict from the name of each option to its values. The tests are pairwise: for
        any two options, every pair of their values occurs in some test.
      changes: dicts of further options. For each dict, a test changes the default call by these
        options. The call has 16 rows.
      shapes: a tuple for each call that is lowered or compiled. Its items are the number of rows,
        the number of columns and, if groups of rows have their own parameters, the number of
        groups.
      directions: the tested passes.
      mixes: the number of combinations of dtypes that are compiled.
      given: options that all calls of this family have.
    """

    op: Op
    options: dict[str, Sequence[Any]]
    changes: Sequence[dict[str, Any]]
    shapes: Sequence[tuple[int, ...]]
    directions: tuple[str, ...] = ("fwd", "bwd")
    mixes: int = 3
    given: dict[str, Any] = {}  # noqa: RUF012

    def spec(self, direction: str, rows: int, cols: int, *groups: int, **given: Any) -> Spec:
        given = {"mix": self.options["mix"][0], **self.given, **given}
        if "groups" in given or groups:
            n = given.pop("groups", None) or groups * 3
            given |= {f"{p}_groups": i for p, i in zip(("scale", "bias", "branch_scale"), n)}
        spec: Spec = norms.make_spec(self.op, direction, rows, cols, **given)
        return spec

    @property
    def combinations(self) -> list[dict[str, Any]]:
        found = pairwise(*self.options.values())
        return [dict(zip(self.options, values)) for values in found]


MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
KINDS = ["layer_norm", "rms_norm"]
SHAPES = [(131072, 64), (65536, 256), (32768, 1000), (32768, 1024), (16384, 2048), (8191, 4088)]
SHAPES += [(8192, 4096), (8192, 5120), (8192, 8192), (4096, 16384), (2048, 65536), (300, 2992)]
WIDTHS = [64, 768, 1000, 1024, 2048, 3000, 4096, 5120, 7168, 8192, 12288, 16384, 32768]
FAMILIES = {
    "gate": Family(
        "norm_gated",
        {"norm_before_gate": [True, False], "mix": MIXES, "activation": ACTIVATIONS},
        [{"scale_dtype": None}, {"scale_offset": 1.0}, {"scale_dtype": BF16}, {"scale_groups": 2}],
        [*SHAPES, (131072, 128), (8192, 8184)],
    ),
    "activation": Family(
        "norm",
        {
            "kind": KINDS,
            "mix": [(BF16, BF16), (F32, F32), (BF16, F32), (F32, F16)],
            "activation": ACTIVATIONS,
        },
        [
            {"scale_dtype": None},
            {"bias_dtype": None},
            {"scale_dtype": None, "bias_dtype": None},
            {"scale_offset": 1.0, "bias_dtype": BF16},
            {"scale_groups": 2, "bias_groups": 2},
            {"adds_dh": True},
        ],
        SHAPES,
        given={"saved": "input", "activation": "silu", "kind": "layer_norm"},
    ),
    "scaled sum": Family(
        "scaled_add_norm",
        {"kind": KINDS, "mix": MIXES, "saved": ["output", "input"]},
        [
            {"scale_dtype": None, "bias_dtype": None},
            {"scale_offset": 1.0, "branch_scale_dtype": BF16},
            *({"groups": groups} for groups in ((2, 2, 2), (1, 1, 2), (2, 1, 1))),
        ],
        [
            *((131072, 64), (65536, 256), (32768, 512, 32), (32768, 768), (32768, 1024)),
            *((32768, 1152, 32), (32768, 1536, 8), (16384, 2048), (8191, 4088), (8192, 4096)),
            *((8192, 5120), (8192, 8192, 8), (8192, 8184), (4096, 16384), (2048, 65536)),
            (300, 2992),
        ],
        given={"kind": "layer_norm"},
    ),
    "two norms": Family(
        "norm_add_norm",
        {"saved": ["output", "input"], "mix": [*MIXES[:3], (F32, BF16, BF16)]},
        [
            {"adds_dh": False},
            {"scale_dtype": None},
            {"next_scale_dtype": None},
            {"scale_dtype": None, "next_scale_dtype": None},
            {"scale_groups": 2},
            {"scale_offset": 0.25},
        ],
        [(8192, cols) for cols in WIDTHS],
        directions=("bwd",),  # The forwards are in `test_interpret` and `test_lowering`.
        mixes=4,
    ),
}
# Names of the schedules with which "two norms" is tested. A few schedules are enough, because two
# norms run in the same loops over rows as one norm.
OF_TWO_NORMS = (
    *("ring_two_stages", "ring_tail", "ring_rows"),
    *("ring_two_warpgroups", "rows_ring_tail"),
)
QUICK = {"fwd": "rows_in_warps_tail", "bwd": "rows_ring_tail"}
IN_BOTH_ORDERS = [{"norm_before_gate": before} for before in (True, False)]


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels with two persistent blocks.

    Two blocks suffice to test sums over blocks, and take the interpreter little time.
    """
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)


interpreted = pytest.mark.usefixtures("two_blocks")


def run(spec: Spec, *operands: Any, schedule: Any) -> Any:
    with mosaic.interpreted():
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, schedule=schedule))(*operands)


def check(spec: Spec, schedule: Any) -> None:
    """Run a pass in the interpreter and assert that its results are within their bounds."""
    checked = norms.check_forward if spec.direction == "fwd" else norms.check_backward
    checked(functools.partial(run, schedule=schedule), spec)


def in_turn(direction: str) -> Iterable[Any]:
    """Yield cases of each family: a schedule with a combination of options.

    One fast schedule runs all combinations. Every other schedule runs only one combination. This is
    enough, because the options do not change a schedule's loop over rows. Several schedules use the
    same kind of loop, so each kind of loop still runs with several combinations.
    """
    for family, of in FAMILIES.items():
        if direction not in of.directions:
            continue
        cases: Sequence[Any] = CASES if direction == "fwd" else NORM_CASES
        if family == "two norms":
            cases = [case for case in cases if case.name in OF_TWO_NORMS]
        option, values = next(iter(of.options.items()))
        ways = [[c for c in of.combinations if c[option] == value] for value in values]
        # Items with an even index run with one value of the first option, items with an odd index
        # with the other. In `cases`, schedules of the same kind are neighbours, so each kind runs
        # with both values.
        found = [
            (case, way[i // 2 % len(way)])
            for i, case in enumerate(cases)
            for way in [ways[(i + i // 2) % len(ways)]]
        ]
        (quick,) = (case for case in cases if case.name == QUICK[direction])
        found += [(quick, c) for c in of.combinations if (quick, c) not in found]
        for case, given in found:
            name = "-".join([family, case.name, *map(str, given.values())])
            yield pytest.param(family, direction, case, given, id=name)


@interpreted
@pytest.mark.parametrize(
    ("family", "direction", "case", "given"), [*in_turn("fwd"), *in_turn("bwd")]
)
def test_values(family: str, direction: str, case: Any, given: dict[str, Any]) -> None:
    spec = FAMILIES[family].spec(direction, case.rows, case.cols, **given)
    check(spec, case.schedule_for(*given["mix"]))


ROW_TILES = [TileSchedule("row_tile", 4, rows=8, params_first=first) for first in (True, False)]
RINGS = (
    ((8, 1024), PipelinedRows(4, 1, stages=2)),
    ((16, 440), PipelinedNarrowRows(4, 32, rows=4, stages=2)),
)


def check_both(family: str, **given: Any) -> None:
    """Check the forward and the backward, each with several schedules.

    For a scaled sum, two schedules of the forward run: one loads parameters before x, the other
    loads x before parameters. The backward runs with both kinds of loop over rows.
    """
    if "fwd" in FAMILIES[family].directions and "adds_dh" not in given:
        for row_tile in ROW_TILES if family == "scaled sum" else ROW_TILES[:1]:
            check(FAMILIES[family].spec("fwd", 16, 440, **given), row_tile)
    for shape, ring in RINGS:
        check(FAMILIES[family].spec("bwd", *shape, **given), ring)


@interpreted
@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change | order, id=f"{family}-{change | order}")
        for family, of in FAMILIES.items()
        for change in of.changes
        for order in (IN_BOTH_ORDERS if family == "gate" else [{}])
    ],
)
def test_variants(family: str, change: dict[str, Any]) -> None:
    check_both(family, mix=FAMILIES[family].options["mix"][1], **change)


@interpreted
@pytest.mark.parametrize(
    ("family", "given"),
    [
        *(("gate", order) for order in IN_BOTH_ORDERS),
        *(("activation", {"activation": name}) for name in ACTIVATIONS),
        ("scaled sum", {}),
    ],
    ids=str,
)
def test_with_64_bit_types(family: str, given: dict[str, Any]) -> None:
    """If 64-bit types are enabled, kernels still use 32-bit indices and float32 arithmetic.

    This needs a test because Python numbers such as `1.0` are traced as float64 in this mode.
    """
    with jax.enable_x64(True):
        check_both(family, **given)


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_all_sizes(activation: str) -> None:
    """The activation is correct for a gate of 0, and if its exponential over- or underflows."""
    spec = FAMILIES["gate"].spec("fwd", 8, 512, mix=MIXES[1], activation=activation)
    gate = np.concatenate([[0.0], *np.outer([-1, 1], np.geomspace(1e-20, 3e4, 255)), [-0.0]])
    arrays = norms.make_operands(spec)
    arrays["gate"] = jnp.asarray(np.broadcast_to(gate, (8, 512)), F32)
    _, found, stats = norms.check_forward(
        functools.partial(run, schedule=ROW_TILES[1]), spec, arrays
    )
    backward = changed(spec, direction="bwd", want_stats=False)
    call = functools.partial(run, schedule=RINGS[1][1])
    norms.check_backward(call, backward, arrays, (found, stats))


@interpreted
@pytest.mark.parametrize(
    ("rows", "cols", "schedule"),
    [(6, 1024, PipelinedRows(4, 1, stages=2, rows=2)), (9, 440, RINGS[1][1])],
    ids=str,
)
def test_two_norms_in_float16_that_overflow(rows: int, cols: int, schedule: Any) -> None:
    """An infinite y whose cotangent is 0 acts like the largest finite number.

    The cotangent is 0 if, for example, a tanh follows.
    """
    spec = FAMILIES["two norms"].spec("bwd", rows, cols, mix=(F32, F32, F16))
    *_, (x, saved, *others, dy, dh) = norms.backward_operands(spec)
    dy = dy.at[1, 5].set(0)
    of_inf, of_largest = (
        run(spec, x, saved.at[1, 5].set(y), *others, dy, dh, schedule=schedule)
        for y in (np.inf, 65504)
    )
    for a, b in zip(of_inf, of_largest):
        np.testing.assert_array_equal(a, b)
        assert a is None or np.all(np.isfinite(a))


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
def test_activations_of_groups_of_channels(
    strips: str,
    dtype: Any,
    activation: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strip_schedule, "strips_of", lambda spec: STRIPS[strips])
    spec = test_group_norm.spec_of(
        STRIPS[strips], dtype, saved="input", activation=activation, **changes
    )
    test_group_norm.check(spec, adds_dh="adds_dh" in changes)


# ------------------------------------------------------------------------------- for a GPU


def lowered_cases() -> Iterable[Any]:
    """Yield test parameters: each shape of each family with one to three combinations of options.

    Successive shapes have successive combinations, so that all combinations occur. The combinations
    of "scaled sum" differ only in the dtypes, and each shape has three of them.
    """
    for family, of in FAMILIES.items():
        times = {"activation": 1, "scaled sum": 3}.get(family, 2)
        for i, shape in enumerate([*of.shapes] * times):
            given = of.combinations[(i + i // len(of.shapes)) % len(of.combinations)]
            if family == "scaled sum":
                given = {"mix": MIXES[i // len(of.shapes)]}
            yield pytest.param(family, shape, given, id=f"{family}-{shape}-{given}")


@pytest.mark.oldest_jax
@pytest.mark.parametrize(("family", "shape", "given"), [*lowered_cases()])
def test_lowers_for_a_gpu(family: str, shape: tuple[int, ...], given: dict[str, Any]) -> None:
    """Each pass lowers to one kernel."""
    for direction in FAMILIES[family].directions:
        spec = FAMILIES[family].spec(direction, *shape, **given)
        assert mosaic.why_unsupported(spec) is None
        call = functools.partial(contract.call, mosaic, spec)
        assert kernels_in(call, *norms.types_of(spec)) == 1


SHORT = {"rows": 32, "cols": 64}, "needs at least 64 rows this short"
STATISTICS = {"stat_cotangents": True}, "only plain JAX"
SHARED_REFUSALS = [
    ({"cols": 7}, "rows of at least 8 elements"),
    ({"scattered": True}, "not consecutive"),
    ({"cols": 2**19}, "support no rows of this length"),
]


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        *(("activation", *refusal) for refusal in (SHORT, STATISTICS)),
        *(("gate", *refusal) for refusal in (SHORT, STATISTICS, *SHARED_REFUSALS)),
        ("gate", {"gate_dtype": np.dtype("float64")}, "float64"),
        ("gate", {"cols": 8191}, "a multiple of 16 bytes"),
        *(("scaled sum", *refusal) for refusal in (SHORT, STATISTICS, *SHARED_REFUSALS)),
        # Rows of the float32 residual are a multiple of 16 bytes, but rows of the bfloat16 x are
        # not.
        (
            "scaled sum",
            {"cols": 100, "saved": "input", "residual_dtype": F32},
            "a multiple of 16 bytes",
        ),
        ("scaled sum", {"scale_groups": 8, "branch_scale_groups": 4}, "groups of different sizes"),
        ("scaled sum", {"unused": "y"}, "only plain JAX"),
        ("scaled sum", {"branch_scale_dtype": np.dtype("float64")}, "float64"),
        ("two norms", {"cols": 50257}, "multiple of 16 bytes"),
        ("two norms", {"cols": 262144}, "no rows of this length"),
    ],
    ids=str,
)
def test_refusals(family: str, change: dict[str, Any], sentence: str) -> None:
    spec = changed(FAMILIES[family].spec("bwd", 8192, 1024), **change)
    assert sentence in (mosaic.why_unsupported(spec) or "")


COMPILED = {
    "gate": [order | {"activation": "gelu"} for order in IN_BOTH_ORDERS],
    "activation": [{"kind": kind, "activation": "gelu"} for kind in KINDS],
    "scaled sum": [{"saved": "output"}, {"saved": "input"}],
    "two norms": [{}],
}


@pytest.mark.parametrize(
    ("family", "shape", "given"),
    [
        pytest.param(family, shape, {"mix": mix, **given}, id=f"{family}-{shape}-{mix}-{given}")
        for family, of in FAMILIES.items()
        for given in COMPILED[family]
        for mix in of.options["mix"][: of.mixes]
        for shape in of.shapes
    ],
)
def test_registers(
    family: str, shape: tuple[int, ...], given: dict[str, Any], compiler: Compiler
) -> None:
    for direction in FAMILIES[family].directions:
        spec = FAMILIES[family].spec(direction, *shape, **given)
        call = functools.partial(contract.call, mosaic, spec)
        (kernel,) = compiler.compile(call, norms.types_of(spec))
        assert_fits(kernel, spec)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sizes", test_group_norm.SIZES + test_group_norm.UNEVEN[:2], ids=str)
def test_registers_of_strips(
    sizes: tuple[int, ...], dtype: np.dtype, direction: str, compiler: Compiler
) -> None:
    outer, cols, inner, groups = sizes
    given = {"saved": "input", "activation": "gelu"}
    shape, group = (outer, cols, inner), inner // groups
    spec = test_group_norm.make_spec(direction, shape, group, dtype, **given)
    (kernel,) = compiler.compile(test_group_norm.call_of(spec), test_group_norm.types(spec))
    assert kernel.spilled == 0
    # The registers must suffice for two blocks per SM.
    threads = 128 * strip_schedule.strips_of(spec).warpgroups
    assert -(-kernel.registers // 8) * 8 * threads * 2 <= schedules.REGISTERS
