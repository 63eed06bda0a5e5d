"""The matrix products that a loss cannot do without, and no loss: the yardstick of what fuses it.

Logits stand for their own gradient: an array of the same shape and dtype. They are normal, and a
GPU's clock depends on what it multiplies.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.custom_vjp
def products(x: Array, weight: Array, labels: Array) -> Array:
    return _forward(x, weight, labels)[0]


def _forward(x: Array, weight: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
    # Else XLA might take a part of the product for its one element that is returned.
    logits = jax.lax.optimization_barrier(x @ weight)
    return logits[0, 0].astype(jnp.float32), (x, weight, logits)


def _backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    x, weight, logits = saved
    return logits @ weight.T, x.T @ logits, None


products.defvjp(_forward, _backward)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Array]:
    del name, op, y_dtype
    return products
