"""The cross-entropy of a chunk's logits: a primitive of its own, but for classes in shards."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.operations.linear_loss_call import NAME, Head
from jaxnorm.operations.loss import NAME as FUNCTION
from jaxnorm.operations.loss import loss_call
from jaxnorm.primitives import row_operations


def loss_and_dlogits(
    call: Call,
    logits: jax.Array,
    labels: jax.Array,
    positions: jax.Array | None,
    dloss: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rows' losses, and the gradient of sum(dloss * loss), in the logits' dtype.

    dlogits take the logits' place, which nothing reads after this.
    """
    with_stats = call.with_stats()
    loss, *stats = bind(with_stats, logits, labels, None, positions)
    (dlogits,) = bind(with_stats.backward(["x"], overwrites_x=True), logits, *stats, labels, dloss)
    return loss, dlogits


def call_of(head: Head, shape: tuple[int, ...], dtype: np.dtype, has_positions: bool) -> Call:
    """The cross-entropy of a chunk's logits, whose errors name the function that users call."""
    call = loss_call(
        FUNCTION,
        shape,
        np.dtype(dtype),
        axis=-1,
        mask=None,
        has_positions=has_positions,
        label_smoothing=head.label_smoothing,
        z_loss=head.z_loss,
        logits_scale=head.logits_scale,
        logit_softcap=head.logit_softcap,
        implementation=head.implementation,
    )
    return dataclasses.replace(call, function=NAME, primitives=call.function)


def bind(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """The pass: a primitive of its own, but for classes that are split over a mesh."""
    if not call.spec.cols_over:
        return row_operations.bind(call, *arrays)
    if call.spec.direction == "fwd":
        return _forward_on_shards(call, *arrays)
    return call.xla(*[a for a in arrays if a is not None])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_on_shards(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """With the rule of the primitive: a maximum over a mesh has no derivative of its own."""
    return call.xla(*[a for a in arrays if a is not None])


@_forward_on_shards.defjvp
def _(call: Call, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    logits, labels, *_ = primals
    outputs = _forward_on_shards(call, *primals)
    _, *stats = outputs
    return outputs, call.tangent(["x"]).xla(logits, *stats, labels, tangents[0])
