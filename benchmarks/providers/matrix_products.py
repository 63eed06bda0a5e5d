"""The matmuls that a loss needs, without the loss: the reference for fused losses.

An array of random numbers stands for the gradient of the logits. The numbers are normal, because a
GPU's clock depends on the values that it multiplies. The classes are padded to a multiple of 8, as
every fast 16-bit matmul needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.losses import LOSSES

Array = jax.Array


def operands(x: Array, weight: Array, labels: Array) -> tuple[Array, ...]:
    """Return the operands of `three` and `four`, which are not part of the measured time."""
    padding = -weight.shape[1] % 8
    weight = jnp.pad(weight, ((0, 0), (0, padding))) if padding else weight
    gradient = jax.random.normal(jax.random.key(0), (len(x), weight.shape[1]), x.dtype)
    return x, weight, labels, gradient


def _logits(x: Array, weight: Array, dtype: Any) -> Array:
    # Without the barrier, XLA could compute only the few elements that are returned.
    return jax.lax.optimization_barrier(jnp.matmul(x, weight, preferred_element_type=dtype))


@jax.custom_vjp
def three(x: Array, weight: Array, labels: Array, gradient: Array) -> Array:
    """Return an element of the logits, which have x's dtype."""
    return _three_forward(x, weight, labels, gradient)[0]


def _three_forward(
    x: Array, weight: Array, labels: Array, gradient: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _logits(x, weight, x.dtype)[0, 0].astype(jnp.float32), (x, weight, gradient)


def _gradients(x: Array, weight: Array, gradient: Array) -> tuple[Array, Array]:
    return gradient @ weight.T, x.T @ gradient


def _three_backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    return *_gradients(*saved), None, None


three.defvjp(_three_forward, _three_backward)


@jax.custom_vjp
def four(x: Array, weight: Array, labels: Array, gradient: Array) -> tuple[Array, Array]:
    """Return two elements of each row of float32 logits, which the backward pass recomputes."""
    return _four_forward(x, weight, labels, gradient)[0]


def _four_forward(
    x: Array, weight: Array, labels: Array, gradient: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    some = _logits(x, weight, jnp.float32)[:, :2]
    return (some[:, 0], some[:, 1]), (x, weight, gradient)


def _four_backward(
    saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    # Without the barrier, XLA would save the logits of the forward pass.
    (x, weight, gradient), _ = jax.lax.optimization_barrier((saved, cotangents))
    logits = _logits(x, weight, jnp.float32)
    dx, dweight = _gradients(x, weight, gradient)
    # Without a use, XLA would compute no logits.
    dx = jax.lax.dynamic_update_slice(dx, logits[:1, :1].astype(dx.dtype), (0, 0))
    return dx, dweight, None, None


four.defvjp(_four_forward, _four_backward)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    return {3: three, 4: four}[LOSSES[op].products]
