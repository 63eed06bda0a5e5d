"""check_params: what it finds, what it says, how it prints."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm


def params():
    return {
        "block": {
            "norm1": {"scale": jnp.ones(8), "bias": jnp.zeros(8)},
            "norm2": {"scale": jnp.ones(8).at[3].set(0), "bias": jnp.zeros(8)},
            "dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)},
        },
        "final": {"scale": jnp.full(8, 1e-3), "bias": jnp.ones(8)},
    }


def test_finds_norms_only_and_judges_each():
    report = jaxnorm.check_params(params(), jnp.bfloat16)
    assert [n.path for n in report] == ["block/norm1", "block/norm2", "final"]
    norm1, norm2, final = report
    assert (norm1.columns, norm1.under_floor, norm1.max_bias_ratio) == (8, 0, 0.0)
    assert norm1.dscale_error == pytest.approx(0.83 * 2**-9)
    assert (norm2.under_floor, norm2.verdict) == (1, "safe")
    assert final.max_bias_ratio == pytest.approx(1000, rel=1e-3)
    assert final.verdict == 'save="input" advised'
    assert not report.safe
    assert jaxnorm.check_params(params(), jnp.float32).safe


def test_prints_a_table():
    lines = str(jaxnorm.check_params(params(), jnp.bfloat16)).splitlines()
    assert lines[0].split("  ")[0] == "norm"
    assert [line.split()[0] for line in lines[1:]] == ["block/norm1", "block/norm2", "final"]
    assert lines[3].endswith('save="input" advised')
    assert str(jaxnorm.check_params({"a": jnp.ones(3)}, "float32")).startswith("no norm found")


def test_float16_degrades_below_its_normal_numbers():
    """2 % off at 2^-20, 30 % at 2^-24, lost at 0."""
    for scale, low, high in [(2**-20, 0.01, 0.03), (2**-24, 0.2, 0.4), (0.0, 1.0, 1.0)]:
        (norm,) = jaxnorm.check_params({"scale": jnp.full(4, scale)}, jnp.float16)
        assert norm.under_floor == 4
        assert low <= norm.dscale_error <= high


def test_scale_offset():
    stored = {"norm": {"scale": jnp.zeros(8)}}
    assert jaxnorm.check_params(stored, jnp.float16, scale_offset=1.0).safe
    assert not jaxnorm.check_params(stored, jnp.float16).safe


def test_zero_bias_beside_a_zero_scale_is_safe():
    stored = {"scale": np.zeros(4), "bias": np.zeros(4)}
    (norm,) = jaxnorm.check_params(stored, jnp.bfloat16)
    assert (norm.under_floor, norm.verdict) == (4, "safe")


def test_stacked_layers_and_linen_params():
    variables = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.RMSNorm()]).init(
        jax.random.key(0), jnp.ones((2, 3))
    )
    report = jaxnorm.check_params(variables["params"], jnp.bfloat16)
    assert len(report) == 2
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 5), variables)
    assert [n.columns for n in jaxnorm.check_params(stacked, jnp.bfloat16)] == [20, 20]


def test_nnx_state_and_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(6, rngs=rngs)
            self.dense = nnx.Linear(6, 6, rngs=rngs)

    block = Block(nnx.Rngs(0))
    block.norm.bias[...] = jnp.full(6, 3.0)
    for tree in (nnx.state(block), nnx.state(block, nnx.Param), nnx.to_pure_dict(nnx.state(block))):
        (norm,) = jaxnorm.check_params(tree, jnp.bfloat16)
        assert (norm.path, norm.max_bias_ratio) == ("norm", 3.0)


def test_errors():
    with pytest.raises(TypeError, match="dtype=int8"):
        jaxnorm.check_params(params(), "int8")
    with pytest.raises(TypeError, match="norm/scale has dtype int32"):
        jaxnorm.check_params({"norm": {"scale": jnp.ones(3, int)}}, "float32")
    with pytest.raises(
        ValueError, match=r"norm has scale of shape \(3,\) and bias of shape \(2,\)"
    ):
        jaxnorm.check_params({"norm": {"scale": jnp.ones(3), "bias": jnp.ones(2)}}, "float32")
