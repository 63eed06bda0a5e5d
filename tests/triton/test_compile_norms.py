"""Norms with fused operations compile for all GPUs: residuals, gates, rotations, groups of rows.

The kernels have the schedules of the schedule tables. In the code, dh is the cotangent of the sum
h. The backward takes dh in addition to dy.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import norms
import pytest
from pairs import pairwise
from reference import ACTIVATIONS
from specs import BF16, F16, F32
from test_compile import GPUS, check, compile_call

from jaxnorm_kernels.specs import Shared
from jaxnorm_kernels.triton.schedule import choose

# Widths of short rows, of unaligned rows, and of rows for which a backward needs a loop.
COLS = [64, 128, 1000, 1152, 2048, 4095, 4096, 8192, 16384, 50257]
OF_SUMS = [1000, 4095, 4096, 16384]
KINDS, BOTH, BOTH_WAYS = ["layer_norm", "rms_norm"], [True, False], ["fwd", "bwd"]
DTYPES = [BF16, F32]


class Family(NamedTuple):
    """The calls with which one operation is tested.

    Attributes:
      options: maps an option to the values that are tested. For any two options, every pair of
      their values is compiled for some GPU.
      mixes: combinations of dtypes. Each is compiled for one GPU, with each entry of `changes`.
      changes: dicts of options that replace the defaults.
      second: True if the operation has a second array of rows.
      columns: the largest row length for which register spills are limited, or None. Up to this
      length, a thread may spill at most half of the values that it holds. If None, this limit
      applies to all rows that are held in registers.
    """

    op: Any
    options: dict[str, Sequence[Any]]
    mixes: Sequence[tuple[Any, ...]]
    changes: Sequence[dict[str, Any]]
    second: bool = True
    given: dict[str, Any] = {}  # noqa: RUF012
    columns: int | None = None
    directions: Sequence[str] = BOTH_WAYS
    widths: Sequence[int] = COLS


OF_RESIDUALS = [(BF16, F32, BF16), (F32, BF16, F32), (F16, F32, BF16), (F16, F16, BF16)]
CHANGES = [{}, {"scale_dtype": None}, {"saved": "input", "scale_dtype": BF16}]
CHANGES.append({"scale_groups": 8})
FAMILIES = {
    "gate": Family(
        "norm_gated",
        {"norm_before_gate": BOTH, "activation": ACTIVATIONS},
        [(BF16, F32, BF16), (F32, BF16, F32), (F16, F32, BF16), (F16, F16, F16)],
        [
            change | {"norm_before_gate": before}
            for change in ({}, {"scale_dtype": None}, {"scale_dtype": BF16}, {"scale_groups": 8})
            for before in BOTH
        ],
    ),
    "activation": Family(
        "norm",
        {"kind": KINDS, "activation": ["silu", "gelu", "relu"]},
        [(BF16, F32), (F32, BF16), (F16, F32), (F16, F16)],
        [{}, {"scale_dtype": None}, {"bias_dtype": BF16}, {"scale_groups": 8, "bias_groups": 8}],
        second=False,
        given={"kind": "layer_norm", "saved": "input", "activation": "silu"},
        columns=8192,  # wider rows spill even without an activation
    ),
    "scaled sum": Family(
        "scaled_add_norm",
        {"kind": KINDS, "groups": [1, 8]},
        [(BF16, F32, BF16), (F32, BF16, F32), (F16, F32, BF16)],
        [
            {"scale_dtype": None, "bias_dtype": None},
            {"saved": "input"},
            {"branch_scale_groups": 8},
            {"scale_groups": 8, "bias_groups": 8},
        ],
        given={"kind": "layer_norm"},
    ),
    "add_norm": Family(
        "add_norm",
        {"kind": KINDS},
        OF_RESIDUALS,
        [change | {"kind": kind} for change in CHANGES for kind in KINDS],
        directions=["fwd"],
        widths=OF_SUMS,
    ),
    "norm_add": Family("norm_add", {}, OF_RESIDUALS, CHANGES, directions=["fwd"], widths=OF_SUMS),
    "norm_add_norm": Family(
        "norm_add_norm", {}, OF_RESIDUALS, CHANGES, directions=["fwd"], widths=OF_SUMS
    ),
    "dh": Family(
        "norm",
        {"kind": KINDS},
        [],
        [],
        second=False,
        given={"adds_dh": True},
        columns=0,
        directions=["bwd"],
        widths=OF_SUMS,
    ),
}


def make_spec(family, direction, cols, dtype=BF16, mix=None, **given):
    of = FAMILIES[family]
    given = {**of.given, **given}
    if "groups" in given:
        given |= norms.grouped(given.pop("groups"), given["kind"])
    mix = mix or (dtype,) * (2 + of.second)
    return norms.make_spec(of.op, direction, 4096, cols, mix, **given)


def in_turn():
    """Yield cases for all families of calls.

    A case has a value of each of these parameters: GPU, width, dtype, direction, and each option.
    For any two parameters (such as GPU and width), every pair of their values occurs in some case.
    """
    for family, of in FAMILIES.items():
        axes = [[*GPUS], of.widths, DTYPES, of.directions, *of.options.values()]
        for gpu, cols, dtype, direction, *values in pairwise(*axes):
            if direction == "fwd" and cols > 16384:
                continue  # not supported
            given = dict(zip(of.options, values))
            name = f"{family}-{gpu}-{cols}-{dtype}-{direction}-{given}"
            yield pytest.param(family, gpu, cols, dtype, direction, given, id=name)


@pytest.mark.parametrize(("family", "gpu", "cols", "dtype", "direction", "given"), [*in_turn()])
def test_tables_compile(family, gpu, cols, dtype, direction, given):
    spec = make_spec(family, direction, cols, dtype, **given)
    check(spec, GPUS[gpu])
    held = FAMILIES[family].columns
    is_held = not choose(spec, GPUS[gpu]).is_looped(spec) if held is None else cols <= held
    for kernel in compile_call(spec, GPUS[gpu]):
        # If rows are held in registers, a thread holds up to 32 values of 4 bytes. At most half of
        # these values may spill.
        assert not is_held or kernel.spilled <= 4 * 32 / 2


@pytest.mark.parametrize(
    ("family", "mix", "direction", "cols"),
    [
        pytest.param(family, mix, direction, cols, id=f"{family}-{mix}-{direction}-{cols}")
        for family, of in FAMILIES.items()
        for mix in of.mixes
        for direction in of.directions
        for cols in (1000, 65536 if direction == "bwd" else 16384)
    ],
)
def test_mixes_compile(family, mix, direction, cols):
    for change in FAMILIES[family].changes:
        check(make_spec(family, direction, cols, mix=mix, **change), GPUS["sm_80"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [256, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_elements_are_read_and_written_16_bytes_at_a_time(family, cols, dtype):
    for direction in FAMILIES[family].directions:
        for kernel in compile_call(make_spec(family, direction, cols, dtype), GPUS["sm_80"]):
            kinds = re.findall(r"(?:ld|st)\.global[\w.:]*|cp\.async\.c[ag]\.shared", kernel.ptx)
            assert any(".v4." in kind or kind.startswith("cp.async.cg") for kind in kinds)
            assert not [kind for kind in kinds if re.search(r"\.(b|u)16$", kind)]


# ---------------------------------------------------------------------- norms with rotary embedding

# Each entry is a tuple (number of columns of a head, number of rotated columns).
HEADS = [(2, 2), (33, 6), (64, 64), (80, 32), (96, 96), (128, 128), (192, 64), (256, 256)]
HEADS += [(1024, 1024)]


def of_heads(direction, cols, rotated, x=BF16, y=BF16, heads=32, table=F32, **changes):
    shared = Shared(((4, False), (2048, True), (heads, False)), has_columns=True)
    changes |= {"rotated": rotated, "table_rows": shared}
    return norms.make_spec(
        "norm_rope", direction, shared.rows * 4 * heads, cols, (x, table, y), **changes
    )


def check_heads(spec, gpu):
    """Assert that a pass compiles to one kernel that fits the GPU and spills nothing."""
    (kernel,) = compile_call(spec, gpu)
    assert kernel.shared <= gpu.smem
    assert kernel.registers <= choose(spec, gpu).registers
    assert kernel.spilled == 0
    return kernel


each_order = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_order
@pytest.mark.parametrize(("cols", "rotated"), HEADS)
@pytest.mark.parametrize("direction", BOTH_WAYS)
def test_heads_compile(direction, cols, rotated, interleaved, dtype):
    # The cases take the GPUs in turn, so each head size is compiled for several GPUs.
    gpu = [*GPUS][(HEADS.index((cols, rotated)) + interleaved) % len(GPUS)]
    heads = 3 if interleaved else 32
    spec = of_heads(direction, cols, rotated, dtype, dtype, heads, interleaved=interleaved)
    check_heads(spec, GPUS[gpu])


@pytest.mark.parametrize("direction", BOTH_WAYS)
def test_mixes_of_heads_compile(direction):
    for (x, y), change in itertools.product(
        [(F32, BF16), (BF16, F32), (F16, F16)],
        [{"scale_dtype": None}, {"saved": "input"}, {"table": BF16, "scale_groups": 4}],
    ):
        check_heads(of_heads(direction, 128, 64, x, y, **change), GPUS["sm_80"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_order
@pytest.mark.parametrize("direction", BOTH_WAYS)
def test_heads_are_read_and_written_8_or_16_bytes_at_a_time(direction, interleaved, dtype):
    spec = of_heads(direction, 128, 128, dtype, dtype, interleaved=interleaved)
    kernel = check_heads(spec, GPUS["sm_80"])
    # In the backward pass, a thread has 4 columns of each half of a head. In a 16-bit dtype, these
    # are 8 bytes.
    size = 8 if direction == "bwd" and dtype == BF16 and not interleaved else 16
    written = re.findall(r"st\.global[\w.:]*", kernel.ptx)
    # Arrays of rows are stored `size` bytes at a time. Statistics (one number per row) and partial
    # sums of dscale (one per program) may be stored in other widths.
    assert any(f".v{size // 4}.b32" in kind for kind in written)
    read = re.findall(r"ld\.global\.(?!L1)[\w.:]*", kernel.ptx)
    assert all(kind.endswith(".v4.b32") for kind in read)
    if direction == "bwd":
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x(\w+),", kernel.ptx)
        assert {*copies} == {"4", f"{size:x}"}
