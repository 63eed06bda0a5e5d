"""LayerNorm and RMSNorm: the public functions."""

import jax

from jaxnorm.operations import checks, norm_call
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name, NormActivation, Save


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
    options = norm_call.options(axis, epsilon, scale_offset, dtype, save, implementation)
    (y,) = norm_call.normalise(
        "layer_norm", x, scale=scale, bias=bias, activation=activation, **options
    )
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
    options = norm_call.options(axis, epsilon, scale_offset, dtype, save, implementation)
    (y,) = norm_call.normalise(
        "rms_norm", x, scale=scale, bias=bias, activation=activation, **options
    )
    return y
