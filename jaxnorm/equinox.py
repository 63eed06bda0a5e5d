"""Equinox modules: drop-in LayerNorm and RMSNorm that save their outputs.

A model that exists is converted by ``equinox.tree_at``::

    import equinox as eqx
    import jax
    import jaxnorm.equinox

    MODULES = {eqx.nn.LayerNorm: jaxnorm.equinox.LayerNorm, eqx.nn.RMSNorm: jaxnorm.equinox.RMSNorm}


    def is_norm(node):
        return type(node) in MODULES


    def norms_of(model):
        return [node for node in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(node)]


    def converted(norm):
        new = MODULES[type(norm)](norm.shape, norm.eps, norm.use_weight, norm.use_bias)
        return eqx.tree_at(
            lambda norm: (norm.weight, norm.bias),
            new,
            (norm.weight, norm.bias),
            is_leaf=lambda leaf: leaf is None,
        )


    model = eqx.tree_at(norms_of, model, replace_fn=converted)

The arrays are those of the old model, in the same order of leaves, so that
``equinox.tree_serialise_leaves`` of either is read into the other, and stacked layers (of
``equinox.filter_vmap``, for ``jax.lax.scan``) stay stacked.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax

if importlib.util.find_spec("equinox") is None:
    raise ImportError(
        "jaxnorm.equinox needs equinox, which is not installed; "
        'install it, from a checkout of jaxnorm, with: pip install -e ".[equinox]"'
    )

import equinox as eqx

from jaxnorm._norm import layer_norm, rms_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = ["LayerNorm", "RMSNorm"]

_NO_STATE: Any = object()


class LayerNorm(eqx.nn.LayerNorm):
    """``equinox.nn.LayerNorm`` that keeps its output, not its input, for the backward pass.

    Fields, arguments, defaults and the call are equinox's; three keyword arguments come on top. As
    there, x has the module's shape, all of which is normalised, and the result has x's dtype. Under
    ``jax.vmap`` (one or more, one inside the other) all rows are one kernel's, forward and
    backward. An x of another dtype than the floats of 16 to 64 bits, or without axes or elements,
    is equinox's own, input-saving computation.

    Args:
      shape: of x, an integer or several; weight and bias have it, too.
      eps: added to the variance.
      use_weight, use_bias: whether there are these parameters; None where not.
      dtype: of the parameters; JAX's default float by default.
      elementwise_affine: equinox's deprecated one for both ``use_weight`` and ``use_bias``.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to ``weight``; 0.0 by default.

    Raises:
      ValueError: when called with an x that has not the module's shape, or as
        :func:`jaxnorm.layer_norm` does.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.LayerNorm(512)
      >>> jax.vmap(norm)(jnp.ones((8, 512))).shape
      (8, 512)
    """

    save: Save = eqx.field(static=True)
    implementation: Name | None = eqx.field(static=True)
    scale_offset: float = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        elementwise_affine: bool | None = None,
        save: Save = "output",
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        super().__init__(
            shape, eps, use_weight, use_bias, dtype, elementwise_affine=elementwise_affine
        )
        self.save = save
        self.implementation = implementation
        self.scale_offset = scale_offset

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Normalises x, as ``equinox.nn.LayerNorm`` does; ``state`` passes through unchanged.

        Returns:
          Array of x's shape and dtype; with a ``state``, (that array, state).
        """
        y = _normalised(self, layer_norm, super().__call__, x)
        return y if state is _NO_STATE else (y, state)


class RMSNorm(eqx.nn.RMSNorm):
    """``equinox.nn.RMSNorm`` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.equinox.LayerNorm` says of fields, arguments, ``jax.vmap`` and equinox's
    own path holds here.

    Args:
      shape, eps, use_weight, use_bias, dtype: as in :class:`jaxnorm.equinox.LayerNorm`.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.rms_norm`. With a bias the advice is
        that of :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.rms_norm`.
      scale_offset: added to ``weight``; 1.0 for Gemma's ``1 + w``.

    Raises:
      ValueError: as :class:`jaxnorm.equinox.LayerNorm` does.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.RMSNorm(512, scale_offset=1.0)  # Gemma's 1 + w
      >>> jax.vmap(norm)(jnp.ones((8, 512))).shape
      (8, 512)
    """

    save: Save = eqx.field(static=True)
    implementation: Name | None = eqx.field(static=True)
    scale_offset: float = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        save: Save = "output",
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        super().__init__(shape, eps, use_weight, use_bias, dtype)
        self.save = save
        self.implementation = implementation
        self.scale_offset = scale_offset

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Normalises x, as ``equinox.nn.RMSNorm`` does; ``state`` passes through unchanged.

        Returns:
          Array of x's shape and dtype; with a ``state``, (that array, state).
        """
        y = _normalised(self, rms_norm, super().__call__, x)
        return y if state is _NO_STATE else (y, state)


def _normalised(
    norm: Any, function: Callable[..., jax.Array], equinox_norm: Callable[..., Any], x: Any
) -> jax.Array:
    name = type(norm).__name__
    if x.shape != norm.shape:
        raise ValueError(
            f"{name}: x has shape {x.shape}; expected {norm.shape}, the module's shape; map it "
            f"over the other axes, e.g. jax.vmap(norm)(x), or make it {name}({x.shape}, ...)"
        )
    if x.dtype.name not in FLOAT_DTYPES or not x.size or not x.ndim:
        if norm.scale_offset:
            raise ValueError(
                f"{name}: scale_offset={norm.scale_offset} with an x of shape {x.shape} and dtype "
                f"{x.dtype.name}, which is left to equinox's own code, which adds no offset; cast "
                "x, or add the offset to the parameter"
            )
        return equinox_norm(x)
    return function(
        x,
        norm.weight,
        bias=norm.bias,
        axis=None,
        epsilon=norm.eps,
        scale_offset=norm.scale_offset,
        dtype=x.dtype,
        save=norm.save,
        implementation=norm.implementation,
    )
