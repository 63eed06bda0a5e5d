"""The public functions that fuse a norm with a residual addition."""

import jax

from jaxnorm.operations.checks import ArrayLike, Axis, DTypeLike
from jaxnorm.operations.norm import common_options, normalise
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name, Save


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
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: x and residual differ in shape, or gate's shape is wrong. Also any ValueError that
        :func:`jaxnorm.layer_norm` raises.

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
    options = common_options(axis, epsilon, scale_offset, dtype, save, implementation)
    parameters = {"scale": scale, "bias": bias, "branch_scale": gate}
    y, h = normalise("add_layer_norm", x, parameters, residual, **options)
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
    options = common_options(axis, epsilon, scale_offset, dtype, save, implementation)
    parameters = {"scale": scale, "branch_scale": gate}
    y, h = normalise("add_rms_norm", x, parameters, residual, **options)
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
    options = common_options(axis, epsilon, scale_offset, None, "input", implementation)
    (y,) = normalise("rms_norm_add", x, {"scale": scale}, residual, **options)
    return y


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
    options = common_options(axis, epsilon, scale_offset, dtype, save, implementation)
    parameters = {"scale": scale, "next_scale": next_scale}
    y, h = normalise("rms_norm_add_rms_norm", x, parameters, residual, **options)
    return y, h
