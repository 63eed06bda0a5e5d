"""The loss of a chunk's logits: a primitive of its own, but for classes in shards."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.operations.linear_loss_call import OF_LOGITS, Head
from jaxnorm.operations.loss import loss_call
from jaxnorm.primitives import row_operations

Arrays = dict[str, jax.Array]


def call_of(
    head: Head,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    has_positions: bool,
    mask: tuple[int, ...] | None = None,
) -> Call:
    """Of logits and labels, with errors that name the function that users call."""
    call = loss_call(
        OF_LOGITS[head.function],
        shape,
        np.dtype(dtype),
        axis=-1,
        mask=mask,
        has_positions=has_positions,
        label_smoothing=head.label_smoothing,
        z_loss=head.z_loss,
        logits_scale=head.logits_scale,
        logit_softcap=head.logit_softcap,
        implementation=head.implementation,
    )
    return call.replaced(function=head.function, primitives=call.function)


def forward(call: Call, operands: Arrays) -> Arrays:
    """The results, and the statistics where the call wants them."""
    results = _bind(call, [operands.get(name) for name in call.primals])
    return dict(zip(call.result_names, results))


def tangent(call: Call, residuals: Arrays, along: jax.Array) -> list[jax.Array]:
    """Of the results, along a tangent of the logits."""
    call = call.tangent(["x"])
    return _bind(call, [*(residuals[name] for name in call.residual_names), along])


def dlogits(
    call: Call, residuals: Arrays, cotangents: Sequence[jax.Array], dtype: np.dtype
) -> jax.Array:
    """The gradient of sum(cotangents * results), in `dtype`; nothing reads the logits after this.

    Where it is theirs, it takes their place.
    """
    outputs = call.with_stats().result_names[: len(cotangents)]
    call = call.backward(["x"], outputs, gradient_dtype=dtype)
    return _bind(call, [*(residuals[name] for name in call.residual_names), *cotangents])[0]


def _bind(call: Call, arrays: Sequence[jax.Array | None]) -> list[jax.Array]:
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
    outputs = _forward_on_shards(call, *primals)
    arrays = dict(zip(call.primals, primals)) | dict(zip(call.result_names, outputs))
    arrays["saved"] = arrays["x"]
    residuals = [arrays[name] for name in call.residual_names]
    return outputs, call.tangent(["x"]).xla(*residuals, tangents[0])
