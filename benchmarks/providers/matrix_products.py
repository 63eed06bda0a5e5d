"""Only the matmuls of a linear layer with a loss, as the reference for the times of fused losses.

The functions take the operands of a loss, and one more operand, which stands for the gradient of
the logits. Its numbers are normally distributed, because a GPU's clock depends on the values that
it multiplies. The values that the functions return mean nothing.

The logits have the same dtype as in the loss: the dtype of x in the cross-entropy, and float32 in
the other losses. The weights are padded so that the number of classes is a multiple of 8, because
16-bit matmuls are slow otherwise. The padding happens before the measurement starts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.losses import LOSSES

Array = jax.Array


def operands(*of_loss: Array) -> tuple[Array, ...]:
    """Return the operands of the functions in this module, given the operands of the loss.

    The operands of the loss are x, weight and labels; or x, weight, teacher_x and teacher_weight.
    The weights are padded. An array of random numbers is appended, which stands for the gradient of
    the logits.
    """
    padded = [_padded(a) if i % 2 else a for i, a in enumerate(of_loss)]
    shape = len(of_loss[0]), padded[1].shape[1]
    return *padded, jax.random.normal(jax.random.key(0), shape, of_loss[0].dtype)


def _padded(weight: Array) -> Array:
    padding = -weight.shape[1] % 8
    return jnp.pad(weight, ((0, 0), (0, padding))) if padding else weight


def _logits(x: Array, weight: Array, dtype: Any) -> Array:
    # The program returns only a few logits. The barrier keeps XLA from computing only these logits.
    return jax.lax.optimization_barrier(jnp.matmul(x, weight, preferred_element_type=dtype))


@jax.custom_vjp
def three(x: Array, weight: Array, labels: Array, gradient: Array) -> Array:
    """Run the matmuls of a linear layer with a mean loss: one forward and two backward.

    One element of the logits is returned in place of the loss.
    """
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
    """Run the matmuls of a linear layer with a loss whose backward pass recomputes the logits.

    One matmul is in the forward pass and three are in the backward pass.

    Two elements of each row of logits are returned in place of the results.
    """
    return _four_forward(x, weight, labels, gradient)[0]


def _four_forward(
    x: Array, weight: Array, labels: Array, gradient: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    some = _logits(x, weight, jnp.float32)[:, :2]
    return (some[:, 0], some[:, 1]), (x, weight, gradient)


def _four_backward(
    saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    # This pass must recompute the logits. The barrier keeps XLA from saving the logits of the
    # forward pass instead.
    (x, weight, gradient), _ = jax.lax.optimization_barrier((saved, cotangents))
    logits = _logits(x, weight, jnp.float32)
    dx, dweight = _gradients(x, weight, gradient)
    # Store one of the logits in a result. Otherwise all logits would be unused, and XLA would not
    # compute them.
    dx = jax.lax.dynamic_update_slice(dx, logits[:1, :1].astype(dx.dtype), (0, 0))
    return dx, dweight, None, None


four.defvjp(_four_forward, _four_backward)


@jax.custom_vjp
def of_two_layers(
    x: Array, weight: Array, teacher_x: Array, teacher_weight: Array, gradient: Array
) -> Array:
    """Run the matmuls of a divergence of two linear layers, with the gradients of the first one.

    Instead of a divergence, the function returns the sum of two numbers: one logit of each layer.
    """
    return _of_two_layers_forward(x, weight, teacher_x, teacher_weight, gradient)[0]


def _of_two_layers_forward(
    x: Array, weight: Array, teacher_x: Array, teacher_weight: Array, gradient: Array
) -> tuple[Array, tuple[Array, ...]]:
    both = [_logits(*layer, jnp.float32) for layer in ((x, weight), (teacher_x, teacher_weight))]
    return both[0][0, 0] + both[1][0, 0], (x, weight, gradient)


def _of_two_layers_backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
    return (*_gradients(*saved), None, None, None)


of_two_layers.defvjp(_of_two_layers_forward, _of_two_layers_backward)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    if LOSSES[op].has_teacher:
        return of_two_layers
    return three if LOSSES[op].products == 3 else four
