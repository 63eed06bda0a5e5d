"""What the tests of softmaxes with a mask, a bias or `causal` share: calls of their kernels."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm._call import Call
from jaxnorm._softmax import softmax_call
from jaxnorm_kernels import mosaic

SCALE = 0.37


@dataclasses.dataclass(frozen=True)
class Case:
    """A softmax of an array; shapes of its mask and its bias, which broadcast to it."""

    shape: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    causal: bool = False
    scale: float = SCALE
    masked_logit: float = -math.inf

    def __str__(self) -> str:
        given = {"mask": self.mask, "bias": self.bias, "causal": self.causal}
        return "-".join([str(self.shape), *(f"{k} {v}" for k, v in given.items() if v)])

    def call(self, op: str, x: Any, bias: Any = None, y: Any = None) -> Call:
        """The forward, for these dtypes: by default that of x."""

        def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
            return (1,) * (len(self.shape) - len(shape)) + shape

        return softmax_call(
            op,
            self.shape,
            np.dtype(x),
            None if self.bias is None else (padded(self.bias), np.dtype(bias or x)),
            axis=-1,
            mask=None if self.mask is None else padded(self.mask),
            scale=self.scale,
            causal=self.causal,
            dtype=y or x,
            implementation=None,
            masked_logit=self.masked_logit,
        )

    def backward(self, op: str, x: Any, bias: Any = None, y: Any = None) -> Call:
        call = self.call(op, x, bias, y)
        return call.backward(call.differentiable)


#: Rows share masks and biases in all ways that attention has.
S = 2048
KINDS = {
    "mask": Case((4, 16, S, S), mask=(4, 1, S, S)),
    "bias": Case((4, 16, S, S), bias=(16, S, S)),
    "keys": Case((4, 16, S, S), bias=(4, 1, 1, S), mask=(4, 1, 1, S)),
    "rows": Case((4, 16, S, S), bias=(4, 16, S, 1), mask=(S, 1)),
    "causal": Case((4, 16, S, S), causal=True),
    "all": Case((4, 16, S, S), mask=(4, 16, S, S), bias=(4, 1, S, S), causal=True),
}


def of_width(kind: str, rows: int, cols: int) -> Case:
    """With as many queries and keys, where both are S."""

    def sized(shape):
        if shape is None:
            return None
        *lead, keys = (rows if n == S else n for n in shape)
        return (*lead, cols if keys == rows else keys)

    case = KINDS[kind]
    return dataclasses.replace(
        case, shape=sized(case.shape), mask=sized(case.mask), bias=sized(case.bias)
    )


def operand_types(call: Call) -> list[jax.ShapeDtypeStruct]:
    """Of the forward, or of the backward."""
    spec, view = call.spec, call.view
    is_forward = spec.direction == "fwd"
    x = jax.ShapeDtypeStruct(view.shape, spec.x_dtype if is_forward else spec.y_dtype)
    mask = [jax.ShapeDtypeStruct(view.mask, jnp.bool_)] * spec.has_mask
    if not is_forward:
        return [x, *mask, x]
    if spec.logits_bias_dtype is None:
        return [x, *mask]
    return [x, *mask, jax.ShapeDtypeStruct(view.logits_bias, spec.logits_bias_dtype)]


def lower(call: Call) -> str:
    """The module that XLA gets for an NVIDIA GPU."""
    traced = jax.jit(call.kernel("mosaic")).trace(*operand_types(call))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def interpret(call: Call, *arrays: Any) -> list[jax.Array]:
    with mosaic.interpreted():
        results: list[jax.Array] = jax.jit(call.kernel("mosaic"))(*arrays)
    return results


def interpreted(op: str) -> Any:
    """The public function, differentiable, with its kernels in the interpreter."""

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
