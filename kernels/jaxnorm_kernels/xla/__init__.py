"""All operations in plain ``jax.numpy``: the reference, and the code for CPUs and TPUs."""

from jaxnorm_kernels.implementation import Implementation, Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla import cross_entropy, kl_divergence, log_probs, norm, norm_rope, softmax
from jaxnorm_kernels.xla.formulas import Formulas

#: Maps the name of each operation in `operations.OPERATIONS` to its `Formulas`.
FORMULAS: dict[Op, Formulas] = {
    **softmax.FORMULAS,
    **cross_entropy.FORMULAS,
    **kl_divergence.FORMULAS,
    **log_probs.FORMULAS,
    **norm.FORMULAS,
    **norm_rope.FORMULAS,
}


def forward(operands: Operands, spec: Spec) -> Results:
    """Run a forward pass; see `Implementation.forward`."""
    return FORMULAS[spec.op].forward(operands, spec)


def tangent(residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
    """Return the tangents of an operation's results; see `Implementation.tangent`."""
    return FORMULAS[spec.op].tangent(residuals, tangents, spec)


def backward(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Run a backward pass; see `Implementation.backward`."""
    return FORMULAS[spec.op].backward(residuals, cotangents, spec)


IMPLEMENTATION = Implementation(forward, backward, tangent=tangent)
