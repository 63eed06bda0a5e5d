"""Norms with a residual, a second cotangent and parameters of groups compile for every GPU."""

import functools
import re

import jax
import pytest
from specs import build_spec, changed
from test_compile import BF16, F16, F32, GPUS, check, compile_call, kernels_in

from benchmarks import contract
from jaxnorm_kernels import triton
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.schedule import choose, choose_line

# Rows that are short, unaligned, held, and looped over.
COLS = [1000, 4095, 4096, 16384, 32768, 50257]
KINDS = ["add_rms_norm", "add_layer_norm", "rms_norm_add", "rms_norm_add_rms_norm"]


def make_spec(kind, cols, x=BF16, residual=BF16, **changes):
    """A forward pass with a residual; or the backward one of a norm that adds dh."""
    backward = kind.endswith("bwd")
    layer = {"subtract_mean": True, "bias_dtype": F32} if "layer" in kind else {}
    more = {"adds_dh": True} if backward else {"residual_dtype": residual}
    if kind == "rms_norm_add_rms_norm":
        more["next_scale_dtype"] = F32
    op = "norm" if backward else re.sub("layer_norm|rms_norm", "norm", kind)
    options = {"scale_dtype": F32, "epsilon": 1e-6, "want_stats": True, **layer, **more}
    direction = "bwd" if backward else "fwd"
    return build_spec(op, direction, 4096, cols, x, BF16 if x == F16 else x, **(options | changes))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", GPUS)
def test_residuals_compile(gpu, kind, cols, dtype):
    spec = make_spec(kind, cols, dtype, dtype)
    check(spec, GPUS[gpu])
    (kernel,) = compile_call(spec, GPUS[gpu])
    if not choose(spec, GPUS[gpu]).is_looped(spec):
        # At most half of the 32 values that a thread holds of the widest rows.
        assert kernel.spilled <= 4 * 32 / 2


@pytest.mark.parametrize(
    ("x", "residual"), [(BF16, F32), (F32, BF16), (F16, F32), (F16, F16)], ids=str
)
@pytest.mark.parametrize("cols", [1000, 8192, 65536])
@pytest.mark.parametrize("kind", KINDS)
def test_mixes_compile(kind, cols, x, residual):
    for change in ({}, {"scale_dtype": None}, {"saved": "input", "scale_dtype": BF16}):
        check(make_spec(kind, cols, x, residual, **change), GPUS["sm_80"])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("kind", ["rms_norm_bwd", "layer_norm_bwd"])
@pytest.mark.parametrize("gpu", GPUS)
def test_backward_with_dh_compiles(gpu, kind, cols, dtype):
    check(make_spec(kind, cols, dtype), GPUS[gpu])


@pytest.mark.parametrize(("cols", "groups"), [(64, 64), (1000, 8), (4096, 4096), (50257, 8)])
@pytest.mark.parametrize("kind", [*KINDS, "rms_norm_bwd", "layer_norm_bwd"])
@pytest.mark.parametrize("gpu", GPUS)
def test_groups_compile(gpu, kind, cols, groups):
    check(make_spec(kind, cols, scale_groups=groups), GPUS[gpu])
    if "layer" in kind:
        check(make_spec(kind, cols, bias_groups=groups), GPUS[gpu])


@pytest.mark.parametrize("cols", [256, 4096, 65536])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "rms_norm_bwd"])
def test_elements_are_read_and_written_16_bytes_at_a_time(kind, dtype, cols):
    for kernel in compile_call(make_spec(kind, cols, dtype, dtype), GPUS["sm_80"]):
        kinds = re.findall(r"(?:ld|st)\.global[\w.:]*", kernel.ptx)
        assert {kind.split(".")[-1] for kind in kinds} == {"b32"}
        assert any(".v4." in kind for kind in kinds)


def test_every_line_of_a_table_is_used():
    for table, kinds in (
        (schedules.RESIDUAL_FORWARD, KINDS[:3]),
        (schedules.TWO_NORMS_FORWARD, KINDS[3:]),
    ):
        widths = [*COLS, 2048, 8192, 12288]
        specs = [make_spec(kind, n, t, t) for kind in kinds for n in widths for t in (BF16, F32)]
        lines = {choose_line(changed(spec, rows=32768)) for spec in specs}
        assert lines == set(table)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("cols", [300, 65536])
def test_calls_lower_for_cuda(cols, groups):
    """One kernel for each forward; of the backward, two where a row is looped over."""
    x = jax.ShapeDtypeStruct((6, cols), BF16)
    scale = jax.ShapeDtypeStruct((cols,) if groups == 1 else (groups, cols), F32)
    stat = jax.ShapeDtypeStruct((6,), F32)

    for kind, operands in (
        ("add_rms_norm", (x, x, scale, None)),
        ("rms_norm_add", (x, x, scale)),
        ("rms_norm_add_rms_norm", (x, x, scale, scale)),
        ("rms_norm_bwd", (x, (stat,), scale, None, x, x)),
    ):
        spec = changed(make_spec(kind, cols), rows=6, scale_groups=groups)
        run = functools.partial(contract.call, triton, spec)
        looped = "bwd" in kind and cols > 16384
        assert kernels_in(run, *operands) == 1 + looped
