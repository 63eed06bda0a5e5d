"""Calls of a norm and the rotation after it, and the types of their operands."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specs import build_spec

from jaxnorm_kernels.specs import Shared, Spec

BF16, F16, F32 = (np.dtype(jnp.dtype(name)) for name in ("bfloat16", "float16", "float32"))

QUERIES = {
    each: Shared(((4, False), (2048, True), (each, False)), has_columns=True) for each in (32, 5, 1)
}


def make_spec(
    direction: str,
    shared: Shared,
    size: tuple[int, int] = (32, 32),
    mix: tuple[np.dtype, ...] = (F32, F32, F32),
    **given: Any,
) -> Spec:
    (cols, rotated), (x, table, y) = size, mix
    return build_spec(
        "norm_rope",
        direction,
        math.prod(size for size, _ in shared.segments),
        cols,
        x,
        y,
        epsilon=1e-6,
        table_dtype=table,
        rotated=rotated,
        table_rows=shared,
        **{"scale_dtype": F32, "want_stats": direction == "fwd", **given},
    )


def types_of(spec: Spec) -> tuple[Any, ...]:
    assert spec.norm.table_rows is not None

    def rows(dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((spec.rows, spec.cols), dtype)

    table = jax.ShapeDtypeStruct(
        (spec.norm.table_rows.rows, spec.norm.rotated // 2), spec.norm.table_dtype
    )
    scale = jax.ShapeDtypeStruct((spec.cols,), F32)
    if spec.direction == "fwd":
        return rows(spec.x_dtype), scale, table, table
    rstd = jax.ShapeDtypeStruct((spec.rows,), F32)
    saved = rows(spec.y_dtype if spec.norm.saved == "output" else spec.x_dtype)
    return saved, (rstd,), scale, table, table, rows(spec.y_dtype)
