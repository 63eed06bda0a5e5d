"""Liger's linear cross-entropy with kernels in CuTe DSL. By default, Liger uses Triton kernels."""

from collections.abc import Callable
from typing import Any

from liger_kernel.functional import fused_linear_cross_entropy
from torch import Tensor


def in_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss chunk by chunk. cuBLAS runs the matmuls, a CuTe kernel processes the logits.

    If the size of the vocabulary is not a multiple of 8, Liger uses its Triton kernel instead.
    """
    loss, *_ = fused_linear_cross_entropy(x, weight.t(), labels, impl="nvidia-cutedsl")
    return loss


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    if name == "liger_cute":
        return in_chunks
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    def whole_logits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy_sm90(x, weight.t(), labels)

    return whole_logits
