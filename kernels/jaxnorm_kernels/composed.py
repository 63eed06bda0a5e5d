"""Passes that are made of others, where an implementation has no kernel for the whole."""

from collections.abc import Callable

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec


def two_norms_bwd(
    norm_bwd: Callable[[Residuals, Results, Spec], Operands],
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
) -> Operands:
    """Of two norms and the sum between them, by theirs: the second's dx is the first's dy."""
    assert residuals.x is not None
    rstd, next_rstd = residuals.stats
    of_last = Residuals(residuals.saved, stats=(next_rstd,), scale=residuals.next_scale)
    of_first = Residuals(residuals.x, stats=(rstd,), scale=residuals.scale)
    last = norm_bwd(of_last, cotangents, spec.last)
    first = norm_bwd(of_first, Results(last.x), spec.first)
    return Operands(first.x, residual=last.x, scale=first.scale, next_scale=last.scale)
