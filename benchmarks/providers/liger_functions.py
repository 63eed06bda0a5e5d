"""Liger's kernels. RMSNorm's dx overwrites dy, and the gradient of logits overwrites the logits.

Liger's GroupNorm is not compared with jaxnorm. It takes images with channels first, so all elements
of a group are adjacent in memory. The benchmark has channels last. There, the elements of a group
are not adjacent, so the two problems differ.
"""

from collections.abc import Callable
from typing import Any

from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.functional import (
    liger_fused_add_rms_norm,
    liger_layer_norm,
    liger_rms_norm,
    liger_softmax,
)
from torch import Tensor

from benchmarks.losses import SOFTCAP


def _of_logits(**options: float) -> Callable[..., Tensor]:
    loss = LigerCrossEntropyLoss(reduction="none", **options)
    return lambda logits, labels: loss(logits, labels).float()  # the loss has the logits' dtype


def _of_layer(**options: float) -> Callable[..., Tensor]:
    loss = LigerFusedLinearCrossEntropyLoss(**options)
    return lambda x, weight, labels: loss(weight.t(), x, labels)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    return {
        "softmax": liger_softmax,
        "layer_norm": lambda x, scale, bias: liger_layer_norm(x, scale, bias, 1e-6),
        "rms_norm": lambda x, scale: liger_rms_norm(x, scale, 1e-6),
        "add_rms_norm": lambda x, residual, scale: liger_fused_add_rms_norm(
            x, residual, scale, 1e-6
        ),
        "cross_entropy": _of_logits(),
        "capped_cross_entropy": _of_logits(softcap=SOFTCAP),
        "linear_cross_entropy": _of_layer(),
        "capped_linear_cross_entropy": _of_layer(softcap=SOFTCAP),
    }[op]
