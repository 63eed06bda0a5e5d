"""Cross-entropy of optax, for logits and for a linear layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.providers import jnp_functions


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    # With 16-bit logits, optax's loss has 16 bits too. It is cast to float32, as in a training
    # step.
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.astype(jnp.float32)


_LOSSES = jnp_functions.cross_entropies(cross_entropy)


def function(name: str, op: str, y_dtype: str) -> Callable[..., jax.Array]:
    return _LOSSES[op]
