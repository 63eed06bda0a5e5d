"""Only the matmuls of a linear layer with a loss, as the reference for the times of fused losses.

The two functions have the signature of a loss, but the values that they return mean nothing. The
backward pass multiplies by the logits instead of their gradient. This takes the same time, because
both have the same shape and dtype.
The logits are normally distributed, because a GPU's clock depends on the values that it multiplies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.losses import LOSSES

Array = jax.Array


def _logits(x: Array, weight: Array) -> Array:
    # The program returns only a few logits. The barrier keeps XLA from computing only these.
    return jax.lax.optimization_barrier(x @ weight)


@jax.custom_vjp
def three(x: Array, weight: Array, labels: Array) -> Array:
    """Run the matmuls of a linear layer with a mean loss: one forward and two backward.

    One element of the logits is returned in place of the loss.
    """
    return _three_forward(x, weight, labels)[0]


def _three_forward(x: Array, weight: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
    logits = _logits(x, weight)
    return logits[0, 0].astype(jnp.float32), (x, weight, logits)


def _three_backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    x, weight, logits = saved
    return logits @ weight.T, x.T @ logits, None


three.defvjp(_three_forward, _three_backward)


@jax.custom_vjp
def four(x: Array, weight: Array, labels: Array) -> tuple[Array, Array]:
    """Run the matmuls of a linear layer with a loss whose backward pass recomputes the logits.

    One matmul is in the forward pass and three are in the backward pass.

    Two elements of each row of logits are returned in place of the results.
    """
    return _four_forward(x, weight, labels)[0]


def _four_forward(
    x: Array, weight: Array, labels: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    some = _logits(x, weight)[:, :2].astype(jnp.float32)
    return (some[:, 0], some[:, 1]), (x, weight)


def _four_backward(
    saved: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    # This pass must recompute the logits. The barrier keeps XLA from saving the logits of the
    # forward pass instead.
    (x, weight), _ = jax.lax.optimization_barrier((saved, cotangents))
    return _three_backward((x, weight, _logits(x, weight)), cotangents[0])


four.defvjp(_four_forward, _four_backward)


@jax.custom_vjp
def of_two_layers(x: Array, weight: Array, teacher_x: Array, teacher_weight: Array) -> Array:
    """Return the sum of an element of each layer's logits. The first layer's logits are saved."""
    return _of_two_layers_forward(x, weight, teacher_x, teacher_weight)[0]


def _of_two_layers_forward(
    x: Array, weight: Array, teacher_x: Array, teacher_weight: Array
) -> tuple[Array, tuple[Array, ...]]:
    of_student, saved = _three_forward(x, weight, teacher_x)
    return of_student + _logits(teacher_x, teacher_weight)[0, 0], saved


def _of_two_layers_backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
    return (*_three_backward(saved, cotangent), None)


of_two_layers.defvjp(_of_two_layers_forward, _of_two_layers_backward)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    if LOSSES[op].has_teacher:
        return of_two_layers
    return three if LOSSES[op].products == 3 else four
