"""memory_report on equinox's modules: attention, MLP and norms, under `jax.vmap`."""

import jax
import jax.numpy as jnp
import pytest
from advice_cases import assert_remat_true

from jaxnorm import memory_report

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.oldest_jax

BATCH, LENGTH, WIDTH, HIDDEN = 4, 64, 64, 256
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32")


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.Module

    def __call__(self, x):
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


def block(key, width, hidden, *, use_bias=True):
    keys = jax.random.split(key)
    bias = {"use_bias": use_bias, "use_final_bias": use_bias}
    return Block(
        eqx.nn.RMSNorm(width),
        eqx.nn.MultiheadAttention(2, width, key=keys[0]),
        eqx.nn.LayerNorm(width),
        eqx.nn.MLP(width, width, hidden, 1, jax.nn.gelu, key=keys[1], **bias),
    )


def report_of(model, remat=lambda loss: loss):
    def loss(model, x):
        for _ in range(2):
            x = jax.vmap(model)(x)
        return jnp.sum(jnp.sin(x))

    return memory_report(remat(loss), model, X, argnums=(0, 1))


@pytest.mark.parametrize("use_bias", [True, False])
def test_auto_remat_saves_what_the_report_says(use_bias):
    import jaxnorm.equinox

    model = block(jax.random.key(0), WIDTH, HIDDEN, use_bias=use_bias)
    report = report_of(model)
    assert_remat_true(report, report_of(model, jaxnorm.auto_remat))
    converted = report_of(jaxnorm.equinox.convert(model))
    assert report.total - report.saves <= converted.total - converted.saves
