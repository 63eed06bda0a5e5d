"""Triton kernels for NVIDIA GPUs since Ampere, called through jax-triton.

They need Triton and jax-triton, which are optional dependencies (the extra ``triton``).
"""

from collections.abc import Callable
from typing import Any

from jaxnorm_kernels.implementation import Implementation, Operands, Residuals, Results
from jaxnorm_kernels.operations import Family, Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import extra

extra.check()  # raise a helpful error before the imports below, which need Triton and jax-triton

from jaxnorm_kernels.triton.cross_entropy import cross_entropy_bwd, cross_entropy_fwd  # noqa: E402
from jaxnorm_kernels.triton.kl_divergence import kl_divergence_bwd, kl_divergence_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm_backward import norm_bwd, two_norms_bwd  # noqa: E402
from jaxnorm_kernels.triton.norm_forward import norm_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm_rope import norm_rope_bwd, norm_rope_fwd  # noqa: E402
from jaxnorm_kernels.triton.softmax import softmax_bwd, softmax_fwd  # noqa: E402
from jaxnorm_kernels.triton.support import (  # noqa: E402
    caveat,
    platforms,
    why_not_default,
    why_unsupported,
)

# The functions that run the passes. A key is the name of an operation or of a family of operations.
# If an operation has no entry, the entry of its family is used.
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
    "norm_rope": norm_rope_bwd,
}


def forward(operands: Operands, spec: Spec, **schedule: Any) -> Results:
    """Run a forward pass; see `Implementation.forward`. `schedule` replaces the default."""
    kernel = _FORWARD.get(spec.op) or _FORWARD[spec.operation.family]
    return kernel(operands, spec, **schedule)


def backward(residuals: Residuals, cotangents: Results, spec: Spec, **schedule: Any) -> Operands:
    """Run a backward pass; see `Implementation.backward`. `schedule` replaces the default."""
    kernel = _BACKWARD.get(spec.op) or _BACKWARD[spec.operation.family]
    return kernel(residuals, cotangents, spec, **schedule)


IMPLEMENTATION = Implementation(
    forward, backward, why_unsupported, why_not_default, platforms=platforms, caveat=caveat
)
