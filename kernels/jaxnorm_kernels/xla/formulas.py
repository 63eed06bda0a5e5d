"""What an operation is in plain JAX: its forward and its backward, of which the tangent follows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.reductions import vary_like

_ANOTHER_S: Any = None


class Formulas(NamedTuple):
    """See `Implementation`; forward alone where the table names another operation's derivative.

    The tangent is the transpose of the backward, which is linear in the cotangents. `own_tangent`
    takes its place where XLA fuses that less well on a CPU: over 2048 x 1024 of float32 jax.jvp of
    softmax moves 8 arrays, and would move 12, and that of log_prob takes 0.3 of the time.
    """

    forward: Callable[[Operands, Spec], Results]
    backward: Callable[[Residuals, Results, Spec], Operands] = _ANOTHER_S
    own_tangent: Callable[[Residuals, Operands, Spec], Results] | None = None

    def tangent(self, residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
        """See `Implementation.tangent`."""
        if self.own_tangent is not None:
            return self.own_tangent(residuals, tangents, spec)
        saved = residuals.saved
        given = {n: vary_like(t, saved) for n, t in tangents._asdict().items() if t is not None}
        of_backward = spec.replaced(direction="bwd")
        if spec.norm.residual_dtype is not None:
            # Rounded to it, the gradient of h would not be linear in the cotangents.
            of_backward = of_backward.replaced(residual_dtype=spec.compute_dtype)

        def gradients(cotangents: Results) -> dict[str, jax.Array]:
            found = self.backward(residuals, cotangents, of_backward)
            return {name: getattr(found, name).astype(t.dtype) for name, t in given.items()}

        (results,) = jax.linear_transpose(gradients, _results_like(saved, spec))(given)
        return _over_shards(results, spec) if spec.cols_over else results


def _results_like(saved: jax.Array, spec: Spec) -> Results:
    """Arrays of the types of the results; each differs among shards, as what is saved does."""
    of_row, is_array = jnp.sum(saved, spec.axes), spec.operation.results["y"] == "array"
    stat = of_row.astype(spec.compute_dtype)
    results = Results(stats=(stat,) * len(spec.statistics) if spec.has_stats else ())
    if "y" in spec.outputs:
        results = results._replace(y=(saved if is_array else of_row).astype(spec.y_dtype))
    if "h" in spec.outputs:
        results = results._replace(h=saved.astype(spec.last.x_dtype))
    return results


def _over_shards(results: Results, spec: Spec) -> Results:
    """What there is one of for each row: each shard of a row has a term of it."""
    y, stats = results.y, lax.psum(results.stats, spec.cols_over)
    if spec.operation.results["y"] == "stat":
        y = lax.psum(y, spec.cols_over)
    return results._replace(y=y, stats=stats)
