"""Equinox modules: drop-in replacements of LayerNorm, RMSNorm and GroupNorm.

For the backward pass, the norms save their outputs instead of their inputs.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxnorm.models import conversion

with conversion.needed("equinox", "jaxnorm.equinox needs equinox"):
    import equinox as eqx

from jaxnorm.operations.norm import layer_norm, rms_norm
from jaxnorm.remat.auto_remat import auto_remat as _auto_remat
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm", "auto_remat", "convert"]

_NO_STATE: Any = object()


class _Norm(eqx.Module):
    """A base class with ``__call__``, and the fields that jaxnorm adds to equinox's norms."""

    save: Save = eqx.field(static=True)
    implementation: Name | None = eqx.field(static=True)
    scale_offset: float = eqx.field(static=True)

    def __call__(self, x: Any, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Normalise x like equinox's module; ``state`` is returned unchanged.

        Returns:
          Array of x's shape and dtype; with ``state``, the pair of this array and ``state``.
        """
        _check_shape(self, x)
        of_equinox = super().__call__  # type: ignore[misc]
        y = of_equinox(x) if _is_left_to_equinox(self, x) else _normalised(self, x)
        return y if state is _NO_STATE else (y, state)


class LayerNorm(_Norm, eqx.nn.LayerNorm):
    """``equinox.nn.LayerNorm`` that saves its output, not its input, for the backward pass.

    Fields, arguments, defaults and the call are the same as in equinox; there are three additional
    keyword arguments. As in equinox, x has the module's shape, all axes are normalised, and the
    result has x's dtype. Under one or more nested ``jax.vmap``, each pass processes all rows in one
    kernel. Equinox's code runs, and needs as much memory as in equinox, if the dtype of x is not a
    float of 16 to 64 bits, or if x has no axes or no elements.

    Args:
      shape: shape of x, weight and bias: an integer, or a sequence of integers.
      eps: number that is added to the variance.
      use_weight, use_bias: True by default. If one of them is False, the module does not have this
        parameter, and the field ``weight`` or ``bias`` is None.
      dtype: dtype of the parameters; by default, JAX's default float dtype.
      elementwise_affine: equinox's deprecated argument for both ``use_weight`` and ``use_bias``.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to ``weight``; 0.0 by default.

    Raises:
      ValueError: in a call, the shape of x is not the module's shape. Also any error that
        :func:`jaxnorm.layer_norm` raises.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.LayerNorm(512)
      >>> jax.vmap(norm)(jnp.ones((8, 512))).shape
      (8, 512)
    """

    __init__ = conversion.init_of(eqx.nn.LayerNorm)


class RMSNorm(_Norm, eqx.nn.RMSNorm):
    """``equinox.nn.RMSNorm`` that saves its output, not its input, for the backward pass.

    See :class:`jaxnorm.equinox.LayerNorm` for the fields and arguments, for the behaviour under
    ``jax.vmap``, and for the cases in which a call runs equinox's own code.

    Args:
      shape, eps, use_weight, use_bias, dtype: as in :class:`jaxnorm.equinox.LayerNorm`.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.rms_norm` and, for norms with a bias, :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.rms_norm`.
      scale_offset: number that is added to ``weight``; 0.0 by default. For Gemma's ``1 + w``, pass
        ``scale_offset=1.0``.

    Raises:
      ValueError: as for :class:`jaxnorm.equinox.LayerNorm`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.RMSNorm(512, scale_offset=1.0)  # Gemma's 1 + w
      >>> jax.vmap(norm)(jnp.ones((8, 512))).shape
      (8, 512)
    """

    __init__ = conversion.init_of(eqx.nn.RMSNorm)


class GroupNorm(_Norm, eqx.nn.GroupNorm):
    """``equinox.nn.GroupNorm`` that saves its output, not its input, for the backward pass.

    Fields, arguments, defaults and the call are the same as in equinox; there are three additional
    keyword arguments. Channels are the first axis of x. If the dtype of x is not a float of 16 to
    64 bits, equinox's code runs, and needs as much memory as in equinox.

    Args:
      groups, channels, eps, channelwise_affine, dtype: as in ``equinox.nn.GroupNorm``.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to ``weight``; 0.0 by default.

    Raises:
      ValueError: in a call, x does not have the module's number of channels. Also any error that
        :func:`jaxnorm.layer_norm` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> norm = jaxnorm.equinox.GroupNorm(8, 64)
      >>> norm(jnp.ones((64, 16, 16))).shape
      (64, 16, 16)
    """

    __init__ = conversion.init_of(eqx.nn.GroupNorm)


def convert[Model](
    model: Model,
    *,
    save: Save = "output",
    implementation: Name | None = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Model:
    """Replace each ``equinox.nn.LayerNorm``, ``RMSNorm`` and ``GroupNorm`` in a model by jaxnorm's.

    Modules are immutable, so the function returns a new model. It has the same arrays, in the same
    order of leaves, so checkpoints (``equinox.tree_serialise_leaves``) load in both directions. An
    optimiser's state has the structure of its model, so convert the model before you create the
    optimiser. A norm that occurs twice in the model is converted to one object.

    Norms are found anywhere in the model's tree, in fields, lists, tuples and dictionaries. This
    includes stacked norms (from ``equinox.filter_vmap``, for ``jax.lax.scan``) and abstract norms
    (``equinox.filter_eval_shape``).

    If a weight is 0, or much smaller than the bias in the same column, its gradient cannot be
    computed from the norm's output (see :func:`jaxnorm.check_params`). The conversion therefore
    examines the values of parameters, and norms with such columns get ``save="input"``. Abstract
    and traced parameters have no values, so convert a model after its checkpoint is loaded. A
    norm's output has the dtype of x, and the conversion assumes that this is the dtype of the
    parameters. If x has fewer bits, fewer gradients can be computed from the output: check the
    model with ``jaxnorm.check_params(model, x.dtype)``.

    Norms are not converted if the dtypes of their parameters are not floats of 16 to 64 bits. Norms
    whose class is a subclass of equinox's class and overrides code are not converted either. (A
    subclass whose body is ``pass`` is converted.) The logger ``"jaxnorm"`` logs one warning. It
    lists the norms that are not converted and the norms that save their input, with the reasons. If
    the model has no norms, the warning says so. If there is nothing to list, nothing is logged.
    Modules of jaxnorm's classes keep their own settings.

    Args:
      model: an ``equinox.Module``, or a tree that contains modules.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`. Norms whose gradients would otherwise be wrong always save their
        input.
      implementation: name of the implementation of all norms, or None; see
        :func:`jaxnorm.layer_norm`.
      calls: a dictionary ``{class: function(module, *args, **kwargs)}``, for norm classes that the
        model defines. In modules of exactly such a class, the function replaces ``__call__``. It
        may call the original ``__call__``. The modules keep their fields, and stay instances of the
        class; ``save`` and ``implementation`` do not apply to them. Modules of subclasses are not
        changed. One log line lists the changed modules. If it also lists modules of subclasses, or
        classes in ``calls`` that the model does not use, its level is WARNING instead of INFO. If
        the function cannot be pickled (a lambda, for example), a pickled model is loaded with
        modules of the original class.

    Returns:
      The model, with the same structure except for its norms.

    Raises:
      TypeError: ``model`` has no ``equinox.Module`` in it; ``calls`` is not a dictionary of
        classes and functions.
      ValueError: ``save`` or ``implementation`` is wrong; ``calls`` has a class that is not an
        ``equinox.Module``.

    Example:
      >>> import equinox as eqx
      >>> import jaxnorm.equinox
      >>> model = jaxnorm.equinox.convert([eqx.nn.LayerNorm(512)])
      >>> type(model[0]).__module__
      'jaxnorm.equinox'
    """
    report = conversion.Report("equinox.convert", eqx.Module, _CLASSES, save, implementation, calls)
    if not any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        raise TypeError(
            f"convert: model is a {type(model).__name__}; expected an equinox.Module, or a tree "
            "that has some; Flax's models are converted by jaxnorm.nnx and jaxnorm.linen"
        )

    def replace(made: Any, node: Any, path: str) -> Any:
        change = report.change(node, path, _why_left, _why_input)
        if change is not None:
            return _of_class(made, *change)
        if not any(map(_is_module, vars(node).values())):
            report.note(type(node), path, jax.tree.leaves(node))
        return made

    model = _rebuilt(model, replace)
    report.log(
        f"{type(model).__name__} has no equinox.nn.LayerNorm and no equinox.nn.RMSNorm and no "
        "GroupNorm"
    )
    return model


_CLASSES = {eqx.nn.LayerNorm: LayerNorm, eqx.nn.RMSNorm: RMSNorm, eqx.nn.GroupNorm: GroupNorm}


def _rebuilt[Tree](model: Tree, replace: Callable[[Any, Any, str], Any]) -> Tree:
    """Return a model with its modules replaced, from the innermost modules outwards.

    All occurrences of a module are replaced by the same object. A module in which nothing is
    replaced is not copied.

    Args:
      model: a tree with modules.
      replace: function that returns the replacement of a module. Its arguments are the module with
        its submodules already replaced, the original module, and its path.
    """
    new: dict[int, Any] = {}

    def visit(node: Any, path: tuple[Any, ...]) -> Any:
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node and _is_module(child)
        )
        visited = [
            visit(child, (*path, *keys)) if _is_module(child) and child is not node else child
            for keys, child in children
        ]
        is_same = all(after is before for after, (_, before) in zip(visited, children))
        made = node if is_same else jax.tree.unflatten(structure, visited)
        if _is_module(node):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            made = new.setdefault(id(node), replace(made, node, name))
        return made

    return visit(model, ())


def _of_class(module: Any, kind: type, added: Mapping[str, Any]) -> Any:
    """Return an instance of the class `kind` with a module's fields and the fields in `added`."""
    made: Any = object.__new__(kind)
    for name, value in {**vars(module), **added}.items():
        object.__setattr__(made, name, value)
    return made


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _why_left(norm: Any) -> str | None:
    """Return the reason why a norm is left to equinox; None if it is converted."""
    dtypes = [parameter.dtype.name for parameter in _parameters(norm)]
    return None if set(dtypes) <= set(FLOAT_DTYPES) else f"dtypes {', '.join(dtypes)}"


def _why_input(norm: Any) -> str | None:
    """Return the reason why a norm must save its input instead of its output, or None."""
    return conversion.why_input(_parameters(norm)) if hasattr(norm.weight, "dtype") else None


def _parameters(norm: Any) -> list[Any]:
    """Return the parameters of a norm: weight and bias, if present. They may be abstract arrays."""
    return [a for a in (norm.weight, norm.bias) if hasattr(a, "dtype")]


def _check_shape(norm: Any, x: Any) -> None:
    name = type(norm).__name__
    if not isinstance(norm, eqx.nn.GroupNorm):
        if x.shape != norm.shape:
            raise ValueError(
                f"{name}: x has shape {x.shape}; expected {norm.shape}, the module's shape; map it "
                f"over the other axes, e.g. jax.vmap(norm)(x), or make it {name}({x.shape}, ...)"
            )
    elif not x.ndim or x.shape[0] % norm.groups or norm.channels not in (None, x.shape[0]):
        expected = norm.channels or f"a multiple of {norm.groups}"
        raise ValueError(
            f"GroupNorm: x has shape {x.shape}; expected {expected} channels on its first axis"
        )


def _normalised(norm: Any, x: Any) -> jax.Array:
    """Run a norm with jaxnorm's functions."""
    function = rms_norm if isinstance(norm, eqx.nn.RMSNorm) else layer_norm
    parameters, axis, shape = [norm.weight, norm.bias], None, x.shape
    if isinstance(norm, eqx.nn.GroupNorm):
        axis, shape = (1, 2), (norm.groups, x.shape[0] // norm.groups, math.prod(x.shape[1:]))
        parameters = [None if a is None else a.reshape(*shape[:2], 1) for a in parameters]
    scale, bias = parameters
    options = {"axis": axis, "epsilon": norm.eps, **conversion.settings_of(norm)}
    return function(x.reshape(shape), scale, bias=bias, **options).reshape(x.shape)


def _is_left_to_equinox(norm: Any, x: Any) -> bool:
    """Return True if a call must run equinox's code, because jaxnorm's functions do not support x.

    ValueError is raised if such a call would ignore a scale_offset of the module, because equinox's
    code does not have this option.
    """
    if x.dtype.name in FLOAT_DTYPES and x.size and x.ndim:
        return False
    call = f"with an x of shape {x.shape} and dtype {x.dtype.name}, left to equinox's own code"
    conversion.check_offset(norm, call, "cast x")
    return True


def auto_remat[**P, T](fun: Callable[P, T], *, budget: int | float | None = None) -> Callable[P, T]:
    """Return the same function, with a derivative that saves as few arrays as possible.

    This function applies :func:`jaxnorm.auto_remat` to functions that are modules, as
    ``eqx.filter_checkpoint`` applies ``jax.checkpoint``. So the arrays in ``fun`` itself are also
    differentiated.

    Args:
      fun: a function, such as an equinox module. Its arguments are trees with any leaves.
      budget: None, a number of bytes per device, or a share, as for :func:`jaxnorm.auto_remat`.

    Returns:
      A function with the signature and the results of ``fun``. It is itself a module, and has the
      arrays of ``fun``.

    Raises:
      TypeError, ValueError: ``budget`` is not valid, as for :func:`jaxnorm.auto_remat`.

    Example:
      >>> import equinox as eqx
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.equinox
      >>> def loss(model, x):
      ...     return jnp.sum(jaxnorm.equinox.auto_remat(model)(x) ** 2)
      >>> model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
      >>> eqx.filter_grad(loss)(model, jnp.ones(4)).layers[0].weight.shape
      (8, 4)
    """
    _auto_remat(fun, budget=budget)  # checks the arguments
    wrapped: Any = eqx.module_update_wrapper(_AutoRemat(fun, budget))
    return wrapped


class _AutoRemat(eqx.Module):
    """A function with `auto_remat`. It is a module, so that it can be a layer of another module."""

    fun: Callable[..., Any]
    budget: int | float | None = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _auto_remat(_call, budget=self.budget)(self.fun, args, kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else eqx.Partial(self, instance)


def _call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fun(*args, **kwargs)
