"""Helpers that lower or interpret Mosaic's softmax kernels with a mask, a bias or `causal`."""

from typing import Any

import jax
from logits_cases import Case, operand_types
from programs import text_for_cuda

from jaxnorm.calls.call import Call
from jaxnorm_kernels import mosaic


def lower(call: Call) -> str:
    """Return the module that XLA receives for an NVIDIA GPU."""
    return text_for_cuda(call.kernel("mosaic"), *operand_types(call))


def interpret(call: Call, *arrays: Any) -> list[jax.Array]:
    with mosaic.interpreted():
        results: list[jax.Array] = jax.jit(call.kernel("mosaic"))(*arrays)
    return results


def interpreted(op: str) -> Any:
    """Return softmax or log_softmax with its kernels running in the interpreter.

    Like the public function, it can be differentiated.
    """

    def function(
        x: Any,
        *,
        where: Any = None,
        scale: float = 1.0,
        bias: Any = None,
        causal: bool = False,
        dtype: Any = None,
        implementation: Any = None,
    ) -> jax.Array:
        del implementation
        shapes = [None if a is None else a.shape for a in (where, bias)]
        case = Case(x.shape, *shapes, causal, scale)
        dtypes = x.dtype, None if bias is None else bias.dtype, dtype
        rank = [1] * x.ndim
        mask = [] if where is None else [where.reshape((*rank[where.ndim :], *where.shape))]

        @jax.custom_vjp
        def run(x: Any, *bias: Any) -> jax.Array:
            bias = [b.reshape((*rank[b.ndim :], *b.shape)) for b in bias]
            return interpret(case.call(op, *dtypes), x, *mask, *bias)[0]

        def backward(kept: Any, dy: Any) -> tuple[jax.Array, ...]:
            y, *shapes = kept
            dx, *dbias = interpret(case.backward(op, *dtypes), y, *mask, dy)
            return dx, *(d.reshape(b.shape) for d, b in zip(dbias, shapes))

        def forward(*primals: Any) -> tuple[Any, Any]:
            y = run(*primals)
            return y, (y, *primals[1:])

        run.defvjp(forward, backward)
        return run(*[a for a in (x, bias) if a is not None])

    return function
