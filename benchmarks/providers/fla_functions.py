"""Two gated norms of flash-linear-attention, which are Triton kernels.

The first norm is used in gated delta nets, the second norm is used in Mamba 2.
"""

from collections.abc import Callable
from typing import Any

from fla.modules.fused_norm_gate import rms_norm_gated
from fla.modules.layernorm_gated import rmsnorm_fn
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    return rms_norm_gated(x, gate, scale, None, eps=1e-6)


def gate_first_rms_norm(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    return rmsnorm_fn(x, scale, None, gate, eps=1e-6, norm_before_gate=False)


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    return {"gated_rms_norm": gated_rms_norm, "gate_first_rms_norm": gate_first_rms_norm}[op]
