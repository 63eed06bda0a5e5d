"""Liger's kernels as its functional API calls them: RMSNorm's dx is written over dy."""

from collections.abc import Callable
from typing import Any

from liger_kernel.transformers.functional import (
    liger_fused_add_rms_norm,
    liger_layer_norm,
    liger_rms_norm,
    liger_softmax,
)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    return {
        "softmax": liger_softmax,
        "layer_norm": lambda x, scale, bias: liger_layer_norm(x, scale, bias, 1e-6),
        "rms_norm": lambda x, scale: liger_rms_norm(x, scale, 1e-6),
        "add_rms_norm": lambda x, residual, scale: liger_fused_add_rms_norm(
            x, residual, scale, 1e-6
        ),
    }[op]
