"""The code that runs calls of linen norms, also inside `jaxnorm.linen.converted`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxnorm.models import conversion, flax_modules
from jaxnorm_kernels.specs import FLOAT_DTYPES


def called(
    norm: Any, flax_norm: Callable[..., Any], x: Any, mask: jax.Array | None, residual: Any
) -> Any:
    """Run a call of one of jaxnorm's norm modules. Return y or, with a residual, (y, h).

    `flax_norm` is the ``__call__`` of Flax's class, which runs calls that jaxnorm does not support.
    """
    normal = x if residual is None else residual
    if why_flax(norm, normal, mask):
        return flax_modules.by_flax(norm, functools.partial(flax_norm, mask=mask), x, residual)
    place, parameters, dtype = _operands(norm, normal)
    return flax_modules.normalised(norm, place, x, residual, parameters, dtype)


def _operands(norm: Any, x: Any) -> tuple[flax_modules.Place, dict[str, Any], np.dtype]:
    """Return the place of a norm, its parameters and the dtype of its result.

    The parameters are created in the scope of the module, according to the module's fields.
    """
    place = flax_modules.place_of(norm, jnp.shape(x))
    assert place is not None
    shape = [x.shape[-1]] if flax_modules.is_group_norm(norm) else [*place.parameter]
    parameters = {
        name: norm.param(name, getattr(norm, f"{name}_init"), shape, norm.param_dtype)
        for name in ("scale", "bias")
        if getattr(norm, f"use_{name}", False)
    }
    return place, parameters, flax_modules.result_dtype(norm.dtype, x, *parameters.values())


def why_flax(norm: Any, x: Any, mask: jax.Array | None) -> str | None:
    """Return the reason why a call of a norm runs Flax's code; None if it runs jaxnorm's code."""
    dtypes = jnp.result_type(x), norm.param_dtype, norm.dtype
    why = flax_modules.why_flax(norm, dtypes, mask)
    if why is not None or flax_modules.place_of(norm, jnp.shape(x)) is not None:
        return why
    if flax_modules.is_group_norm(norm):
        return "groups or axes that Flax refuses"
    return f"feature_axes={norm.feature_axes} are not reduction_axes={norm.reduction_axes}"


# Maps the path of a norm, and the name of the dtype of its output, to the reason why the norm must
# save its input, or to None.
Reasons = dict[tuple[str, str], str | None]


def reasons_in(params: Any) -> Reasons:
    """Return which norms must save their input, by the values in the argument ``params``."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"converted: params is a {type(params).__name__}; expected a model's "
            'variables, or those of the collection "params": a dictionary'
        )
    arrays = nn.unbox(params.get("params", params))
    arrays = flax.traverse_util.flatten_dict(arrays)
    reasons: Reasons = {}
    for (*path, name), scale in arrays.items():
        if name == "scale":
            parameters = [scale, *(a for a in [arrays.get((*path, "bias"))] if a is not None)]
            for dtype in FLOAT_DTYPES:
                at = "/".join(path), dtype
                reasons[at] = conversion.why_input(parameters, np.dtype(dtype))
    return reasons


def converted_call(
    report: conversion.Report, reasons: Reasons | None, norm: Any, path: str, x: Any
) -> Any:
    """Run a call of one of Flax's norms with jaxnorm's functions, inside `converted`.

    Record the norm if it must save its input. This depends on the values of the parameters. Traced
    parameters have no values. For them, the decision is taken from `reasons`, which were computed
    from the user's argument ``params``; None if there is no such argument.
    """
    place, parameters, dtype = _operands(norm, x)
    why = None
    if report.save == "output" and "scale" in parameters:
        if conversion.are_known(parameters.values()):
            why = conversion.why_input(parameters.values(), dtype)
        elif reasons is not None:
            why = reasons.get((path, dtype.name))
            if (path, dtype.name) not in reasons:
                report.unknown[path] = "params has no such norm"
    settings = report.settings(path, why)
    return flax_modules.normalised(norm, place, x, None, parameters, dtype, settings)
