"""softmax and log_softmax: argument checks, and the custom_vjp rule that they share."""

import dataclasses
import functools
from typing import Literal

import jax
import numpy as np

from jaxnorm import _arguments, _kernel_call, _remat, _sharding
from jaxnorm._calls import Call
from jaxnorm._rows import RowView
from jaxnorm_kernels.specs import Direction, Spec


def softmax(
    x: jax.typing.ArrayLike,
    axis: _arguments.Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Softmax; the counterpart of :func:`jax.nn.softmax` that keeps only its output for the
    backward.

    .. math::
      y_i = \frac{\exp(x_i)}{\sum_j \exp(x_j)}

    The arithmetic is float32 (float64 where x or the output is float64) for every dtype.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      axis: axis or axes over which the output sums to 1; None for all.
      where: boolean mask that broadcasts to x's shape. Entries where it is False take no part:
        their
        output and gradient are 0, also in a row where all are False.
      dtype: dtype of the output; x's by default.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. As in :mod:`jax.nn`, a row with +inf, NaN or nothing but -inf
      is NaN.

    Differentiable in reverse mode, to any order; forward mode (``jax.jvp``, ``jax.jacfwd``) raises
    JAX's TypeError for ``custom_vjp``.

    Raises:
      TypeError: x or ``dtype`` is not a supported float dtype, or ``where`` is not boolean.
      ValueError: ``axis``, ``where``'s shape or ``implementation`` is wrong.
    """
    return _softmax_of("softmax", x, axis, where, dtype, implementation)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: _arguments.Axis = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Logarithm of the softmax; the output-saving counterpart of :func:`jax.nn.log_softmax`.

    .. math::
      y_i = x_i - \log \sum_j \exp(x_j)

    The backward recomputes probabilities as ``exp(y)``, so keep log-probabilities of a large
    vocabulary in float32: with bfloat16 logits, pass ``dtype=jnp.float32``.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      axis: axis or axes over which ``exp`` of the output sums to 1; None for all.
      where: boolean mask that broadcasts to x's shape. Entries where it is False take no part:
        their
        output is -inf and their gradient 0.
      dtype: dtype of the output; x's by default.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable as :func:`jaxnorm.softmax` is.

    Raises:
      TypeError: x or ``dtype`` is not a supported float dtype, or ``where`` is not boolean.
      ValueError: ``axis``, ``where``'s shape or ``implementation`` is wrong.
    """
    return _softmax_of("log_softmax", x, axis, where, dtype, implementation)


Op = Literal["softmax", "log_softmax"]
_Residuals = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class SoftmaxCall:
    """The static part of one call, after the checks."""

    op: Op
    view: RowView
    x_dtype: np.dtype
    y_dtype: np.dtype
    has_mask: bool
    implementation: str | None

    def spec(self, direction: Direction) -> Spec:
        return Spec(
            op=self.op,
            direction=direction,
            rows=self.view.rows,
            cols=self.view.cols,
            x_dtype=self.x_dtype,
            y_dtype=self.y_dtype,
            has_mask=self.has_mask,
            axes=self.view.axes,
        )


def _softmax_of(
    op: Op,
    x: jax.typing.ArrayLike,
    axis: _arguments.Axis,
    where: jax.typing.ArrayLike | None,
    dtype: jax.typing.DTypeLike | None,
    implementation: str | None,
) -> jax.Array:
    x = _arguments.float_array(op, "x", x)
    view = RowView(x.shape, _arguments.axes(op, axis, x.shape))
    mask = _arguments.mask(op, where, x.shape)
    _arguments.implementation(op, implementation)
    call = SoftmaxCall(
        op=op,
        view=view,
        x_dtype=x.dtype,
        y_dtype=_arguments.output_dtype(op, dtype, x.dtype),
        has_mask=mask is not None,
        implementation=implementation,
    )
    return _softmax(*_sharding.vary_alike(x, mask), call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(x: jax.Array, mask: jax.Array | None, call: SoftmaxCall) -> jax.Array:
    return _softmax_forward(x, mask, call)


def _softmax_fwd(
    x: jax.Array, mask: jax.Array | None, call: SoftmaxCall
) -> tuple[jax.Array, _Residuals]:
    y = _remat.name_softmax(_softmax_forward(x, mask, call))
    # The mask stays in the shape it came in, and is needed: -inf in a log_softmax may be genuine.
    return y, (y, mask)


def _softmax_bwd(call: SoftmaxCall, residuals: _Residuals, dy: jax.Array) -> tuple[jax.Array, None]:
    y, mask = residuals
    return _softmax_backward(y, mask, dy, call), None


_softmax.defvjp(_softmax_fwd, _softmax_bwd)


@functools.partial(jax.jit, static_argnames="call")
def _softmax_forward(x: jax.Array, mask: jax.Array | None, call: SoftmaxCall) -> jax.Array:
    softmax = Call(f"{call.op}_fwd", call.spec("fwd"), call.view, call.implementation)
    y: jax.Array = _kernel_call.run(softmax, x, mask)
    return y


@functools.partial(jax.jit, static_argnames="call")
def _softmax_backward(
    y: jax.Array, mask: jax.Array | None, dy: jax.Array, call: SoftmaxCall
) -> jax.Array:
    softmax = Call(f"{call.op}_bwd", call.spec("bwd"), call.view, call.implementation)
    dx: jax.Array = _kernel_call.run(softmax, y, mask, dy)
    return dx
