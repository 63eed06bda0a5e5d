"""A norm and a gate compile for Ampere, Ada and Hopper, as the tables schedule them."""

import re

import jax
import jax.numpy as jnp
import pytest
from gated_cases import ACTIVATIONS, make_spec
from pairs import pairwise
from test_compile import BF16, F16, F32, GPUS, check, compile_call, kernels_in

import jaxnorm
from jaxnorm_kernels.triton.schedule import choose

# Short rows, unaligned, held, and looped over.
COLS = [64, 128, 1000, 2048, 4095, 4096, 8192, 16384, 50257]
DTYPES = [BF16, F32]
ORDERS = [True, False]


def same(direction, cols, dtype, **given):
    return make_spec(direction, 4096, cols, (dtype,) * 3, **given)


@pytest.mark.parametrize(
    ("gpu", "cols", "dtype", "direction", "before", "activation"),
    pairwise([*GPUS], COLS, DTYPES, ["fwd", "bwd"], ORDERS, ACTIVATIONS),
    ids=str,
)
def test_tables_compile(gpu, cols, dtype, direction, before, activation):
    spec = same(direction, cols, dtype, norm_before_gate=before, activation=activation)
    check(spec, GPUS[gpu])
    for kernel in compile_call(spec, GPUS[gpu]):
        if not choose(spec, GPUS[gpu]).is_looped(spec):
            # At most half of the 32 values that a thread holds of the widest rows.
            assert kernel.spilled <= 4 * 32 / 2


@pytest.mark.parametrize(
    "mix", [(BF16, F32, BF16), (F32, BF16, F32), (F16, F32, BF16), (F16, F16, F16)], ids=str
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cols", [1000, 65536])
def test_mixes_compile(cols, direction, mix):
    for change in ({}, {"scale_dtype": None}, {"scale_dtype": BF16}, {"scale_groups": 8}):
        for before in ORDERS:
            spec = make_spec(direction, 4096, cols, mix, norm_before_gate=before, **change)
            check(spec, GPUS["sm_80"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("before", ORDERS)
def test_elements_are_read_and_written_16_bytes_at_a_time(before, direction, dtype):
    (kernel,) = compile_call(same(direction, 4096, dtype, norm_before_gate=before), GPUS["sm_80"])
    kinds = re.findall(r"(?:ld|st)\.global[\w.:]*|cp\.async\.c[ag]\.shared", kernel.ptx)
    assert any(".v4." in kind or kind.startswith("cp.async.cg") for kind in kinds)
    assert not [kind for kind in kinds if re.search(r"\.(b|u)16$", kind)]


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("before", ORDERS)
def test_calls_lower_for_cuda(before):
    """One kernel forward and one backward, of a batch with scales of its own, too."""
    x, scale = jax.ShapeDtypeStruct((2, 6, 4, 96), BF16), jax.ShapeDtypeStruct((96,), F32)

    def step(x, gate, scale):
        def loss(*operands):
            y = jaxnorm.rms_norm_gated(*operands, norm_before_gate=before, implementation="triton")
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(x, gate, scale)

    assert kernels_in(step, x, x, scale) == 2
    batch = [jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in (x, scale)]
    assert kernels_in(jax.vmap(step), batch[0], *batch) == 2
