"""Cross-entropy of optax, for logits and for a linear layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.losses import SOFTCAP


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    # With 16-bit logits, optax's loss has 16 bits too. It is cast to float32, as in a training
    # step.
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.astype(jnp.float32)


def capped_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(SOFTCAP * jnp.tanh(logits.astype(jnp.float32) / SOFTCAP), labels)


def linear_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(cross_entropy(x @ weight, labels))


def capped_linear_cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(capped_cross_entropy(x @ weight, labels))


_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "cross_entropy": cross_entropy,
    "capped_cross_entropy": capped_cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "capped_linear_cross_entropy": capped_linear_cross_entropy,
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., jax.Array]:
    return _LOSSES[op]
