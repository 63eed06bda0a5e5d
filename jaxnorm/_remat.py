"""Names of the residuals, and the rematerialisation policy that keeps them."""

import jax
from jax.ad_checkpoint import checkpoint_name

_OUT = "jaxnorm_out"
_RSTD = "jaxnorm_rstd"
_SOFTMAX_OUT = "jaxnorm_softmax_out"

#: Policy for ``jax.checkpoint(f, policy=jaxnorm.save_policy)``: the outputs and statistics of the
#: norms (``jaxnorm_out``, ``jaxnorm_rstd``) are kept, so the backward computes no norm again, and
#: everything else is recomputed. A softmax's output, as large as the attention matrix, has a name
#: of its own (``jaxnorm_softmax_out``) and is not kept; to keep it too, use
#: ``jax.checkpoint_policies.save_only_these_names`` with the three names.
save_policy = jax.checkpoint_policies.save_only_these_names(_OUT, _RSTD)


def name_norm(
    y: jax.Array, stats: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Names a norm's output and statistics."""
    return checkpoint_name(y, _OUT), tuple(checkpoint_name(s, _RSTD) for s in stats)


def name_softmax(y: jax.Array) -> jax.Array:
    """Names a softmax's output."""
    return checkpoint_name(y, _SOFTMAX_OUT)
