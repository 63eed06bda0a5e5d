"""The norms, alone and with a residual: the public functions, and the checks that they share."""

import functools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, PARAMETERS
from jaxnorm_kernels.specs import Activation, Name, NormActivation, Save, Spec


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
    (y,) = _NORMS["layer_norm"](
        x,
        None,
        scale,
        bias,
        None,
        axis,
        epsilon,
        scale_offset,
        dtype,
        save,
        implementation,
        activation,
    )
    return y


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
    (y,) = _NORMS["rms_norm"](
        x,
        None,
        scale,
        bias,
        None,
        axis,
        epsilon,
        scale_offset,
        dtype,
        save,
        implementation,
        activation,
    )
    return y


def add_layer_norm(
    x: checks.ArrayLike,
    residual: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    gate: checks.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Residual addition and layer normalisation in one pass: a pre-norm block's step.

    .. math::
      h = \mathrm{residual} + \mathrm{gate} \, x, \qquad y = \mathrm{layer\_norm}(h)

    Its backward adds the cotangent of h in the same pass, so that the gradient of x and residual,
    without a gate one array where their dtypes agree, is written once. The gate's comes from that
    pass, too.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      residual: array of x's shape; any of these dtypes.
      scale, bias, axis, epsilon, scale_offset: as in :func:`jaxnorm.layer_norm`.
      dtype: dtype of y; x's by default.
      save: what the norm's backward starts from: ``"output"`` keeps y, ``"input"`` keeps h and the
        row means. Scales of 0 beside a bias need the latter; see :func:`jaxnorm.layer_norm`.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.
      gate: like ``scale``, with axes of its own: (batch, 1, channels) in adaLN-zero (Peebles and
        Xie, 2022, https://arxiv.org/abs/2212.09748), (channels,) in LayerScale (Touvron et al.,
        2021, https://arxiv.org/abs/2103.17239). With one, x is kept, too, for its gradient. None
        adds x as it is.

    Returns:
      (y, h): arrays of x's shape, y in ``dtype`` and h in residual's dtype; y is the norm of h as
      rounded to it. Differentiable as :func:`jaxnorm.layer_norm` is.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: x and residual differ in shape, or gate's shape is wrong, or as in
        :func:`jaxnorm.layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> y, h = jaxnorm.add_layer_norm(x, residual, jnp.ones(512), jnp.zeros(512))
      >>> y.dtype.name, h.dtype.name
      ('bfloat16', 'float32')
      >>> y, h = jaxnorm.add_layer_norm(x, residual, jnp.ones(512), gate=jnp.full(512, 1e-4))
      >>> round(float(h[0, 0]), 4)
      1.0001
    """
    kind, last = (_NORMS, None) if gate is None else (_GATED, gate)
    y, h = kind["add_layer_norm"](
        x, residual, scale, bias, last, axis, epsilon, scale_offset, dtype, save, implementation
    )
    return y, h


def add_rms_norm(
    x: checks.ArrayLike,
    residual: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    gate: checks.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Residual addition and root-mean-square normalisation in one pass: a pre-norm block's step.

    .. math::
      h = \mathrm{residual} + \mathrm{gate} \, x, \qquad y = \mathrm{rms\_norm}(h)

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, axis, epsilon, scale_offset: as in :func:`jaxnorm.rms_norm`.
      dtype, save, implementation, gate: as in :func:`jaxnorm.add_layer_norm`.

    Returns:
      (y, h), as :func:`jaxnorm.add_layer_norm` does.

    Raises:
      TypeError, ValueError: as :func:`jaxnorm.add_layer_norm` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> y, h = jaxnorm.add_rms_norm(x, residual, jnp.ones(512))
      >>> y.dtype.name, h.dtype.name
      ('bfloat16', 'float32')
    """
    kind, last = (_NORMS, None) if gate is None else (_GATED, gate)
    y, h = kind["add_rms_norm"](
        x, residual, scale, None, last, axis, epsilon, scale_offset, dtype, save, implementation
    )
    return y, h


def rms_norm_add(
    x: checks.ArrayLike,
    residual: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Root-mean-square normalisation and residual addition in one pass: a post-norm block's step.

    .. math::
      y = \mathrm{residual} + \mathrm{rms\_norm}(x)

    The norm's output is rounded only in the sum, and nobody else needs it: the backward starts from
    x, whatever it is that needs x, too.

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, axis, epsilon, scale_offset: as in :func:`jaxnorm.rms_norm`.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in residual's dtype. Differentiable as :func:`jaxnorm.rms_norm` is with
      ``save="input"``.

    Raises:
      TypeError, ValueError: as :func:`jaxnorm.add_layer_norm` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> y = jaxnorm.rms_norm_add(x, residual, jnp.ones(512))
      >>> y.shape, y.dtype.name
      ((8, 512), 'float32')
    """
    (y,) = _NORMS["rms_norm_add"](
        x, residual, scale, None, None, axis, epsilon, scale_offset, None, "input", implementation
    )
    return y


def rms_norm_add_rms_norm(
    x: checks.ArrayLike,
    residual: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    next_scale: checks.ArrayLike | None = None,
    *,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""The norm after a branch, the residual addition and the next branch's norm, in one pass.

    .. math::
      h = \mathrm{residual} + \mathrm{rms\_norm}(x), \qquad y = \mathrm{rms\_norm}(h)

    What Gemma 2 and 3 have between two branches.

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, next_scale: of the first and of the second norm, as in :func:`jaxnorm.rms_norm`.
      axis, epsilon, scale_offset: of both norms, as in :func:`jaxnorm.rms_norm`.
      dtype: dtype of y; x's by default.
      save: what the second norm's backward starts from: ``"output"`` keeps y, ``"input"`` keeps h.
        The first norm keeps x.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      (y, h), as :func:`jaxnorm.add_layer_norm` does.

    Raises:
      TypeError, ValueError: as :func:`jaxnorm.add_layer_norm` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> after, before = jnp.ones(512), jnp.ones(512)  # of the branch that was, of the next one
      >>> y, h = jaxnorm.rms_norm_add_rms_norm(x, residual, after, before)
      >>> y.dtype.name, h.dtype.name
      ('bfloat16', 'float32')
    """
    y, h = _NORMS["rms_norm_add_rms_norm"](
        x,
        residual,
        scale,
        None,
        next_scale,
        axis,
        epsilon,
        scale_offset,
        dtype,
        save,
        implementation,
    )
    return y, h


def normalise(
    function: str,
    x: checks.ArrayLike,
    residual: checks.ArrayLike | None = None,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    next_scale: checks.ArrayLike | None = None,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    activation: NormActivation | None = None,
    *,
    gate: checks.ArrayLike | None = None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a function of the table, after the checks.

    `gate`: of a sum, in the table its branch_scale.
    `options`: fields of `Spec` that this operation alone has, checked.
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
        given["residual"] = checks.float_array(function, "residual", residual)
    if "residual" in given:
        checks.same_shape(function, "residual", given["residual"].shape, x.shape)
        given["residual"] = sharding.lie_alike(given["residual"], x)
    call = norm_call(
        function,
        x.shape,
        x.dtype,
        {name: (a.shape, a.dtype) for name, a in given.items()},
        axis=axis,
        epsilon=epsilon,
        scale_offset=scale_offset,
        dtype=dtype,
        save=save,
        implementation=implementation,
        activation=activation,
        **options,
    )
    if "next_scale" in given and "scale" in given:
        shape = call.view.shape_of("scale")
        for name in ("scale", "next_scale"):
            if given[name].shape != shape:
                call, wide = call.widened(name, given[name])
                given[name] = jnp.broadcast_to(wide, shape)
    if implementation is not None:
        backends.forced(call, implementation)
    return row_operations.bind(call, x, *[given[name] for name in call.primals[1:]])


# Each function that takes these arguments, as it is called outside `jax.jit`.
_ARRAYS = ("x", "residual", "scale", "bias", "next_scale")
_NORMS = {
    name: eager.compiled(functools.partial(normalise, name), name=name, arrays=range(len(_ARRAYS)))
    for name, function in FUNCTIONS.items()
    if {*OPERATIONS[function.op].operands} <= {*_ARRAYS}
}


def _normalise_gated(
    function: str,
    x: checks.ArrayLike,
    residual: checks.ArrayLike,
    scale: checks.ArrayLike | None,
    bias: checks.ArrayLike | None,
    gate: checks.ArrayLike | None,
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    save: Save,
    implementation: Name | None,
) -> list[jax.Array]:
    options = (axis, epsilon, scale_offset, dtype, save, implementation)
    return normalise(function, x, residual, scale, bias, None, *options, gate=gate)


# The same of each function with a gate of the sum, which takes the place of next_scale.
_GATED = {
    name: eager.compiled(
        functools.partial(_normalise_gated, name), name=name, arrays=range(len(_ARRAYS))
    )
    for name, function in FUNCTIONS.items()
    if function.gated is not None
}
# What errors call an operand of the table.
_PUBLIC_NAMES = {"branch_scale": "gate"}


def norm_call(
    function: str,
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    given: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    *,
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    save: Save,
    implementation: Name | None,
    activation: Activation | None = None,
    **options: Any,
) -> Call:
    """The forward of a call with these arguments, after the checks.

    `given`: shape and dtype of residual and parameters, those that there are; `options`: as in
    `normalise`.
    """
    axes = checks.axes(function, axis, shape)
    view = RowView(shape, axes)
    shapes = {name: own for name, (own, _) in given.items() if OPERANDS[name] in PARAMETERS}
    for name, own in shapes.items():
        checks.check_parameter(function, _PUBLIC_NAMES.get(name, name), own, view)
    by_kind = {
        kind: np.broadcast_shapes(*(own for name, own in shapes.items() if OPERANDS[name] == kind))
        for kind in PARAMETERS
    }
    # Of the sizes of the normalised axes, a view needs no word.
    view = RowView(
        shape, axes, **{k: () if own == view.normalised else own for k, own in by_kind.items()}
    )
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)
    dtypes = {name: own for name, (_, own) in given.items()}
    entry = FUNCTIONS[function]
    default = given["residual"][1] if OPERATIONS[entry.op].y_is_sum else x_dtype
    op = entry.gated if "branch_scale" in given else entry.op
    assert op is not None
    spec = Spec(
        op=op,
        direction="fwd",
        rows=view.rows,
        cols=view.cols,
        x_dtype=x_dtype,
        y_dtype=checks.output_dtype(function, dtype, default),
        epsilon=checks.number(function, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(function, "scale_offset", scale_offset),
        subtract_mean=entry.subtract_mean,
        saved=save if activation is None else "input",  # an activation cannot be undone
        scale_dtype=dtypes.get("scale"),
        bias_dtype=dtypes.get("bias"),
        residual_dtype=dtypes.get("residual"),
        next_scale_dtype=dtypes.get("next_scale"),
        branch_scale_dtype=dtypes.get("branch_scale"),
        activation=activation,
        **options,
    )
    return Call(function, spec, view, implementation).on(view)
