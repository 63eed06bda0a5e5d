"""layer_norm and rms_norm: the public functions, and the checks that they share."""

import functools
from typing import Literal

import jax
import numpy as np

from jaxnorm import _arguments, _eager, _implementation, _primitive
from jaxnorm._call import Call
from jaxnorm._rows import RowView
from jaxnorm_kernels.specs import Name, Save, Spec

Function = Literal["layer_norm", "rms_norm"]
_Parameter = tuple[tuple[int, ...], np.dtype] | None  # shape and dtype


def layer_norm(
    x: _arguments.ArrayLike,
    scale: _arguments.ArrayLike | None = None,
    bias: _arguments.ArrayLike | None = None,
    *,
    axis: _arguments.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
) -> jax.Array:
    r"""Layer normalisation (Ba, Kiros and Hinton, 2016, https://arxiv.org/abs/1607.06450).

    .. math::
      y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}
          \, (\mathrm{scale} + \mathrm{scale\_offset}) + \mathrm{bias}

    Mean and biased variance are taken over ``axis`` in two passes, in float32 (float64 where x or
    the output is float64).

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      scale: array whose shape is the sizes of the normalised axes, in the order of x; any of the
        dtypes of x, not necessarily the same. None multiplies by 1 (``scale_offset`` is then
        unused).
      bias: like ``scale``. None adds nothing.
      axis: axis or axes to normalise, negative ones count from the end; None for all.
      epsilon: added to the variance, at least 0.
      scale_offset: added to ``scale``; 1.0 for parameters stored as ``1 + w``.
      dtype: dtype of the output; x's by default.
      save: what the backward pass starts from. ``"output"`` keeps y, which the next layer usually
        keeps anyway, and frees x. Gradients of ``scale`` then lose accuracy in columns with
        ``|bias|`` far above ``|scale|`` (and, in float16, ``|scale|`` below 2**-14);
        :func:`jaxnorm.check_params` finds them. ``"input"`` keeps x and the row means.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``.

    Differentiable in reverse and forward mode, to any order. Gradients of the parameters come in
    their own dtypes, summed in float32. Tangents, too, start from what is saved: along ``scale``
    they have y's accuracy from the output, and float32's with ``save="input"``. For second
    derivatives prefer ``save="input"``: from the output, those of ``scale`` carry a relative error
    of about ``u / |scale|`` (u: the output dtype's roundoff), and are NaN in columns with
    ``|scale| < 2**-60``.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, a parameter's shape, ``epsilon``, ``save`` or ``implementation`` is
        wrong, or the implementation asked for cannot run this call.
    """
    return _layer_norm(x, scale, bias, axis, epsilon, scale_offset, dtype, save, implementation)


def rms_norm(
    x: _arguments.ArrayLike,
    scale: _arguments.ArrayLike | None = None,
    *,
    axis: _arguments.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    bias: _arguments.ArrayLike | None = None,
) -> jax.Array:
    r"""Root-mean-square normalisation (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    .. math::
      y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \, (\mathrm{scale} +
      \mathrm{scale\_offset}) + \mathrm{bias}

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      scale: as in :func:`jaxnorm.layer_norm`.
      axis: axis or axes to normalise, negative ones count from the end; None for all.
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of the output; x's by default.
      save: as in :func:`jaxnorm.layer_norm`. Without a bias ``"output"`` is safe for every scale in
        bfloat16, float32 and float64, zeros included.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.
      bias: like ``scale``, by keyword alone; equinox's RMSNorm has one. None adds nothing.

    Returns:
      Array of x's shape in ``dtype``. Differentiable as :func:`jaxnorm.layer_norm` is.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, scale's shape, ``epsilon``, ``save`` or ``implementation`` is wrong, or
        the implementation asked for cannot run this call.
    """
    return _rms_norm(x, scale, bias, axis, epsilon, scale_offset, dtype, save, implementation)


def _normalise(
    function: Function,
    x: _arguments.ArrayLike,
    scale: _arguments.ArrayLike | None,
    bias: _arguments.ArrayLike | None,
    axis: _arguments.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: jax.typing.DTypeLike | None,
    save: Save,
    implementation: Name | None,
) -> jax.Array:
    x = _arguments.float_array(function, "x", x)
    scale = None if scale is None else _arguments.float_array(function, "scale", scale)
    bias = None if bias is None else _arguments.float_array(function, "bias", bias)
    call = norm_call(
        function,
        x.shape,
        x.dtype,
        None if scale is None else (scale.shape, scale.dtype),
        None if bias is None else (bias.shape, bias.dtype),
        axis,
        epsilon,
        scale_offset,
        dtype,
        save,
        implementation,
    )
    if implementation is not None:
        _implementation.forced(call.in_rows, implementation)
    return _primitive.bind(call, x, scale, bias)[0]


_layer_norm, _rms_norm = (
    _eager.compiled(functools.partial(_normalise, function), name=function, arrays=(0, 1, 2))
    for function in ("layer_norm", "rms_norm")
)


def norm_call(
    function: Function,
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    scale: _Parameter,
    bias: _Parameter,
    axis: _arguments.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: jax.typing.DTypeLike | None,
    save: Save,
    implementation: Name | None,
) -> Call:
    """The forward of a call with these arguments, after the checks."""
    view = RowView(shape, _arguments.axes(function, axis, shape))
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None:
            _arguments.parameter_shape(function, name, parameter[0], view.normalised)
    _arguments.one_of(function, "save", save, _arguments.SAVE_MODES)
    _arguments.implementation(function, implementation)
    spec = Spec(
        op="norm",
        direction="fwd",
        rows=view.rows,
        cols=view.cols,
        x_dtype=x_dtype,
        y_dtype=_arguments.output_dtype(function, dtype, x_dtype),
        scale_dtype=None if scale is None else scale[1],
        bias_dtype=None if bias is None else bias[1],
        epsilon=_arguments.number(function, "epsilon", epsilon, minimum=0.0),
        scale_offset=_arguments.number(function, "scale_offset", scale_offset),
        subtract_mean=function == "layer_norm",
        saved=save,
        axes=view.axes,
    )
    return Call(function, spec, view, implementation)
