"""memory_report's advice to pass `activation=` to a norm, which then saves only x."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import pytest
from advice_cases import assert_true, functions_of, told

import jaxnorm
import jaxnorm.linen
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

LAYERS, CHANNELS = 3, 64
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}
IMAGES = jax.ShapeDtypeStruct((2, 8, 8, CHANNELS), "bfloat16")
ROWS = jax.ShapeDtypeStruct((128, CHANNELS), "bfloat16")
each = pytest.mark.parametrize("activation", ACTIVATIONS)


class Blocks(flax.linen.Module):
    """The block of a U-Net: GroupNorm, an activation and a convolution."""

    norm: functools.partial
    activation: str | None = None

    @flax.linen.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            y = self.norm(8, dtype=jnp.bfloat16)(x)
            y = y if self.activation is None else ACTIVATIONS[self.activation](y)
            x = x + flax.linen.Conv(CHANNELS, (3, 3), dtype=jnp.bfloat16)(y)
        return jnp.sum(x.astype(jnp.float32))


def of_model(model):
    params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    return memory_report(model.apply, params, IMAGES, argnums=(0, 1))


def has_activations(report):
    """Return True if a report advises to pass `activation=` to a norm."""
    return any("orm(activation=" in row.advice for row in told(report))


def check(before, after, function):
    assert_true(before, after, function)
    assert not has_activations(after)


@each
@pytest.mark.parametrize("module", [flax.linen.GroupNorm, jaxnorm.linen.GroupNorm], ids=str)
def test_group_norm(module, activation):
    before = of_model(Blocks(module, activation))
    after = of_model(Blocks(functools.partial(jaxnorm.linen.GroupNorm, activation=activation)))
    check(before, after, f'GroupNorm(activation="{activation}")')


def test_group_norm_alone():
    """Flax's GroupNorm saves its result before and after a reshape. The advice counts both."""
    before, after = (of_model(Blocks(m.GroupNorm)) for m in (flax.linen, jaxnorm.linen))
    check(before, after, "GroupNorm")


def layer_norm(x, scale):
    wide = x.astype(jnp.float32)
    return rms_norm(wide - jnp.mean(wide, -1, keepdims=True), scale).astype(x.dtype)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def of_rows(step):
    weights = {
        "scale": jax.ShapeDtypeStruct((LAYERS, CHANNELS), "bfloat16"),
        "weight": jax.ShapeDtypeStruct((LAYERS, CHANNELS, CHANNELS), "bfloat16"),
    }

    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (x + step(x, w["scale"]) @ w["weight"], None), x, w)
        return jnp.sum(x.astype(jnp.float32))

    return memory_report(loss, weights, ROWS, argnums=(0, 1))


@each
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_plain_norms_of_rows(norm, activation):
    ours = getattr(jaxnorm, norm.__name__)
    before = of_rows(lambda x, scale: ACTIVATIONS[activation](norm(x, scale)))
    after = of_rows(lambda x, scale: ours(x, scale, activation=activation))
    check(before, after, f'{norm.__name__}(activation="{activation}")')


@pytest.mark.parametrize(
    "step",
    [
        lambda y: jax.nn.sigmoid(y),
        lambda y: jnp.tanh(y),
        lambda y: jax.nn.gelu(y, approximate=False),
        lambda y: jax.nn.silu(y) * 2,
        lambda y: jax.nn.silu(y) + y,
        lambda y: jnp.square(jax.nn.relu(y)),
        lambda y: jnp.cumsum(jax.nn.silu(jax.nn.silu(y)), axis=0),
    ],
    ids=["sigmoid", "tanh", "exact gelu", "twice silu", "silu and more", "squared relu", "in row"],
)
@pytest.mark.parametrize("norm", [rms_norm, jaxnorm.rms_norm], ids=["plain", "jaxnorm"])
def test_what_no_norm_has(norm, step):
    assert not has_activations(of_rows(lambda x, scale: step(norm(x, scale))))


def test_a_norm_that_has_one():
    norm = functools.partial(jaxnorm.rms_norm, activation="silu")
    report = of_rows(lambda x, scale: jnp.cumsum(jax.nn.silu(norm(x, scale)), axis=0))
    assert not told(report)


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_norm_that_another_norm_follows(is_followed):
    """There is no advice if a norm in plain JAX also uses the result of jaxnorm's norm.

    The derivative of the second norm needs this result.
    """

    def step(x, scale):
        y = jaxnorm.rms_norm(x, scale)
        other = jnp.mean(rms_norm(y, 1.0)) if is_followed else 1
        return jnp.cumsum(jax.nn.silu(y), axis=0) * other

    assert has_activations(of_rows(step)) != is_followed


def test_a_result_that_is_cast_twice():
    """If the result of a norm in plain JAX is cast for each use, all casts are saved.

    jaxnorm's norm returns, and saves, a single 16-bit array.
    """

    def before(x, scale):
        y = rms_norm(x.astype(jnp.float32), scale)
        return jnp.sin(y.astype(x.dtype)) @ jnp.outer(scale, scale) + y.astype(x.dtype)

    def after(x, scale):
        y = jaxnorm.rms_norm(x, scale)
        return jnp.sin(y) @ jnp.outer(scale, scale) + y

    check(of_rows(before), of_rows(after), "rms_norm")


def test_a_product_that_is_cast_twice():
    """If a norm casts the result of a matmul twice, plain JAX saves both casts.

    With jaxnorm's norm, neither is saved.
    """

    def twice(x, scale):
        x = x @ jnp.outer(scale, scale)
        mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return (x.astype(jnp.float32) * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)

    before = of_rows(twice)
    after = of_rows(lambda x, scale: jaxnorm.rms_norm(x @ jnp.outer(scale, scale), scale))
    check(before, after, "rms_norm")


def test_a_product_can_have_the_activation():
    """If a matmul follows the activation, the advice is `activation_linear`.

    With it, only the norm's result is saved.
    """
    report = of_rows(lambda x, scale: jax.nn.silu(jaxnorm.rms_norm(x, scale)))
    assert functions_of(report) == {"activation_linear"}
