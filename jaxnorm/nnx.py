"""Flax nnx modules: drop-in norms and an attention function that save their outputs."""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

# First, because it says what to do where Flax is missing.
from jaxnorm.models import flax_modules

# isort: split
from flax import nnx
from flax.nnx.nn import dtypes

from jaxnorm.models import conversion, nnx_conversion
from jaxnorm.models.nnx_attention import dot_product_attention
from jaxnorm.models.nnx_group_norm import GroupNorm, value
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.operations.norm import layer_norm, rms_norm
from jaxnorm.operations.norm_residual import add_layer_norm, add_rms_norm
from jaxnorm_kernels.linear_spec import Activation
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormDense",
    "convert",
    "dot_product_attention",
]

GroupNorm.__module__ = dot_product_attention.__module__ = __name__  # where users find them


class LayerNorm(nnx.LayerNorm):
    """:class:`flax.nnx.LayerNorm` that keeps its output, not its input, for the backward pass.

    Every argument, default, parameter name and the call are Flax's, so states load unchanged; three
    arguments come on top. As in Flax, x and the parameters are first promoted to one dtype
    (``promote_dtype``). ``use_fast_variance`` is accepted, but the variance is always the stable
    two-pass one. A call with ``mask``, ``axis_name``, ``feature_axes`` other than
    ``reduction_axes``, or a dtype that is no float of 16 to 64 bits, is Flax's own, input-saving
    computation.

    Args:
      num_features: number of scales and biases.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to the parameter ``scale``; 0.0 by default.

    The others are those of :class:`flax.nnx.LayerNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm = jaxnorm.nnx.LayerNorm(512, rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((8, 512))).shape
      (8, 512)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),
        scale_init: nnx.Initializer = nnx.initializers.ones_init(),
        reduction_axes: flax_modules.Axes = -1,
        feature_axes: flax_modules.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        save: Save = "output",
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )
        self.save = save
        self.implementation = implementation
        self.scale_offset = scale_offset

    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalises x, as :meth:`flax.nnx.LayerNorm.__call__` does.

        With a residual: h = x + residual, in one pass with the addition, and returns (y, h), as
        :func:`jaxnorm.add_layer_norm` does.
        """
        normalised = x if residual is None else residual
        promoted, scale, bias = self.promote_dtype(
            (normalised, value(self.scale), value(self.bias)), dtype=self.dtype
        )
        axes = _covered_axes(self, promoted, scale, bias, mask)
        if axes is None:
            flax_modules.no_offset(self)
            flax_norm = functools.partial(super().__call__, mask=mask)
            return flax_modules.composed(flax_norm, x, residual)
        parameters = (_shaped(self, p, promoted, axes) for p in (scale, bias))
        options = flax_modules.options(
            dtypes, self, flax_modules.added(self), axes, promoted, scale, bias
        )
        if residual is None:
            return layer_norm(promoted, *parameters, **options)
        return add_layer_norm(x, residual, *parameters, **options)


class RMSNorm(nnx.RMSNorm):
    """:class:`flax.nnx.RMSNorm` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.nnx.LayerNorm` says of arguments, parameters and Flax's own path holds
    here.

    Args:
      num_features: number of scales.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.rms_norm`.
      implementation: see :func:`jaxnorm.rms_norm`.
      scale_offset: added to the parameter ``scale``; 1.0 for Gemma's ``1 + w``, with zeros for
        ``scale_init``.

    The others are those of :class:`flax.nnx.RMSNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm, x = jaxnorm.nnx.RMSNorm(512, rngs=nnx.Rngs(0)), jnp.ones((8, 512))
      >>> y, h = norm(x, residual=x)
      >>> y.shape, h.shape
      ((8, 512), (8, 512))
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: nnx.Initializer = nnx.initializers.ones_init(),
        reduction_axes: flax_modules.Axes = -1,
        feature_axes: flax_modules.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        save: Save = "output",
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init,
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            scale_metadata=scale_metadata,
        )
        self.save = save
        self.implementation = implementation
        self.scale_offset = scale_offset

    def __call__(self, x: Any, mask: jax.Array | None = None, *, residual: Any = None) -> Any:
        """Normalises x, as :meth:`flax.nnx.RMSNorm.__call__` does.

        With a residual: h = x + residual, in one pass with the addition, and returns (y, h), as
        :func:`jaxnorm.add_rms_norm` does.
        """
        normalised = x if residual is None else residual
        promoted, scale = self.promote_dtype((normalised, value(self.scale)), dtype=self.dtype)
        axes = _covered_axes(self, promoted, scale, None, mask)
        if axes is None:
            flax_modules.no_offset(self)
            flax_norm = functools.partial(super().__call__, mask=mask)
            return flax_modules.composed(flax_norm, x, residual)
        scale = _shaped(self, scale, promoted, axes)
        options = flax_modules.options(
            dtypes, self, flax_modules.added(self), axes, promoted, scale
        )
        if residual is None:
            return rms_norm(promoted, scale, **options)
        return add_rms_norm(x, residual, scale, **options)


class RMSNormDense(nnx.Module):
    """RMSNorm and the linear layer after it, as :func:`jaxnorm.rms_norm_linear`.

    They are two modules, ``norm`` and ``dense``, so that the states of an RMSNorm and of a
    :class:`flax.nnx.Linear` load into them unchanged, and back. Their fields count where the whole
    is called.

    Args:
      in_features, out_features: columns and features of the product.
      use_bias, kernel_init, bias_init: as in :class:`flax.nnx.Linear`.
      epsilon, use_scale, scale_init: as in :class:`flax.nnx.RMSNorm`.
      dtype: of the product and its result; by default that to which what is normalised and the
        parameters promote.
      param_dtype: of all parameters.
      rngs: keys of the parameters.
      kernel_metadata, bias_metadata, scale_metadata: of the parameters.
      activation: None, or a name; see :func:`jaxnorm.rms_norm_linear`.
      implementation: see :func:`jaxnorm.rms_norm_linear`.
      scale_offset: added to the parameter ``scale``; 1.0 for Gemma's ``1 + w``, with zeros for
        ``scale_init``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> module = jaxnorm.nnx.RMSNormDense(512, 2048, activation="silu", rngs=nnx.Rngs(0))
      >>> module(jnp.ones((8, 512))).shape
      (8, 2048)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        use_scale: bool = True,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),
        scale_init: nnx.Initializer = nnx.initializers.ones_init(),
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: Activation | None = None,
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        self.norm = RMSNorm(
            in_features,
            epsilon=epsilon,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init,
            rngs=rngs,
            scale_metadata=scale_metadata,
            implementation=implementation,
            scale_offset=scale_offset,
        )
        self.dense = nnx.Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation

    def __call__(self, x: Any, *, residual: Any = None) -> Any:
        """The result, or (y, h) with a residual, as :func:`jaxnorm.rms_norm_linear` gives them."""
        stored = {
            "scale": value(self.norm.scale),
            "kernel": value(self.dense.kernel),
            "bias": value(self.dense.bias),
        }
        parameters = {name: a for name, a in stored.items() if a is not None}
        return flax_modules.norm_and_dense(
            dtypes, self.norm, parameters, x, residual, self.activation, self.dense.dtype
        )


def convert[Model](
    model: Model,
    *,
    save: Save = "output",
    implementation: Name | None = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Model:
    """Makes each :class:`flax.nnx.LayerNorm`, ``RMSNorm`` and ``GroupNorm`` in a model jaxnorm's.

    In place: a norm stays the object that it is, with the very same ``nnx.Param`` objects, and gets
    jaxnorm's class: what shares it goes on sharing it, optimisers that hold the parameters go on
    holding them, and the paths, shapes and dtypes of the state are as before, so checkpoints of
    either load into the other. An ``nnx.Optimizer`` may be made before or after. Graph definitions
    that were split off before still describe the old model: convert first, or split again. ::

        model = jaxnorm.nnx.convert(Transformer(config, rngs=nnx.Rngs(0)))

    Norms are found wherever nnx finds modules: attributes, ``nnx.List``, ``nnx.Dict``,
    ``nnx.Sequential``, lists and dictionaries; among them the stacked ones that ``nnx.vmap`` and
    ``nnx.scan`` use, those of ``nnx.MultiHeadAttention(normalize_qk=True)``, and abstract ones
    (``nnx.eval_shape``). A converted norm takes the stable two-pass variance, whatever
    ``use_fast_variance`` says, and a call with ``mask`` stays Flax's.

    From the output of a norm whose scale is 0 beside a bias, or far below it, the gradient of that
    scale cannot be computed (see :func:`jaxnorm.check_params`). So parameters are looked at, where
    they have values, and norms that have such columns get ``save="input"``: convert a model after
    its checkpoint is loaded. Abstract and traced parameters have no values. A norm without a
    ``dtype`` is judged for outputs of its parameters' dtype.

    Left as they are are norms with an ``axis_name``, with ``feature_axes`` that are not
    ``reduction_axes``, or with dtypes that are no floats of 16 to 64 bits, and subclasses of
    Flax's classes with code of their own. (A subclass whose body is ``pass`` is converted.) One
    warning of the logger ``"jaxnorm"`` names these and those that keep their input, with the
    reasons; it also says so where a model has none of these norms at all. Norms that are jaxnorm's
    already keep their own settings.

    Many models have norm classes of their own. ``calls`` says what to call in their place; here for
    Tunix's Qwen 3::

        def rms_norm(norm, x):
            return jaxnorm.rms_norm(x, norm.w[...], epsilon=norm.norm_eps, dtype=norm.dtype)


        model = jaxnorm.nnx.convert(model, calls={tunix.models.qwen3.model.RMSNorm: rms_norm})

    Args:
      model: an ``nnx.Module``, or a list, tuple or dictionary of them.
      save: ``"output"`` or ``"input"``, of all norms but those that have to keep their input; see
        :func:`jaxnorm.layer_norm`.
      implementation: of all norms; see :func:`jaxnorm.layer_norm`.
      calls: ``{class: function(module, *args, **kwargs)}``: what is called in place of the
        ``__call__`` of modules of exactly that class; it may call that ``__call__`` itself. Such a
        module keeps its parameters and its identity, and stays an instance of the class; ``save``
        and ``implementation`` do not apply to it. The log line names these modules, those of
        subclasses, which are left as they are, and classes that the model does not have.

    Returns:
      ``model``, the same object.

    Raises:
      TypeError: ``model`` has no ``nnx.Module`` in it, or ``calls`` is not a dictionary of classes
        and functions.
      ValueError: ``save`` or ``implementation`` is wrong, or ``calls`` has a class that is not an
        ``nnx.Module``.

    Example:
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.LayerNorm(512, rngs=nnx.Rngs(0)))
      >>> model = jaxnorm.nnx.convert(model)
      >>> type(model.layers[0]).__module__
      'jaxnorm.nnx'
    """
    added = flax_modules.given_to("convert", save, implementation)
    classes: dict[type, type] = {
        nnx.LayerNorm: LayerNorm,
        nnx.RMSNorm: RMSNorm,
        nnx.GroupNorm: GroupNorm,
    }
    replaced = conversion.Calls("convert", calls, nnx.Module, "nnx")
    nnx_conversion.convert(model, classes, added, replaced)
    return model


def _covered_axes(
    module: Any, x: jax.Array, scale: Any, bias: Any, mask: jax.Array | None
) -> tuple[int, ...] | None:
    """The axes to normalise, or None where the call is left to Flax."""
    if mask is not None or module.axis_name is not None:
        return None
    operands = [a for a in (x, scale, bias) if a is not None]
    if any(a.dtype.name not in FLOAT_DTYPES for a in operands):
        return None
    name = type(module).__name__
    return flax_modules.shared_axes(name, module.reduction_axes, module.feature_axes, x.shape)


def _shaped(
    module: Any, parameter: jax.Array | None, x: jax.Array, axes: tuple[int, ...]
) -> jax.Array | None:
    """Flax stores one flat vector of features, whatever the number of feature axes."""
    if parameter is None:
        return None
    shape = tuple(x.shape[a] for a in axes)
    if math.prod(shape) != parameter.size:
        name = type(module).__name__
        raise ValueError(
            f"{name}: x has shape {x.shape}, with {math.prod(shape)} features on its axes {axes}; "
            f"expected {module.num_features}, the module's num_features; make it "
            f"{name}({math.prod(shape)}, ...)"
        )
    return parameter.reshape(shape)
