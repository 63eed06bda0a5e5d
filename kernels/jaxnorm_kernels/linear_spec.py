"""Everything static about one call of Mosaic's kernel of a norm and the product after it.

A forward alone::

    rms_norm_linear  y = activation(z),  z = rms_norm(x) weight + bias
"""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from jaxnorm_kernels.specs import Direction

Activation = Literal["relu", "leaky_relu", "gelu", "silu"]


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Everything static about one call of a kernel of a norm and the product after it.

    Since rms_norm(x) weight = rstd (x (G weight)) row by row, with G = scale + scale_offset, a
    kernel need not write the normalised array.

    Attributes:
      rows, cols, features: x is ``(rows, cols)``, weight ``(cols, features)``.
      x_dtype, weight_dtype: of these arrays.
      product_dtype: to which the normalised x (or what stands for it in a kernel's product) and
        weight are rounded. Sums are of `compute_dtype`.
      y_dtype: of y, rounded to it once, from `compute_dtype`.
      scale_dtype, bias_dtype: of ``(cols,)`` and ``(features,)``; None for one that is absent.
      epsilon, scale_offset: as in :class:`Spec`.
      activation: that of `jax.nn` with its defaults, of z in `compute_dtype`; None for y = z.
      precision: of the product, as ``jax.default_matmul_precision``.
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
        """dtype of the product's sums and of z: float64 where an array of rows is, else float32."""
        names = (self.x_dtype.name, self.product_dtype.name, self.y_dtype.name)
        return np.dtype(np.float64 if "float64" in names else np.float32)
