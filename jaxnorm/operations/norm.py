"""Norms, norms fused with a residual addition or a gate, and the checks of all norms' arguments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.operations.checks import ArrayLike, Axis, DTypeLike
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, PARAMETERS
from jaxnorm_kernels.specs import Activation, Name, NormOptions, Save

# Maps the name of an operand in `OPERANDS` to the name of the public argument, which errors use.
# Operands that are not listed have the same name in both places.
_PUBLIC_NAMES = {"branch_scale": "gate"}

_GATED = "rms_norm_gated"


def norm_call(
    function: str,
    options: NormOptions,
    x: jax.Array | jax.ShapeDtypeStruct,
    given: Mapping[str, jax.Array],
    axis: Axis,
    dtype: DTypeLike | None,
    implementation: Name | None,
) -> Call:
    """Check a norm's options and the shapes of its parameters, and return its forward call.

    Args:
      function: name of the public function.
      options: the options that the user passed. This function adds the dtypes of the operands in
        `given` and the field `subtract_mean`.
      x: the array that is normalised, or its shape and dtype.
      given: a dict from names in `OPERANDS` to the operands that the user passed, without x: the
        parameters, and the residual or the gate.
      axis, dtype, implementation: the public function's arguments.
    """
    none = () if function == _GATED else (None,)
    checks.one_of(function, "activation", options.activation, (*none, *get_args(Activation)))
    axes = checks.axes(function, axis, x.shape)
    view = RowView.of(x.shape, axes)
    shapes = {name: a.shape for name, a in given.items() if OPERANDS[name] in PARAMETERS}
    for name, own in shapes.items():
        checks.check_parameter(function, _PUBLIC_NAMES.get(name, name), own, view)
    by_kind = {
        kind: jnp.broadcast_shapes(*[own for name, own in shapes.items() if OPERANDS[name] == kind])
        for kind in PARAMETERS
    }
    # Most parameters have the shape `view.normalised`, the sizes of x's normalised axes. As an
    # argument of `RowView.of`, `()` stands for this shape.
    view = RowView.of(
        x.shape, axes, **{k: () if own == view.normalised else own for k, own in by_kind.items()}
    )
    checks.one_of(function, "save", options.saved, checks.SAVE_MODES)
    checks.implementation(function, implementation)
    entry = FUNCTIONS[function]
    default = given["residual"].dtype if OPERATIONS[entry.op].y_is_sum else x.dtype
    op = entry.gated if "branch_scale" in given else entry.op
    of_x_and_y = x.dtype, checks.output_dtype(function, dtype, default)
    # save="output" recovers the normalised x from y. This is impossible in two cases. First, y may
    # be the result of an activation. Second, a row may be too short: the elements of a normalised
    # row have a fixed mean square and, in a LayerNorm, a mean of 0. If a row has one element (two
    # in a LayerNorm), y depends on x's magnitude only through epsilon, and dx is a small difference
    # of large numbers.
    is_degenerate = isinstance(view.cols, int) and view.cols <= 1 + entry.subtract_mean
    numbers = {
        "epsilon": checks.number(function, "epsilon", options.epsilon, minimum=0.0),
        "scale_offset": checks.number(function, "scale_offset", options.scale_offset),
    }
    fields: dict[str, Any] = {f"{name}_dtype": a.dtype for name, a in given.items()} | numbers
    options = dataclasses.replace(
        options,
        subtract_mean=entry.subtract_mean,
        saved="input" if is_degenerate or options.activation is not None else options.saved,
        **fields,
    )
    call = Call.forward(function, op, view, of_x_and_y, options, implementation)
    checks.finite_in(function, call.spec.compute_dtype, numbers)
    return call


def normalise(
    function: str,
    options: NormOptions,
    x: ArrayLike,
    operands: Mapping[str, ArrayLike | None],
    axis: Axis,
    dtype: DTypeLike | None,
    implementation: Name | None,
) -> list[jax.Array]:
    """Check the arguments of a norm, run it, and return its results.

    `operands` is a dict from names in `OPERANDS` to arrays, without x. A parameter may be None.
    `options`, `axis`, `dtype` and `implementation` are the same as for `norm_call`.
    """
    x = checks.float_array(function, "x", x)
    given: dict[str, jax.Array] = {}
    for name, operand in operands.items():
        is_parameter = OPERANDS[name] in PARAMETERS
        if is_parameter and operand is None:
            continue
        array = checks.float_array(function, _PUBLIC_NAMES.get(name, name), operand)
        if not is_parameter:
            checks.same_shape(function, name, array.shape, x.shape)
            array = sharding.lie_alike(array, x)
        given[name] = array
    call = norm_call(function, options, x, given, axis, dtype, implementation)
    if "next_scale" in given and "scale" in given:
        shape = call.view.shape_of("scale")
        for name in ("scale", "next_scale"):
            if given[name].shape != shape:
                call, wide = call.widened(name, given[name])
                given[name] = jnp.broadcast_to(wide, shape)
    return row_operations.run(call, x, *[given[name] for name in call.primals[1:]])


@eager.compiled("x", "scale", "bias")
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    r"""Layer normalisation (Ba, Kiros and Hinton, 2016, https://arxiv.org/abs/1607.06450).

    .. math::
      y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}
          \, (\mathrm{scale} + \mathrm{scale\_offset}) + \mathrm{bias}

    The mean and the biased variance are computed over ``axis`` in two passes, in float32 (float64
    if x or the output is float64).

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      scale: array of any of these dtypes. Its shape is usually the sizes of the normalised axes, in
        the order of x. A size may also be 1, if the scale is the same along that axis. The shape
        may have other axes before these. They broadcast, right-aligned as in NumPy, to the axes of
        x that are not normalised. Each group of rows then has its own scale (adaLN). None for no
        scale (``scale_offset`` is then unused).
      bias: array. The rules for its shape and dtype are the same as for ``scale``, but the two
        shapes may differ. None for no bias.
      axis: axis or axes to normalise; negative ones count from the end; None for all.
      epsilon: added to the variance, at least 0.
      scale_offset: added to ``scale``; 1.0 for models that store w and multiply by ``1 + w``.
      dtype: dtype of the output; by default, x's dtype.
      save: the array that is saved for the backward pass. ``"output"`` saves y. The next layer
        usually saves y anyway, and then x can be freed. ``"input"`` saves x and the row means.

        With ``"output"``, gradients of ``scale`` are less accurate in columns where ``|bias|`` is
        far above ``|scale|`` (and, in float16, where ``|scale|`` is below 2**-14). In columns with
        a ``scale`` of 0 and a nonzero bias, these gradients are 0, because x cannot be recovered
        from y. :func:`jaxnorm.check_params` finds such columns. If rows have at most two elements
        (one in functions that compute RMSNorm), y does not determine the gradient of x. In this
        case, x is saved for any value of ``save``.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.
      activation: ``"silu"``, ``"gelu"``, ``"relu"``, ``"leaky_relu"`` or ``"sigmoid"``: the
        function of :mod:`jax.nn` with its defaults (gelu is the tanh approximation), applied to the
        norm's result in the same pass. None for no activation. The backward pass cannot invert an
        activation, so x is saved for any value of ``save``.

    Returns:
      Array of x's shape in ``dtype``.

    Differentiable in reverse and forward mode, to any order. Gradients of the parameters have the
    parameters' shapes and dtypes, and are summed in float32. Both modes compute derivatives from
    the saved array. The tangent of y with respect to ``scale`` has the accuracy of y's dtype with
    ``save="output"``, and the accuracy of float32 with ``save="input"``.

    For second derivatives, prefer ``save="input"``. With ``save="output"``, second derivatives with
    respect to ``scale`` have a relative error of about ``u / |scale|``, where u is the unit
    roundoff of the output's dtype. They are NaN in columns with ``|scale| < 2**-60``.

    GroupNorm (Wu and He, 2018, https://arxiv.org/abs/1803.08494) of images ``(N, H, W, C)`` with G
    groups of channels: reshape x to ``(N, H, W, G, C / G)``, and use ``axis=(1, 2, 4)`` with
    parameters of shape ``(G, 1, 1, C / G)``. No transpose is needed. In the U-Net or VAE of a
    diffusion model, ``activation="silu"`` fuses the activation that follows each GroupNorm.

    InstanceNorm of images ``(N, H, W, C)``: use ``axis=(1, 2)`` with parameters of shape
    ``(C, 1, 1)``.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: an axis, a parameter's shape, ``epsilon``, ``save``, ``implementation`` or
        ``activation`` is wrong; the requested implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x = jnp.ones((8, 128, 512), jnp.bfloat16)
      >>> y = jaxnorm.layer_norm(x, jnp.ones(512), jnp.zeros(512), epsilon=1e-5)
      >>> y.shape, y.dtype.name
      ((8, 128, 512), 'bfloat16')
      >>> jaxnorm.layer_norm(x, axis=(-2, -1)).shape  # normalises each sample as one row
      (8, 128, 512)
      >>> images = jnp.ones((2, 16, 16, 32, 8), jnp.bfloat16)  # 256 channels in 32 groups
      >>> scale = jnp.ones((32, 1, 1, 8))
      >>> jaxnorm.layer_norm(images, scale, axis=(1, 2, 4), activation="silu").shape
      (2, 16, 16, 32, 8)
    """
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, saved=save, activation=activation
    )
    operands = {"scale": scale, "bias": bias}
    return normalise("layer_norm", options, x, operands, axis, dtype, implementation)[0]


@eager.compiled("x", "scale", "bias")
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    r"""Root-mean-square normalisation (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    .. math::
      y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \, (\mathrm{scale} +
      \mathrm{scale\_offset}) + \mathrm{bias}

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      scale: as in :func:`jaxnorm.layer_norm`.
      axis: axis or axes to normalise; negative ones count from the end; None for all.
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of the output; by default, x's dtype.
      save: as in :func:`jaxnorm.layer_norm`. Without a bias, ``"output"`` gives accurate gradients
        for any scale, including 0, in bfloat16, float32 and float64. If there is a bias and the
        scale may be 0, use ``"input"``.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.
      bias: array like ``scale``, passed by keyword only. None for no bias. (equinox's RMSNorm has a
        bias.)
      activation: as in :func:`jaxnorm.layer_norm`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable like :func:`jaxnorm.layer_norm`.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: an axis, scale's shape, ``epsilon``, ``save``, ``implementation`` or
        ``activation`` is wrong; the requested implementation cannot run this call.

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
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, saved=save, activation=activation
    )
    operands = {"scale": scale, "bias": bias}
    return normalise("rms_norm", options, x, operands, axis, dtype, implementation)[0]


@eager.compiled("x", "residual", "scale", "bias", "gate")
def add_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    gate: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Residual addition and then layer normalisation, in one pass, as in pre-norm blocks.

    .. math::
      h = \mathrm{residual} + \mathrm{gate} \, x, \qquad y = \mathrm{layer\_norm}(h)

    The backward pass is also a single pass over memory. It adds the cotangent of h to the norm's
    gradient, and computes the gradient of gate. Without a gate, the gradients of x and residual are
    equal. If x and residual also have the same dtype, this gradient is written only once.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      residual: array of x's shape; any of these dtypes.
      scale, bias, axis, epsilon, scale_offset: as in :func:`jaxnorm.layer_norm`.
      dtype: dtype of y; by default, x's dtype.
      save: the array that is saved for the norm's backward pass: ``"output"`` saves y, ``"input"``
        saves h and the row means. If there is a bias and the scale may be 0, use ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.
      gate: array by which x is multiplied. The rules for its shape are the same as for ``scale``,
        but the two shapes may differ. For example, the shape is (batch, 1, channels) in adaLN-zero
        (Peebles and Xie, 2022, https://arxiv.org/abs/2212.09748), and (channels,) in LayerScale
        (Touvron et al., 2021, https://arxiv.org/abs/2103.17239). With a gate, x is also saved for
        the backward pass, because the gate's gradient needs it. None for no gate.

    Returns:
      (y, h): arrays of x's shape, y in ``dtype`` and h in residual's dtype. y is the norm of the
      rounded h. Differentiable like :func:`jaxnorm.layer_norm`.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: x and residual differ in shape; gate's shape is wrong; or there is another reason,
        listed for :func:`jaxnorm.layer_norm`.

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
    options = NormOptions(epsilon=epsilon, scale_offset=scale_offset, saved=save)
    operands = {"residual": residual, "scale": scale, "bias": bias, "branch_scale": gate}
    y, h = normalise("add_layer_norm", options, x, operands, axis, dtype, implementation)
    return y, h


@eager.compiled("x", "residual", "scale", "gate")
def add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    gate: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Residual addition and then RMSNorm, in one pass, as in pre-norm blocks.

    .. math::
      h = \mathrm{residual} + \mathrm{gate} \, x, \qquad y = \mathrm{rms\_norm}(h)

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, axis, epsilon, scale_offset: as in :func:`jaxnorm.rms_norm`.
      dtype, save, implementation, gate: as in :func:`jaxnorm.add_layer_norm`.

    Returns:
      (y, h), as for :func:`jaxnorm.add_layer_norm`.

    Raises:
      TypeError, ValueError: as for :func:`jaxnorm.add_layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> y, h = jaxnorm.add_rms_norm(x, residual, jnp.ones(512))
      >>> y.dtype.name, h.dtype.name
      ('bfloat16', 'float32')
    """
    options = NormOptions(epsilon=epsilon, scale_offset=scale_offset, saved=save)
    operands = {"residual": residual, "scale": scale, "branch_scale": gate}
    y, h = normalise("add_rms_norm", options, x, operands, axis, dtype, implementation)
    return y, h


@eager.compiled("x", "residual", "scale")
def rms_norm_add(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Name | None = None,
) -> jax.Array:
    r"""RMSNorm and then residual addition, in one pass, as in post-norm blocks.

    .. math::
      y = \mathrm{residual} + \mathrm{rms\_norm}(x)

    The norm's output is not rounded before the addition, and it is not saved. The backward pass
    always uses the saved x.

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, axis, epsilon, scale_offset: as in :func:`jaxnorm.rms_norm`.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in residual's dtype. Differentiable like :func:`jaxnorm.rms_norm` with
      ``save="input"``.

    Raises:
      TypeError, ValueError: as for :func:`jaxnorm.add_layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> y = jaxnorm.rms_norm_add(x, residual, jnp.ones(512))
      >>> y.shape, y.dtype.name
      ((8, 512), 'float32')
    """
    options = NormOptions(epsilon=epsilon, scale_offset=scale_offset, saved="input")
    operands = {"residual": residual, "scale": scale}
    return normalise("rms_norm_add", options, x, operands, axis, None, implementation)[0]


@eager.compiled("x", "residual", "scale", "next_scale")
def rms_norm_add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    next_scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""RMSNorm of x, residual addition, and RMSNorm of the sum, in one pass.

    .. math::
      h = \mathrm{residual} + \mathrm{rms\_norm}(x), \qquad y = \mathrm{rms\_norm}(h)

    Gemma 2 and 3 compute this after each attention block and after each MLP. x is the output of the
    block or MLP. y is the input of the next one: after attention, the layer's MLP; after an MLP,
    the attention block of the next layer.

    Args:
      x, residual: as in :func:`jaxnorm.add_layer_norm`.
      scale, next_scale: scales of the first and the second norm, as in :func:`jaxnorm.rms_norm`.
      axis, epsilon, scale_offset: as in :func:`jaxnorm.rms_norm`, for both norms.
      dtype: dtype of y; by default, x's dtype.
      save: the array that is saved for the second norm's backward pass: ``"output"`` saves y,
        ``"input"`` saves h. The first norm always saves x.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      (y, h), as for :func:`jaxnorm.add_layer_norm`.

    Raises:
      TypeError, ValueError: as for :func:`jaxnorm.add_layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, residual = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((8, 512), jnp.float32)
      >>> post_attention, pre_mlp = jnp.ones(512), jnp.ones(512)  # the two scales
      >>> y, h = jaxnorm.rms_norm_add_rms_norm(x, residual, post_attention, pre_mlp)
      >>> y.dtype.name, h.dtype.name
      ('bfloat16', 'float32')
    """
    options = NormOptions(epsilon=epsilon, scale_offset=scale_offset, saved=save)
    operands = {"residual": residual, "scale": scale, "next_scale": next_scale}
    y, h = normalise("rms_norm_add_rms_norm", options, x, operands, axis, dtype, implementation)
    return y, h


@eager.compiled("x", "gate", "scale")
def rms_norm_gated(
    x: ArrayLike,
    gate: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    norm_before_gate: bool = True,
    activation: Activation = "silu",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""RMSNorm over the last axis, fused with a gate, as in Mamba 2 and gated delta nets.

    .. math::
      y = \mathrm{rms\_norm}(x) \cdot \mathrm{activation}(\mathrm{gate})
      \qquad \text{or} \qquad
      y = \mathrm{rms\_norm}(x \cdot \mathrm{activation}(\mathrm{gate}))

    Gated delta nets normalise the columns of each head, and apply the gate after the norm (Yang,
    Kautz and Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464; Qwen3-Next, Kimi Linear). Mamba 2
    applies the gate before the norm (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060). The
    arithmetic is float32 (float64 if x, gate or the output is float64), and the result is rounded
    once. The residuals are x, gate, and one number for each row. The backward pass recomputes
    ``rms_norm(x)`` and ``activation(gate)``.

    Args:
      x: array (..., d); bfloat16, float16, float32 or float64.
      gate: array of x's shape; any of these dtypes.
      scale: array (d,), as in :func:`jaxnorm.rms_norm`. It may have axes before d, which broadcast
        to x's other axes. For example, Mamba 2 with groups has x (..., groups, d) and scale
        (groups, d). None for no scale (``scale_offset`` is then unused).
      norm_before_gate: True to normalise x, False to normalise ``x * activation(gate)``.
      activation: ``"silu"``, ``"gelu"``, ``"relu"``, ``"leaky_relu"`` or ``"sigmoid"``: the
        function of :mod:`jax.nn` with its defaults (gelu is the tanh approximation).
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for models that store w and multiply by ``1 + w``.
      dtype: dtype of the output; by default, x's dtype.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable in reverse and forward mode, to any order;
      gradients have the dtypes of their arguments.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: x and gate have different shapes; the shape of scale is wrong; ``activation``,
        ``epsilon`` or ``implementation`` is wrong; the requested implementation cannot run this
        call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x = gate = jnp.ones((2, 16, 8, 128), jnp.bfloat16)  # (batch, length, heads, d)
      >>> y = jaxnorm.rms_norm_gated(x, gate, jnp.ones(128))  # as in a gated delta net
      >>> y.shape, y.dtype.name
      ((2, 16, 8, 128), 'bfloat16')
      >>> scale = jnp.ones((8, 128))  # as in Mamba 2, with 8 groups
      >>> jaxnorm.rms_norm_gated(x, gate, scale, norm_before_gate=False).shape
      (2, 16, 8, 128)
    """
    x = checks.float_array(_GATED, "x", x)
    checks.features(_GATED, "x", x.shape, "d")
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        saved="input",
        activation=activation,
        norm_before_gate=checks.flag(_GATED, "norm_before_gate", norm_before_gate),
    )
    operands = {"gate": gate, "scale": scale}
    return normalise(_GATED, options, x, operands, -1, dtype, implementation)[0]
