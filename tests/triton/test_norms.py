"""Norms, and operations fused with them, against float64 NumPy, in all kinds of schedules.

The tests call an implementation's functions directly, in Triton's interpreter or on a GPU. They run
everything that `FAMILIES` lists with every schedule.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import contract
import jax
import jax.numpy as jnp
import norms
import numpy as np
import pytest
from needs import INTERPRETED
from pairs import pairwise
from program_error import assert_computes
from reference import ACTIVATIONS, exact
from specs import BF16, F16, F32, changed
from test_schedules import SCHEDULES, make_schedule

import jaxnorm
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels import xla

pytestmark = pytest.mark.triton

SHAPE = (9, 100)
# Dtypes of x, of the second array of rows, and of y.
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16), (F16, BF16, F32)]
OF_ONE = [(BF16, BF16), (F32, F32), (BF16, F32), (F32, F16)]
KINDS, BOTH, SAVED = ["layer_norm", "rms_norm"], [True, False], ["output", "input"]


class Family(NamedTuple):
    """The calls with which one operation is tested, here and in `test_compile_norms`.

    Attributes:
      options: maps an option to its tested values. For any two options, every pair of their values
        is tested. Every value of an option is also tested with every schedule.
      changes: options of further tests. Each dict has the options with which a test differs from
        the default call. These may be options that are not in `options`.
      backward: True if its backward kernels differ from those of a norm without fused operations.
    """

    op: Any
    options: dict[str, Sequence[Any]]
    changes: Sequence[dict[str, Any]] = ()
    given: dict[str, Any] = {}  # noqa: RUF012
    backward: bool = True


SCALES = [
    {"scale_dtype": None},
    {"scale_offset": 1.0},
    {"scale_dtype": BF16},
    {"scale_groups": 3},
    {"scale_groups": 9},
]
OF_SUMS = [*SCALES, {"want_stats": False}]
FAMILIES = {
    "norm": Family(
        "norm",
        {
            "kind": KINDS,
            "mix": OF_ONE,
            "saved": SAVED,
            "adds_dh": BOTH,
            "scale_groups": [1, 3, 9],
            "scale_dtype": [F32, BF16],
        },
        [
            *SCALES[:2],
            {"bias_groups": 3},
            {"scale_groups": 3, "saved": "input"},
            {"scale_groups": 3},
        ],
        {"kind": "layer_norm"},
    ),
    "activation": Family(
        "norm",
        {
            "kind": KINDS,
            "mix": OF_ONE,
            "activation": ["silu", "gelu", "relu"],
            "scale_dtype": [F32, BF16],
        },
        [
            {"scale_dtype": None},
            {"bias_dtype": None},
            {"scale_offset": 1.0},
            {"scale_groups": 3, "bias_groups": 3},
            {"adds_dh": True},
        ],
        {"kind": "layer_norm", "saved": "input", "activation": "silu"},
    ),
    "add_norm": Family(
        "add_norm", {"kind": KINDS, "mix": MIXES, "saved": SAVED}, OF_SUMS, backward=False
    ),
    "norm_add": Family("norm_add", {"mix": MIXES}, OF_SUMS, backward=False),
    "norm_add_norm": Family(
        "norm_add_norm",
        {"mix": MIXES, "saved": SAVED},
        [{"scale_dtype": None, "next_scale_dtype": None}, *OF_SUMS[1:]],
        backward=False,
    ),
    "scaled sum": Family(
        "scaled_add_norm",
        {"kind": KINDS, "mix": MIXES[:4], "saved": SAVED, "groups": [1, 3]},
        [
            {"scale_dtype": None, "bias_dtype": None},
            {"scale_offset": 1.0, "branch_scale_dtype": BF16},
            {"branch_scale_groups": 3},
            {"scale_groups": 3},
            {"scale_groups": 9, "bias_groups": 9},
            {"adds_dh": False},
        ],
        {"kind": "layer_norm"},
    ),
    "gate": Family(
        "norm_gated",
        {"mix": MIXES[:4], "norm_before_gate": BOTH, "activation": ACTIVATIONS},
        [change | {"norm_before_gate": b} for change in SCALES[:4] for b in BOTH],
    ),
}


@pytest.fixture
def call(monkeypatch):
    """Return ``call(spec, *operands, schedule=None)``, which runs a pass.

    `schedule` is a name in `test_schedules.SCHEDULES`, or a `Schedule`. If it is None, the pass
    uses the schedule that the tables choose.
    """
    from jaxnorm_kernels import triton

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)

    def run(spec, *operands, schedule=None):
        assert triton.why_unsupported(spec) is None
        schedule = make_schedule(schedule, spec) if isinstance(schedule, str) else schedule
        options = {} if schedule is None else {"schedule": schedule}
        return contract.call(triton, spec, *operands, **options)

    return run


def make_spec(family, direction, rows, cols, **given):
    """Return the spec of a pass of an entry of `FAMILIES`, with other options in `given`."""
    of = FAMILIES[family]
    given = {"mix": of.options["mix"][1], **of.given, **given}
    if "groups" in given:
        given |= norms.grouped(given.pop("groups"), given["kind"])
    if given.get("scale_dtype") and given.get("kind") == "layer_norm" and of.op == "norm":
        given = {"bias_dtype": given["scale_dtype"], **given}
    return norms.make_spec(of.op, direction, rows, cols, **given)


def check(call, family, schedule=None, **given):
    """Assert that the passes of a call are within their bounds.

    The backward is not tested if it runs the kernels of another operation.
    """
    call = functools.partial(call, schedule=schedule)
    if not given.get("adds_dh"):
        norms.check_forward(call, make_spec(family, "fwd", *SHAPE, **given))
    if FAMILIES[family].backward:
        norms.check_backward(call, make_spec(family, "bwd", *SHAPE, **given))


@pytest.mark.parametrize(
    ("family", "schedule", "given"),
    [
        pytest.param(family, schedule, given, id=f"{family}-{schedule}-{given}")
        for family, of in FAMILIES.items()
        for schedule, *values in pairwise([None, *SCHEDULES], *of.options.values())
        for given in [dict(zip(of.options, values))]
    ],
)
def test_values_and_gradients(family, schedule, given, call):
    check(call, family, schedule, **given)


@pytest.mark.parametrize(
    ("family", "change", "schedule"),
    [
        pytest.param(family, change, schedule, id=f"{family}-{change}-{schedule}")
        for i, (family, of) in enumerate(FAMILIES.items())
        for j, change in enumerate(of.changes)
        for schedule in (None, [*SCHEDULES][(i + j) % len(SCHEDULES)])
    ],
)
def test_variants(family, change, schedule, call):
    check(call, family, schedule, **change)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("scale_groups", [1, 3])
def test_gradients_of_groups_have_the_same_bits(scale_groups, schedule, call):
    groups = {"scale_groups": scale_groups, "bias_groups": 3}
    spec = norms.make_spec("norm", "bwd", *SHAPE, OF_ONE[0], "layer_norm", **groups)
    *_, operands = norms.backward_operands(spec)
    runs = [call(spec, *operands, schedule=schedule) for _ in range(2)]
    for a, b in zip(*runs):
        np.testing.assert_array_equal(exact(a), exact(b))


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.usefixtures("call")
def test_columns_beyond_a_row(activation):
    """The columns with which a kernel pads a row have no effect.

    In this test, all numbers of a row are equal, so the variance is 0. Without a mask, x_hat would
    be huge in padding columns, because their x differs from the mean.
    """
    x = jnp.full((9, 100), 2.0**60, jnp.float32)
    norm = functools.partial(jaxnorm.layer_norm, activation=activation, implementation="triton")
    y, vjp = jax.vjp(norm, x)
    (dx,) = vjp(jnp.ones_like(x))
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


# ------------------------------------------------------------------ norms with rotary embedding

# The fields of a schedule: warps, rows of a tile, programs, stages.
OF_HEADS = {
    "a row in a tile": (1, 1, 3, 1),
    "rows share a tile": (2, 4, 2, 1),
    "the next rows come meanwhile": (1, 2, 2, 3),
}
# The shape of x, the number of rotated columns, and the axes of the tables before their columns.
SHAPES = {
    "heads share a position": ((2, 3, 4, 16), 16, (1, 3, 1)),
    "rows with tables of their own": ((9, 24), 24, (9,)),
    "one row of tables": ((9, 16), 8, (1,)),
    "tables of the first and the last axis": ((2, 3, 4, 20), 12, (2, 1, 4)),
    "nothing is a power of two": ((3, 5, 13), 6, (1, 5)),
    "one pair": ((2, 5, 2), 2, (1, 5)),
    "long": ((3, 300), 300, (3,)),
}
# Dtypes of x, tables, scale and y.
OF_TABLES = [
    (BF16, F32, F32, BF16),
    (F32, F32, F32, F32),
    (F16, F16, F32, F16),
    (BF16, BF16, BF16, F32),
    (F32, F32, BF16, BF16),
    (F16, BF16, F16, F32),
]
OF_SCALES = [{}, {"scale_dtype": None}, {"scale_offset": 1.0}, {"scale_groups": 3}]


@pytest.fixture(params=[None, *OF_HEADS], ids=str)
def rotate(request, call):
    """Return ``rotate(spec, *operands)``, which runs a pass of a norm with a rotation.

    The fixture's parameter is a schedule, or None for the schedule that the tables choose.
    """
    return functools.partial(call, schedule=of_heads(request.param))


def of_heads(name):
    from jaxnorm_kernels.triton.schedule import Schedule

    if name is None:
        return None
    warps, tile_rows, programs, stages = OF_HEADS[name]
    return Schedule(512, warps, tile_rows, programs=programs, stages=stages)


def spec_of(shape, mix=OF_TABLES[1], **changes):
    """Return the spec of a forward for an entry of `SHAPES`."""
    (*lead, cols), rotated, table = SHAPES[shape]
    view = RowView((*lead, cols), (len(lead),), table=(*table, rotated // 2))
    x, tables, scale, y = mix
    changes = {"scale_dtype": scale, **changes}
    changes |= {"rotated": rotated, "table_rows": view.shared("table")}
    return norms.make_spec("norm_rope", "fwd", math.prod(lead), cols, (x, tables, y), **changes)


def check_rotated(rotate, spec, arrays=None):
    """Check both passes and return the gradients.

    The backward reads what the forward has saved.
    """
    arrays, *made = norms.check_forward(rotate, spec, arrays)
    return norms.check_backward(
        rotate, changed(spec, direction="bwd", want_stats=False), arrays, made
    )


@pytest.mark.parametrize(
    ("schedule", "shape", "mix", "saved", "interleaved", "change"),
    pairwise([None, *OF_HEADS], [*SHAPES], OF_TABLES, SAVED, BOTH, OF_SCALES),
    ids=str,
)
def test_rotations(schedule, shape, mix, saved, interleaved, change, call):
    rows = math.prod(SHAPES[shape][0][:-1])
    if rows % change.get("scale_groups", 1):
        change = {}
    spec = spec_of(shape, mix, **{"interleaved": interleaved, "saved": saved, **change})
    check_rotated(functools.partial(call, schedule=of_heads(schedule)), spec)


def with_scale(spec, columns, value):
    arrays = norms.make_operands(spec)
    return arrays | {"scale": arrays["scale"].at[columns].set(value)}


@pytest.mark.parametrize("value", [0.0, -1e-30])
def test_pairs_of_vanishing_scales(value, rotate):
    """If both scales of a rotated pair are 0, a floor replaces them, so x_hat can be recovered."""
    spec = spec_of("heads share a position", OF_TABLES[4])
    gradients = check_rotated(rotate, spec, with_scale(spec, np.array([2, 5, 10, 13]), value))
    assert np.all(exact(gradients["scale"])[2::8] != 0)


@pytest.mark.parametrize("y_dtype", [BF16, F16], ids=str)
def test_a_scale_that_is_small_beside_its_partner_s(y_dtype, rotate):
    """If one scale of a rotated pair is tiny next to the other, its column's x_hat is clipped.

    After the rotation, the column with the large scale dominates both columns of y. So the x_hat
    that the backward computes for the column with the tiny scale consists mostly of rounding
    errors.
    """
    spec = spec_of("heads share a position", (F32, F32, F32, y_dtype))
    arrays = with_scale(spec, np.array([2, 5]), 2.0**-40)
    dscale = exact(check_rotated(rotate, spec, arrays)["scale"])
    # The rotation combines two columns, a pair. Let d1 and d2 be the cotangents of the rotated
    # pair. Each column of the pair before the rotation then has a cotangent of at most
    # (|d1| + |d2|) * 1.2, because no entry of the tables cos and sin exceeds 1.2.
    d = np.abs(exact(arrays["dy"]))
    most = 1.2 * (d + np.roll(d, 8, 1)).sum(0) * math.sqrt(spec.cols)
    assert np.all(np.abs(dscale) <= most)


def gradients_of(rotate, spec, arrays):
    """Run both passes, and return y, dx and dscale."""
    y, stats = rotate(spec, *[arrays[n] for n in norms.names_of(spec)])
    backward = changed(spec, direction="bwd", want_stats=False)
    *_, operands = norms.backward_operands(backward, arrays, ({"y": y}, stats))
    return y, *rotate(backward, *operands)[:2]


@pytest.mark.parametrize("interleaved", BOTH)
def test_tables_of_zero_tell_nothing(interleaved, rotate):
    """If cos and sin of a pair of columns are 0, y, dx and dscale are 0 in these columns.

    In all columns, the results equal those of plain JAX.
    """
    spec = spec_of("rows with tables of their own", interleaved=interleaved)
    arrays = norms.make_operands(spec)
    arrays |= {name: arrays[name].at[:, 1::4].set(0) for name in ("cos", "sin")}
    ours = gradients_of(rotate, spec, arrays)
    plain = functools.partial(contract.call, xla)
    assert_computes(ours, lambda: gradients_of(plain, spec, arrays))
    firsts = np.arange(0, 24, 2) if interleaved else np.arange(12)
    for a in ours:
        assert np.all(exact(a)[..., firsts[1::4]] == 0)


def test_an_output_that_overflows(rotate):
    """Gradients are finite if elements of y overflow float16 and their cotangents are 0."""
    spec = spec_of("heads share a position", (F32, F32, F32, F16))
    arrays = with_scale(spec, np.array([2, 10]), 1e6)
    y, _ = rotate(spec, *[arrays[n] for n in norms.names_of(spec)])
    assert np.isinf(exact(y)).any()
    arrays["dy"] = jnp.where(jnp.isinf(y), 0, arrays["dy"]).at[:, 2::8].set(0)
    for gradient in gradients_of(rotate, spec, arrays)[1:]:
        assert np.isfinite(exact(gradient)).all()
