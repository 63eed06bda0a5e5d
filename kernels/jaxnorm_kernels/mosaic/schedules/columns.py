"""Numbers of registers and bytes per column of a row. Schedules are computed from them."""

import numpy as np

from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, vector_width
from jaxnorm_kernels.specs import Spec

#: Number of registers that a thread of a backward pass needs in addition to the registers for its
#: columns. The additional registers contain addresses, and the thread's current vector of each of
#: the two inputs.
OTHER_REGISTERS = 40


def registers(spec: Spec) -> int:
    """Return how many registers a thread needs for each column that it processes: 1 or 2.

    * A softmax needs 2 if its bias has a value for each column, otherwise 1.
    * A norm without a residual or a gate needs 1.
    * A norm with a residual or a gate needs 1 if this operand is combined with x before the norm,
      and both have at most 16 bits. Otherwise, it needs 2.
    """
    if len(spec.operand_dtypes) == 1:
        return 1 + (full_bias_dtype(spec) is not None)
    operand_waits = spec.norm.norm_before_gate or "first" in spec.operation.norms
    return 2 if operand_waits or column_bytes(spec) > 4 else 1


def param_sizes(spec: Spec) -> list[int]:
    """Return the bytes per column of each parameter of the call (such as scale), as a list."""
    return _sizes(*map(spec.dtype, ("scale", "bias", "next_scale", "branch_scale")))


def param_bytes(spec: Spec) -> int:
    """Return the bytes per column, summed over all parameters (scale, bias and others)."""
    return sum(param_sizes(spec))


def column_bytes(spec: Spec) -> int:
    """Return the bytes per column, summed over all arrays that are loaded row by row."""
    return sum(_sizes(*spec.operand_dtypes, full_bias_dtype(spec)))


def data_bytes(spec: Spec) -> int:
    """Return the bytes per column, summed over all arrays that are read or written row by row."""
    h_dtype = spec.dtype("residual") if spec.normalises_h else None
    return column_bytes(spec) + sum(_sizes(spec.y_dtype, h_dtype))


def row_vector(spec: Spec) -> int:
    """Return the number of elements that a thread loads at once from a row.

    A thread loads this many elements at once from every array of x's shape. A softmax's bias does
    not affect the number.
    """
    return vector_width(spec.cols, *spec.operand_dtypes, spec.y_dtype)


def full_bias_dtype(spec: Spec) -> np.dtype | None:
    """Return the dtype of a softmax's bias if the bias has a value for each column, else None.

    Such a bias is loaded together with x.
    """
    shared = spec.softmax.logits_bias_rows if spec.is_softmax else None
    return None if shared is None or not shared.has_columns else spec.softmax.logits_bias_dtype


def _sizes(*dtypes: np.dtype | None) -> list[int]:
    return [dtype.itemsize for dtype in dtypes if dtype is not None]


def is_unaligned(spec: Spec) -> bool:
    """Return True if asynchronous copies cannot load a row.

    Asynchronous copies require that the size of a row is a multiple of 16 bytes.
    """
    return any(spec.cols * size % VECTOR_BYTES for size in _sizes(*spec.operand_dtypes))
