"""linear_log_prob_and_entropy: the public function."""

import jax

from jaxnorm.operations import checks
from jaxnorm.operations.linear_loss import of_linear_logits
from jaxnorm.operations.linear_loss_call import Function
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "linear_log_prob_and_entropy"


@eager.compiled("x", "weight", "labels", "bias", "where")
def linear_log_prob_and_entropy(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    labels: checks.ArrayLike,
    *,
    bias: checks.ArrayLike | None = None,
    where: checks.ArrayLike | None = None,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probabilities and entropies of the logits ``x @ weight + bias``, without these logits.

    They exist for a chunk of rows at a time. It is :func:`log_prob_and_entropy` of the logits, with
    one difference: a chunk's logits are the float32 sums of the product, and are never rounded.
    Rounded to bfloat16, ratios of probabilities :math:`e^{\log p' - \log p}` err by percents.

    Forward it takes one matrix product; the backward makes the logits again, and takes three. It
    keeps x, weight and three numbers for each position.

    Args:
      x: array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, V), of these dtypes.
      labels: integers of any dtype, of x's shape without its last axis: which of the V classes. A
        position with one that is none, a negative one too, has NaN for both results, and gradients.
      bias: array (V,), of these dtypes; or None.
      where: booleans that broadcast to labels' shape, with as many axes: which positions count, for
        example ``labels != -100``. Where it is False, both results are 0, neither label nor x
        matters, and x's gradient is 0. With as many axes as x, booleans that broadcast to
        ``(..., V)``: which classes there are, as in :func:`log_prob_and_entropy`.
      logits_scale, logit_softcap: of logits with bias, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      chunk: rows of x at a time, at least 1; on a mesh, of a device's rows. None chooses, as in
        :func:`linear_softmax_cross_entropy`, by the memory of float32 logits.
      dtype: of the products, where x and weight promote to a wider one: ``jnp.bfloat16`` rounds a
        float32 weight, and makes products of 16 bits. None for what they promote to.
      implementation: of a chunk's results; None chooses, a name forces it. What is chosen,
        ``implementation_for("log_prob_and_entropy", (chunk, V), jnp.float32)`` says.

    Returns:
      (log_prob, entropy), arrays of labels' shape: float32, or float64 for float64 products.

    Differentiable with respect to x, weight and bias, in reverse and forward mode, to any order;
    gradients have the dtypes of what they are of. The gradient of a chunk's logits is rounded to
    the products' dtype; weight's is summed in float32 over all chunks.

    On a mesh rows, V and d may be split, as in :func:`linear_softmax_cross_entropy`.

    Raises:
      TypeError: x, weight or bias is not of a supported float dtype, or ``dtype`` is none, labels
        are no integers, ``where`` is not boolean, ``chunk`` is no integer, or ``logits_scale`` or
        ``logit_softcap`` is no Python number.
      ValueError: the shape of an array, ``chunk``, one of these numbers or ``implementation`` is
        wrong.

    Source: what the losses of `GRPO <https://arxiv.org/abs/2402.03300>`_, `PPO
    <https://arxiv.org/abs/1707.06347>`_ and `DPO <https://arxiv.org/abs/2305.18290>`_ take of a
    model.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64), jnp.bfloat16), jnp.zeros((64, 1000), jnp.bfloat16)
      >>> tokens = jnp.zeros((4, 128), jnp.int32)
      >>> log_prob, entropy = jaxnorm.linear_log_prob_and_entropy(x, weight, tokens)
      >>> log_prob.shape, log_prob.dtype.name, round(float(entropy[0, 0]), 2)
      ((4, 128), 'float32', 6.91)
    """
    log_prob, entropy = of_linear_logits(
        NAME,
        x,
        weight,
        labels,
        bias,
        where,
        chunk,
        dtype,
        logits_scale,
        logit_softcap,
        implementation,
    )
    return log_prob, entropy
