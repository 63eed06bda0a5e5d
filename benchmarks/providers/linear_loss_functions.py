"""`linear_loss` of two cross-entropies, and jaxnorm's linear cross-entropy, with given chunks."""

import functools
from collections.abc import Callable

import jax

import jaxnorm

Array = jax.Array


def plain(logits: Array, label: Array) -> Array:
    return jax.nn.logsumexp(logits) - logits[label]


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "jaxnorm": jaxnorm.linear_softmax_cross_entropy,
    "linear_loss": functools.partial(
        jaxnorm.linear_loss, jaxnorm.softmax_cross_entropy_with_integer_labels
    ),
    "linear_loss_plain": functools.partial(jaxnorm.linear_loss, plain),
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., Array]:
    """Return the function of a provider, whose name ends with the rows of a chunk, if given."""
    of, given, _ = name.partition("_2048")
    return functools.partial(_FUNCTIONS[of], chunk=2048 if given else None)
