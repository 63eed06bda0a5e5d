"""The last step of a parameter's gradient: adding up the sums that blocks of rows have made."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def add_partials(
    partials: Sequence[jax.Array], dtypes: Sequence[np.dtype | None]
) -> list[jax.Array | None]:
    """The sums over the first axis of `partials`, each in its dtype.

    All in one reduction, since two would be two kernels. A dtype of None stands for a parameter
    that there is not, and has no partial.
    """
    zeros = (jnp.float32(0),) * len(partials)
    sums = list(lax.reduce(tuple(partials), zeros, _add, (0,))) if partials else []
    return [None if dtype is None else sums.pop(0).astype(dtype) for dtype in dtypes]


def _add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b))
