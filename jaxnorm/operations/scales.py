"""The arguments ``logits_scale`` of losses and ``scale`` of softmax, which multiply the logits.

If the user passes a Python number, it is a constant of the compiled program. If the user passes an
array, it is an operand of the call.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call

from jaxnorm.operations import checks


class Scale(NamedTuple):
    """The checked ``logits_scale`` of a loss.

    Attributes:
      number: the scale if the user passed a number; 1 if the user passed an array.
      array: the scale of each position, in the arithmetic dtype; None if the user passed a number.
    """

    number: float
    array: jax.Array | None = None


def is_array(value: Any) -> bool:
    """Return True if a scale is an array, and False if it is a number.

    NumPy scalars, and NumPy arrays without axes, count as numbers.
    """
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, jax.Array) or hasattr(value, "__jax_array__")


def of_logits(
    function: str, value: Any, positions: tuple[int, ...], dtype: np.dtype, of: str = "labels'"
) -> Scale:
    """Check the ``logits_scale`` of a loss and return it.

    Args:
      function: name of the public function, for errors.
      value: the argument that the user passed.
      positions: shape of the logits without the axis of classes.
      dtype: dtype of the arithmetic, to which an array is cast.
      of: a word in the possessive, such as "labels'". In errors, it names the array that has the
        shape `positions`.
    """
    if not is_array(value):
        return Scale(checks.number(function, "logits_scale", value))
    array = _checked(function, "logits_scale", value, dtype)
    if array.ndim and not checks.fits(array.shape, positions):
        raise ValueError(
            f"{function}: logits_scale has shape {array.shape}; expected a number, a scalar array, "
            f"or one that broadcasts to {of} shape {positions}, with {len(positions)} axes: one "
            f"scale for each position{checks.reshaping('logits_scale', array.shape, positions)}"
        )
    return Scale(1.0, jnp.broadcast_to(array, positions))


def of_softmax(function: str, value: Any, rows: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Check that ``scale`` of a softmax is a scalar array, and broadcast it to `rows`.

    `rows` is the shape of x without the normalised axes.
    """
    array = _checked(function, "scale", value, dtype)
    if array.ndim:
        raise ValueError(
            f"{function}: scale has shape {array.shape}; expected a number or a scalar array; "
            "multiply x by it instead, with a shape that broadcasts to x's"
        )
    return jnp.broadcast_to(array, rows)


def _checked(function: str, name: str, value: Any, dtype: np.dtype) -> jax.Array:
    """Convert a scale to an array of dtype `dtype`.

    Differentiating a function with respect to this array raises TypeError.
    """
    return _constant(function, name, checks.scale_array(function, name, value).astype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _constant(function: str, name: str, scale: jax.Array) -> jax.Array:
    """Return `scale` unchanged. Differentiating this function raises TypeError.

    There is one exception: with ``jax_remat3``, forward-mode derivatives with respect to the scale
    are NaN.
    """
    del function, name
    return scale


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _(function: str, name: str, primals: Any, tangents: Any) -> Any:
    (scale,), (tangent,) = primals, tangents
    if isinstance(tangent, SymbolicZero):
        return scale, tangent

    def refuse(*_: Any) -> Any:
        x = "x" if name == "scale" else "the logits"
        raise TypeError(
            f"{function}: {name} is differentiated, and has no derivative; expected a constant; "
            f"wrap it in jax.lax.stop_gradient, or multiply {x} yourself"
        )

    if not jax.config.jax_remat3:
        refuse()
    # In forward mode, the `jax.checkpoint` of ``jax_remat3`` passes arrays of zeros for symbolic
    # zeros (jax 0.12.0.1). So a tangent of 0 must give 0. Any other tangent becomes NaN, which the
    # primitives' JVP rules add to the tangents of the results.
    return scale, linear_call(lambda _, t: jnp.where(t == 0, 0, jnp.nan * t), refuse, (), tangent)
