"""What a row costs: bytes in memory, and registers of a thread; of a column, in a forward pass."""

import numpy as np

from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, vector_width
from jaxnorm_kernels.specs import Spec

#: What a thread of a backward pass needs beside its columns: addresses, and a unit of both inputs.
OTHER_REGISTERS = 40


def registers(spec: Spec) -> int:
    """Registers of a thread for each column of a row, at most.

    x and a residual of 32 bits wait for each other, and a residual that is added to the norm of x
    for its statistics. In 16 bits, x and its residual share the register that their sum then takes.
    """
    if len(spec.operand_dtypes) == 1:
        return 1 + (full_bias_dtype(spec) is not None)
    return 2 if spec.operand_waits or column_bytes(spec) > 4 else 1


def param_sizes(spec: Spec) -> list[int]:
    """Bytes of each parameter of a column."""
    norms = (spec.norm.scale_dtype, spec.norm.bias_dtype, spec.norm.next_scale_dtype)
    return _sizes(*norms, spec.norm.branch_scale_dtype)


def param_bytes(spec: Spec) -> int:
    """Bytes of all parameters of a column."""
    return sum(param_sizes(spec))


def column_bytes(spec: Spec) -> int:
    """Bytes of each column of the rows that are read."""
    return sum(_sizes(*spec.operand_dtypes, full_bias_dtype(spec)))


def data_bytes(spec: Spec) -> int:
    """Bytes of each column of the rows that are read and written."""
    h_dtype = spec.norm.residual_dtype if spec.normalises_h else None
    return column_bytes(spec) + sum(_sizes(spec.y_dtype, h_dtype))


def row_vector(spec: Spec) -> int:
    """Elements that a thread reads at once of the rows of all arrays but a softmax's bias."""
    return vector_width(spec.cols, *spec.operand_dtypes, spec.y_dtype)


def full_bias_dtype(spec: Spec) -> np.dtype | None:
    """Of a softmax's bias that is read with x; not that of one value for a row."""
    shared = spec.softmax.logits_bias_rows
    return None if shared is None or not shared.has_columns else spec.softmax.logits_bias_dtype


def _sizes(*dtypes: np.dtype | None) -> list[int]:
    return [dtype.itemsize for dtype in dtypes if dtype is not None]


def is_unaligned(spec: Spec) -> bool:
    """Whether a row that is read is no multiple of what asynchronous copies take."""
    return any(spec.cols * size % VECTOR_BYTES for size in _sizes(*spec.operand_dtypes))
