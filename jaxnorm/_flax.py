"""What linen and nnx modules share; neither imports the other's half of Flax.

Imported before anything of Flax, it says what to do where that is missing.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _arguments

if importlib.util.find_spec("flax") is None:
    raise ImportError(
        "jaxnorm.linen and jaxnorm.nnx need Flax, which is not installed; "
        'install it with: pip install "jaxnorm[flax]"'
    )

Axes = int | Sequence[int]


def shared_axes(
    module: str, reduction_axes: Axes, feature_axes: Axes, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The axes that are both normalised and scaled; None where the two differ."""
    reduced, features = (
        tuple(
            sorted(
                {
                    _arguments.axes(module, a, shape)[0]
                    for a in (axes if isinstance(axes, Sequence) else (axes,))
                }
            )
        )
        for axes in (reduction_axes, feature_axes)
    )
    return reduced if reduced == features else None


def options(dtypes: Any, module: Any, axes: tuple[int, ...], *operands: Any) -> dict[str, Any]:
    """What the functions take by keyword.

    The output's dtype is by Flax's rule, linen's or nnx's `dtypes`: the module's, or what the
    operands promote to.
    """
    dtype = dtypes.canonicalize_dtype(*operands, dtype=module.dtype)
    return {
        "axis": axes,
        "epsilon": module.epsilon,
        "scale_offset": module.scale_offset,
        "dtype": jax.dtypes.canonicalize_dtype(dtype),
        "save": module.save,
        "implementation": module.implementation,
    }


def composed(norm: Callable[[Any], Any], x: Any, residual: Any) -> Any:
    """Flax's own norm of x or, with a residual, (y, h) of the sum h in the residual's dtype."""
    if residual is None:
        return norm(x)
    dtype = jnp.result_type(residual)
    h = (jnp.asarray(x) + residual).astype(dtype)
    return norm(h), h


def no_offset(module: Any) -> None:
    """Raises for a module with a scale_offset whose call is left to Flax, which has none."""
    if module.scale_offset:
        name = type(module).__name__
        raise ValueError(
            f"{name}: scale_offset={module.scale_offset} in a call that is left to Flax's own code "
            f"(see jaxnorm's {name}), which adds no offset; leave out what leaves the call to "
            "Flax, or add the offset to the parameter"
        )
