"""Helpers for backward passes: sums of partial gradients, and backward passes with two norms."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec


def add_partials(
    partials: Sequence[jax.Array],
    dtypes: Sequence[np.dtype | None],
    groups: Sequence[int] | None = None,
) -> list[jax.Array | None]:
    """Return the gradient of each parameter, given the partial sums that a kernel's blocks stored.

    A gradient has the dtype of its parameter. A single reduction adds up all partial sums, because
    XLA would run two reductions as two kernels.

    Args:
      partials: for each parameter that is present, an array ``(number of sums, cols)``. Each of its
        rows is a partial sum.
      dtypes: for each parameter, its dtype; None if the parameter is absent.
      groups: for each parameter, a number n. If n is 1, all rows of x share the parameter. If n is
        above 1, the parameter has the shape ``(n, cols)``: the rows of x form n groups, each with
        its own row of the parameter. The partial sums are then ordered by group. If `groups` is
        None, every n is 1.
    """
    counts = [1 if dtype is None else n for dtype, n in zip(dtypes, groups or [1] * len(dtypes))]
    most = max(counts)
    if most > 1:
        partials = [p.reshape(most, -1, p.shape[-1]) for p in partials]
    sums = _sums(partials, axis=int(most > 1))
    totals: list[jax.Array | None] = []
    for dtype, n in zip(dtypes, counts):
        if dtype is None:
            totals.append(None)
            continue
        total = sums.pop(0)
        if n < most:
            (total,) = _sums([total], axis=0)
        totals.append(total.astype(dtype))
    return totals


def _sums(arrays: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    zeros = (jnp.float32(0),) * len(arrays)
    return list(lax.reduce(tuple(arrays), zeros, _add, (axis,))) if arrays else []


def _add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b))


def add_rows(shared: Shared, numbers: jax.Array) -> jax.Array:
    """Return the gradient of a bias with one value per row, as an ``(n, 1)`` array.

    `numbers` has one number for each row of x. Row i of the result is the sum of the numbers of all
    rows of x that use row i of the bias. `shared` describes how the bias is broadcast.
    """
    broadcast = [axis for axis, (_, has_axis) in enumerate(shared.segments) if not has_axis]
    return numbers.reshape([size for size, _ in shared.segments]).sum(broadcast).reshape(-1, 1)


def two_norms_bwd(
    norm_bwd: Callable[[Residuals, Results, Spec], Operands],
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
) -> Operands:
    """Run the backward pass of y = norm(residual + norm(x)) as the backward passes of two norms.

    `norm_bwd` runs the backward pass of one norm. It runs for the outer norm first, because the dx
    of the outer norm is the dy of the inner norm.
    """
    assert residuals.x is not None
    rstd, next_rstd = residuals.stats
    of_last = Residuals(residuals.saved, stats=(next_rstd,), scale=residuals.next_scale)
    of_first = Residuals(residuals.x, stats=(rstd,), scale=residuals.scale)
    last = norm_bwd(of_last, cotangents, spec.last)
    first = norm_bwd(of_first, Results(last.x), spec.first)
    return Operands(first.x, residual=last.x, scale=first.scale, next_scale=last.scale)
