"""Liger's kernels as its functional API calls them: RMSNorm's dx is written over dy."""

from collections.abc import Callable

from liger_kernel.transformers.functional import liger_layer_norm, liger_rms_norm, liger_softmax
from torch import Tensor

from benchmarks.workloads import Operation


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., Tensor]:
    return {
        "softmax": liger_softmax,
        "layer_norm": lambda x, scale, bias: liger_layer_norm(x, scale, bias, 1e-6),
        "rms_norm": lambda x, scale: liger_rms_norm(x, scale, 1e-6),
    }[op]
