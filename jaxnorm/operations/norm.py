"""layer_norm and rms_norm: the public functions, and what all functions of norms share."""

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, PARAMETERS
from jaxnorm_kernels.specs import Activation, Name, NormActivation, NormOptions, Save, Spec

# What errors call an operand of the table.
_PUBLIC_NAMES = {"branch_scale": "gate"}


def norm_call(
    function: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    given: Mapping[str, jax.Array],
    *,
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save,
    implementation: Name | None,
    activation: Activation | None = None,
    **options: Any,
) -> Call:
    """The forward of a call with these arguments, after the checks.

    `given`: the residual and the parameters that the call has. `options`: fields of `NormOptions`
    that only this operation has, checked.
    """
    axes = checks.axes(function, axis, x.shape)
    view = RowView(x.shape, axes)
    shapes = {name: a.shape for name, a in given.items() if OPERANDS[name] in PARAMETERS}
    for name, own in shapes.items():
        checks.check_parameter(function, _PUBLIC_NAMES.get(name, name), own, view)
    by_kind = {
        kind: jnp.broadcast_shapes(*(own for name, own in shapes.items() if OPERANDS[name] == kind))
        for kind in PARAMETERS
    }
    # Of the sizes of the normalised axes, a view needs no word.
    view = RowView(
        x.shape, axes, **{k: () if own == view.normalised else own for k, own in by_kind.items()}
    )
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)
    entry = FUNCTIONS[function]
    default = given["residual"].dtype if OPERATIONS[entry.op].y_is_sum else x.dtype
    op = entry.gated if "branch_scale" in given else entry.op
    assert op is not None
    dtypes: dict[str, Any] = {f"{name}_dtype": a.dtype for name, a in given.items()}
    spec = Spec(
        op=op,
        direction="fwd",
        outputs=(*OPERATIONS[op].results,),
        rows=view.rows,
        cols=view.cols,
        x_dtype=x.dtype,
        y_dtype=checks.output_dtype(function, dtype, default),
        options=NormOptions(
            epsilon=checks.number(function, "epsilon", epsilon, minimum=0.0),
            scale_offset=checks.number(function, "scale_offset", scale_offset),
            subtract_mean=entry.subtract_mean,
            saved=save if activation is None else "input",  # an activation cannot be undone
            activation=activation,
            **dtypes,
            **options,
        ),
    )
    numbers = {"epsilon": spec.norm.epsilon, "scale_offset": spec.norm.scale_offset}
    checks.finite_in(function, spec.compute_dtype, numbers)
    return Call.of(function, spec, view, implementation).on(view)


def common_options(
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    save: Save,
    implementation: Name | None,
) -> dict[str, Any]:
    """The options that all norms have, by name, from arguments in the order of their signatures."""
    return {
        "axis": axis,
        "epsilon": epsilon,
        "scale_offset": scale_offset,
        "dtype": dtype,
        "save": save,
        "implementation": implementation,
    }


def normalise(
    function: str,
    x: checks.ArrayLike,
    residual: checks.ArrayLike | None = None,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    next_scale: checks.ArrayLike | None = None,
    gate: checks.ArrayLike | None = None,
    activation: NormActivation | None = None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a function of the table, after the checks.

    `gate`: of a sum; in the table it is its branch_scale. `options`: of `norm_call`.
    """
    checks.one_of(function, "activation", activation, (None, *get_args(NormActivation)))
    x = checks.float_array(function, "x", x)
    given: dict[str, jax.Array] = {}
    for name, array in (("scale", scale), ("bias", bias), ("next_scale", next_scale)):
        if array is not None:
            given[name] = checks.float_array(function, name, array)
    if gate is not None:
        given["branch_scale"] = checks.float_array(function, "gate", gate)
    if "residual" in OPERATIONS[FUNCTIONS[function].op].operands:
        # None is no residual: the check says so.
        residual = checks.float_array(function, "residual", residual)
        checks.same_shape(function, "residual", residual.shape, x.shape)
        given["residual"] = sharding.lie_alike(residual, x)
    call = norm_call(function, x, given, activation=activation, **options)
    if "next_scale" in given and "scale" in given:
        shape = call.view.shape_of("scale")
        for name in ("scale", "next_scale"):
            if given[name].shape != shape:
                call, wide = call.widened(name, given[name])
                given[name] = jnp.broadcast_to(wide, shape)
    return row_operations.run(call, x, *[given[name] for name in call.primals[1:]])


@eager.compiled("x", "scale", "bias")
def layer_norm(
    x: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    activation: NormActivation | None = None,
) -> jax.Array:
    r"""Layer normalisation (Ba, Kiros and Hinton, 2016, https://arxiv.org/abs/1607.06450).

    .. math::
      y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}
          \, (\mathrm{scale} + \mathrm{scale\_offset}) + \mathrm{bias}

    Mean and biased variance are taken over ``axis`` in two passes, in float32 (float64 where x or
    the output is float64).

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      scale: array whose shape is the sizes of the normalised axes, in the order of x, or 1 where it
        is the same along such an axis; any of the dtypes of x, not necessarily the same. It may
        have axes before those, a scale for each group of rows (adaLN): they broadcast,
        right-aligned as numpy's, to the other axes of x. None multiplies by 1 (``scale_offset`` is
        then unused).
      bias: like ``scale``, with axes of its own. None adds nothing.
      axis: axis or axes to normalise, negative ones count from the end; None for all.
      epsilon: added to the variance, at least 0.
      scale_offset: added to ``scale``; 1.0 for parameters stored as ``1 + w``.
      dtype: dtype of the output; x's by default.
      save: what the backward pass starts from. ``"output"`` keeps y, which the next layer usually
        keeps anyway, and frees x. Gradients of ``scale`` then lose accuracy in columns with
        ``|bias|`` far above ``|scale|`` (and, in float16, ``|scale|`` below 2**-14), and are 0
        where ``scale`` is 0 beside a bias that is not, of which y tells nothing;
        :func:`jaxnorm.check_params` finds these columns. ``"input"`` keeps x and the row means.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.
      activation: ``"silu"``, ``"gelu"`` or ``"relu"``: y is that of :mod:`jax.nn` with its defaults
        (gelu is the approximation by tanh) of the norm, in the same pass and rounded once. None for
        none. An activation cannot be undone: with one the input is kept, whatever ``save`` says.

    Returns:
      Array of x's shape in ``dtype``.

    Differentiable in reverse and forward mode, to any order. Gradients of the parameters come in
    their own shapes and dtypes, summed in float32. Tangents, too, start from what is saved: along
    ``scale`` they have y's accuracy from the output, and float32's with ``save="input"``. For
    second derivatives prefer ``save="input"``: from the output, those of ``scale`` carry a relative
    error of about ``u / |scale|`` (u: the output dtype's roundoff), and are NaN in columns with
    ``|scale| < 2**-60``.

    GroupNorm (Wu and He, 2018, https://arxiv.org/abs/1803.08494) of images with channels last is
    this function over all but the axes of samples and of groups, without a transpose: of x
    ``(N, H, W, G, C / G)`` with ``axis=(1, 2, 4)`` and parameters ``(G, 1, 1, C / G)``.
    InstanceNorm is that of x ``(N, H, W, C)`` with ``axis=(1, 2)`` and parameters ``(C, 1, 1)``.
    ``activation="silu"`` is what a diffusion model's U-Net or VAE has after each GroupNorm.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, a parameter's shape, ``epsilon``, ``save``, ``implementation`` or
        ``activation`` is wrong, or the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x = jnp.ones((8, 128, 512), jnp.bfloat16)
      >>> y = jaxnorm.layer_norm(x, jnp.ones(512), jnp.zeros(512), epsilon=1e-5)
      >>> y.shape, y.dtype.name
      ((8, 128, 512), 'bfloat16')
      >>> jaxnorm.layer_norm(x, axis=(-2, -1)).shape  # of each sample
      (8, 128, 512)
      >>> images = jnp.ones((2, 16, 16, 32, 8), jnp.bfloat16)  # 256 channels in 32 groups
      >>> scale = jnp.ones((32, 1, 1, 8))
      >>> jaxnorm.layer_norm(images, scale, axis=(1, 2, 4), activation="silu").shape
      (2, 16, 16, 32, 8)
    """
    options = common_options(axis, epsilon, scale_offset, dtype, save, implementation)
    (y,) = normalise("layer_norm", x, scale=scale, bias=bias, activation=activation, **options)
    return y


@eager.compiled("x", "scale", "bias")
def rms_norm(
    x: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    bias: checks.ArrayLike | None = None,
    activation: NormActivation | None = None,
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
        bfloat16, float32 and float64, zeros included; scales of 0 beside a bias are not.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.
      bias: like ``scale``, by keyword alone; equinox's RMSNorm has one. None adds nothing.
      activation: as in :func:`jaxnorm.layer_norm`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable as :func:`jaxnorm.layer_norm` is.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: an axis, scale's shape, ``epsilon``, ``save``, ``implementation`` or
        ``activation`` is wrong, or the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x = jnp.ones((8, 128, 512), jnp.bfloat16)
      >>> jaxnorm.rms_norm(x, jnp.ones(512)).shape
      (8, 128, 512)
      >>> y = jaxnorm.rms_norm(x, jnp.zeros(512), scale_offset=1.0)  # Gemma's 1 + w
      >>> y.shape, y.dtype.name
      ((8, 128, 512), 'bfloat16')
    """
    options = common_options(axis, epsilon, scale_offset, dtype, save, implementation)
    (y,) = normalise("rms_norm", x, scale=scale, bias=bias, activation=activation, **options)
    return y
