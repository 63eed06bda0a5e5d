"""The function kl_divergence."""

import jax

from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks, scales
from jaxnorm.operations.checks import ArrayLike, Axis
from jaxnorm.operations.loss import Function, counted, loss_call, masks, weighted
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.specs import Name

NAME: Function = "kl_divergence"


@eager.compiled("logits", "teacher_logits", "where", either=("logits_scale",))
def kl_divergence(
    logits: ArrayLike,
    teacher_logits: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    reverse: bool = False,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Kullback-Leibler divergence between a teacher's and a student's distribution of classes.

    .. math::
      \mathrm{KL}(p \| q) = \sum_j p_j \log \frac{p_j}{q_j} \qquad
      p = \mathrm{softmax}(z_{\mathrm{teacher}}) \qquad q = \mathrm{softmax}(z)

    This is a loss for distillation: p is the teacher's distribution, and q is the student's. z is
    computed from the student's logits with ``logits_scale`` and ``logit_softcap``, as in
    :func:`softmax_cross_entropy_with_integer_labels`. The teacher's z is computed from its logits
    with ``logits_scale`` and ``teacher_logit_softcap``. ``reverse=True`` gives KL(q || p), which
    on-policy distillation uses. A position is an index into the axes of logits other than ``axis``.
    Each position has one divergence.

    On a GPU, the forward pass writes no array of the logits' size. On a CPU, it has three float32
    temporaries of that size. The residuals are the two arrays of logits, and five numbers for each
    position. The backward pass reads both arrays and writes the gradient of logits. The arithmetic
    is float32 (float64 if logits or teacher_logits are float64).

    The divergence is never negative. Small divergences are nearly as accurate as large ones. If the
    logits of student and teacher are equal, the divergence and its gradient are exactly 0.

    Args:
      logits: the student's logits, of any shape; bfloat16, float16, float32 or float64.
      teacher_logits: the teacher's logits, of the same shape and any of these dtypes. They are
        constants: their gradient is 0.
      axis: the axis or axes of the classes; None for all.
      where: None, or one of three kinds of arrays:

        - A boolean mask of positions. It has as many axes as the result, and broadcasts to the
          result's shape. Where it is False, divergence and gradient are 0 for any logits.
        - Float weights of positions. The rule for their shape is the same as for such a mask. The
          divergences are multiplied by the weights. Where a weight is 0, divergence and gradient
          are 0 for any logits.
        - A boolean mask of classes. It has as many axes as logits, and broadcasts to their shape.
          Classes where it is False are excluded from both distributions. If all classes of a
          position are excluded, its divergence is 0.
      reverse: True for KL(q || p) instead of KL(p || q).
      logits_scale: factor by which both arrays of logits are multiplied, such as 1 / temperature.
        It may be a number above 0, a scalar array (which may be traced), or an array with a scale
        for each position. The latter has as many axes as the result, and broadcasts to the result's
        shape. The values of an array are not checked, and have no derivative. The divergence is not
        multiplied by the temperature squared.
      logit_softcap, teacher_logit_softcap: Python numbers above 0, the bounds of the student's and
        the teacher's logits. None for no bound. A softcap is applied after ``logits_scale``. If a
        model applies a softcap of c before it divides by a temperature T, use
        ``logit_softcap=c / T`` with ``logits_scale=1 / T``.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      The divergences, an array of the shape of logits without ``axis``: float32, or float64 if
      logits or teacher_logits are float64. KL(p || q) is infinite if there is a class with q = 0
      and p > 0. KL(q || p) is infinite if there is a class with p = 0 and q > 0. A divergence is
      NaN if the position's logits include +inf or NaN, or are all -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: an array of logits does not have a supported float dtype, ``where`` has an integer
        dtype or is a mask of classes that is not boolean, ``reverse`` is neither True nor False, a
        softcap is not a Python number, or ``logits_scale`` is differentiated.
      ValueError: ``axis``, ``logits_scale``, a softcap, ``implementation``, or the shape of
        teacher_logits or ``where`` is wrong.

    Source: `Distilling the Knowledge in a Neural Network <https://arxiv.org/abs/1503.02531>`_, and
    for the reverse divergence `On-Policy Distillation of Language Models
    <https://arxiv.org/abs/2306.13649>`_.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> teacher = jnp.array([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
      >>> divergences = jaxnorm.kl_divergence(jnp.zeros((2, 3)), teacher, logits_scale=1 / 2)
      >>> [round(d, 3) for d in divergences.tolist()]  # in row 1, p and q are equal
      [0.078, 0.0]
    """
    logits = checks.float_array(NAME, "logits", logits)
    teacher = checks.float_array(NAME, "teacher_logits", teacher_logits)
    checks.same_shape(NAME, "teacher_logits", teacher.shape, logits.shape, of="logits")
    view = RowView.of(logits.shape, checks.axes(NAME, axis, logits.shape, of="logits"))
    dtype, positions = checks.arithmetic_dtype(logits.dtype, teacher.dtype), view.shape_of("stat")
    mask = weights = None
    if where is not None:
        array = checks.weights(NAME, "where", where, dtype)
        mask, weights = masks(NAME, array, view, of="the positions'")
    scale = scales.of_logits(NAME, logits_scale, positions, dtype, of="the positions'")
    call = loss_call(
        NAME,
        logits.shape,
        logits.dtype,
        axis=view.axes,
        mask=None if mask is None else mask.shape,
        has_positions=weights is not None,
        implementation=implementation,
        teacher_dtype=teacher.dtype,
        logits_scale=scale.number,
        has_scale=scale.array is not None,
        logit_softcap=logit_softcap,
        teacher_softcap=teacher_logit_softcap,
        reverse=reverse,
    )
    counts = None if weights is None else counted(weights)
    constant = jax.lax.stop_gradient(teacher)
    (divergence,) = row_operations.run(call, logits, constant, mask, counts, scale.array)
    return divergence if weights is None else weighted(divergence, weights)
