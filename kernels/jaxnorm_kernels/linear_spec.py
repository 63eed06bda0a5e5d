"""`LinearSpec`, the static description of a call of Mosaic's kernel of a norm and a matmul.

The kernel is a forward only::

    rms_norm_linear  y = activation(z),  z = rms_norm(x) weight + bias
"""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from jaxnorm_kernels.specs import Direction

Activation = Literal["relu", "leaky_relu", "gelu", "silu"]


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """The static description of a call of a kernel that fuses a norm and a matmul.

    With G = scale + scale_offset, rms_norm(x) weight = rstd (x (G weight)) in each row, so a kernel
    need not store the normalised array.

    Attributes:
      rows, cols, features: x is ``(rows, cols)``, weight ``(cols, features)``.
      x_dtype, weight_dtype: dtypes of these arrays.
      product_dtype: dtype of the matmul's operands, to which the normalised x (or the array that
        a kernel multiplies instead) and weight are rounded. Sums are in `compute_dtype`.
      y_dtype: dtype of y, which is rounded to it once.
      scale_dtype, bias_dtype: dtypes of scale ``(cols,)`` and bias ``(features,)``; None if absent.
      epsilon, scale_offset: as in :class:`Spec`.
      activation: function of `jax.nn`, with its defaults, of z in `compute_dtype`; None for y = z.
      precision: precision of the matmul, as ``jax.default_matmul_precision``.
    """

    op: ClassVar[Literal["rms_norm_linear"]] = "rms_norm_linear"
    direction: ClassVar[Direction] = "fwd"

    rows: int
    cols: int
    features: int
    x_dtype: np.dtype
    weight_dtype: np.dtype
    product_dtype: np.dtype
    y_dtype: np.dtype
    scale_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    epsilon: float = 0.0
    scale_offset: float = 0.0
    activation: Activation | None = None
    precision: str | None = None

    @property
    def compute_dtype(self) -> np.dtype:
        """dtype of the matmul's sums and of z: float64 if an array of rows is, else float32."""
        names = (self.x_dtype.name, self.product_dtype.name, self.y_dtype.name)
        return np.dtype(np.float64 if "float64" in names else np.float32)
