"""The code that runs calls of linen norms, and the classes behind `jaxnorm.linen.converted`."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes

from jaxnorm.models import conversion, flax_modules
from jaxnorm.operations.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Save


def called(
    norm: Any, flax_norm: Callable[..., Any], x: Any, mask: jax.Array | None, residual: Any
) -> Any:
    """Run a call of one of jaxnorm's norm modules.

    `flax_norm` is the ``__call__`` of Flax's class, which runs calls that jaxnorm does not support.
    """
    if why_flax(norm, x if residual is None else residual, mask):
        return flax_modules.by_flax(norm, functools.partial(flax_norm, mask=mask), x, residual)
    return normalised(norm, x, residual)


def normalised(
    norm: Any,
    x: Any,
    residual: Any = None,
    added: flax_modules.Added | None = None,
    judged: flax_modules.Judged = None,
) -> Any:
    """Run a norm module with jaxnorm's functions. Return y or, with a residual, (y, h).

    The parameters are created in the module's scope.

    Args:
      norm: a module of Flax or of jaxnorm.
      x, residual: the operands of the call.
      added: the values of `save`, `implementation` and `scale_offset` for a norm of Flax.
      judged: a function that chooses the `save` mode. None to use the mode `added.save`.
    """
    normal = x if residual is None else residual
    place = _place(norm, normal)
    assert place is not None
    is_group = isinstance(norm, nn.GroupNorm)
    parameters = _parameters(norm, [normal.shape[a] for a in ((-1,) if is_group else place)])
    has_mean = is_group or isinstance(norm, nn.LayerNorm)
    functions = (layer_norm, add_layer_norm) if has_mean else (rms_norm, add_rms_norm)
    summands = None if residual is None else (x, residual)
    return flax_modules.normalised(
        dtypes, norm, place, functions, normal, parameters, summands, added, judged
    )


def _parameters(norm: Any, shape: list[int]) -> dict[str, Any]:
    """Create a norm's parameters in the scope of the module, according to the module's fields."""
    inits = {"scale": norm.scale_init if norm.use_scale else None}
    if not isinstance(norm, nn.RMSNorm):
        inits["bias"] = norm.bias_init if norm.use_bias else None
    return {
        name: norm.param(name, init, shape, norm.param_dtype)
        for name, init in inits.items()
        if init is not None
    }


def _place(norm: Any, x: Any) -> tuple[Any, ...] | None:
    """Return the axes, or the `Groups` of a GroupNorm; None if Flax's code must run."""
    if not isinstance(norm, nn.GroupNorm):
        return flax_modules.shared_axes(
            type(norm).__name__, norm.reduction_axes, norm.feature_axes, x.shape
        )
    count: Any = norm.num_groups
    size = norm.group_size
    if (count is None) == (size is None):
        return None
    if size is not None:
        count = x.shape[-1] // size if x.ndim and size > 0 and x.shape[-1] % size == 0 else 0
    return flax_modules.groups_of(norm, x.shape, count)


def why_flax(norm: Any, x: Any, mask: jax.Array | None) -> str | None:
    """Return the reason why a call of a norm runs Flax's code; None if it runs jaxnorm's code."""
    dtypes_seen = jnp.result_type(x), norm.param_dtype, norm.dtype
    why = flax_modules.why_flax(norm, dtypes_seen, mask)
    if why is not None or _place(norm, x) is not None:
        return why
    if isinstance(norm, nn.GroupNorm):
        return "groups or axes that Flax refuses"
    return f"feature_axes={norm.feature_axes} are not reduction_axes={norm.reduction_axes}"


# -------------------------------------------------------------------------------------- conversion


class Stored:
    """The set of norms that must save their input instead of their output.

    The set is determined from the values of the norms' parameters. These are in ``params``, an
    argument of the context manager `converted`.

    Attributes:
      reasons: a dict. A key is a pair: the path of a norm, and the name of a dtype. The norm must
        save its input if its output has this dtype. The value is the reason.
      paths: the paths of all norms in ``params``, or None if the user has not passed ``params``.
    """

    def __init__(self, params: Any) -> None:
        self.reasons: dict[tuple[str, str], str] = {}
        self.paths: set[str] | None = None
        if params is not None:
            if not isinstance(params, Mapping):
                raise TypeError(
                    f"converted: params is a {type(params).__name__}; expected a model's "
                    'variables, or those of the collection "params": a dictionary'
                )
            params = nn.unbox(params)
            self.paths = set(self._norms(params.get("params", params), ()))

    def _norms(self, tree: Any, path: tuple[str, ...]) -> Iterator[str]:
        """Yield the paths of the norms in a tree. Add to `reasons` the norms that must save x."""
        if not isinstance(tree, Mapping):
            return
        name = "/".join(path)
        if "scale" in tree:
            yield name
            parameters = [tree[p] for p in ("scale", "bias") if p in tree]
            for dtype in FLOAT_DTYPES:
                why = conversion.why_input(parameters, np.dtype(dtype))
                if why is not None:
                    self.reasons[name, dtype] = why
        for key, subtree in tree.items():
            yield from self._norms(subtree, (*path, key))


def judged(
    report: conversion.Report,
    stored: Stored,
    path: str,
    parameters: Mapping[str, Any],
    y_dtype: np.dtype,
) -> Save:
    """Return the `save` mode of a norm, and record the norm if it must save its input.

    The mode depends on the values of the parameters. Traced parameters have no values. For them,
    the mode is taken from `stored`, which was computed from the values in the user's argument
    ``params``.
    """
    if "scale" not in parameters:
        return "output"
    if conversion.are_known(parameters.values()):
        why = conversion.why_input(parameters.values(), y_dtype)
    else:
        why = stored.reasons.get((path, y_dtype.name))
        if stored.paths is not None and path not in stored.paths:
            report.unknown[path] = "params has no such norm"
    if why is None:
        return "output"
    report.kept[path] = why
    return "input"
