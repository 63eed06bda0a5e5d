"""layer_norm and rms_norm: argument checks, and the custom_vjp rule that they share."""

import dataclasses
import functools

import jax
import numpy as np

from jaxnorm import _arguments, _kernel_call, _remat, _sharding
from jaxnorm._calls import Call
from jaxnorm._rows import RowView
from jaxnorm_kernels.specs import Direction, Save, Spec, Stats


def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: _arguments.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    save: Save = "output",
    implementation: str | None = None,
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

    Differentiable in reverse mode, to any order; forward mode (``jax.jvp``, ``jax.jacfwd``) raises
    JAX's TypeError for ``custom_vjp``. Gradients of the parameters come in their own dtypes, summed
    in float32. For second derivatives prefer ``save="input"``: from the output, those of ``scale``
    carry a relative error of about ``u / |scale|`` (u: the output dtype's roundoff), and are NaN in
    columns with ``|scale| < 2**-60``.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, a parameter's shape, ``epsilon``, ``save`` or ``implementation`` is
        wrong,
        or the implementation asked for cannot run this call.
    """
    return _normalise(
        "layer_norm", x, scale, bias, axis, epsilon, scale_offset, dtype, save, implementation
    )


def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: _arguments.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    save: Save = "output",
    implementation: str | None = None,
) -> jax.Array:
    r"""Root-mean-square normalisation (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    .. math::
      y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \, (\mathrm{scale} +
      \mathrm{scale\_offset})

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

    Returns:
      Array of x's shape in ``dtype``. Differentiable as :func:`jaxnorm.layer_norm` is.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, scale's shape, ``epsilon``, ``save`` or ``implementation`` is wrong, or
        the implementation asked for cannot run this call.
    """
    return _normalise(
        "rms_norm", x, scale, None, axis, epsilon, scale_offset, dtype, save, implementation
    )


_Residuals = tuple[jax.Array, Stats, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class NormCall:
    """The static part of one call, after the checks."""

    view: RowView
    x_dtype: np.dtype
    y_dtype: np.dtype
    scale_dtype: np.dtype | None
    bias_dtype: np.dtype | None
    epsilon: float
    scale_offset: float
    subtract_mean: bool
    save: Save
    implementation: str | None

    def spec(self, direction: Direction, *, want_stats: bool = False) -> Spec:
        return Spec(
            op="norm",
            direction=direction,
            rows=self.view.rows,
            cols=self.view.cols,
            x_dtype=self.x_dtype,
            y_dtype=self.y_dtype,
            scale_dtype=self.scale_dtype,
            bias_dtype=self.bias_dtype,
            epsilon=self.epsilon,
            subtract_mean=self.subtract_mean,
            scale_offset=self.scale_offset,
            saved=self.save,
            want_stats=want_stats,
            axes=self.view.axes,
        )


def _normalise(
    function: str,
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None,
    bias: jax.typing.ArrayLike | None,
    axis: _arguments.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: jax.typing.DTypeLike | None,
    save: Save,
    implementation: str | None,
) -> jax.Array:
    x = _arguments.float_array(function, "x", x)
    view = RowView(x.shape, _arguments.axes(function, axis, x.shape))
    scale = _arguments.parameter(function, "scale", scale, view.normalised)
    bias = _arguments.parameter(function, "bias", bias, view.normalised)
    _arguments.one_of(function, "save", save, _arguments.SAVE_MODES)
    _arguments.implementation(function, implementation)
    call = NormCall(
        view=view,
        x_dtype=x.dtype,
        y_dtype=_arguments.output_dtype(function, dtype, x.dtype),
        scale_dtype=None if scale is None else scale.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        epsilon=_arguments.number(function, "epsilon", epsilon, minimum=0.0),
        scale_offset=_arguments.number(function, "scale_offset", scale_offset),
        subtract_mean=function == "layer_norm",
        save=save,
        implementation=implementation,
    )
    return _norm(*_sharding.vary_alike(x, scale, bias), call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, call: NormCall
) -> jax.Array:
    return _norm_forward(x, scale, bias, call, want_stats=False)[0]


def _norm_fwd(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, call: NormCall
) -> tuple[jax.Array, _Residuals]:
    y, stats = _remat.name_norm(*_norm_forward(x, scale, bias, call, want_stats=True))
    # The very array that is returned: a reshaped or cast twin would be stored a second time.
    return y, (y if call.save == "output" else x, stats, scale, bias)


def _norm_bwd(
    call: NormCall, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    return _norm_backward(*residuals, dy, call)


_norm.defvjp(_norm_fwd, _norm_bwd)


@functools.partial(jax.jit, static_argnames=("call", "want_stats"))
def _norm_forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    call: NormCall,
    want_stats: bool,
) -> tuple[jax.Array, Stats]:
    spec = call.spec("fwd", want_stats=want_stats)
    norm = Call("norm_fwd", spec, call.view, call.implementation)
    y, stats = _kernel_call.run(norm, x, scale, bias)
    return y, stats


@functools.partial(jax.jit, static_argnames="call")
def _norm_backward(
    saved: jax.Array,
    stats: Stats,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dy: jax.Array,
    call: NormCall,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    norm = Call("norm_bwd", call.spec("bwd"), call.view, call.implementation)
    dx, dscale, dbias = _kernel_call.run(norm, saved, stats, scale, bias, dy)
    return dx, _sharding.like(dscale, scale), _sharding.like(dbias, bias)
