"""rms_norm_gated under transformations; what its programs keep; what it refuses."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from test_norm import normal

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SHAPE = BATCH, LENGTH, COLS = 4, 6, 16
X, GATE = normal(SHAPE, "float32", 0), normal(SHAPE, "float32", 1)
SCALE = normal((COLS,), "float32", 2, scale=0.3, shift=1.0)
ALL = X, GATE, SCALE
ORDERS = {"norm first": True, "gate first": False}
each_order = pytest.mark.parametrize("before", ORDERS.values(), ids=list(ORDERS))


def gated(before):
    return functools.partial(jaxnorm.rms_norm_gated, norm_before_gate=before)


# --------------------------------------------------------------------- control flow, and programs


@pytest.mark.remat
@each_order
def test_what_the_policy_keeps_for_the_next_product(before):
    """y, so that a block which is made again makes the products before the gate, and no norm."""
    weight = jnp.eye(COLS)

    def block(x, gate, scale, weight):
        return gated(before)(x @ weight, gate @ weight, scale) @ weight

    policy = jaxnorm.save_policy

    def loss(*operands):
        return jnp.sum(jnp.sin(jax.checkpoint(block, policy=policy)(*operands)))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*ALL, weight))
    assert text.count("jaxnorm.rms_norm_gated[") == 1
    # Three forward, the first two again, and two for each of three in the backward.
    assert text.count("dot_general[") == 3 + 2 + 6


# ----------------------------------------------------------------------------------------- errors


def test_implementation_for():
    """The gate is as x is, where none is given; float64 ones and Mamba 2's groups are XLA's."""
    shape = (4, 2048, 32, 128)
    scale = jax.ShapeDtypeStruct((128,), "float32")
    asked = functools.partial(jaxnorm.implementation_for, "rms_norm_gated", shape, "bfloat16")
    plan = asked(scale=scale, platform="cpu")
    assert (plan.forward.name, plan.backward.name) == ("xla", "xla")
    gate = jax.ShapeDtypeStruct(shape, "bfloat16")
    plan = asked(scale=scale, platform="cuda")
    assert plan == asked(scale=scale, gate=gate, norm_before_gate=False, platform="cuda")
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    groups = asked(scale=jax.ShapeDtypeStruct((32, 128), "float32"), platform="cuda")
    for choice in (groups.forward, groups.backward):
        assert choice.name == "xla"
        assert "groups of rows that are not consecutive" in choice.reason
    with pytest.raises(ValueError, match=r"^rms_norm_gated: activation='tanh'"):
        asked(activation="tanh")


def test_a_wide_gate_has_no_kernel(x64):
    x = jax.ShapeDtypeStruct((8192, 1024), "float32")
    gate = jax.ShapeDtypeStruct((8192, 1024), "float64")
    plan = jaxnorm.implementation_for(
        "rms_norm_gated", x.shape, x.dtype, gate=gate, platform="cuda"
    )
    assert plan.forward.name == plan.backward.name == "xla"
    assert "float64 arrays ask for more" in plan.forward.reason
