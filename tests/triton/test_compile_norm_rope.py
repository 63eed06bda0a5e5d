"""A norm and the rotation after it compile for every GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from specs import build_spec
from test_compile import (
    BF16,
    F16,
    F32,
    GPUS,
    choose,
    choose_line,
    compile_call,
    kernels_in,
    schedules,
)

import jaxnorm
from jaxnorm_kernels.specs import Shared

# Columns of a head, and how many of them are rotated.
HEADS = [(2, 2), (33, 6), (64, 64), (80, 32), (96, 96), (128, 128), (192, 64), (256, 256)]
HEADS += [(1024, 1024)]


def make_spec(direction, cols, rotated, x=BF16, y=BF16, heads=32, **changes):
    options = {"scale_dtype": F32, "epsilon": 1e-6, "want_stats": True, "table_dtype": F32}
    return build_spec(
        "norm_rope",
        direction,
        4 * 2048 * heads,
        cols,
        x,
        y,
        rotated=rotated,
        table_rows=Shared(((4, False), (2048, True), (heads, False)), has_columns=True),
        **(options | changes),
    )


def check(spec, gpu):
    """It is one kernel, of which nothing spills: heads are short."""
    (kernel,) = compile_call(spec, gpu)
    assert kernel.shared <= gpu.smem
    assert kernel.registers <= choose(spec, gpu).registers
    assert kernel.spilled == 0
    return kernel


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("cols", "rotated"), HEADS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_heads_compile(direction, cols, rotated, interleaved, dtype):
    # In turn, so that each size meets all: GPUs, and heads whose tiles share a position or do not.
    gpu = [*GPUS][(HEADS.index((cols, rotated)) + interleaved) % len(GPUS)]
    heads = 3 if interleaved else 32
    spec = make_spec(direction, cols, rotated, dtype, dtype, heads, interleaved=interleaved)
    check(spec, GPUS[gpu])


@pytest.mark.parametrize(
    "change",
    [
        {"scale_dtype": None},
        {"saved": "input", "scale_dtype": BF16},
        {"table_dtype": BF16, "scale_groups": 4},
        {"scale_offset": 1.0, "table_dtype": F16},
    ],
    ids=str,
)
@pytest.mark.parametrize(("x", "y"), [(F32, BF16), (BF16, F32), (F16, F16)], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_mixes_compile(direction, x, y, change):
    check(make_spec(direction, 128, 64, x, y, **change), GPUS["sm_80"])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_elements_are_read_and_written_16_bytes_at_a_time(direction, interleaved, dtype):
    kernel = check(
        make_spec(direction, 128, 128, dtype, dtype, interleaved=interleaved), GPUS["sm_80"]
    )
    written = re.findall(r"st\.global[\w.:]*", kernel.ptx)
    # Statistics and the sums of dscale are numbers of a row, or of a program.
    assert any(".v4.b32" in kind for kind in written)
    read = re.findall(r"ld\.global\.(?!L1)[\w.:]*|cp\.async\.c[ag]\.shared", kernel.ptx)
    assert all(kind.endswith(".v4.b32") for kind in read if kind.startswith("ld."))
    if direction == "bwd":
        assert any("cp.async.cg" in kind for kind in read)


def test_every_line_of_a_table_is_used():
    for direction, table in (
        ("fwd", schedules.NORM_ROPE_FORWARD),
        ("bwd", schedules.NORM_ROPE_BACKWARD),
    ):
        specs = [make_spec(direction, 128, 128, dtype, dtype) for dtype in (BF16, F32)]
        assert {choose_line(spec) for spec in specs} == {*table}


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_calls_lower_for_cuda(interleaved):
    """One kernel forward and one backward, of a batch with scales of its own, too."""
    x, scale = jax.ShapeDtypeStruct((2, 6, 4, 96), BF16), jax.ShapeDtypeStruct((96,), F32)
    table = jax.ShapeDtypeStruct((6, 1, 32), F32)

    def step(x, scale, cos, sin):
        def loss(x, scale):
            y = jaxnorm.rms_norm_rope(
                x, scale, cos, sin, interleaved=interleaved, implementation="triton"
            )
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(x, scale)

    assert kernels_in(step, x, scale, table, table) == 2
    batch = [jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in (x, scale)]
    assert kernels_in(jax.vmap(step, (0, 0, None, None)), *batch, table, table) == 2
