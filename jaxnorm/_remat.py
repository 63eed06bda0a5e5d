"""Names of the residuals, and the rematerialisation policy that keeps them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_OUT = "jaxnorm_out"
_RSTD = "jaxnorm_rstd"
_SOFTMAX_OUT = "jaxnorm_softmax_out"

_keep = jax.checkpoint_policies.save_only_these_names(_OUT, _RSTD)


def save_policy(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Policy for :func:`jax.checkpoint`: norms are kept, and everything else is recomputed.

    ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` keeps the outputs and statistics of the
    norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward computes no norm again. A
    softmax's output, as large as the attention matrix, has a name of its own
    (``jaxnorm_softmax_out``) and is not kept; to keep it too, use
    :func:`jax.checkpoint_policies.save_only_these_names` with the three names.

    Args:
      primitive, *avals, **params: an equation, as JAX hands it to a policy.

    Returns:
      Whether its result is kept.
    """
    return bool(_keep(primitive, *avals, **params))


def name(op: str, outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Names a call's output, and a norm's statistics."""
    y, *stats = outputs
    return [
        checkpoint_name(y, _OUT if op == "norm" else _SOFTMAX_OUT),
        *[checkpoint_name(stat, _RSTD) for stat in stats],
    ]
