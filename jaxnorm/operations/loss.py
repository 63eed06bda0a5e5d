"""The losses and the divergence of logits, and the checks of their arguments."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, scales
from jaxnorm.operations.checks import ArrayLike, Axis
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.specs import LossOptions, Name

Function = Literal[
    "softmax_cross_entropy_with_integer_labels", "log_prob_and_entropy", "kl_divergence"
]

NAME: Function = "softmax_cross_entropy_with_integer_labels"


@eager.compiled("logits", "labels", "where", either=("logits_scale",))
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Cross-entropy between the softmax of logits and integer labels.

    It replaces ``optax.softmax_cross_entropy_with_integer_labels``.

    .. math::
      L - \sum_j q_j z_j + \mathrm{z\_loss} \cdot L^2 \qquad L = \log \sum_j \exp(z_j) \qquad
      q_j = (1 - a) [j = \mathrm{label}] + a / V \qquad a = \mathrm{label\_smoothing}

    Here, V is the number of classes, and z = logits or, with ``logits_scale`` and
    ``logit_softcap``,

    .. math::
      z = c \tanh (\mathrm{logits\_scale} \cdot \mathrm{logits} / c)
      \qquad c = \mathrm{logit\_softcap}

    A position is an index into the axes of logits other than ``axis``. Each position has one label
    and one loss.

    The forward pass reads the logits once and writes no array of their size. The residuals are the
    logits and, for each position, L. L is stored as two numbers, because a single float32 would be
    too inaccurate for large logits. The backward pass reads the logits once and writes the
    gradient. The arithmetic is float32 (float64 for float64 logits). A loss near 0 has as many
    accurate digits as a large one.

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: class indices from 0 to V - 1, integers of any dtype, of the shape of logits without
        ``axis``. If a label is out of range, such as a negative one, the loss of its position and
        the gradient of its logits are NaN.
      axis: the axis or axes of the classes; None for all. With several axes, a label is an index in
        row-major order of the axes as given, as in optax: the last axis varies fastest. If the axes
        are not in ascending order, logits are transposed.
      where: None, or one of three kinds of arrays:

        - A boolean mask of positions, such as ``labels != -100``. It has the same number of axes as
          labels, and broadcasts to their shape. Where it is False, loss and gradient are 0 for any
          labels and logits.
        - Float weights of positions. The rule for their shape is the same as for a mask of
          positions. The losses are multiplied by the weights. Weights may be negative, are cast to
          the loss's dtype, and have no gradient. Where a weight is 0, loss and gradient are 0 for
          any labels and logits.
        - A boolean mask of classes. It has the same number of axes as logits, and broadcasts to
          their shape. Classes where it is False are excluded from the sum in L. The logit of the
          label is used even if its class is masked. If all classes of a position are masked, its
          loss and gradient are 0.
      label_smoothing: a Python number from 0 to 1: the fraction of the target probability that is
        spread evenly over all classes. With a mask of classes, it must be 0.
      z_loss: a finite Python number of at least 0, the factor of ``L^2`` in the equation above.
      logits_scale: factor by which the logits are multiplied, such as 1 / temperature. It may be a
        finite number, a scalar array, or an array with a scale for each position. A scalar array
        may be traced, so that a schedule of temperatures compiles once. An array with a scale for
        each position has the same number of axes as labels, and broadcasts to their shape. The
        values of an array are not checked, and have no derivative. Kernels run only for numbers
        above 0.
      logit_softcap: a Python number above 0, the bound c of the logits, as in Gemma 2. None for no
        bound. With a bound of c, a logit of -inf becomes -c, so use ``where`` to exclude classes.
        In kernels, the absolute error of tanh is at most 2 ulps of 1.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of labels' shape, the loss of each position: float32, or float64 for float64 logits. A
      loss is NaN if the position's logits include +inf or NaN, or are all -inf. It is infinite if a
      class with a nonzero target has the logit -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: the dtype of logits is not a supported float dtype; labels are not integers;
        ``where`` has an integer dtype; a mask of classes is not boolean; ``label_smoothing``,
        ``z_loss`` or ``logit_softcap`` is not a Python number; ``logits_scale`` is differentiated.
      ValueError: ``axis``, ``label_smoothing``, ``z_loss``, ``logits_scale``, ``logit_softcap`` or
        ``implementation`` is wrong; the shape of labels or ``where`` is wrong.

    Sources: label smoothing is from `Rethinking the Inception Architecture
    <https://arxiv.org/abs/1512.00567>`_, z_loss from `PaLM <https://arxiv.org/abs/2204.02311>`_,
    and the softcap from `Gemma 2 <https://arxiv.org/abs/2408.00118>`_.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits, labels = jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([3, -100])
      >>> losses = jaxnorm.softmax_cross_entropy_with_integer_labels(
      ...     logits, labels, where=labels != -100
      ... )
      >>> [round(loss, 2) for loss in losses.tolist()]  # log(1000), and 0 where masked
      [6.91, 0.0]
    """
    options = LossOptions(
        label_smoothing=label_smoothing, z_loss=z_loss, logit_softcap=logit_softcap
    )
    (loss,) = _of_rows(NAME, options, logits, labels, axis, where, logits_scale, implementation)
    return loss


def _of_rows(
    function: Function,
    options: LossOptions,
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    logits_scale: ArrayLike,
    implementation: Name | None,
) -> list[jax.Array]:
    """Check the arguments of a loss that takes logits and labels, and compute its results.

    `options` has the public function's arguments that are static.
    """
    logits = checks.float_array(function, "logits", logits)
    shape = logits.shape
    in_order = checks.axes_in_order(function, axis, shape, of="logits")
    view = RowView.of(shape, tuple(sorted(in_order)))
    why = f"the shape of logits {shape} without axis={axis!r}"
    others = where, logits_scale, implementation
    call, operands, weights = checked_call(
        function, options, view, logits.dtype, *others, labels=labels, why=why
    )
    if in_order != view.axes:
        # A label is the index of a class in row-major order of the class axes. The user's labels
        # are computed with the axes in the order of the argument `axis`, such as (2, 1). The call
        # takes the axes in ascending order, here (1, 2). So transpose the logits: move axis 2 to
        # position 1, and axis 1 to position 2. The labels then fit without a conversion.
        logits = jnp.moveaxis(logits, in_order, view.axes)
        view = dataclasses.replace(call.view, shape=logits.shape)
        if (mask := operands["mask"]) is not None:
            operands["mask"] = mask = jnp.moveaxis(mask, in_order, view.axes)
            view = dataclasses.replace(view, mask=mask.shape)
        call = call.with_view(view)
    results = row_operations.run(call, logits, *operands.values())
    return [weighted(result, weights) for result in results]


def checked_call(
    function: str,
    options: LossOptions,
    view: RowView,
    dtype: np.dtype,
    where: ArrayLike | None,
    logits_scale: ArrayLike,
    implementation: Name | None,
    *,
    labels: Any = None,
    why: str = "",
    of: Function | None = None,
    takes_classes: bool = True,
) -> tuple[Call, dict[str, jax.Array | None], jax.Array | None]:
    """Check the arguments that the losses of logits and the linear losses share.

    Return three values: the forward call of the loss of logits; a dict of the call's operands
    without the logits (None for an absent one); and the mask or the weights of positions, or None.
    The caller applies the third value to the results with the function `weighted`.

    Args:
      function: name of the public function.
      options: the static arguments of the public function, as the user passed them.
      view, dtype: the `RowView` and the dtype of the logits.
      where, logits_scale, implementation: the public function's arguments.
      labels: the public function's argument, which divergences do not have.
      why: a description of the expected shape of labels, for errors.
      of: if `function` is a linear loss, the name of the loss that it applies to the logits; else
        None.
      takes_classes: True if the function takes a mask of classes.
    """
    wide, candidates = checks.arithmetic_dtype(dtype, options.teacher_dtype or dtype), None
    operands: dict[str, jax.Array | None] = {}
    is_divergence = options.teacher_dtype is not None
    if not is_divergence:
        array, candidates = checked_labels(function, of or function, labels, view, why)
        operands = {"labels" if candidates is None else "candidates": array}
    whose = "the positions'" if is_divergence else "labels'"
    scale = scales.of_logits(function, logits_scale, view.shape_of("stat"), wide, of=whose)
    mask, weights = masks(function, where, view, wide, whose, takes_classes=takes_classes)
    checks.implementation(function, implementation)
    given = options.label_smoothing
    smoothing = checks.number(function, "label_smoothing", given, minimum=0, maximum=1)
    if smoothing and mask is not None:
        raise ValueError(
            f"{function}: label_smoothing={given!r} with a mask of classes (where has as "
            "many axes as logits), for which smoothed targets are not defined; expected 0, or "
            "a mask of positions with the axes of labels; leave one of both out"
        )
    options = dataclasses.replace(
        options,
        has_mask=mask is not None,
        has_positions=weights is not None,
        label_smoothing=smoothing,
        z_loss=checks.number(function, "z_loss", options.z_loss, minimum=0),
        logits_scale=scale.number,
        has_scale=scale.array is not None,
        logit_softcap=softcap(function, options.logit_softcap),
        teacher_softcap=softcap(function, options.teacher_softcap, "teacher_logit_softcap"),
        reverse=checks.flag(function, "reverse", options.reverse),
    )
    of_mask = () if mask is None else mask.shape
    of_candidates = () if candidates is None else (candidates,)
    view = RowView.of(view.shape, view.axes, mask=of_mask, candidates=of_candidates)
    op = FUNCTIONS[of or function].op if candidates is None else FUNCTIONS[of or function].several
    call = Call.forward(function, op, view, (dtype, wide), options, implementation)
    _check_numbers(function, call.spec.compute_dtype, options)
    positions = None if weights is None else counted(weights)
    operands |= {"mask": mask, "positions": positions, "logits_scale": scale.array}
    return call.replaced(primitives=of), operands, weights


def checked_labels(
    function: str, of: str, labels: ArrayLike, view: RowView, why: str
) -> tuple[jax.Array, int | None]:
    """Check the labels of a loss; return them, and the number of labels of a position.

    The number is None if labels have no axis for several labels of a position.

    Args:
      function: name of the public function, for errors.
      of: name of the loss that is applied to the logits.
      labels: the public function's argument.
      view: the `RowView` of the logits.
      why: a description of the expected shape, for errors.
    """
    checks.not_one_hot(function, labels, view.shape, view.axes)
    labels, expected = checks.integer_array(function, "labels", labels), view.shape_of("label")
    may_be_several = FUNCTIONS[of].several is not None
    if may_be_several and labels.shape[:-1] == expected and labels.ndim > len(expected):
        several, classes = labels.shape[-1], view.cols
        # Symbolic sizes (`jax.export`) cannot be compared.
        if isinstance(several, int) and isinstance(classes, int) and several >= classes:
            raise ValueError(
                f"{function}: labels have shape {labels.shape}: {several} labels for each "
                f"position, with {classes} classes; expected fewer labels than classes along the "
                "last axis; these look like one-hot labels, use jnp.argmax(labels, -1)"
            )
        return labels, several
    also = f", or {expected} and an axis of several labels" if may_be_several else ""
    checks.same_shape(function, "labels", labels.shape, expected, f"{why}{also}")
    return labels, None


def _check_numbers(function: str, dtype: np.dtype, options: LossOptions) -> None:
    """Raise ValueError unless the options of a loss are finite in `dtype`.

    Also raise ValueError if the scale of the logits or a softcap is not 0, but is rounded to 0.
    """
    checks.finite_in(function, dtype, {"z_loss": options.z_loss})
    factors: dict[str, float] = {"logits_scale": options.logits_scale}
    caps = {
        "logit_softcap": options.logit_softcap,
        "teacher_logit_softcap": options.teacher_softcap,
    }
    for name, cap in caps.items():
        if cap is not None:
            factors |= {name: cap, f"logits_scale / {name}": options.logits_scale / cap}
    checks.finite_in(function, dtype, factors, underflow=False)


def softcap(function: str, value: float | None, name: str = "logit_softcap") -> float | None:
    """Return the softcap `value` as a Python float, or None if `value` is None.

    Raise an error unless `value` is None or a finite number above 0. `name` is the argument's name.
    """
    return None if value is None else checks.positive(function, name, value)


def counted(weights: jax.Array) -> jax.Array:
    """Convert a mask or weights of positions to a mask: True where the weight is not 0."""
    return weights if weights.dtype == bool else weights != 0


def weighted(result: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return ``result * weights`` for float weights of positions.

    The result may have one more axis, for several labels of each position. If `weights` is None or
    a boolean mask, return `result` unchanged: its masked entries are already 0.
    """
    if weights is None or weights.dtype == bool:
        return result
    weights = weights if result.ndim == weights.ndim else weights[..., None]
    return result * sharding.broadcast_alike(weights, result)


def masks(
    function: str,
    where: ArrayLike | None,
    view: RowView,
    dtype: np.dtype,
    of: str = "labels'",
    *,
    takes_classes: bool = True,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Check the argument ``where``. Return a pair: a mask of classes, and weights of positions.

    If `where` has the same number of axes as the logits, it is a mask of classes, and the second
    element of the pair is None. Otherwise, it is a boolean mask of positions or float weights of
    positions, and the first element is None.

    Args:
      function: name of the public function, for errors.
      where: the argument.
      view: the `RowView` of the logits.
      dtype: dtype of the arithmetic, to which weights are cast.
      of: a word in the possessive, such as "labels'". In errors, it names the array to whose shape
        a mask or weights of positions must broadcast.
      takes_classes: True if the function takes a mask of classes.
    """
    if where is None:
        return None, None
    array = checks.weights(function, "where", where, dtype)
    shape, of_labels = view.shape, view.shape_of("label")
    if takes_classes and array.ndim == len(shape):
        also = f", or give weights of positions the axes of {of.rstrip("'")}"
        mask = checks.boolean(function, "where", array, also)
        return checks.broadcastable(function, "where", mask, shape, "logits'"), None
    if not checks.fits(array.shape, of_labels):
        logits = [shape] if array.dtype == bool and takes_classes else []
        classes = (
            f"; or a mask of classes that broadcasts to logits' shape {shape}, with {len(shape)} "
            "axes: which classes there are"
        )
        if not takes_classes:
            classes = _instead_of_classes(array.shape, shape)
        raise ValueError(
            f"{function}: where has shape {array.shape}; expected a mask or weights of positions "
            f"that broadcast to {of} shape {of_labels}, with {len(of_labels)} axes"
            f"{classes}{checks.reshaping('where', array.shape, of_labels, *logits)}"
        )
    return None, jnp.broadcast_to(array, of_labels)


def _instead_of_classes(where: tuple[int, ...], logits: tuple[int, ...]) -> str:
    """Return a hint if `where` looks like a mask of classes, for functions that take none."""
    if where[-1:] != logits[-1:]:
        return ""
    is_one = math.prod(where) == where[-1]
    bias = "add it to the bias, e.g. bias=jnp.where(where.reshape(-1), 0, -jnp.inf), or "
    return (
        f"; this function takes no mask of classes; {bias if is_one else ''}use "
        "-jaxnorm.linear_log_prob_and_entropy(x, weight, labels, where=where)[0], which takes one"
    )


_LOG_PROB: Function = "log_prob_and_entropy"


@eager.compiled("logits", "labels", "where", either=("logits_scale",))
def log_prob_and_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probability of a label, and entropy of the distribution over all classes.

    .. math::
      \log p_{\mathrm{label}}, \quad - \sum_j p_j \log p_j
      \qquad p = \mathrm{softmax}(z)

    Here, z = logits. If ``logits_scale`` or ``logit_softcap`` is given, z is computed from the
    logits as in :func:`softmax_cross_entropy_with_integer_labels`. The losses of GRPO, PPO and DPO
    are computed from log-probabilities and entropies (`Losses <losses.html>`_). A position is an
    index into the axes of logits other than ``axis``.

    The forward pass reads the logits once and writes no array of their size. The residuals are the
    logits and three numbers for each position. The backward pass reads the logits once and writes
    one gradient, the sum of the gradients through the two results. The arithmetic is float32
    (float64 for float64 logits). A log-probability near 0 has as many accurate digits as a large
    one, and the entropy is never negative.

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: class indices from 0 to V - 1, integers of any dtype, of the shape of logits without
        ``axis``. If a label is out of range, such as a negative one, its log-probability is NaN,
        but the entropy is not affected. The gradient of the position's logits is then NaN, unless
        the cotangent of the log-probability is 0.

        Labels may have an additional last axis of size k. Each position then has k labels, such as
        a teacher's top k classes. k must be less than V, the number of classes. If a position has
        fewer than k labels, fill up with any class, and multiply the log-probability of this class
        by 0.
      axis: the axis or axes of the classes; None for all. With several axes, a label is an index in
        row-major order of the axes as given.
      where: None, or one of three kinds of arrays:

        - A boolean mask of positions, such as ``labels != -100``. It has the same number of axes as
          the entropy, and broadcasts to the entropy's shape. Where it is False, both results and
          the gradients are 0 for any labels and logits.
        - Float weights of positions. The rule for their shape is the same as for a mask of
          positions. Both results are multiplied by the weights. Where a weight is 0, both results
          and the gradients are 0 for any labels and logits.
        - A boolean mask of classes. It has the same number of axes as logits, and broadcasts to
          their shape. Classes where it is False are excluded from the sums over classes. The logit
          of a label is used even if its class is masked. If all classes of a position are masked,
          both results are 0.
      logits_scale: factor by which the logits are multiplied, a number or an array, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      logit_softcap: a Python number above 0, the bound of the logits. None for no bound.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      (log_prob, entropy): log_prob has labels' shape, and entropy the shape of logits without
      ``axis``. Both are float32, or float64 for float64 logits. They are NaN if the position's
      logits include +inf or NaN, or are all -inf. If a label's logit is -inf, log_prob is -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: the dtype of logits is not a supported float dtype; labels are not integers;
        ``where`` has an integer dtype; a mask of classes is not boolean; ``logit_softcap`` is not a
        Python number; ``logits_scale`` is differentiated.
      ValueError: ``axis``, ``logits_scale``, ``logit_softcap`` or ``implementation`` is wrong; the
        shape of labels or ``where`` is wrong.

    Source: the sum of exponentials is computed in one pass as in `Online normalizer calculation for
    softmax <https://arxiv.org/abs/1805.02867>`_, together with the sum that the entropy needs.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits, tokens = jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([3, 7])
      >>> log_prob, entropy = jaxnorm.log_prob_and_entropy(logits, tokens)
      >>> [round(v, 2) for v in (*log_prob.tolist(), *entropy.tolist())]  # 1000 equal logits
      [-6.91, -6.91, 6.91, 6.91]
      >>> jaxnorm.log_prob_and_entropy(logits, jnp.array([[3, 4, 5], [7, 8, 9]]))[0].shape
      (2, 3)
    """
    options = LossOptions(logit_softcap=logit_softcap)
    log_prob, entropy = _of_rows(
        _LOG_PROB, options, logits, labels, axis, where, logits_scale, implementation
    )
    return log_prob, entropy


_KL: Function = "kl_divergence"


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
    :func:`softmax_cross_entropy_with_integer_labels`. The teacher's z is computed from the
    teacher's logits with ``logits_scale`` and ``teacher_logit_softcap``. ``reverse=True`` gives
    KL(q || p), which on-policy distillation uses. A position is an index into the axes of logits
    other than ``axis``. Each position has one divergence.

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

        - A boolean mask of positions. It has the same number of axes as the result, and broadcasts
          to the result's shape. Where it is False, divergence and gradient are 0 for any logits.
        - Float weights of positions. The rule for their shape is the same as for a mask of
          positions. The divergences are multiplied by the weights. Where a weight is 0, divergence
          and gradient are 0 for any logits.
        - A boolean mask of classes. It has the same number of axes as logits, and broadcasts to
          their shape. Classes where it is False are excluded from both distributions. If all
          classes of a position are excluded, its divergence is 0.
      reverse: True for KL(q || p) instead of KL(p || q).
      logits_scale: factor by which both arrays of logits are multiplied, such as 1 / temperature.
        It may be a finite number, a scalar array (which may be traced), or an array with a scale
        for each position. Such an array has the same number of axes as the result, and broadcasts
        to the result's shape. The values of an array are not checked, and have no derivative.
        Kernels run only for numbers above 0. The divergence is not multiplied by the temperature
        squared.
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
      TypeError: an array of logits does not have a supported float dtype; ``where`` has an integer
        dtype; a mask of classes is not boolean; ``reverse`` is neither True nor False; a softcap is
        not a Python number; ``logits_scale`` is differentiated.
      ValueError: ``axis``, ``logits_scale``, a softcap or ``implementation`` is wrong; the shape of
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
    logits = checks.float_array(_KL, "logits", logits)
    teacher = checks.float_array(_KL, "teacher_logits", teacher_logits)
    also = "; slice the logits with more classes, or pad the others with -inf"
    of_classes = teacher.shape[:-1] == logits.shape[:-1]
    checks.same_shape(
        *(_KL, "teacher_logits", teacher.shape, logits.shape, "the shape of logits"),
        also if of_classes else "",
    )
    view = RowView.of(logits.shape, checks.axes(_KL, axis, logits.shape, of="logits"))
    options = LossOptions(
        logit_softcap=logit_softcap,
        teacher_dtype=teacher.dtype,
        teacher_softcap=teacher_logit_softcap,
        reverse=reverse,
    )
    call, operands, weights = checked_call(
        _KL, options, view, logits.dtype, where, logits_scale, implementation
    )
    constant = jax.lax.stop_gradient(teacher)
    (divergence,) = row_operations.run(call, logits, constant, *operands.values())
    return weighted(divergence, weights)
