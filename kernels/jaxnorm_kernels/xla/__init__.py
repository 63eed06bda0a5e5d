"""The contract in plain ``jax.numpy``: the reference, the fallback, the path for CPU and TPU."""

from collections.abc import Callable

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import LinearSpec, Spec
from jaxnorm_kernels.xla import cross_entropy, norm, softmax

_Passes = tuple[
    Callable[[Operands, Spec], Results],
    Callable[[Residuals, Operands, Spec], Results],
    Callable[[Residuals, Results, Spec], Operands],
]

_NORM: _Passes = (norm.norm_fwd, norm.norm_tan, norm.norm_bwd)
_PASSES: dict[Op, _Passes] = {
    "softmax": (softmax.softmax_fwd, softmax.softmax_tan, softmax.softmax_bwd),
    "log_softmax": (softmax.log_softmax_fwd, softmax.log_softmax_tan, softmax.log_softmax_bwd),
    "cross_entropy": (
        cross_entropy.cross_entropy_fwd,
        cross_entropy.cross_entropy_tan,
        cross_entropy.cross_entropy_bwd,
    ),
    "norm": _NORM,
    "add_norm": _NORM,
    "norm_add": _NORM,
    "norm_add_norm": _NORM,
}


def forward(operands: Operands, spec: Spec) -> Results:
    """See `Implementation.forward`."""
    return _PASSES[spec.op][0](operands, spec)


def tangent(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """See `WithTangent.tangent`."""
    return _PASSES[spec.op][1](residuals, tangents, spec)


def backward(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """See `Implementation.backward`."""
    return _PASSES[spec.op][2](residuals, cotangents, spec)


def platforms() -> None:
    """It runs on all."""


def supports(spec: Spec | LinearSpec) -> str | None:
    """Every call is supported."""
    del spec
    return None


def prefers(spec: Spec) -> str | None:
    """There is nothing to fall back to."""
    del spec
    return None
