"""GroupNorm as an nnx module."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxnorm.models import flax_modules
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.operations.norm import layer_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, NormActivation, Save


class GroupNorm(nnx.GroupNorm):
    """:class:`flax.nnx.GroupNorm` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.nnx.LayerNorm` says of arguments, parameters and Flax's own path holds
    here; channels are the last axis.

    Args:
      num_features: number of channels.
      num_groups, group_size: how many groups they are in, or how many a group has; one is None.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to the parameter ``scale``; 0.0 by default.
      activation: ``"silu"``, ``"gelu"`` or ``"relu"``, of the norm, in the same pass; it then keeps
        its input. None for none.

    The others are those of :class:`flax.nnx.GroupNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm = jaxnorm.nnx.GroupNorm(64, activation="silu", rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 16, 16, 64))).shape
      (2, 16, 16, 64)
    """

    activation: NormActivation | None = None  # of one that was converted

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),
        scale_init: nnx.Initializer = nnx.initializers.ones_init(),
        reduction_axes: flax_modules.Axes | None = None,
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
        activation: NormActivation | None = None,
    ) -> None:
        super().__init__(
            num_features,
            num_groups,
            group_size,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
            reduction_axes=reduction_axes,
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
        self.activation = activation

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalises x, as :meth:`flax.nnx.GroupNorm.__call__` does, and activates it."""
        operands = x, value(self.scale), value(self.bias)
        promoted, scale, bias = self.promote_dtype(operands, dtype=self.dtype)
        seen = {a.dtype.name for a in (promoted, scale, bias) if a is not None}
        if jnp.shape(x)[-1:] != (self.num_groups * self.group_size,):
            raise ValueError(
                f"{type(self).__name__}: x has shape {jnp.shape(x)}; expected "
                f"{self.num_groups * self.group_size} channels, the module's num_features, on its "
                "last axis; transpose x, or make the module of as many as x has"
            )
        groups = flax_modules.groups_of(self, promoted.shape, self.num_groups)
        is_flax_s = mask is not None or self.axis_name is not None
        if is_flax_s or groups is None or not seen <= {*FLOAT_DTYPES}:
            flax_modules.no_offset(self)
            return flax_modules.activated(self, super().__call__(x, mask=mask))
        y = layer_norm(
            promoted.reshape(groups.shape),
            groups.of_parameter(scale),
            groups.of_parameter(bias),
            activation=self.activation,
            **flax_modules.options(
                dtypes, self, flax_modules.added(self), groups.axes, promoted, scale, bias
            ),
        )
        return y.reshape(promoted.shape)


def value(param: Any) -> jax.Array | None:
    """That of a parameter; None for none."""
    return None if param is None else param[...]
