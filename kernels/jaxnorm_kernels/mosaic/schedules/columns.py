"""The cost of a row in bytes of memory, and of a column in registers of a thread."""

import numpy as np

from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, vector_width
from jaxnorm_kernels.specs import Spec

#: Registers of a thread in a backward pass beside its columns: addresses, and a unit of both
#: inputs.
OTHER_REGISTERS = 40


def registers(spec: Spec) -> int:
    """Return the largest number of registers that a thread needs per column of a row.

    x and a residual of 32 bits both stay in registers. So does a residual that is added after the
    norm of x, while the statistics are computed. 16-bit x and residual share the register that
    their sum then takes.
    """
    if len(spec.operand_dtypes) == 1:
        return 1 + (full_bias_dtype(spec) is not None)
    return 2 if spec.operand_waits or column_bytes(spec) > 4 else 1


def param_sizes(spec: Spec) -> list[int]:
    """Return the bytes of each parameter of a column."""
    norms = (spec.norm.scale_dtype, spec.norm.bias_dtype, spec.norm.next_scale_dtype)
    return _sizes(*norms, spec.norm.branch_scale_dtype)


def param_bytes(spec: Spec) -> int:
    """Return the bytes of all parameters of a column."""
    return sum(param_sizes(spec))


def column_bytes(spec: Spec) -> int:
    """Return the bytes per column of the rows that are loaded."""
    return sum(_sizes(*spec.operand_dtypes, full_bias_dtype(spec)))


def data_bytes(spec: Spec) -> int:
    """Return the bytes per column of the rows that are loaded and stored."""
    h_dtype = spec.norm.residual_dtype if spec.normalises_h else None
    return column_bytes(spec) + sum(_sizes(spec.y_dtype, h_dtype))


def row_vector(spec: Spec) -> int:
    """Return the elements that a thread loads at once, for all row arrays but a softmax's bias."""
    return vector_width(spec.cols, *spec.operand_dtypes, spec.y_dtype)


def full_bias_dtype(spec: Spec) -> np.dtype | None:
    """Return the dtype of a softmax's bias if it has columns and is loaded with x; else None."""
    shared = spec.softmax.logits_bias_rows
    return None if shared is None or not shared.has_columns else spec.softmax.logits_bias_dtype


def _sizes(*dtypes: np.dtype | None) -> list[int]:
    return [dtype.itemsize for dtype in dtypes if dtype is not None]


def is_unaligned(spec: Spec) -> bool:
    """Return True if a row is not a multiple of what asynchronous copies require."""
    return any(spec.cols * size % VECTOR_BYTES for size in _sizes(*spec.operand_dtypes))
