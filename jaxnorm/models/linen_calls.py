"""Calls of linen norms by jaxnorm's functions, or by Flax's own code."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes

from jaxnorm.models import flax_modules
from jaxnorm.operations.norm import layer_norm, rms_norm
from jaxnorm.operations.norm_residual import add_layer_norm, add_rms_norm
from jaxnorm_kernels.specs import FLOAT_DTYPES, Save

# Returns what is saved, from a module's parameters and its output's dtype.
Judged = Callable[[Mapping[str, Any], np.dtype], Save] | None


def called(
    norm: Any, flax_norm: Callable[..., Any], x: Any, mask: jax.Array | None, residual: Any
) -> Any:
    """Call one of jaxnorm's modules; `flax_norm` is the call of its base."""
    if why_flax(norm, x if residual is None else residual, mask):
        flax_modules.no_offset(norm)
        flax_norm = functools.partial(flax_norm, mask=mask)
        if isinstance(norm, nn.GroupNorm):
            return flax_modules.activated(norm, flax_norm(x))
        return flax_modules.composed(flax_norm, x, residual)
    return normalised(norm, flax_modules.added(norm), x, residual)


def normalised(
    norm: Any,
    added: flax_modules.Added,
    x: Any,
    residual: Any = None,
    judged: Judged = None,
) -> Any:
    """y or, with a residual, (y, h), by a module's fields; its parameters are made in its scope.

    `judged` returns what is saved, from the parameters and the output's dtype.
    """
    if isinstance(norm, nn.GroupNorm):
        return _of_groups(norm, added, x, judged)
    normal = x if residual is None else residual
    has_mean = isinstance(norm, nn.LayerNorm)
    axes = _axes(norm, normal)
    assert axes is not None
    parameters = _parameters(norm, [normal.shape[a] for a in axes])
    options = _options(norm, added, axes, normal, parameters, judged)
    if residual is None:
        return (layer_norm if has_mean else rms_norm)(x, **parameters, **options)
    return (add_layer_norm if has_mean else add_rms_norm)(x, residual, **parameters, **options)


def _of_groups(norm: Any, added: flax_modules.Added, x: Any, judged: Judged) -> Any:
    groups = _groups(norm, x)
    assert groups is not None
    parameters = _parameters(norm, [x.shape[-1]])
    options = _options(norm, added, groups.axes, x, parameters, judged)
    y = layer_norm(
        jnp.reshape(x, groups.shape),
        **{name: groups.of_parameter(a) for name, a in parameters.items()},
        activation=getattr(norm, "activation", None),
        **options,
    )
    return y.reshape(x.shape)


def _parameters(norm: Any, shape: list[int]) -> dict[str, Any]:
    """Make the parameters that the fields ask for in the module's scope."""
    inits = {"scale": norm.scale_init if norm.use_scale else None}
    if not isinstance(norm, nn.RMSNorm):
        inits["bias"] = norm.bias_init if norm.use_bias else None
    return {
        name: norm.param(name, init, shape, norm.param_dtype)
        for name, init in inits.items()
        if init is not None
    }


def _options(
    norm: Any,
    added: flax_modules.Added,
    axes: tuple[int, ...],
    x: Any,
    parameters: Mapping[str, Any],
    judged: Judged,
) -> dict[str, Any]:
    options = flax_modules.options(dtypes, norm, added, axes, x, *parameters.values())
    if judged is not None:
        options["save"] = judged(parameters, options["dtype"])
    return options


def _groups(norm: Any, x: Any) -> flax_modules.Groups | None:
    """Return the groups of a GroupNorm's channels; None for what Flax refuses."""
    count, size = norm.num_groups, norm.group_size
    if (count is None) == (size is None):
        return None
    if count is None:
        count = x.shape[-1] // size if x.ndim and size > 0 and x.shape[-1] % size == 0 else 0
    return flax_modules.groups_of(norm, x.shape, count)


def _axes(norm: Any, x: Any) -> tuple[int, ...] | None:
    return flax_modules.shared_axes(
        type(norm).__name__, norm.reduction_axes, norm.feature_axes, x.shape
    )


def why_flax(norm: Any, x: Any, mask: jax.Array | None) -> str | None:
    """Why a call is left to Flax's own code; None where it is not."""
    dtypes_seen = [jnp.result_type(x), jnp.dtype(norm.param_dtype)]
    if norm.dtype is not None:
        dtypes_seen.append(jnp.dtype(norm.dtype))
    names = [seen.name for seen in dtypes_seen]
    reasons = (
        ("a mask", mask is not None),
        (f"axis_name={norm.axis_name!r}", norm.axis_name is not None),
        ("force_float32_reductions=False", not norm.force_float32_reductions),
        (f"dtypes {', '.join(names)}", not set(names) <= set(FLOAT_DTYPES)),
    )
    why = next((why for why, applies in reasons if applies), None)
    if why is None and isinstance(norm, nn.GroupNorm):
        return None if _groups(norm, x) else "groups or axes that Flax refuses"
    if why is None and _axes(norm, x) is None:
        return f"feature_axes={norm.feature_axes} are not reduction_axes={norm.reduction_axes}"
    return why
