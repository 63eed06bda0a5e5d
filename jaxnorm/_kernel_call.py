"""Runs a call, and makes a kernel an ordinary JAX function: what it lacks comes from its xla twin.

A kernel has neither a differentiation nor a batching rule. Its derivative (the second one, as seen
from the API) is that of the twin. Under ``jax.vmap`` a batch of rows is more rows, and one launch
does them all; a batch of parameters, or of parameter gradients, is left to the batched twin.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxnorm import _implementation, _sharding
from jaxnorm._calls import Call


def run(call: Call, *operands: Any) -> Any:
    """The call's results, by the implementation that it gets where it runs."""
    if call.implementation is not None:
        _implementation.forced(call.in_rows, call.implementation)
    return _ordinary(call)(*operands)


def _ordinary(call: Call) -> Callable[..., Any]:
    """The call as a function that can be differentiated and batched."""
    twin = functools.partial(_sharding.run_twin, call)

    @custom_vmap
    def batchable(*operands: Any) -> Any:
        return _sharding.run(call, *operands)

    @batchable.def_vmap
    def batched(size: int, in_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        if _is_more_rows(call, operands, in_batched):
            more = call.on(call.view.batched(size))
            out = _ordinary(more)(*_with_batch_axis(call, operands, in_batched))
        else:
            in_axes = jax.tree.map(lambda b: 0 if b else None, tuple(in_batched))
            out = jax.vmap(twin, in_axes, axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_vjp(lambda *operands: batchable(*operands))
    differentiable.defvjp(
        lambda *operands: (differentiable(*operands), operands),
        lambda operands, cotangents: jax.vjp(twin, *operands)[1](cotangents),
    )
    return differentiable


def _is_more_rows(call: Call, operands: tuple[Any, ...], in_batched: Sequence[Any]) -> bool:
    """Whether a batch is just more rows: parameters are shared, and none has a gradient here."""
    kinds = call.operand_kinds(operands)
    if call.spec.direction == "bwd" and "param" in kinds:
        return False
    return all(
        batched != (kind == "param") or kind == "mask"
        for kind, batched in zip(kinds, jax.tree.leaves(in_batched))
    )


def _with_batch_axis(
    call: Call, operands: tuple[Any, ...], in_batched: Sequence[Any]
) -> tuple[Any, ...]:
    """The operands of the batch as one call: a mask that all entries share gets an axis of 1."""
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(in_batched)
    kinds = call.operand_kinds(operands)
    leaves = [
        a[None] if kind == "mask" and not batched else a
        for kind, batched, a in zip(kinds, flags, leaves)
    ]
    return tuple(jax.tree.unflatten(tree, leaves))
