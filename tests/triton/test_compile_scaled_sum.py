"""A norm of residual + branch_scale x compiles for every GPU, as the tables schedule it."""

import pytest
from pairs import pairwise
from scaled_sum_cases import make_spec
from test_compile import BF16, F16, F32, GPUS, check, compile_call

from jaxnorm_kernels.triton.schedule import choose

# Short rows, unaligned, held, and looped over.
COLS = [64, 128, 1000, 1152, 2048, 4095, 4096, 8192, 16384, 50257]
KINDS = ["layer_norm", "rms_norm"]


@pytest.mark.parametrize(
    ("gpu", "cols", "dtype", "direction", "kind", "groups"),
    pairwise([*GPUS], COLS, [BF16, F32], ["fwd", "bwd"], KINDS, [1, 8]),
    ids=str,
)
def test_tables_compile(gpu, cols, dtype, direction, kind, groups):
    of = (groups, groups if kind == "layer_norm" else 1, groups)
    spec = make_spec(direction, 4096, cols, (dtype,) * 3, kind, of)
    check(spec, GPUS[gpu])
    for kernel in compile_call(spec, GPUS[gpu]):
        if not choose(spec, GPUS[gpu]).is_looped(spec):
            # At most half of the 32 values that a thread holds of the widest rows.
            assert kernel.spilled <= 4 * 32 / 2


@pytest.mark.parametrize("mix", [(BF16, F32, BF16), (F32, BF16, F32), (F16, F32, BF16)], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cols", [1000, 65536])
def test_mixes_compile(cols, direction, mix):
    changes = ({"scale_dtype": None, "bias_dtype": None}, {"saved": "input"})
    for change in (*changes, {"groups": (1, 1, 8)}, {"groups": (8, 8, 1)}):
        check(make_spec(direction, 4096, cols, mix, **change), GPUS["sm_80"])
