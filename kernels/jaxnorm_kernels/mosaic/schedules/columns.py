"""The cost of a row in bytes of memory, and of a column in registers of a thread."""

import numpy as np

from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, vector_width
from jaxnorm_kernels.specs import Spec

#: Registers of a thread in a backward pass besides those for its columns. They hold addresses, and
#: a unit of both inputs.
OTHER_REGISTERS = 40


def registers(spec: Spec) -> int:
    """Return the maximum number of registers that a thread needs at a time per column of a row.

    A 32-bit x and its residual both stay in registers. So does a residual that is added after the
    norm of x, while the statistics are computed. A 16-bit x and its residual share the register
    that their sum takes later.
    """
    if len(spec.operand_dtypes) == 1:
        return 1 + (full_bias_dtype(spec) is not None)
    return 2 if spec.operand_waits or column_bytes(spec) > 4 else 1


def param_sizes(spec: Spec) -> list[int]:
    """Return, for each parameter, its bytes per column."""
    norms = (spec.norm.scale_dtype, spec.norm.bias_dtype, spec.norm.next_scale_dtype)
    return _sizes(*norms, spec.norm.branch_scale_dtype)


def param_bytes(spec: Spec) -> int:
    """Return the bytes per column of all parameters together."""
    return sum(param_sizes(spec))


def column_bytes(spec: Spec) -> int:
    """Return the bytes per column of all rows that are loaded."""
    return sum(_sizes(*spec.operand_dtypes, full_bias_dtype(spec)))


def data_bytes(spec: Spec) -> int:
    """Return the bytes per column of all rows that are loaded or stored."""
    h_dtype = spec.norm.residual_dtype if spec.normalises_h else None
    return column_bytes(spec) + sum(_sizes(spec.y_dtype, h_dtype))


def row_vector(spec: Spec) -> int:
    """Return the number of elements that a thread loads at once from each row array.

    A softmax's bias is not taken into account.
    """
    return vector_width(spec.cols, *spec.operand_dtypes, spec.y_dtype)


def full_bias_dtype(spec: Spec) -> np.dtype | None:
    """Return the dtype of a softmax's bias that has columns, or None without such a bias.

    Such a bias is loaded together with x.
    """
    shared = spec.softmax.logits_bias_rows
    return None if shared is None or not shared.has_columns else spec.softmax.logits_bias_dtype


def _sizes(*dtypes: np.dtype | None) -> list[int]:
    return [dtype.itemsize for dtype in dtypes if dtype is not None]


def is_unaligned(spec: Spec) -> bool:
    """Return True if the bytes of a row are no multiple of what asynchronous copies require."""
    return any(spec.cols * size % VECTOR_BYTES for size in _sizes(*spec.operand_dtypes))
