"""log_prob_and_entropy: the public function, and its checks."""

import jax

from jaxnorm.operations import checks
from jaxnorm.operations.loss import Function, of_rows
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "log_prob_and_entropy"


@eager.compiled("logits", "labels", "where")
def log_prob_and_entropy(
    logits: checks.ArrayLike,
    labels: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probability of a label, and the entropy of the distribution that it is drawn from.

    .. math::
      \log p_{\mathrm{label}}, \quad - \sum_j p_j \log p_j
      \qquad p = \mathrm{softmax}(z)

    of z = logits, or as ``logits_scale`` and ``logit_softcap`` say in
    :func:`softmax_cross_entropy_with_integer_labels`. What GRPO, PPO and DPO are made of
    (`Losses <losses.html>`_).

    It reads the logits once and writes no array of their size; it keeps them and three numbers for
    each position for the backward, which reads them once and writes the gradient of both results.
    A log-probability near 0 is as accurate as a large one, and the entropy is never negative. The
    arithmetic is float32 (float64 for float64 logits).

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: integers of any dtype, of the shape of logits without ``axis``: which of the V classes
        along that. A position with another number, a negative one too, has NaN for both results,
        and its logits the gradient NaN.
      axis: the axis of the classes; of several, or of all for None, labels count classes in
        row-major order of the axes as given.
      where: booleans that broadcast to labels' shape, with as many axes: which positions count, for
        example ``labels != -100``. Where it is False, both results are 0, and gradients, whatever
        labels and logits are. With as many axes as logits, it says which classes there are; a
        position that has none has 0 for both, and the logit of a label counts even if it is not
        among them.
      logits_scale: a Python number above 0: 1 over a temperature.
      logit_softcap: a Python number above 0, or None for no cap.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      (log_prob, entropy), arrays of labels' shape: float32, or float64 for float64 logits. NaN for
      logits with +inf, NaN or nothing but -inf; a label whose logit is -inf has log_prob -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: logits are not of a supported float dtype, labels are no integers, ``where`` is not
        boolean, or ``logits_scale`` or ``logit_softcap`` is no Python number.
      ValueError: ``axis``, the shape of labels or ``where``, one of these numbers or
        ``implementation`` is wrong.

    Source: both sums in one pass are those of `Online normalizer calculation for softmax
    <https://arxiv.org/abs/1805.02867>`_, with the sum of the exponents beside that of the
    exponentials.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits, tokens = jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([3, 7])
      >>> log_prob, entropy = jaxnorm.log_prob_and_entropy(logits, tokens)
      >>> [round(v, 2) for v in (*log_prob.tolist(), *entropy.tolist())]  # of 1000 alike
      [-6.91, -6.91, 6.91, 6.91]
    """
    (log_prob, entropy), _ = of_rows(
        NAME,
        logits,
        labels,
        axis,
        where,
        implementation,
        logits_scale=logits_scale,
        logit_softcap=logit_softcap,
    )
    return log_prob, entropy
