"""Equinox modules: drop-in LayerNorm, RMSNorm and GroupNorm that save their outputs."""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
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
from jaxnorm.tools.text import progress
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm", "convert"]

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


class GroupNorm(eqx.nn.GroupNorm):
    """``equinox.nn.GroupNorm`` that keeps its output, not its input, for the backward pass.

    Fields, arguments, defaults and the call are equinox's; three keyword arguments come on top.
    Channels are the first axis of x. An x of another dtype than the floats of 16 to 64 bits is left
    to equinox's own, input-saving computation.

    Args:
      groups, channels, eps, channelwise_affine, dtype: as in ``equinox.nn.GroupNorm``.
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to ``weight``; 0.0 by default.

    Raises:
      ValueError: when called with an x whose channels are not the module's, or as
        :func:`jaxnorm.layer_norm` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.GroupNorm(8, 64)
      >>> norm(jnp.ones((64, 16, 16))).shape
      (64, 16, 16)
    """

    save: Save = eqx.field(static=True)
    implementation: Name | None = eqx.field(static=True)
    scale_offset: float = eqx.field(static=True)

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: Any = None,
        *,
        save: Save = "output",
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        super().__init__(groups, channels, eps, channelwise_affine, dtype)
        self.save = save
        self.implementation = implementation
        self.scale_offset = scale_offset

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Normalises x, as ``equinox.nn.GroupNorm`` does; ``state`` passes through unchanged.

        Returns:
          Array of x's shape and dtype; with a ``state``, (that array, state).
        """
        if not x.ndim or x.shape[0] % self.groups or self.channels not in (None, x.shape[0]):
            expected = self.channels or f"a multiple of {self.groups}"
            raise ValueError(
                f"GroupNorm: x has shape {x.shape}; expected {expected} channels on its first axis"
            )
        if _is_left_to_equinox(self, x):
            y = super().__call__(x)
        else:
            groups = (self.groups, x.shape[0] // self.groups, math.prod(x.shape[1:]))
            scale, bias = (
                None if a is None else a.reshape(*groups[:2], 1) for a in (self.weight, self.bias)
            )
            y = layer_norm(
                x.reshape(groups), scale, bias, axis=(1, 2), epsilon=self.eps, **_added(self)
            ).reshape(x.shape)
        return y if state is _NO_STATE else (y, state)


def convert[Model](
    model: Model,
    *,
    save: Save = "output",
    implementation: Name | None = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Model:
    """Makes every ``equinox.nn.LayerNorm``, ``RMSNorm`` and ``GroupNorm`` in a model jaxnorm's.

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
    of equinox's classes with code of their own. (A subclass whose body is ``pass`` is converted.)
    One warning of the logger ``"jaxnorm"`` names
    these and those that keep their input, with the reasons; it also says so where a model has none
    of these norms at all. Norms that are jaxnorm's already keep their own settings.

    Args:
      model: an ``equinox.Module``, or a tree that has some.
      save: ``"output"`` or ``"input"``, of all norms but those that have to keep their input; see
        :func:`jaxnorm.layer_norm`.
      implementation: of all norms; see :func:`jaxnorm.layer_norm`.
      calls: ``{class: function(module, *args, **kwargs)}``: what is called in place of the
        ``__call__`` of modules of exactly that class, such as a norm class of the model's own; it
        may call that ``__call__`` itself. Such a module keeps its fields, and stays an instance of
        the class; ``save`` and ``implementation`` do not apply to it. The log line names these
        modules, those of subclasses, which are left as they are, and classes that the model does
        not have.

    Returns:
      The model, of the same structure but for its norms.

    Raises:
      TypeError: ``model`` has no ``equinox.Module`` in it, or ``calls`` is not a dictionary of
        classes and functions.
      ValueError: ``save`` or ``implementation`` is wrong, or ``calls`` has a class that is not an
        ``equinox.Module``.

    Example:
      >>> import equinox as eqx
      >>> import jaxnorm.equinox
      >>> model = jaxnorm.equinox.convert([eqx.nn.LayerNorm(512)])
      >>> type(model[0]).__module__
      'jaxnorm.equinox'
    """
    conversion.check("convert", save, implementation)
    replaced = conversion.Calls("convert", calls, eqx.Module, "equinox")
    if not any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        raise TypeError(
            f"convert: model is a {type(model).__name__}; expected an equinox.Module, or a tree "
            "that has some; Flax's models are converted by jaxnorm.nnx and jaxnorm.linen"
        )
    model, norms = _with_calls(model, replaced)
    if not norms and not replaced.applied:
        others = "".join(f". {sentence}" for sentence in replaced.sentences())
        conversion.warn(
            "jaxnorm.equinox.convert: %s has no equinox.nn.LayerNorm and no equinox.nn.RMSNorm and "
            "no GroupNorm; norms of other classes can call jaxnorm.layer_norm and "
            "jaxnorm.rms_norm%s",
            type(model).__name__,
            others,
        )
        return model
    theirs = {path: norm for path, norm in norms.items() if not isinstance(norm, _OURS)}
    left: dict[str, str] = {}
    kept: dict[str, str] = {}
    new: dict[int, Any] = {}  # by the identity of the old one
    for name in progress([*theirs], after=conversion.PATIENCE):
        norm = theirs[name]
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
    own = [
        type(theirs[name]).__name__
        for name in left
        if conversion.converted_as(type(theirs[name]), _CONVERTED) is None
    ]
    conversion.log("equinox.convert", len(theirs), outcomes, replaced.sentences(own))
    return _rebuilt(model, lambda made, node, path: new.get(id(node), made))


_CONVERTED: dict[type, type] = {
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RMSNorm: RMSNorm,
    eqx.nn.GroupNorm: GroupNorm,
}
_OURS = tuple(_CONVERTED.values())


def _with_calls[Tree](model: Tree, calls: conversion.Calls) -> tuple[Tree, dict[str, Any]]:
    """Return a model whose modules call the functions of ``calls``, and its norms by their paths.

    The norms are those whose conversion ``calls`` leaves open.
    """
    norms: dict[str, Any] = {}

    def replace(made: Any, node: Any, path: str) -> Any:
        function = calls.of(type(node), path)
        if function is not None:
            return _of_class(made, conversion.with_call(conversion.original(type(node)), function))
        if _is_norm(node):
            if not calls.has(path):
                norms[path] = node
        elif not any(map(_is_module, vars(node).values())):
            calls.note(type(node), path)
        return made

    return _rebuilt(model, replace), norms


def _rebuilt[Tree](model: Tree, replace: Callable[[Any, Any, str], Any]) -> Tree:
    """Return a model with each module replaced, from the innermost outwards.

    A module in two places stays one object, and a module with nothing replaced the object it is.

    Args:
      model: a tree with modules.
      replace: what stands for a module: a function of that module with its submodules replaced, of
        the module as it was, and of its path.
    """
    new: dict[int, Any] = {}

    def visit(node: Any, path: str) -> Any:
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node and _is_module(child)
        )
        old = [child for _, child in children]
        visited = [
            visit(child, _joined(path, key)) if _is_module(child) and child is not node else child
            for key, child in children
        ]
        is_same = all(a is b for a, b in zip(visited, old))
        made = node if is_same else jax.tree.unflatten(structure, visited)
        if not _is_module(node):
            return made
        replaced = replace(made, node, path)
        return new.setdefault(id(node), replaced)

    return visit(model, "")


def _joined(path: str, key: Any) -> str:
    name = jax.tree_util.keystr(key, simple=True, separator=".")
    return f"{path}.{name}" if path else name


def _of_class(module: Any, kind: type) -> Any:
    """Return a module of a class that has the same fields."""
    made: Any = object.__new__(kind)
    for name, value in vars(module).items():
        object.__setattr__(made, name, value)
    return made


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _is_norm(node: Any) -> bool:
    return isinstance(node, tuple(_CONVERTED))


def _converted(norm: Any, save: Save, implementation: Name | None) -> Any:
    """jaxnorm's module of equinox's, with its parameters."""
    base = conversion.converted_as(type(norm), _CONVERTED)
    assert base is not None
    options: dict[str, Any] = {"save": save, "implementation": implementation}
    if base is eqx.nn.GroupNorm:
        made = GroupNorm(norm.groups, norm.channels, norm.eps, norm.channelwise_affine, **options)
    else:
        made = _CONVERTED[base](norm.shape, norm.eps, norm.use_weight, norm.use_bias, **options)
    return eqx.tree_at(
        lambda norm: (norm.weight, norm.bias),
        made,
        (norm.weight, norm.bias),
        is_leaf=lambda leaf: leaf is None,
    )


def _why_left(norm: Any) -> str | None:
    """Why a norm of equinox's is not converted; None where it is."""
    if conversion.converted_as(type(norm), _CONVERTED) is None:
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
    if _is_left_to_equinox(norm, x):
        return equinox_norm(x)
    return function(x, norm.weight, bias=norm.bias, axis=None, epsilon=norm.eps, **_added(norm))


def _added(norm: Any) -> dict[str, Any]:
    """Return the fields that equinox's modules do not have, as keyword arguments."""
    names = ("scale_offset", "save", "implementation")
    return {name: getattr(norm, name) for name in names}


def _is_left_to_equinox(norm: Any, x: Any) -> bool:
    """Return True if equinox's own code computes a call; ValueError if it cannot."""
    if x.dtype.name in FLOAT_DTYPES and x.size and x.ndim:
        return False
    if norm.scale_offset:
        raise ValueError(
            f"{type(norm).__name__}: scale_offset={norm.scale_offset} with an x of shape {x.shape} "
            f"and dtype {x.dtype.name}, which is left to equinox's own code, which adds no offset; "
            "cast x, or add the offset to the parameter"
        )
    return True
