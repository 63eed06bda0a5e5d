"""Names of the residuals, and the rematerialisation policy that keeps them."""

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxnorm.calls.call import Call
from jaxnorm_kernels.operations import OPERATIONS

_PREACTIVATION = "jaxnorm_preactivation"

# Of norms and of what is a number for each row: not of softmaxes, as large as attention's matrix.
_KEPT = sorted(
    {
        name
        for operation in OPERATIONS.values()
        for name in (operation.statistics_name, operation.out_name)
        if name is not None and (operation.family == "norm" or name != operation.out_name)
    }
)

#: Policy for :func:`jax.checkpoint`: norms are kept, and everything else is recomputed.
#:
#: ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` keeps the outputs and statistics of the
#: norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward computes no norm again, and
#: the log-sum-exp of each row of a loss (``jaxnorm_lse``: two numbers, and results that a
#: derivative takes), not its logits. A softmax's output, as large as the attention matrix, has a
#: name of its own (``jaxnorm_softmax_out``), and is not kept; nor is what ``rms_norm_linear``
#: gives to an activation (``jaxnorm_preactivation``), a product's result. To keep them, or arrays
#: with names of your own, too, use :func:`jax.checkpoint_policies.save_only_these_names` with all
#: of the names, or :func:`jax.checkpoint_policies.save_from_both_policies`.
#:
#: It is what ``save_only_these_names`` returns: a function, or data in a JAX whose policies are
#: that. So hand it to JAX, and do not call it.
save_policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def name(call: Call, outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Names a call's outputs, and the statistics of a norm or a loss.

    Results that are numbers of a row, which may be factors of a derivative, are as cheap to keep as
    statistics. h has a name only where it is what the backward starts from: else its sum costs less
    to make again than to keep.
    """
    operation = call.spec.operation
    names = {"y": operation.out_name}
    of_rows = [result for result, kind in operation.results.items() if kind == "stat"]
    names |= dict.fromkeys((*call.spec.statistics, *of_rows), operation.statistics_name)
    if call.spec.starts_from == "h":
        names["h"] = operation.out_name
    return [
        a if (residual := names.get(result)) is None else checkpoint_name(a, residual)
        for result, a in zip(call.result_names, outputs)
    ]


def name_of_linear(result: str, a: jax.Array) -> jax.Array:
    """Names a result of rms_norm_linear, or the sum h that it normalises."""
    norm = OPERATIONS["norm"]
    names = {"h": norm.out_name, "rstd": norm.statistics_name, "z": _PREACTIVATION}
    return checkpoint_name(a, names[result]) if result in names else a
