"""Norms with an activation: what they refuse, and which implementation runs them."""

import functools

import jax
import pytest
from test_norm import normal

import jaxnorm

X, SCALE = normal((8, 6, 16), "float32", 0), normal((16,), "float32", 2, scale=0.3, shift=1.0)
BIAS = normal((16,), "float32", 3, scale=0.3)
ours = functools.partial(jaxnorm.layer_norm, activation="silu")


def test_what_is_saved_is_still_checked():
    with pytest.raises(ValueError, match=r"^layer_norm: save='x'; expected one of"):
        ours(X, save="x")


def test_implementation_for():
    asked = functools.partial(
        jaxnorm.implementation_for, "layer_norm", (8192, 1024), "bfloat16", platform="cuda"
    )
    plan = asked(scale=jax.ShapeDtypeStruct((1024,), "float32"), activation="silu")
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    images = (32, 64, 64, 32, 8)
    param = jax.ShapeDtypeStruct((32, 1, 1, 8), "float32")
    plan = jaxnorm.implementation_for(
        "layer_norm",
        images,
        "bfloat16",
        scale=param,
        bias=param,
        axis=(1, 2, 4),
        activation="silu",
        platform="cuda",
    )
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    with pytest.raises(ValueError, match=r"^layer_norm: activation='tanh'"):
        asked(activation="tanh")
