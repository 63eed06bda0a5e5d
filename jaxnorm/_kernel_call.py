"""Runs a call, and makes a kernel an ordinary JAX function: what it lacks comes from its xla twin.

A kernel has neither a differentiation nor a batching rule. Its derivative (the second one, as seen
from the API) is that of the twin. Under ``jax.vmap`` a batch of rows is more rows, and one launch
does them all; a batch of parameters, or of parameter gradients, is left to the batched twin.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxnorm import _implementation
from jaxnorm._default_call import default_call
from jaxnorm_kernels.specs import Spec

Function = Callable[..., Any]


def run(function: str, spec: Spec, implementation: str | None, *operands: Any) -> Any:
    """`function` of the contract on `operands`, by the implementation that `spec` gets."""

    def twin(spec: Spec) -> Function:
        return _implementation.bind("xla", function, spec)

    def kernel(spec: Spec) -> Function:
        if implementation is None:
            return functools.partial(default_call, function, spec, twin(spec))
        return _implementation.bind(
            _implementation.forced(spec, implementation).name, function, spec
        )

    if implementation == "xla":
        return twin(spec)(*operands)
    return kernel_call(kernel, twin(spec), spec)(*operands)


def kernel_call(bind: Callable[[Spec], Function], twin: Function, spec: Spec) -> Function:
    """The kernel ``bind(spec)`` over its operands, differentiable and batchable.

    Args:
      bind: gives the kernel for a spec; batching binds it again, for more rows.
      twin: the same function of the xla implementation.
      spec: of one call, without batch axes.
    """

    @custom_vmap
    def batchable(*operands: Any) -> Any:
        return bind(spec)(*operands)

    @batchable.def_vmap
    def batched(size: int, in_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        if _rows_fold(spec, in_batched):
            folded = jax.tree.map(
                lambda a, b: a.reshape(-1, *a.shape[2:]) if b else a, operands, tuple(in_batched)
            )
            more_rows = dataclasses.replace(spec, rows=size * spec.rows)
            out = kernel_call(bind, twin, more_rows)(*folded)
            out = jax.tree.map(lambda a: a.reshape(size, spec.rows, *a.shape[1:]), out)
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


def _rows_fold(spec: Spec, in_batched: Sequence[Any]) -> bool:
    """Whether a batch is just more rows: parameters are shared, and none has a gradient here."""
    if spec.op == "norm" and spec.direction == "fwd":
        x, *parameters = in_batched
        return bool(x) and not any(jax.tree.leaves(parameters))
    has_parameters = spec.scale_dtype is not None or spec.bias_dtype is not None
    return not has_parameters and all(jax.tree.leaves(in_batched))
