"""Parts that several of the models share: attention, norms, dropout and the loss.

In shapes, B is the number of sequences, S and T are the numbers of tokens of queries and of keys, d
is the width, H is the number of heads, and D is the size of a head.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from benchmarks import language_models, variants

Array = jax.Array
DType = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A training loss and its arguments.

    Attributes:
      loss: a function of parameters and a batch.
      init: a function of a random key, which returns the parameters in float32.
      batch: a function of a random key, which returns the batch.
      activation: number of elements of one activation (tokens x width); 0 if widths differ.
      matrix: number of elements of one attention's probabilities (B x H x S x S); 0 if they are
        never stored.
      length: the number of tokens S.
    """

    loss: Callable[[Any, Any], Array]
    init: Callable[[Array], Any]
    batch: Callable[[Array], Any]
    activation: int = 0
    matrix: int = 0
    length: int = 0

    def is_matrix(self, shape: Sequence[int]) -> bool:
        return bool(self.matrix) and [*shape].count(self.length) >= 2


def of_module(
    module: nn.Module,
    loss: Callable[[Any, Any], Array],
    batch: Callable[[Array], Any],
    **sizes: int,
) -> Program:
    """Return the program of a Flax module, whose argument is a batch.

    `loss` is a function of the module's result and the batch.
    """

    def init(key: Array) -> Any:
        return module.init({"params": key, "dropout": key}, batch(key))["params"]

    def of_results(params: Any, batch: Any) -> Array:
        has_key = isinstance(batch, dict) and "dropout" in batch
        rngs = {"dropout": batch["dropout"]} if has_key else {}
        return loss(module.apply({"params": params}, batch, rngs=rngs), batch)

    return Program(of_results, init, batch, **sizes)


def tokens(*shape: int, vocabulary: int) -> Callable[[Array], Array]:
    return lambda key: jax.random.randint(key, shape, 0, vocabulary)


def cross_entropy(logits: Array, labels: Array) -> Array:
    logits = jnp.asarray(logits, jnp.promote_types(logits.dtype, "float32"))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(logits: Array, batch: Array) -> Array:
    return cross_entropy(logits[:, :-1], batch[:, 1:])


def squared_error(prediction: Array, target: Array) -> Array:
    difference = prediction - target.astype(prediction.dtype)
    return jnp.mean(jnp.square(difference.astype(jnp.promote_types(difference.dtype, "float32"))))


def dropout(x: Array, rate: float, key: Array) -> Array:
    """Drop elements, with a mask that does not depend on the dtype of x."""
    keep = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    cap: float | None = None,
    rate: float = 0.0,
    key: Array | None = None,
) -> Array:
    """Compute attention of q (B, S, H, D), k and v (B, T, H, D) from a matrix of probabilities.

    The bias and the boolean mask are (B, H, S, T), or broadcast to it. `cap` caps the logits with
    tanh, and `rate` is the dropout rate of the probabilities.
    """
    logits = jnp.einsum("bshd,bthd->bhst", q, k)
    logits = logits.astype(jnp.promote_types(q.dtype, "float32"))
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    probabilities = jax.nn.softmax(logits).astype(q.dtype)
    if key is not None:
        probabilities = dropout(probabilities, rate, key)
    return jnp.einsum("bhst,bthd->bshd", probabilities, v)


def _attend(is_causal: bool, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    y, statistics = jax.nn.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation="xla", return_residual=True
    )
    return y, statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(is_causal: bool, q: Array, k: Array, v: Array) -> Array:
    """Compute attention in place of cuDNN's, which cannot be traced without a GPU.

    Like cuDNN's attention, this function saves its operands, its result, and a float32 statistic
    for each row of the logits. The result and the statistics have a name, as in MaxText.
    """
    return _attend(is_causal, q, k, v)[0]


def _flash_forward(is_causal: bool, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    y, statistics = (checkpoint_name(a, "attended") for a in _attend(is_causal, q, k, v))
    return y, (q, k, v, y, statistics)


def _flash_backward(is_causal: bool, saved: Any, dy: Array) -> tuple[Array, ...]:
    # Without the barrier, XLA would merge equal operations of the forward and the backward pass. It
    # cannot do this for the kernels of cuDNN.
    operands = jax.lax.optimization_barrier(saved[:3])
    return jax.vjp(lambda *operands: _attend(is_causal, *operands)[0], *operands)[1](dy)


flash_attention.defvjp(_flash_forward, _flash_backward)


def rotated(x: Array) -> Array:
    """Apply rotary position embedding to queries or keys (B, S, H, D)."""
    return variants.rotated(x, *language_models.rotations(x.shape[1], x.shape[-1], 1e4))


class GatedMLP(nn.Module):
    """The MLP of Llama: a gate, an up and a down projection."""

    hidden: int
    dtype: DType
    activation: Callable[[Array], Array] = nn.silu

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return an array of x's shape."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        gate, up = dense(self.hidden, name="gate")(x), dense(self.hidden, name="up")(x)
        return dense(x.shape[-1], name="down")(self.activation(gate) * up)
