"""The functions in which the variants of a model differ: norms, losses and linear layers.

In shapes, B is the number of sequences, S their length, d the width, H the number of heads, and D
the size of a head. f is the number of hidden features of an MLP, and V the size of the vocabulary.
Weights are float32, and are cast to x's dtype.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import jaxnorm

Array = jax.Array


def rms_norm(x: Array, scale: Array) -> Array:
    """Compute RMSNorm as Flax does."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * (rstd * scale)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """Compute LayerNorm as Flax does, in one pass: the variance is E[x^2] - E[x]^2."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    mean_of_squares = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, mean_of_squares - jnp.square(mean))
    rstd = jax.lax.rsqrt(variance + 1e-6)
    return ((wide - mean) * (rstd * scale) + bias).astype(x.dtype)


def add_then(
    norm: Callable[..., Array], named: Callable[[Array], Array] = lambda h: h
) -> Callable[..., tuple[Array, Array]]:
    """Return a function that adds the residual, and then normalises the sum in a second step.

    `named` is a function that gives the sum a name for `jax.checkpoint`, and returns it.
    """

    def add_norm(x: Array, residual: Array, **parameters: Array) -> tuple[Array, Array]:
        h = named(x + residual)
        return norm(h, **parameters), h

    return add_norm


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary position embedding to queries or keys (B, S, H, D). Tables are (S, 1, D / 2)."""
    a, b = jnp.split(x.astype(jnp.promote_types(x.dtype, "float32")), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def then_rotated(norm: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function that normalises each head and then rotates it, in two steps."""

    def norm_rope(x: Array, scale: Array, cos: Array, sin: Array) -> Array:
        return rotated(norm(x, scale), cos, sin)

    return norm_rope


def linear(x: Array, weight: Array) -> Array:
    return x @ weight.astype(x.dtype)


def gated_linear(gate: Array, up: Array, weight: Array) -> Array:
    return linear(jax.nn.silu(gate) * up, weight)


def activation_linear(x: Array, weight: Array, bias: Array) -> Array:
    return linear(jax.nn.gelu(x), weight) + bias.astype(x.dtype)


def gated_linear_of_inputs(gate: Array, up: Array, weight: Array) -> Array:
    return jaxnorm.gated_linear(gate, up, weight, dtype=gate.dtype)


def activation_linear_of_inputs(x: Array, weight: Array, bias: Array) -> Array:
    return jaxnorm.activation_linear(x, weight, bias=bias, dtype=x.dtype)


def heads_linear(x: Array, weight: Array) -> Array:
    """Apply the output projection of attention to x (B, S, H, D). The weight is (H * D, d)."""
    return linear(x.reshape(*x.shape[:2], -1), weight)


def loss_of_logits(x: Array, embedding: Array, labels: Array) -> Array:
    logits = (x @ embedding.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_without_logits(x: Array, embedding: Array, labels: Array) -> Array:
    return jaxnorm.linear_softmax_cross_entropy(x, embedding.T, labels)


def loss_of_whole_logits(x: Array, embedding: Array, labels: Array) -> Array:
    return jaxnorm.softmax_cross_entropy_with_integer_labels(x @ embedding.T, labels).mean()


def remade(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Rematerialise a matmul: return a function that saves only the operands of `product`.

    Saving the operands costs no extra memory, because other functions save them, too. Without
    `jax.checkpoint`, a scan would also save two arrays that `product` computes from its operands:
    the weight after the cast to x's dtype, and attention's result after the reshape to
    (B, S, H * D).

    prevent_cse is False. XLA may then skip the recomputation in unrolled layers, if values of the
    forward pass are still in memory.
    """
    return jax.checkpoint(product, prevent_cse=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """The functions of a variant of a model.

    Attributes:
      rms_norm, layer_norm: functions of x and parameters.
      add_rms_norm, add_layer_norm: functions of x, residual and parameters, which return the norm
        of the sum, and the sum.
      rms_norm_rope: a function of queries or keys (B, S, H, D), the scale of their norm, cos and
        sin.
      loss: a function of the last hidden states (B, S, d), the embedding (V, d) and labels (B, S),
        which returns the mean loss.
      linear: a function of x (B, S, d) and weight.
      gated_linear: a function of gate and up (B, S, f), and weight (f, d).
      activation_linear: a function of x (B, S, f), weight (f, d) and bias (d,).
      heads_linear: a function of attention's result (B, S, H, D) and weight (H * D, d).
    """

    rms_norm: Callable[..., Array]
    add_rms_norm: Callable[..., tuple[Array, Array]]
    layer_norm: Callable[..., Array]
    add_layer_norm: Callable[..., tuple[Array, Array]]
    rms_norm_rope: Callable[..., Array]
    loss: Callable[[Array, Array, Array], Array]
    linear: Callable[[Array, Array], Array] = linear
    gated_linear: Callable[[Array, Array, Array], Array] = gated_linear
    activation_linear: Callable[[Array, Array, Array], Array] = activation_linear
    heads_linear: Callable[[Array, Array], Array] = heads_linear


_NORMS = Variant(
    jaxnorm.rms_norm,
    add_then(jaxnorm.rms_norm),
    jaxnorm.layer_norm,
    add_then(jaxnorm.layer_norm),
    then_rotated(jaxnorm.rms_norm),
    loss_of_logits,
)
_EVERYTHING = dataclasses.replace(
    _NORMS,
    add_rms_norm=jaxnorm.add_rms_norm,
    add_layer_norm=jaxnorm.add_layer_norm,
    loss=loss_without_logits,
)
_PRODUCTS = dataclasses.replace(
    _EVERYTHING,
    rms_norm_rope=jaxnorm.rms_norm_rope,
    linear=remade(linear),
    gated_linear=gated_linear_of_inputs,
    activation_linear=activation_linear_of_inputs,
    heads_linear=remade(heads_linear),
)
_PLAIN = Variant(
    rms_norm,
    add_then(rms_norm),
    layer_norm,
    add_then(layer_norm),
    then_rotated(rms_norm),
    loss_of_logits,
)
VARIANTS = {
    "jnp": _PLAIN,
    # Only `auto_remat` measures this variant.
    "jnp-linear-loss": dataclasses.replace(_PLAIN, loss=loss_without_logits),
    "jaxnorm-norms": _NORMS,
    "jaxnorm-everything": _EVERYTHING,
    "jaxnorm-products": _PRODUCTS,
    "jaxnorm-whole-logits": dataclasses.replace(_PRODUCTS, loss=loss_of_whole_logits),
}
