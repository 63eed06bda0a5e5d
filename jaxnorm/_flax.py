"""Flax, imported in one place that says what to install, and what linen and nnx modules share."""

from collections.abc import Iterable
from typing import Any

import jax

from jaxnorm import _arguments

try:
    from flax import linen as linen
    from flax import nnx as nnx
    from flax.linen import dtypes as linen_dtypes
    from flax.nnx.nn import dtypes as nnx_dtypes
except ModuleNotFoundError as error:
    raise ImportError(
        "jaxnorm.linen and jaxnorm.nnx need Flax, which is not installed; "
        'install it with: pip install "jaxnorm[flax]"'
    ) from error

__all__ = ["linen", "linen_dtypes", "nnx", "nnx_dtypes", "result_dtype", "shared_axes"]

Axes = int | Iterable[int]


def shared_axes(
    module: str, reduction_axes: Axes, feature_axes: Axes, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The axes that are both normalised and scaled; None where the two differ."""
    reduced, features = (
        tuple(
            sorted(
                {
                    _arguments.axes(module, a, shape)[0]
                    for a in (axes if isinstance(axes, Iterable) else (axes,))
                }
            )
        )
        for axes in (reduction_axes, feature_axes)
    )
    return reduced if reduced == features else None


def result_dtype(dtype: Any, *operands: jax.Array | None) -> Any:
    """Flax's rule: `dtype`, or what the operands promote to."""
    return jax.dtypes.canonicalize_dtype(linen_dtypes.canonicalize_dtype(*operands, dtype=dtype))
