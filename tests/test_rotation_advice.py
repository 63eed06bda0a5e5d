"""memory_report's advice on RMSNorms whose results are rotated (RoPE)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from advice_cases import assert_true, told
from programs import through_layers

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

LAYERS, BATCH, LENGTH, HEADS, HEAD = 3, 32, 16, 4, 64
WIDTH = HEADS * HEAD


def plain(x, scale):
    """Compute RMSNorm as Flax does."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * (rstd * scale)).astype(x.dtype)


def halves(x, cos, sin):
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def whole(x, cos, sin):
    """Rotate as Hugging Face does: x * cos + swapped * sin.

    `swapped` is x with the two elements (a, b) of each rotated pair replaced by (-b, a).
    """
    cos, sin = (jnp.concatenate([a, a], -1).astype(x.dtype) for a in (cos, sin))
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


def neighbours(x, cos, sin):
    a, b = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)


def step(rotated_norm, tables, x, w):
    q = rotated_norm((x @ w["q"]).reshape(BATCH, LENGTH, HEADS, HEAD), w["scale"], *tables)
    # The derivative of q * q needs q, so the rotated norm's result is saved.
    y = (q * q).reshape(x.shape)
    return x + y @ w["out"]


def report_of(rotated_norm, stack):
    shapes = {"q": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "scale": (HEAD,)}
    w = {n: jax.ShapeDtypeStruct((LAYERS, *shape), "bfloat16") for n, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "bfloat16")

    tables = [jax.ShapeDtypeStruct((LENGTH, 1, HEAD // 2), "float32")] * 2

    def loss(w, x, tables):
        layer = functools.partial(step, rotated_norm, tables)
        x = through_layers(layer, stack, x, w)
        return jnp.sum(x.astype(jnp.float32))

    return memory_report(loss, w, x, tables, argnums=(0, 1))


@pytest.mark.parametrize("stack", ["scan", "unrolled"])
@pytest.mark.parametrize("rotate", [halves, whole, neighbours])
@pytest.mark.parametrize("norm", [plain, jaxnorm.rms_norm])
def test_advice_is_true(norm, rotate, stack):
    def rotated_norm(x, scale, *tables):
        return rotate(norm(x, scale), *tables)

    before, after = report_of(rotated_norm, stack), report_of(jaxnorm.rms_norm_rope, stack)
    assert_true(before, after, "rms_norm_rope")


def untouched(x, scale, cos, sin):
    return plain(x, scale)


def taken_twice(x, scale, *tables):
    n = plain(x, scale)
    return halves(n, *tables) + jnp.sin(n)


def summed(x, scale, cos, sin):
    """Normalise x, and return it with the two halves of its columns swapped.

    This is not a rotation, because no half is negated. The report must not take it for a rotation.
    """
    a, b = jnp.split(plain(x, scale), 2, axis=-1)
    return jnp.concatenate([b, a], axis=-1)


@pytest.mark.parametrize("rotated_norm", [untouched, taken_twice, summed])
def test_other_uses_of_a_norm(rotated_norm):
    assert not told(report_of(rotated_norm, "scan"), "rms_norm_rope")
