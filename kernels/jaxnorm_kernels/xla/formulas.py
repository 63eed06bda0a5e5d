"""The class `Formulas`: the passes of an operation as functions in plain JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla.reductions import vary_like

# The default of `Formulas.backward`: None, declared with the type Any. Operations that use the
# backward pass of another operation keep this default.
_ANOTHER_S: Any = None


class Formulas(NamedTuple):
    """The forward pass, backward pass and tangent of an operation; see `Implementation`.

    Some operations use the tangent and the backward pass of another operation, which
    `Operation.derivative` names. For such an operation, this class has only the forward pass.

    The backward pass is linear in the cotangents, so the tangent can be computed as its transpose.
    This is the default. On a CPU, XLA may fuse this transpose badly, so an operation may have a
    separate function for its tangent, `own_tangent`. With this function, jax.jvp of a softmax loads
    and stores 8 arrays of x's size instead of 12 (float32, 2048 x 1024). jax.jvp of log_prob takes
    30 % of the time that it takes with the transpose.
    """

    forward: Callable[[Operands, Spec], Results]
    backward: Callable[[Residuals, Results, Spec], Operands] = _ANOTHER_S
    own_tangent: Callable[[Residuals, Operands, Spec], Results] | None = None

    def tangent(self, residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
        """Return the tangents of an operation's results; see `Implementation.tangent`."""
        if self.own_tangent is not None:
            return self.own_tangent(residuals, tangents, spec)
        saved = residuals.saved
        given = {n: vary_like(t, saved) for n, t in tangents._asdict().items() if t is not None}
        of_backward = spec.replaced(direction="bwd")
        if spec.has("residual"):
            # Below, the backward pass is transposed, so it must be a linear function. Rounding the
            # gradient of h to the residual's dtype would not be linear. Therefore, this gradient is
            # not rounded.
            of_backward = of_backward.replaced(residual_dtype=spec.compute_dtype)

        def gradients(cotangents: Results) -> dict[str, jax.Array]:
            found = self.backward(residuals, cotangents, of_backward)
            return {name: getattr(found, name).astype(t.dtype) for name, t in given.items()}

        (results,) = jax.linear_transpose(gradients, _results_like(saved, spec))(given)
        return _over_shards(results, spec) if spec.cols_over else results


def _results_like(saved: jax.Array, spec: Spec) -> Results:
    """Return arrays with the shapes and dtypes of the operation's results.

    Their values are unused. Inside `jax.shard_map`, they vary over the same mesh axes as `saved`.
    """
    of_row, is_array = jnp.sum(saved, spec.axes), spec.operation.results["y"] == "array"
    stat = of_row.astype(spec.compute_dtype)
    y = (saved if is_array else of_row).astype(spec.y_dtype)
    results = Results(y, stats=(stat,) * len(spec.statistics) if spec.has_stats else ())
    if "h" in spec.outputs:
        results = results._replace(h=saved.astype(spec.last.x_dtype))
    return results


def _over_shards(results: Results, spec: Spec) -> Results:
    """All-reduce the tangents of all results that have one number per row.

    The columns are sharded, so each shard has computed only a partial sum of each of these numbers.
    """
    y, stats = results.y, lax.psum(results.stats, spec.cols_over)
    if spec.operation.results["y"] == "stat":
        y = lax.psum(y, spec.cols_over)
    return results._replace(y=y, stats=stats)
