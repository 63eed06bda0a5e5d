"""softmax and log_softmax: the public functions, and the checks that they share."""

import functools
from typing import Literal

import jax
import numpy as np

from jaxnorm import _arguments, _eager, _implementation, _primitive
from jaxnorm._call import Call
from jaxnorm._rows import RowView
from jaxnorm_kernels.specs import Name, Spec

Function = Literal["softmax", "log_softmax"]


def softmax(
    x: _arguments.ArrayLike,
    axis: _arguments.Axis = -1,
    where: _arguments.ArrayLike | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Name | None = None,
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
        their output and gradient are 0, also in a row where all are False.
      dtype: dtype of the output; x's by default.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. As in :mod:`jax.nn`, a row with +inf, NaN or nothing but -inf
      is NaN.

    Differentiable in reverse and forward mode, to any order; tangents, too, start from y.

    Raises:
      TypeError: x or ``dtype`` is not a supported float dtype, or ``where`` is not boolean.
      ValueError: ``axis``, ``where``'s shape or ``implementation`` is wrong.
    """
    return _softmax(x, axis, where, dtype, implementation)


def log_softmax(
    x: _arguments.ArrayLike,
    axis: _arguments.Axis = -1,
    where: _arguments.ArrayLike | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Name | None = None,
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
        their output is -inf and their gradient 0.
      dtype: dtype of the output; x's by default.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable as :func:`jaxnorm.softmax` is.

    Raises:
      TypeError: x or ``dtype`` is not a supported float dtype, or ``where`` is not boolean.
      ValueError: ``axis``, ``where``'s shape or ``implementation`` is wrong.
    """
    return _log_softmax(x, axis, where, dtype, implementation)


def _softmax_of(
    function: Function,
    x: _arguments.ArrayLike,
    axis: _arguments.Axis,
    where: _arguments.ArrayLike | None,
    dtype: jax.typing.DTypeLike | None,
    implementation: Name | None,
) -> jax.Array:
    x = _arguments.float_array(function, "x", x)
    mask = None if where is None else _arguments.mask(function, where, x.shape)
    call = softmax_call(function, x.shape, x.dtype, axis, mask is not None, dtype, implementation)
    if implementation is not None:
        _implementation.forced(call.in_rows, implementation)
    return _primitive.bind(call, x, mask)[0]


_softmax, _log_softmax = (
    _eager.compiled(functools.partial(_softmax_of, function), name=function, arrays=(0, 2))
    for function in ("softmax", "log_softmax")
)


def softmax_call(
    function: Function,
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    axis: _arguments.Axis,
    has_mask: bool,
    dtype: jax.typing.DTypeLike | None,
    implementation: Name | None,
) -> Call:
    """The forward of a call with these arguments, after the checks."""
    view = RowView(shape, _arguments.axes(function, axis, shape))
    _arguments.implementation(function, implementation)
    spec = Spec(
        op=function,
        direction="fwd",
        rows=view.rows,
        cols=view.cols,
        x_dtype=x_dtype,
        y_dtype=_arguments.output_dtype(function, dtype, x_dtype),
        has_mask=has_mask,
        axes=view.axes,
    )
    return Call(function, spec, view, implementation)
