"""memory_report's advice on equinox's modules: attention, MLP and norms, under `jax.vmap`."""

import jax
import jax.numpy as jnp
import pytest
from advice_cases import functions_of, told

import jaxnorm
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


class MLP(eqx.Module):
    """equinox's MLP, with the activation fused into the second linear layer."""

    theirs: eqx.nn.MLP

    def __call__(self, x):
        up, down = self.theirs.layers
        h, act = up(x), self.theirs.activation
        return jaxnorm.activation_linear(h, down.weight.T, bias=down.bias, activation=act)


def block(key, width, hidden, *, use_bias=True):
    keys = jax.random.split(key)
    bias = {"use_bias": use_bias, "use_final_bias": use_bias}
    return Block(
        eqx.nn.RMSNorm(width),
        eqx.nn.MultiheadAttention(2, width, key=keys[0]),
        eqx.nn.LayerNorm(width),
        eqx.nn.MLP(width, width, hidden, 1, jax.nn.gelu, key=keys[1], **bias),
    )


def report_of(model):
    def loss(model, x):
        for _ in range(2):
            x = jax.vmap(model)(x)
        return jnp.sum(jnp.sin(x))

    return memory_report(loss, model, X, argnums=(0, 1))


def convert(model, monkeypatch):
    import jaxnorm.equinox

    return jaxnorm.equinox.convert(model)


def with_our_mlp(model, monkeypatch):
    return eqx.tree_at(lambda m: m.mlp, model, MLP(model.mlp))


def with_our_softmax(model, monkeypatch):
    monkeypatch.setattr(jax.nn, "softmax", lambda x, axis=-1: jaxnorm.softmax(x, axis=axis))
    return model


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    ("follow", "functions"),
    [
        (with_our_mlp, ["activation_linear"]),
        (convert, ["rms_norm", "layer_norm"]),
        (with_our_softmax, ["softmax"]),
    ],
)
def test_advice_is_true(follow, functions, use_bias, monkeypatch):
    model = block(jax.random.key(0), WIDTH, HIDDEN, use_bias=use_bias)
    before = report_of(model)
    after = report_of(follow(model, monkeypatch))
    rows = [row for function in functions for row in told(before, function)]
    assert functions_of(before) >= {*functions}
    assert before.total - after.total == pytest.approx(sum(row.saves for row in rows), rel=0.1)
    assert not functions_of(after) & {*functions}
