"""A norm and an activation compile for Ampere, Ada and Hopper, as the tables schedule them."""

import jax
import jax.numpy as jnp
import pytest
from pairs import pairwise
from specs import build_spec
from test_compile import BF16, F16, F32, GPUS, check, compile_call, kernels_in

import jaxnorm

# Short rows, unaligned, held, and looped over.
COLS = [64, 128, 1000, 2048, 4095, 4096, 8192, 16384, 50257]
NORMS, ACTIVATIONS = ("layer_norm", "rms_norm"), ("silu", "gelu", "relu")


def make_spec(norm, direction, cols, x, y=None, **changes):
    layer = {"subtract_mean": True, "bias_dtype": F32} if norm == "layer_norm" else {}
    options = {"scale_dtype": F32, "epsilon": 1e-6, "saved": "input", "activation": "silu"}
    options |= {"want_stats": direction == "fwd", **layer, **changes}
    return build_spec("norm", direction, 4096, cols, x, x if y is None else y, **options)


@pytest.mark.parametrize(
    ("gpu", "cols", "dtype", "direction", "norm", "activation"),
    pairwise([*GPUS], COLS, [BF16, F32], ["fwd", "bwd"], NORMS, ACTIVATIONS),
    ids=str,
)
def test_tables_compile(gpu, cols, dtype, direction, norm, activation):
    spec = make_spec(norm, direction, cols, dtype, activation=activation)
    check(spec, GPUS[gpu])
    for kernel in compile_call(spec, GPUS[gpu]):
        if cols <= 8192:  # of wider rows some values spill without an activation, too
            # At most half of the 32 values that a thread holds of the widest rows.
            assert kernel.spilled <= 4 * 32 / 2


@pytest.mark.parametrize("mix", [(BF16, F32), (F32, BF16), (F16, F32), (F16, F16)], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("cols", [1000, 65536])
def test_mixes_compile(cols, direction, mix):
    groups = {"scale_groups": 8, "bias_groups": 8}
    for change in ({}, {"scale_dtype": None}, {"bias_dtype": BF16}, groups):
        check(make_spec("layer_norm", direction, cols, *mix, **change), GPUS["sm_80"])


@pytest.mark.cuda_plugin
def test_calls_lower_for_cuda():
    """One kernel forward and one backward, of a batch with parameters of its own, too."""
    x, param = jax.ShapeDtypeStruct((2, 6, 96), BF16), jax.ShapeDtypeStruct((96,), F32)

    def step(*operands):
        def loss(*operands):
            y = jaxnorm.layer_norm(*operands, activation="silu", implementation="triton")
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(*operands)

    assert kernels_in(step, x, param, param) == 2
    batch = [jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in (x, param, param)]
    assert kernels_in(jax.vmap(step), *batch) == 2
