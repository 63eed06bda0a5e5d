"""The public functions in plain JAX, for ``--check`` and for the tests.

The functions of this module are written from the equations, and share no code with the functions
that they check. Each has the name of the operation, or of the public function, whose values it
computes. JAX differentiates them, in float64. The last axis is normalised.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_EPSILON = 1e-6


def softmax(
    x: Array,
    where: Any = True,
    bias: Any = 0.0,
    *,
    scale: float = 1.0,
    causal: bool = False,
    log: bool = False,
) -> Array:
    """Return the softmax of ``scale * x + bias`` over the entries where `where` is True."""
    mask = where & jnp.tri(x.shape[-2], x.shape[-1], dtype=bool) if causal else where
    return (jax.nn.log_softmax if log else jax.nn.softmax)(scale * x + bias, where=mask)


log_softmax = functools.partial(softmax, log=True)


def norm(x: Array, scale: Array, bias: Array | None = None, *, activation: str = "") -> Array:
    """Return the LayerNorm of x, or its RMSNorm if `bias` is None, with the activation applied."""
    centred = x if bias is None else x - x.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + _EPSILON) * scale
    y = y if bias is None else y + bias
    return getattr(jax.nn, activation)(y) if activation else y


def add_norm(
    x: Array, residual: Array, scale: Array, bias: Array | None = None, gate: Any = 1.0
) -> tuple[Array, Array]:
    """Return ``y = norm(h)`` and ``h = residual + gate * x``."""
    h = residual + gate * x
    return norm(h, scale, bias), h


def norm_add(x: Array, residual: Array, scale: Array) -> Array:
    """Return ``residual + norm(x)``."""
    return residual + norm(x, scale)


def norm_add_norm(
    x: Array, residual: Array, scale: Array, next_scale: Array
) -> tuple[Array, Array]:
    """Return ``y = norm(h)`` and ``h = residual + norm(x)``."""
    h = norm_add(x, residual, scale)
    return norm(h, next_scale), h


def norm_rope(
    x: Array, scale: Array, cos: Array, sin: Array, *, interleaved: bool = False
) -> Array:
    """Return the RMSNorm of x, with pairs of columns rotated by the tables cos and sin.

    A pair is two adjacent columns if `interleaved`; otherwise, it is one column of each half of the
    rotated columns.
    """
    n, pairs = norm(x, scale), cos.shape[-1]
    columns = np.arange(2 * pairs).reshape((pairs, 2) if interleaved else (2, pairs))
    first, second = columns.T if interleaved else columns
    a, b = n[..., first], n[..., second]
    return n.at[..., first].set(a * cos - b * sin).at[..., second].set(b * cos + a * sin)


def norm_gated(x: Array, gate: Array, scale: Array, *, norm_before_gate: bool = True) -> Array:
    """Return ``norm(x) * silu(gate)`` if `norm_before_gate`, else ``norm(x * silu(gate))``."""
    a = jax.nn.silu(gate)
    return norm(x, scale) * a if norm_before_gate else norm(x * a, scale)


def rms_norm_linear(x: Array, scale: Array, weight: Array, bias: Array) -> Array:
    """Return ``norm(x) @ weight + bias``."""
    return norm(x, scale) @ weight + bias


def gated_linear(gate: Array, up: Array, weight: Array) -> Array:
    """Return ``(silu(gate) * up) @ weight``."""
    return (jax.nn.silu(gate) * up) @ weight


def activation_linear(x: Array, weight: Array, *, activation: str) -> Array:
    """Return ``activation(x) @ weight``."""
    return getattr(jax.nn, activation)(x) @ weight


def log_prob_and_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the log-probability of each label, and the entropy of each row.

    `labels` has one label for each row, or the k labels of a row along its last axis.
    """
    log_p = jax.nn.log_softmax(logits)
    several = labels if labels.ndim == logits.ndim else labels[..., None]
    chosen = jnp.take_along_axis(log_p, several, -1).reshape(labels.shape)
    return chosen, -(jnp.exp(log_p) * log_p).sum(-1)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return ``-log(p[label])`` of each row."""
    return -log_prob_and_entropy(logits, labels)[0]


def kl_divergence(logits: Array, teacher_logits: Array, *, reverse: bool = False) -> Array:
    """Return ``sum(p * log(p / q))`` of each row.

    p is the teacher's softmax, and q the student's; `reverse` swaps them.
    """
    teacher = jax.lax.stop_gradient(teacher_logits)
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    log_p, log_q = (log_q, log_p) if reverse else (log_p, log_q)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def linear_softmax_cross_entropy(x: Array, weight: Array, bias: Array, labels: Array) -> Array:
    """Return the mean cross-entropy of the logits ``x @ weight + bias``."""
    return cross_entropy(x @ weight + bias, labels).mean()


def linear_log_prob_and_entropy(
    x: Array, weight: Array, bias: Array, labels: Array
) -> tuple[Array, Array]:
    """Return log-probabilities and entropies of ``x @ weight + bias``."""
    return log_prob_and_entropy(x @ weight + bias, labels)


def linear_kl_divergence(
    x: Array, weight: Array, bias: Array, teacher_x: Array, teacher_weight: Array
) -> Array:
    """Return the mean KL divergence between the softmaxes of two linear layers' logits."""
    return kl_divergence(x @ weight + bias, teacher_x @ teacher_weight).mean()


# ---------------------------------------------------------------------------------------- operands


def operands(
    shapes: Mapping[str, tuple[int, ...]], classes: int, seed: int
) -> dict[str, np.ndarray]:
    """Return a dict that maps the names in `shapes` to random operands with these shapes.

    All floats are exact in bfloat16, and so in all dtypes that are checked. Scales are at least
    0.5: near 0, gradients from the saved output are not accurate (see
    :func:`jaxnorm.check_params`). Labels are less than `classes`.
    """
    random = np.random.default_rng(seed)
    makers: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
        "where": lambda shape: random.random(shape) < 0.8,
        "labels": lambda shape: random.integers(0, classes, shape).astype(np.int32),
        "scale": lambda shape: random.uniform(0.5, 2, shape),
        "next_scale": lambda shape: random.uniform(0.5, 2, shape),
        # A rotation with cos = sin = 0 has no inverse, so cos is at least 0.5. In general,
        # cos^2 + sin^2 is not 1. This is a valid input, because YaRN scales its tables.
        "cos": lambda shape: random.uniform(0.5, 1, shape),
        "sin": lambda shape: random.uniform(-1, 1, shape),
        "weight": lambda shape: random.normal(size=shape) / math.sqrt(shape[0]),
    }

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = makers.get(name, lambda shape: random.normal(size=shape))(shape)
        return array if array.dtype != np.float64 else _of_bfloat16(array)

    return {name: make(name, shape) for name, shape in shapes.items()}


def _of_bfloat16(array: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)
