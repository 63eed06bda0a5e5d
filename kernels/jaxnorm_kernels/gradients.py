"""The last steps of gradients: sums of partial sums, and two norms by the kernel of one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec


def add_partials(
    partials: Sequence[jax.Array],
    dtypes: Sequence[np.dtype | None],
    groups: Sequence[int] | None = None,
) -> list[jax.Array | None]:
    """The sums over the first axis of `partials`, ``(n, cols)`` each, in the parameters' dtypes.

    All in one reduction, since two would be two kernels. A dtype of None stands for a parameter
    that there is not, and has no partial.

    `groups` says how many groups of rows have a parameter of their own: one ``(groups, cols)`` has
    as many sums, each over its part of the first axis. One that all rows share has a sum of all.
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


def two_norms_bwd(
    norm_bwd: Callable[[Residuals, Results, Spec], Operands],
    residuals: Residuals,
    cotangents: Results,
    spec: Spec,
) -> Operands:
    """Run the backward of two norms and the sum between them by the backward of each norm.

    The dx of the second norm is the dy of the first.
    """
    assert residuals.x is not None
    rstd, next_rstd = residuals.stats
    of_last = Residuals(residuals.saved, stats=(next_rstd,), scale=residuals.next_scale)
    of_first = Residuals(residuals.x, stats=(rstd,), scale=residuals.scale)
    last = norm_bwd(of_last, cotangents, spec.last)
    first = norm_bwd(of_first, Results(last.x), spec.first)
    return Operands(first.x, residual=last.x, scale=first.scale, next_scale=last.scale)
