"""Converting models that exist: what linen's, nnx's and equinox's conversions share."""

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.tools import check_params
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

#: What is said of norms that were to keep their output.
KEPT = 'keep their input, as with save="input"'


def check(function: str, save: Save, implementation: Name | None) -> None:
    """ValueError where an argument of a conversion is wrong."""
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)


def are_known(parameters: Iterable[Any]) -> bool:
    """Whether the values of all of these parameters are at hand."""
    return all(_values(parameter) is not None for parameter in parameters)


def why_input(parameters: Collection[Any], y_dtype: np.dtype) -> str | None:
    """Why a norm with these parameters keeps its input where it was to keep its output.

    None where it need not, or where their values are not at hand.

    Args:
      parameters: scale and, if there is one, bias.
      y_dtype: of the norm's output.
    """
    values = [known for known in map(_values, parameters) if known is not None]
    if len(values) < len(parameters) or len({a.shape for a in values}) > 1:
        return None
    scale, *bias = values
    lost = check_params.columns_lost(scale, bias[0] if bias else None, y_dtype)
    if not lost:
        return None
    where = f"in {lost} of {scale.size} columns"
    if not (bias and bias[0].any()):
        return f"scales too small for {y_dtype.name} {where}"
    return f"scales of 0, or far below the bias, {where}"


def _values(parameter: Any) -> np.ndarray | None:
    """The values of a parameter, if they are floats that are known and within this process's reach.

    That of a tracer of `jax.grad` outside `jax.jit` is known, too.
    """
    if isinstance(parameter, jax.core.Tracer):
        parameter = parameter.to_concrete_value()
    if isinstance(parameter, jax.Array):
        whole = parameter.is_fully_addressable or parameter.is_fully_replicated
        # An explicit transfer, which `jax.transfer_guard` lets pass.
        parameter = jax.device_get(parameter) if whole and not parameter.is_deleted() else None
    is_known = isinstance(parameter, np.ndarray) and parameter.dtype.name in FLOAT_DTYPES
    return parameter if is_known else None


def subclass(module: Any, base: type, package: str) -> str:
    """Why a conversion leaves a module whose class is derived from one of a package's."""
    name = type(module).__name__
    return f"{name} is a subclass of {package}'s {base.__name__}, with code of its own"


def warn(text: str, *arguments: object) -> None:
    """A line of the logger ``"jaxnorm"``.

    A warning, because Python's logging shows no lower level by default.
    """
    logging.getLogger("jaxnorm").warning(text, *arguments)


def log(function: str, seen: int, outcomes: Mapping[str, Mapping[str, str]]) -> None:
    """One line on the norms of those seen that are not what was asked for.

    They run slower, or keep more, than was meant, without another sign of it.

    Args:
      function: the conversion, such as ``"nnx.convert"``.
      seen: how many norms.
      outcomes: what became of some, and for each its path and the reason.
    """
    parts = [
        f"{len(norms)} of {seen} norms {what}: "
        + "; ".join(f"{path or 'the module itself'} ({why})" for path, why in norms.items())
        for what, norms in outcomes.items()
        if norms
    ]
    if parts:
        warn("jaxnorm.%s: %s", function, ". ".join(parts))
