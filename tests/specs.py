"""Build the specs of passes for tests.

A `Spec` is the static description of one pass (the forward or the backward) of a call. Flags say
which optional operands and results exist, so that tests need not list their names.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxnorm_kernels.operations import OPERATIONS, Op
from jaxnorm_kernels.specs import OPTIONS, Direction, Spec

BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))


def build_spec(
    op: Op,
    direction: Direction,
    rows: int,
    cols: int,
    x_dtype: np.dtype,
    y_dtype: np.dtype,
    *parameters: np.dtype,
    want_stats: bool = False,
    unused: str | None = None,
    adds_dh: bool = False,
    stat_cotangents: bool = False,
    wants_tables: bool = False,
    overwrites_x: bool = False,
    **fields: Any,
) -> Spec:
    """Return a `Spec` with these fields.

    Args:
      parameters: dtypes of scale and bias.
      want_stats: True if the forward returns the statistics.
      unused: the name of a result that the forward does not return, or whose cotangent the backward
        does not take.
      adds_dh: True if the backward takes the cotangent of h.
      stat_cotangents: True if the backward takes cotangents of the statistics.
      wants_tables: True if the backward returns the gradients of cos and sin.
      overwrites_x: True if the backward of a loss may write dx over x.
    """
    names = [name for name in OPERATIONS[op].results if name not in (unused, "h")]
    backward = direction == "bwd"
    if adds_dh if backward else "h" in OPERATIONS[op].results and unused != "h":
        names.insert(1 if "y" in names else 0, "h")
    if wants_tables:
        fields["wrt"] = ("cos", "sin")
    if overwrites_x:
        fields["gradient_dtype"] = x_dtype
    fields |= dict(zip(("scale_dtype", "bias_dtype"), parameters))
    options = OPTIONS[OPERATIONS[op].family]()
    spec = Spec(op, direction, rows, cols, x_dtype, y_dtype, tuple(names), options)
    spec = spec.replaced(**fields)
    if stat_cotangents if backward else want_stats:
        spec = spec.replaced(outputs=(*names, *spec.statistics))
    return spec


def changed(spec: Spec, **changes: Any) -> Spec:
    """Return a copy of a `Spec` with new values for some of its fields.

    `changes` maps names of fields, or of the flags of `build_spec`, to new values.
    """
    backward = spec.direction == "bwd"
    unused = [name for name in spec.operation.results if name not in spec.outputs]
    flags = {
        "want_stats": not backward and spec.has_stats,
        "stat_cotangents": backward and spec.has_stats,
        "adds_dh": backward and "h" in spec.outputs,
        "unused": None if backward else next(iter(unused), None),
    }
    fields = vars_of(spec)
    options = fields.pop("options")
    del fields["outputs"]
    if OPERATIONS[changes.get("op", spec.op)].family == spec.operation.family:
        fields |= vars_of(options)
    return build_spec(**(fields | flags | changes))


def vars_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
