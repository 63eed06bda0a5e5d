"""The implementation of `jaxnorm.nnx.convert`."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from jaxnorm.models import conversion, flax_modules
from jaxnorm_kernels.specs import Name


def convert(model: Any, report: conversion.Report, implementation: Name | None) -> None:
    """Convert Flax's norms in a model, in place.

    A converted norm gets the class of jaxnorm's norm, and the attributes that only jaxnorm's norms
    have. A module of a class in ``calls`` calls the user's function and is not converted.

    Args:
      model: an `nnx.Module`, or a container of modules.
      report: the other arguments of the conversion, and the record of what it does.
      implementation: name of the implementation of all norms, or None.

    Raises:
      TypeError: `model` has no `nnx.Module` in it.
    """
    modules = [
        (".".join(map(str, path)), node)
        for path, node in nnx.iter_graph(model, graph=True)
        if isinstance(node, nnx.Module)
    ]
    if not modules:
        raise TypeError(
            f"convert: model is a {type(model).__name__}; expected an nnx.Module, or a list, tuple "
            "or dictionary of them; call linen modules inside jaxnorm.linen.converted()"
        )
    # Every decision is made before the first module is changed, so that an error changes none.
    changes: list[tuple[Any, type, dict[str, Any]]] = []
    for path, node in modules:
        change = report.change(node, path, why_left, why_input)
        if change is not None:
            kind, save = change
            fields = flax_modules.Added(save, implementation)._asdict() if save else {}
            changes.append((node, kind, fields))
        elif not any(isinstance(child, nnx.Module) for child in vars(node).values()):
            parameters = [v.get_value() for v in vars(node).values() if isinstance(v, nnx.Param)]
            report.note(type(node), path, parameters)
    _apply(changes)
    report.log(f"{type(model).__name__} has no nnx.LayerNorm, RMSNorm or GroupNorm")


def _apply(changes: Sequence[tuple[Any, type, Mapping[str, Any]]]) -> None:
    """Change the classes and set attributes of modules. If one cannot be changed, none is.

    For example, nnx raises an error for a module that was made outside the traced function.
    """
    before = [(node, type(node), dict(vars(node))) for node, _, _ in changes]
    try:
        for node, kind, attributes in changes:
            for name, value in attributes.items():
                setattr(node, name, value)
            node.__class__ = kind
    except BaseException:
        for node, kind, attributes in before:
            object.__setattr__(node, "__class__", kind)
            vars(node).clear()
            vars(node).update(attributes)
        raise


def why_left(norm: Any) -> str | None:
    """Return the reason why a norm is left to Flax; None if it is converted."""
    # A GroupNorm has no `feature_axes`, because its features are always the last axis.
    feature_axes = getattr(norm, "feature_axes", norm.reduction_axes)
    reduction, features = (
        set(axes) if isinstance(axes, Sequence) else {axes}
        for axes in (norm.reduction_axes, feature_axes)
    )
    if (
        why := flax_modules.why_flax(norm, (norm.dtype, norm.param_dtype))
    ) or reduction == features:
        return why
    return f"feature_axes={feature_axes} are not reduction_axes={norm.reduction_axes}"


def why_input(norm: Any) -> str | None:
    """Return the reason why a norm must save its input instead of its output, or None."""
    if norm.scale is None:
        return None
    parameters = [norm.scale.get_value()]
    if getattr(norm, "bias", None) is not None:
        parameters.append(norm.bias.get_value())
    return conversion.why_input(parameters, norm.dtype)
