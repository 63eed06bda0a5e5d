"""Code that the linen and the nnx norm modules share. It does not import nnx.

Import this module before Flax: if Flax is not installed, it raises an error with the command that
installs it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.models import conversion
from jaxnorm.operations import checks
from jaxnorm.operations.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxnorm.operations.norm_linear import rms_norm_linear
from jaxnorm_kernels.specs import FLOAT_DTYPES, Activation

with conversion.needed("flax", "jaxnorm.linen and jaxnorm.nnx need Flax"):
    from flax import linen as nn
    from flax.linen import dtypes

Axes = int | Sequence[int]


class Place(NamedTuple):
    """The shapes and axes with which jaxnorm's functions compute a norm.

    A GroupNorm is computed as a LayerNorm of a reshaped x.

    Attributes:
      shape: shape to which x is reshaped. For a GroupNorm, the last axis of x (channels) is split
        into two: the groups, and the channels of a group. For other norms, it is x's shape.
      axes: the axes of this shape that are normalised.
      parameter: the shape to which scale and bias are reshaped.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    parameter: tuple[int, ...]


def place_of(norm: Any, shape: tuple[int, ...]) -> Place | str:
    """Return the `Place` of a norm for an x with the given shape.

    If the call must run Flax's code, the result is the reason. This is the case if the parameters
    do not have exactly the normalised axes, or if Flax raises an error for the groups of a
    GroupNorm.
    """
    name = type(norm).__name__
    if not is_group_norm(norm):
        reduced, features = (
            tuple(sorted({checks.axes(name, axis, shape)[0] for axis in each(axes)}))
            for axes in (norm.reduction_axes, norm.feature_axes)
        )
        if reduced != features:
            return f"feature_axes={norm.feature_axes} are not reduction_axes={norm.reduction_axes}"
        return Place(shape, reduced, tuple(shape[axis] for axis in reduced))
    *others, channels = shape or (0,)
    last, count, size = len(others), norm.num_groups, norm.group_size
    if isinstance(norm, nn.GroupNorm) and size is not None:
        # In linen, num_groups or group_size must be None. (nnx computes the missing one itself.)
        count = channels // size if count is None and size > 0 and channels % size == 0 else 0
    axes = norm.reduction_axes
    reduced = checks.axes(name, (*range(1, last), -1) if axes is None else axes, shape)
    if count is None or count <= 0 or channels % count or reduced[-1] != last:
        return "groups or axes that Flax refuses"
    size = channels // count
    parameter = (count, *[1] * (len(reduced) - 1), size)
    return Place((*others, count, size), (*reduced[:-1], last + 1), parameter)


def is_group_norm(norm: Any) -> bool:
    """Return True for the GroupNorm of linen or nnx."""
    return hasattr(norm, "num_groups")


def each(axes: Axes) -> Sequence[int]:
    """Return the axes as a sequence, even if there is only one axis."""
    return axes if isinstance(axes, Sequence) else (axes,)


def why_flax(norm: Any, seen: Iterable[Any], mask: Any = None) -> str | None:
    """Return the reason why a norm runs Flax's code, or None.

    `seen` has the dtypes of the norm's operands and result; None entries are ignored. The axes are
    examined by `place_of`, not here.
    """
    names = [jnp.dtype(dtype).name for dtype in seen if dtype is not None]
    reasons = {
        "a mask": mask is not None,
        f"axis_name={norm.axis_name!r}": norm.axis_name is not None,
        "force_float32_reductions=False": not getattr(norm, "force_float32_reductions", True),
        f"dtypes {', '.join(names)}": not {*names} <= {*FLOAT_DTYPES},
    }
    return next((why for why, applies in reasons.items() if applies), None)


def result_dtype(dtype: Any, *operands: Any) -> np.dtype:
    """Return the dtype of a module's result by Flax's rule.

    This is the module's `dtype` or, if `dtype` is None, the common dtype of x and the parameters.
    """
    return jax.dtypes.canonicalize_dtype(dtypes.canonicalize_dtype(*operands, dtype=dtype))


def normalised(
    norm: Any,
    place: Place,
    x: Any,
    residual: Any,
    parameters: Mapping[str, Any],
    dtype: np.dtype,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Run a norm module with jaxnorm's functions. Return y or, with a residual, (y, h).

    Args:
      norm: a norm module of Flax or of jaxnorm.
      place: the result of `place_of` for the module.
      x, residual: the operands of the call; residual may be None.
      parameters: a dict with ``scale`` and ``bias``, if the module has them.
      dtype: dtype of y.
      settings: a dict with the values of `conversion.SETTINGS`; by default, the values of `norm`.
    """
    options = dict(settings or conversion.settings_of(norm))
    options |= {"axis": place.axes, "epsilon": norm.epsilon, "dtype": dtype}
    options |= {name: jnp.reshape(a, place.parameter) for name, a in parameters.items()}
    if is_group_norm(norm):
        options["activation"] = getattr(norm, "activation", None)
    has_mean = hasattr(norm, "use_bias")  # RMSNorm has no bias.
    if residual is not None:
        return (add_layer_norm if has_mean else add_rms_norm)(x, residual, **options)
    y = (layer_norm if has_mean else rms_norm)(jnp.reshape(x, place.shape), **options)
    return jnp.reshape(y, jnp.shape(x))


def norm_and_dense(
    module: Any,
    parameters: Mapping[str, Any],
    x: Any,
    residual: Any,
    activation: Activation | None,
    dtype: Any,
) -> Any:
    """Run RMSNormDense. Return y or, with a residual, (y, h).

    `module` has the fields ``epsilon``, ``scale_offset`` and ``implementation``. The matmul and its
    result have the same dtype as in Flax's Dense (linen) or Linear (nnx) after a norm.
    """
    normal = x if residual is None else residual
    promoted = result_dtype(dtype, normal, *parameters.values())
    return rms_norm_linear(
        x,
        parameters["kernel"].astype(promoted),
        parameters.get("scale"),
        bias=parameters.get("bias"),
        residual=residual,
        activation=activation,
        epsilon=module.epsilon,
        scale_offset=module.scale_offset,
        dtype=promoted,
        implementation=module.implementation,
    )


def by_flax(module: Any, norm: Callable[[Any], Any], x: Any, residual: Any = None) -> Any:
    """Return norm(x) or, with a residual, (norm(h), h), where the function `norm` is Flax's code.

    h = x + residual has the residual's dtype. If the module has an activation, the activation is
    applied to norm(x). Flax's norms have no scale_offset, so ValueError is raised if the module's
    is not 0.
    """
    name = type(module).__name__
    call = f"in a call that is left to Flax's own code (see jaxnorm's {name})"
    conversion.check_offset(module, call, "leave out what leaves the call to Flax")
    if residual is not None:
        h = (jnp.asarray(x) + residual).astype(jnp.result_type(residual))
        return norm(h), h
    y, activation = norm(x), getattr(module, "activation", None)
    checks.one_of(name, "activation", activation, (None, *get_args(Activation)))
    return y if activation is None else getattr(jax.nn, activation)(y)
