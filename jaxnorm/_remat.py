"""Names of the residuals, and the rematerialisation policy that keeps them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxnorm._call import Call

_OUT = "jaxnorm_out"
_RSTD = "jaxnorm_rstd"
_LSE = "jaxnorm_lse"
_SOFTMAX_OUT = "jaxnorm_softmax_out"
_PREACTIVATION = "jaxnorm_preactivation"

_keep = jax.checkpoint_policies.save_only_these_names(_OUT, _RSTD, _LSE)


def save_policy(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Policy for :func:`jax.checkpoint`: norms are kept, and everything else is recomputed.

    ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` keeps the outputs and statistics of the
    norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward computes no norm again, and
    the log-sum-exp of each row of a cross-entropy (``jaxnorm_lse``, two numbers), not its logits. A
    softmax's output, as large as the attention matrix, has a name of its own
    (``jaxnorm_softmax_out``) and is not kept, and neither is what ``rms_norm_linear`` gives to an
    activation (``jaxnorm_preactivation``), a product's result; to keep them too, use
    :func:`jax.checkpoint_policies.save_only_these_names` with the names.

    Args:
      primitive, avals, params: an equation, as JAX hands it to a policy.

    Returns:
      Whether its result is kept.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> def block(x, scale, weight):
      ...     return x + jax.nn.gelu(jaxnorm.rms_norm(x, scale) @ weight)
      >>> block = jax.checkpoint(block, policy=jaxnorm.save_policy)
      >>> operands = jnp.ones((8, 64)), jnp.ones(64), jnp.ones((64, 64))
      >>> jax.jit(jax.grad(lambda *operands: block(*operands).sum()))(*operands).shape
      (8, 64)
    """
    return bool(_keep(primitive, *avals, **params))


def name(call: Call, outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Names a call's outputs, and the statistics of a norm or a cross-entropy.

    h has a name only where it is what the backward starts from: else its sum costs less to make
    again than to keep.
    """
    spec = call.spec
    if spec.op == "cross_entropy":
        loss, *stats = outputs
        return [loss, *[checkpoint_name(stat, _LSE) for stat in stats]]
    if spec.is_softmax:
        return [checkpoint_name(y, _SOFTMAX_OUT) for y in outputs]
    y, *others = outputs
    h = [others.pop(0)] if spec.normalises_h else []
    if spec.saved == "input":
        h = [checkpoint_name(a, _OUT) for a in h]
    return [checkpoint_name(y, _OUT), *h, *[checkpoint_name(stat, _RSTD) for stat in others]]


def name_of_linear(result: str, a: jax.Array) -> jax.Array:
    """Names a result of rms_norm_linear, or the sum h that it normalises."""
    names = {"h": _OUT, "rstd": _RSTD, "z": _PREACTIVATION}
    return checkpoint_name(a, names[result]) if result in names else a
