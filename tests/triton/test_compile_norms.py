"""Norms with fused operations compile for all GPUs: residuals, gates, rotations, groups of rows.

The kernels have the schedules of the schedule tables. In the code, dh is the cotangent of the sum
h. The backward takes dh in addition to dy.
"""

import itertools
import re

import norms
import pytest
from pairs import pairwise
from specs import BF16, F16, F32
from test_compile import GPUS, check, compile_call
from test_norms import FAMILIES, make_spec

from jaxnorm_kernels.specs import Shared
from jaxnorm_kernels.triton.schedule import choose

# Widths of short rows, of unaligned rows, and of rows for which a backward needs a loop.
COLS = [64, 128, 1000, 1152, 2048, 4095, 4096, 8192, 16384, 50257]
ROWS = 4608  # a multiple of the numbers of groups in `FAMILIES`
BOTH_WAYS, DTYPES = ["fwd", "bwd"], [BF16, F32]
#: The row length up to which register spills are limited for a family. For other families, they are
#: limited for all rows that are held in registers.
LIMITED = {"activation": 8192, "norm": 0}


def directions_of(family):
    return BOTH_WAYS if FAMILIES[family].backward else ["fwd"]


def in_turn():
    """Yield cases for all families of calls.

    A case has a value of each of these parameters: GPU, width, direction, and each option. For any
    two parameters (such as GPU and width), every pair of their values occurs in some case, unless a
    kernel does not support it.
    """
    for family, of in FAMILIES.items():
        axes = [[*GPUS], COLS, directions_of(family), *of.options.values()]
        for gpu, cols, direction, *values in pairwise(*axes):
            given = dict(zip(of.options, values))
            if direction == "bwd" or (cols <= 16384 and not given.get("adds_dh")):
                name = f"{family}-{gpu}-{cols}-{direction}-{given}"
                yield pytest.param(family, gpu, cols, direction, given, id=name)


@pytest.mark.parametrize(("family", "gpu", "cols", "direction", "given"), [*in_turn()])
def test_tables_compile(family, gpu, cols, direction, given):
    spec = make_spec(family, direction, ROWS, cols, **given)
    check(spec, GPUS[gpu])
    is_held = not choose(spec, GPUS[gpu]).is_looped(spec) and cols <= LIMITED.get(family, cols)
    if is_held and len({*given["mix"]}) == 1:
        # A thread holds up to 32 values of 4 bytes. At most half of these values may spill.
        assert all(kernel.spilled <= 4 * 32 / 2 for kernel in compile_call(spec, GPUS[gpu]))


@pytest.mark.parametrize("cols", [1000, 16384])
@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, of in FAMILIES.items() for change in of.changes],
    ids=str,
)
def test_changes_compile(family, change, cols):
    for direction in directions_of(family):
        if direction == "bwd" or not change.get("adds_dh"):
            check(make_spec(family, direction, ROWS, cols, **change), GPUS["sm_80"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [256, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_elements_are_read_and_written_16_bytes_at_a_time(family, cols, dtype):
    mix = (dtype,) * len(FAMILIES[family].options["mix"][0])
    for direction in directions_of(family):
        for kernel in compile_call(
            make_spec(family, direction, ROWS, cols, mix=mix), GPUS["sm_80"]
        ):
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
