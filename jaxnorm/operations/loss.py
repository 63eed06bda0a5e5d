"""softmax_cross_entropy_with_integer_labels and log_prob_and_entropy, and their checks."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks, scales
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.specs import LossOptions, Name

Function = Literal["softmax_cross_entropy_with_integer_labels", "log_prob_and_entropy"]

NAME: Function = "softmax_cross_entropy_with_integer_labels"


@eager.compiled("logits", "labels", "where", either=("logits_scale",))
def softmax_cross_entropy_with_integer_labels(
    logits: checks.ArrayLike,
    labels: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: checks.ArrayLike = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Cross-entropy between the softmax of logits and integer labels.

    The counterpart of ``optax.softmax_cross_entropy_with_integer_labels``.

    .. math::
      L - \sum_j q_j z_j + \mathrm{z\_loss} \cdot L^2 \qquad L = \log \sum_j \exp(z_j) \qquad
      q_j = (1 - a) [j = \mathrm{label}] + a / V \qquad a = \mathrm{label\_smoothing}

    where z = logits or, with ``logits_scale`` and ``logit_softcap``,

    .. math::
      z = c \tanh (\mathrm{logits\_scale} \cdot \mathrm{logits} / c)
      \qquad c = \mathrm{logit\_softcap}

    The forward pass reads the logits once and writes no array of their size. The residuals are the
    logits and L, as two numbers for each position. The backward pass reads the logits once and
    writes the gradient. A loss near 0 is as accurate as a large one. The arithmetic is float32
    (float64 for float64 logits).

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: class indices from 0 to V - 1, integers of any dtype, of the shape of logits without
        ``axis``. If a label is out of range, such as a negative one, the loss of its position and
        the gradient of its logits are NaN.
      axis: the axis of the classes. If there are several (or all, for None), labels count classes
        in row-major order of the axes as given, like optax's: the last axis varies fastest. Axes
        that are not in ascending order cost a transpose of logits.
      where: booleans that say which positions count, such as ``labels != -100``, or float weights
        of positions, of any sign, by which the losses are multiplied. They have as many axes as
        labels, and broadcast to their shape. Weights are cast to the loss's dtype and have no
        gradient. Where it is False or 0, loss and gradient are 0, whatever labels and logits are. A
        boolean mask with as many axes as logits, which broadcasts to their shape, selects the
        classes in the sum in L. A position without a class has loss and gradient 0. The logit of
        the label counts even if its class is masked.
      label_smoothing: a Python number from 0 to 1, the share of the targets that is spread evenly
        over all classes; 0 with a mask of classes.
      z_loss: a finite Python number of at least 0.
      logits_scale: 1 over a temperature: a number above 0; a scalar array, which may be traced, so
        that a schedule compiles once; or an array with as many axes as labels that broadcasts to
        their shape, a scale for each position. Values of arrays are not checked, and have no
        derivative.
      logit_softcap: a Python number above 0, the bound of the logits, as in Gemma 2; or None. A
        logit of -inf becomes -logit_softcap: use ``where`` to exclude entries. In kernels, tanh is
        accurate to 2 units in the last place of 1.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of labels' shape, the loss of each position: float32, or float64 for float64 logits. It
      is NaN if logits have +inf or NaN, or are all -inf, and infinite if a class with a nonzero
      target has the logit -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: logits are not of a supported float dtype, labels are not integers, ``where`` is of
        integers or, with logits' axes, not boolean, ``label_smoothing``, ``z_loss`` or
        ``logit_softcap`` is not a Python number, or ``logits_scale`` is differentiated.
      ValueError: ``axis``, the shape of labels or ``where``, one of these numbers or
        ``implementation`` is wrong.

    Source: the smoothed targets are those of `Rethinking the Inception Architecture
    <https://arxiv.org/abs/1512.00567>`_, z_loss that of `PaLM <https://arxiv.org/abs/2204.02311>`_,
    the cap that of `Gemma 2 <https://arxiv.org/abs/2408.00118>`_.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits, labels = jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([3, -100])
      >>> losses = jaxnorm.softmax_cross_entropy_with_integer_labels(
      ...     logits, labels, where=labels != -100
      ... )
      >>> [round(loss, 2) for loss in losses.tolist()]  # log(1000); 0 for what does not count
      [6.91, 0.0]
    """
    (loss,), weights = of_rows(
        NAME,
        logits,
        labels,
        axis,
        where,
        implementation,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logits_scale=logits_scale,
        logit_softcap=logit_softcap,
    )
    return loss if weights is None else weighted(loss, weights)


def of_rows(
    function: Function,
    logits: checks.ArrayLike,
    labels: checks.ArrayLike,
    axis: checks.Axis,
    where: checks.ArrayLike | None,
    implementation: Name | None,
    *,
    logits_scale: checks.ArrayLike = 1.0,
    **options: Any,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Return the results of a function of logits and labels, and the weights of positions or None.

    `options` are those of `loss_call`. The caller multiplies the results by the weights.
    """
    logits = checks.float_array(function, "logits", logits)
    shape = logits.shape
    in_order = checks.axes_in_order(function, axis, shape, of="logits")
    axes = tuple(sorted(in_order))
    checks.not_one_hot(function, labels, shape, axes)
    labels = checks.integer_array(function, "labels", labels)
    mask = weights = None
    dtype, view = checks.arithmetic_dtype(logits.dtype), RowView.of(shape, axes)
    scale = scales.of_logits(function, logits_scale, view.shape_of("label"), dtype)
    if where is not None:
        array = checks.weights(function, "where", where, dtype)
        mask, weights = masks(function, array, view)
    if in_order != axes:  # labels count in row-major order of the axes as given
        logits = jnp.moveaxis(logits, in_order, axes)
        mask = None if mask is None else jnp.moveaxis(mask, in_order, axes)
    expected = view.shape_of("label")
    may_be_several = FUNCTIONS[function].several is not None
    is_several = may_be_several and labels.shape[:-1] == expected and labels.ndim > len(expected)
    if is_several:
        checks.fewer_than_classes(function, labels.shape, view.cols)
    elif labels.shape != expected:
        also = f", or {expected} and an axis of several labels" if may_be_several else ""
        raise ValueError(
            f"{function}: labels have shape {labels.shape}; expected {expected}, the shape of "
            f"logits {shape} without axis={axis!r}{also}; reshape or broadcast labels to that shape"
        )
    call = loss_call(
        function,
        logits.shape,
        logits.dtype,
        axis=axis,
        candidates=labels.shape[-1] if is_several else None,
        mask=None if mask is None else mask.shape,
        has_positions=weights is not None,
        implementation=implementation,
        logits_scale=scale.number,
        has_scale=scale.array is not None,
        **options,
    )
    positions = None if weights is None else counted(weights)
    return row_operations.run(call, logits, labels, mask, positions, scale.array), weights


def loss_call(
    function: Function,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    axis: checks.Axis,
    mask: tuple[int, ...] | None,
    has_positions: bool,
    implementation: Name | None,
    candidates: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    has_scale: bool = False,
    logit_softcap: float | None = None,
) -> Call:
    """Check the arguments and return the forward call.

    Args:
      mask: shape of the mask of classes, or None.
      candidates: number of labels per position. None if labels have no axis for it, and each
        position has one label.
    """
    axes = checks.axes(function, axis, shape, of="logits")
    of_candidates = () if candidates is None else (candidates,)
    view = RowView.of(shape, axes, mask=mask or (), candidates=of_candidates)
    checks.implementation(function, implementation)
    smoothing = checks.number(function, "label_smoothing", label_smoothing, minimum=0, maximum=1)
    if smoothing and mask is not None:
        raise ValueError(
            f"{function}: label_smoothing={label_smoothing!r} with a mask of classes (where has as "
            "many axes as logits), which says nothing of the targets of the others; expected 0, or "
            "a mask of positions with the axes of labels; leave one of both out"
        )
    op = FUNCTIONS[function].op if candidates is None else FUNCTIONS[function].several
    dtypes = dtype, checks.arithmetic_dtype(dtype)
    options = LossOptions(
        has_mask=mask is not None,
        has_positions=has_positions,
        label_smoothing=smoothing,
        z_loss=checks.number(function, "z_loss", z_loss, minimum=0),
        logits_scale=logits_scale,
        has_scale=has_scale,
        logit_softcap=softcap(function, logit_softcap),
    )
    call = Call.forward(function, op, view, dtypes, options, implementation)
    check_numbers(
        function,
        call.spec.compute_dtype,
        call.spec.logits.logits_scale,
        call.spec.loss.logit_softcap,
        call.spec.loss.z_loss,
    )
    return call


def check_numbers(
    function: str, dtype: np.dtype, logits_scale: float, logit_softcap: float | None, z_loss: float
) -> None:
    """Raise unless the options of a loss are finite in the arithmetic dtype."""
    checks.finite_in(function, dtype, {"z_loss": z_loss})
    positive: dict[str, float | None] = {
        "logits_scale": logits_scale,
        "logit_softcap": logit_softcap,
    }
    if logit_softcap is not None:
        positive["logits_scale / logit_softcap"] = logits_scale / logit_softcap
    checks.finite_in(function, dtype, positive, above_zero=True)


def softcap(function: str, value: float | None, name: str = "logit_softcap") -> float | None:
    """Return `value`, which must be a number above 0, or None."""
    return None if value is None else checks.positive(function, name, value)


def counted(weights: jax.Array) -> jax.Array:
    """Return a boolean array, True for positions with a nonzero weight."""
    return weights if weights.dtype == bool else weights != 0


def weighted(loss: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply losses by float weights. For a boolean `weights`, the losses are 0 already."""
    return loss if weights.dtype == bool else loss * weights


def masks(
    function: str, where: jax.Array, view: RowView, of: str = "labels'"
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return `where` as (mask, None) if it has the logits' axes, else as (None, weights).

    A mask selects classes; weights belong to positions. `of` says in errors whose shape positions
    have.
    """
    shape, of_labels = view.shape, view.shape_of("label")
    if where.ndim == len(shape):
        also = f", or give weights of positions the axes of {of.rstrip("'")}"
        mask = checks.boolean(function, "where", where, also)
        return checks.broadcastable(function, "where", mask, shape, "logits'"), None
    if not checks.fits(where.shape, of_labels):
        raise ValueError(
            f"{function}: where has shape {where.shape}; expected one that broadcasts to {of} "
            f"shape {of_labels}, with {len(of_labels)} axes, for positions, or to logits' {shape}, "
            f"with {len(shape)} axes, for a mask of classes; reshape where, e.g. where[None]"
        )
    return None, jnp.broadcast_to(where, of_labels)


_LOG_PROB: Function = "log_prob_and_entropy"


@eager.compiled("logits", "labels", "where", either=("logits_scale",))
def log_prob_and_entropy(
    logits: checks.ArrayLike,
    labels: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    logits_scale: checks.ArrayLike = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probability of a label, and the entropy of the distribution that it is drawn from.

    .. math::
      \log p_{\mathrm{label}}, \quad - \sum_j p_j \log p_j
      \qquad p = \mathrm{softmax}(z)

    where z = logits, or is computed with ``logits_scale`` and ``logit_softcap`` as in
    :func:`softmax_cross_entropy_with_integer_labels`. The losses of GRPO, PPO and DPO use these
    two results (`Losses <losses.html>`_).

    The forward pass reads the logits once and writes no array of their size. The residuals are the
    logits and three numbers for each position. The backward pass reads the logits once and writes
    the gradient of both results. A log-probability near 0 is as accurate as a large one, and the
    entropy is never negative. The arithmetic is float32 (float64 for float64 logits).

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: class indices from 0 to V - 1, integers of any dtype, of the shape of logits without
        ``axis``. If a label is out of range, such as a negative one, both results of its position
        and the gradient of its logits are NaN. Labels may have one axis more, the last one,
        wherever ``axis`` is: then there are k labels for each position, fewer than classes, such as
        a teacher's top k. If one of these is out of range, its own log-probability is NaN, and the
        entropy is as without it: replace padding by any class, and weight its result by 0.
      axis: the axis of the classes. If there are several (or all, for None), labels count classes
        in row-major order of the axes as given.
      where: booleans that say which positions count, such as ``labels != -100``, or float weights
        of positions, by which both results are multiplied. They have the axes of positions (logits
        without ``axis``), and broadcast to their shape. Where it is False or 0, both results and
        the gradients are 0, whatever labels and logits are. A boolean mask with as many axes as
        logits selects classes instead. A position without a class has 0 for both results. The logit
        of a label counts even if its class is masked.
      logits_scale: 1 over a temperature, a number or an array, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      logit_softcap: a Python number above 0, or None for no cap.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      (log_prob, entropy): log_prob has labels' shape, and entropy the shape of logits without
      ``axis``. Both are float32, or float64 for float64 logits. They are NaN if logits have +inf or
      NaN, or are all -inf. If a label's logit is -inf, log_prob is -inf.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: logits are not of a supported float dtype, labels are not integers, ``where`` is of
        integers or, with logits' axes, not boolean, ``logit_softcap`` is not a Python number, or
        ``logits_scale`` is differentiated.
      ValueError: ``axis``, the shape of labels or ``where``, one of these numbers or
        ``implementation`` is wrong.

    Source: both sums are computed in one pass as in `Online normalizer calculation for softmax
    <https://arxiv.org/abs/1805.02867>`_, extended by the sum that the entropy needs.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits, tokens = jnp.zeros((2, 1000), jnp.bfloat16), jnp.array([3, 7])
      >>> log_prob, entropy = jaxnorm.log_prob_and_entropy(logits, tokens)
      >>> [round(v, 2) for v in (*log_prob.tolist(), *entropy.tolist())]  # of 1000 alike
      [-6.91, -6.91, 6.91, 6.91]
      >>> jaxnorm.log_prob_and_entropy(logits, jnp.array([[3, 4, 5], [7, 8, 9]]))[0].shape
      (2, 3)
    """
    (log_prob, entropy), weights = of_rows(
        _LOG_PROB,
        logits,
        labels,
        axis,
        where,
        implementation,
        logits_scale=logits_scale,
        logit_softcap=logit_softcap,
    )
    if weights is None:
        return log_prob, entropy
    of_labels = weights if log_prob.ndim == entropy.ndim else weights[..., None]
    return weighted(log_prob, of_labels), weighted(entropy, weights)
