"""Pallas kernels for NVIDIA GPUs with the Mosaic GPU backend (Hopper and newer)."""

from collections.abc import Callable
from typing import Any

from jaxnorm_kernels.implementation import Implementation, Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.backward import cross_entropy_bwd
from jaxnorm_kernels.mosaic.cross_entropy.forward import cross_entropy_fwd
from jaxnorm_kernels.mosaic.cross_entropy.kl_divergence import kl_divergence_bwd, kl_divergence_fwd
from jaxnorm_kernels.mosaic.device.launch import interpreted as interpreted
from jaxnorm_kernels.mosaic.linear import rms_norm_linear_fwd as rms_norm_linear_fwd
from jaxnorm_kernels.mosaic.norm.backward import (
    norm_bwd,
    norm_gated_bwd,
    scaled_sum_bwd,
    two_norms_bwd,
)
from jaxnorm_kernels.mosaic.norm.forward import norm_fwd
from jaxnorm_kernels.mosaic.norm.rope import norm_rope_bwd, norm_rope_fwd
from jaxnorm_kernels.mosaic.norm.strided import norm_strided_bwd, norm_strided_fwd
from jaxnorm_kernels.mosaic.softmax.backward import softmax_bwd
from jaxnorm_kernels.mosaic.softmax.forward import softmax_fwd
from jaxnorm_kernels.mosaic.support import (
    platforms,
    takes_inner,
    why_not_default,
    why_unsupported,
)
from jaxnorm_kernels.operations import Family, Op
from jaxnorm_kernels.specs import Spec

# Maps the name of an operation, or of a family of operations, to a kernel function. An operation
# without an entry uses its family's entry.
_FORWARD: dict[Family | Op, Callable[..., Results]] = {
    "softmax": softmax_fwd,
    "loss": cross_entropy_fwd,
    "kl_divergence": kl_divergence_fwd,
    "norm": norm_fwd,
    "norm_rope": norm_rope_fwd,
}
_BACKWARD: dict[Family | Op, Callable[..., Operands]] = {
    "softmax": softmax_bwd,
    "loss": cross_entropy_bwd,
    "kl_divergence": kl_divergence_bwd,
    "norm": norm_bwd,
    "norm_add_norm": two_norms_bwd,
    "scaled_add_norm": scaled_sum_bwd,
    "norm_rope": norm_rope_bwd,
    "norm_gated": norm_gated_bwd,
}


def forward(operands: Operands, spec: Spec, **schedule: Any) -> Results:
    """Run the forward pass of a call; see `Implementation.forward`.

    ``schedule=...`` replaces the default schedule (numbers of threads, rows per block and so on).
    Norms over an axis other than the last ignore ``schedule``.
    """
    if spec.inner > 1:
        return norm_strided_fwd(operands, spec)
    kernel = _FORWARD.get(spec.op) or _FORWARD[spec.operation.family]
    return kernel(operands, spec, **schedule)


def backward(residuals: Residuals, cotangents: Results, spec: Spec, **schedule: Any) -> Operands:
    """Run the backward pass of a call; see `Implementation.backward`.

    ``schedule=...`` replaces the default schedule (numbers of threads, rows per block and so on).
    Norms over an axis other than the last ignore ``schedule``.
    """
    if spec.inner > 1:
        return norm_strided_bwd(residuals, cotangents, spec)
    kernel = _BACKWARD.get(spec.op) or _BACKWARD[spec.operation.family]
    return kernel(residuals, cotangents, spec, **schedule)


IMPLEMENTATION = Implementation(
    forward,
    backward,
    why_unsupported,
    why_not_default,
    takes_inner,
    platforms,
)
