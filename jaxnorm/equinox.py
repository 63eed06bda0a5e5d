"""Equinox modules: drop-in LayerNorm and RMSNorm that save their outputs."""

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

from jaxnorm.models import conversion
from jaxnorm.operations import checks
from jaxnorm.operations.norm import layer_norm, rms_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = ["LayerNorm", "RMSNorm", "convert"]

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


def convert[Model](
    model: Model, *, save: Save = "output", implementation: Name | None = None
) -> Model:
    """Makes every ``equinox.nn.LayerNorm`` and ``RMSNorm`` in a model jaxnorm's.

    Modules are immutable, so it returns a new model, with the very same arrays in the same order of
    leaves: checkpoints (``equinox.tree_serialise_leaves``) of either are read into the other. The
    state of an optimiser has the structure of the model that it was made for: convert before it is
    made. A norm in two places stays one object.

    Norms are found wherever the model's tree has them, in fields, lists, tuples and dictionaries;
    among them stacked ones (of ``equinox.filter_vmap``, for ``jax.lax.scan``) and abstract ones
    (``equinox.filter_eval_shape``).

    From the output of a norm whose weight is 0 beside a bias, or far below it, the gradient of that
    weight cannot be computed (see :func:`jaxnorm.check_params`). So parameters are looked at, where
    they have values, and norms that have such columns get ``save="input"``: convert a model after
    its checkpoint is loaded. Abstract and traced parameters have no values. A norm is judged for
    outputs, which have the dtype of x, of its parameters' dtype: where x has fewer bits, look at
    ``jaxnorm.check_params(model, x.dtype)``.

    Left as they are are norms with parameters that are no floats of 16 to 64 bits, and subclasses
    of equinox's classes, whose code may be their own. One warning of the logger ``"jaxnorm"`` names
    these and those that keep their input, with the reasons; it also says so where a model has none
    of these norms at all. Norms that are jaxnorm's already keep their own settings.

    Args:
      model: an ``equinox.Module``, or a tree that has some.
      save: ``"output"`` or ``"input"``, of all norms but those that have to keep their input; see
        :func:`jaxnorm.layer_norm`.
      implementation: of all norms; see :func:`jaxnorm.layer_norm`.

    Returns:
      The model, of the same structure but for its norms.

    Raises:
      TypeError: ``model`` has no ``equinox.Module`` in it.
      ValueError: ``save`` or ``implementation`` is wrong.

    Example:
      >>> import equinox as eqx
      >>> import jaxnorm.equinox
      >>> model = jaxnorm.equinox.convert([eqx.nn.LayerNorm(512)])
      >>> type(model[0]).__module__
      'jaxnorm.equinox'
    """
    conversion.check("convert", save, implementation)
    if not any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        raise TypeError(
            f"convert: model is a {type(model).__name__}; expected an equinox.Module, or a tree "
            "that has some; Flax's models are converted by jaxnorm.nnx and jaxnorm.linen"
        )
    leaves = jax.tree.leaves_with_path(model, is_leaf=_is_norm)
    norms = [(path, leaf) for path, leaf in leaves if _is_norm(leaf)]
    if not norms:
        conversion.warn(
            "jaxnorm.equinox.convert: %s has no equinox.nn.LayerNorm and no equinox.nn.RMSNorm; "
            "norms of other classes can call jaxnorm.layer_norm and jaxnorm.rms_norm",
            type(model).__name__,
        )
    theirs = [(path, norm) for path, norm in norms if not isinstance(norm, (LayerNorm, RMSNorm))]
    left: dict[str, str] = {}
    kept: dict[str, str] = {}
    new: dict[int, Any] = {}  # by the identity of the old one
    for path, norm in theirs:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        why = _why_left(norm)
        if why is not None:
            left[name] = why
            continue
        why = _why_input(norm) if save == "output" else None
        if why is not None:
            kept[name] = why
        if id(norm) not in new:
            new[id(norm)] = _converted(norm, save if why is None else "input", implementation)
    outcomes = {"are left to equinox": left, conversion.KEPT: kept}
    conversion.log("equinox.convert", len(theirs), outcomes)
    converted: Model = jax.tree.map(lambda node: new.get(id(node), node), model, is_leaf=_is_norm)
    return converted


_CONVERTED: dict[type, type] = {eqx.nn.LayerNorm: LayerNorm, eqx.nn.RMSNorm: RMSNorm}


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _is_norm(node: Any) -> bool:
    return isinstance(node, tuple(_CONVERTED))


def _converted(norm: Any, save: Save, implementation: Name | None) -> Any:
    """jaxnorm's module of equinox's, with its parameters."""
    made = _CONVERTED[type(norm)](
        norm.shape,
        norm.eps,
        norm.use_weight,
        norm.use_bias,
        save=save,
        implementation=implementation,
    )
    return eqx.tree_at(
        lambda norm: (norm.weight, norm.bias),
        made,
        (norm.weight, norm.bias),
        is_leaf=lambda leaf: leaf is None,
    )


def _why_left(norm: Any) -> str | None:
    """Why a norm of equinox's is not converted; None where it is."""
    if type(norm) not in _CONVERTED:
        base = next(base for base in _CONVERTED if isinstance(norm, base))
        return conversion.subclass(norm, base, "equinox")
    dtypes = [parameter.dtype.name for parameter in _parameters(norm)]
    return None if set(dtypes) <= set(FLOAT_DTYPES) else f"dtypes {', '.join(dtypes)}"


def _why_input(norm: Any) -> str | None:
    """Why a norm that is converted keeps its input though it was to keep its output."""
    if not hasattr(norm.weight, "dtype"):
        return None
    parameters = _parameters(norm)
    y_dtype = checks.product_dtype(parameters[0].dtype, parameters[-1].dtype)
    return conversion.why_input(parameters, y_dtype)


def _parameters(norm: Any) -> list[Any]:
    """Weight and bias: arrays, or what stands for them; those that there are."""
    return [a for a in (norm.weight, norm.bias) if hasattr(a, "dtype")]


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
        save=norm.save,
        implementation=norm.implementation,
    )
