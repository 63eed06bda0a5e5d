"""Passes that are made of others, where an implementation has no kernel for the whole."""

from collections.abc import Callable

import jax

from jaxnorm_kernels.specs import Spec, Stats


def two_norms_bwd(
    norm_bwd: Callable[..., tuple[jax.Array, jax.Array | None, jax.Array | None]],
    x: jax.Array,
    saved: jax.Array,
    stats: Stats,
    scale: jax.Array | None,
    next_scale: jax.Array | None,
    dy: jax.Array,
    dh: jax.Array | None,
    spec: Spec,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """``norm_add_norm_bwd`` of two ``norm_bwd``: the second norm's, whose dx is the first one's dy.

    Arrays are as in :class:`jaxnorm_kernels.implementation.Implementation`.
    """
    rstd, next_rstd = stats
    dresidual, dnext_scale, _ = norm_bwd(
        saved, (next_rstd,), next_scale, None, dy, dh, spec=spec.last
    )
    dx, dscale, _ = norm_bwd(x, (rstd,), scale, None, dresidual, spec=spec.first)
    return dx, dresidual, dscale, dnext_scale
