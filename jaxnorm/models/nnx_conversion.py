"""What `jaxnorm.nnx.convert` asks of a norm of Flax's."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxnorm.models import conversion
from jaxnorm.operations import checks
from jaxnorm_kernels.specs import FLOAT_DTYPES


def why_left(norm: Any) -> str | None:
    """Why a norm of Flax's is not converted; None where it is."""
    if type(norm) not in (nnx.LayerNorm, nnx.RMSNorm):
        base = nnx.LayerNorm if isinstance(norm, nnx.LayerNorm) else nnx.RMSNorm
        return conversion.subclass(norm, base, "Flax")
    reduction, features = (
        set(axes) if isinstance(axes, Sequence) else {axes}
        for axes in (norm.reduction_axes, norm.feature_axes)
    )
    dtypes_seen = [jnp.dtype(d).name for d in (norm.dtype, norm.param_dtype) if d is not None]
    reasons = (
        (f"axis_name={norm.axis_name!r}", norm.axis_name is not None),
        (
            f"feature_axes={norm.feature_axes} are not reduction_axes={norm.reduction_axes}",
            reduction != features,
        ),
        (f"dtypes {', '.join(dtypes_seen)}", not set(dtypes_seen) <= set(FLOAT_DTYPES)),
    )
    return next((why for why, applies in reasons if applies), None)


def why_input(norm: Any) -> str | None:
    """Why a norm that is converted keeps its input though it was to keep its output."""
    if norm.scale is None:
        return None
    parameters = [norm.scale.get_value()]
    if getattr(norm, "bias", None) is not None:
        parameters.append(norm.bias.get_value())
    promoted = checks.product_dtype(parameters[0].dtype, parameters[-1].dtype)
    y_dtype = promoted if norm.dtype is None else norm.dtype
    return conversion.why_input(parameters, jax.dtypes.canonicalize_dtype(y_dtype))
