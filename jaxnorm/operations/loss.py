"""softmax_cross_entropy_with_integer_labels and log_prob_and_entropy, and their checks."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS
from jaxnorm_kernels.specs import LossOptions, Name, Spec

Function = Literal["softmax_cross_entropy_with_integer_labels", "log_prob_and_entropy"]

NAME: Function = "softmax_cross_entropy_with_integer_labels"


@eager.compiled("logits", "labels", "where")
def softmax_cross_entropy_with_integer_labels(
    logits: checks.ArrayLike,
    labels: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Cross-entropy between the softmax of logits and integer labels.

    The counterpart of ``optax.softmax_cross_entropy_with_integer_labels``.

    .. math::
      L - \sum_j q_j z_j + \mathrm{z\_loss} \cdot L^2 \qquad L = \log \sum_j \exp(z_j) \qquad
      q_j = (1 - a) [j = \mathrm{label}] + a / V \qquad a = \mathrm{label\_smoothing}

    of z = logits, or as ``logits_scale`` and ``logit_softcap`` say

    .. math::
      z = c \tanh (\mathrm{logits\_scale} \cdot \mathrm{logits} / c)
      \qquad c = \mathrm{logit\_softcap}

    It reads the logits once and writes no array of their size; it keeps them and L, as two numbers
    for each position, for the backward, which reads them once and writes the gradient. A loss near
    0 is as accurate as a large one. The arithmetic is float32 (float64 for float64 logits).

    Args:
      logits: array of any shape; bfloat16, float16, float32 or float64.
      labels: integers of any dtype, of the shape of logits without ``axis``: which of the V classes
        along that. A position with another number, a negative one too, has the loss NaN, and its
        logits the gradient NaN.
      axis: the axis of the classes; of several, or of all for None, labels count classes in
        row-major order of the axes as given, as optax's do: the last one varies fastest. Others
        than ascending ones cost a transpose of logits.
      where: booleans or float weights that broadcast to labels' shape, with as many axes: which
        positions count, for example ``labels != -100``, or how much, of any sign; the loss of each
        is multiplied by its weight, which is taken in the loss's dtype and has no gradient. Where
        it is False or 0, loss and gradient are 0, whatever labels and logits are. A boolean mask
        with as many axes as logits, which broadcasts to their shape, says which classes enter the
        sum in L; a position that has none has loss and gradient 0, and the logit of a label counts
        even if it is not among them.
      label_smoothing: a Python number from 0 to 1, the share of the targets that is spread evenly
        over all classes; 0 with a mask of classes.
      z_loss: a finite Python number of at least 0.
      logits_scale: a Python number above 0: 1 over a temperature.
      logit_softcap: a Python number above 0, what logits are held below, as Gemma 2's; or None. A
        logit of -inf is then -logit_softcap: what is to take no part, ``where`` says. In kernels
        tanh is right to 2 units in the last place of 1.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of labels' shape, the loss of each position: float32, or float64 for float64 logits. NaN
      for logits with +inf, NaN or nothing but -inf; infinite where a logit of -inf has a target.

    Differentiable with respect to logits, in reverse and forward mode, to any order.

    Raises:
      TypeError: logits are not of a supported float dtype, labels are no integers, ``where`` is of
        integers or, with logits' axes, not boolean, or ``label_smoothing``, ``z_loss``,
        ``logits_scale`` or ``logit_softcap`` is no Python number.
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
        has_weights=True,
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
    has_weights: bool = False,
    **options: Any,
) -> tuple[list[jax.Array], jax.Array | None]:
    """The results of a function of logits and labels; `where`, if that is of positions.

    Args:
      has_weights: `where` may be float weights.
      options: of `loss_call`.
    """
    logits = checks.float_array(function, "logits", logits)
    shape = logits.shape
    in_order = checks.axes_in_order(function, axis, shape, of="logits")
    axes = tuple(sorted(in_order))
    checks.not_one_hot(function, labels, shape, axes)
    labels = checks.integer_array(function, "labels", labels)
    mask = weights = None
    if where is not None:
        array = (
            checks.weights(function, "where", where, checks.arithmetic_dtype(logits.dtype))
            if has_weights
            else checks.boolean(function, "where", where)
        )
        mask, weights = _masks(function, array, RowView(shape, axes))
    if in_order != axes:  # Labels count along the axes as given, as optax's do.
        logits = jnp.moveaxis(logits, in_order, axes)
        mask = None if mask is None else jnp.moveaxis(mask, in_order, axes)
    call = loss_call(
        function,
        logits.shape,
        logits.dtype,
        axis=axis,
        mask=None if mask is None else mask.shape,
        has_positions=weights is not None,
        implementation=implementation,
        **options,
    )
    expected = call.view.shape_of("label")
    if labels.shape != expected:
        raise ValueError(
            f"{function}: labels have shape {labels.shape}; expected {expected}, the shape of "
            f"logits {shape} without axis={axis!r}; reshape or broadcast labels to that shape"
        )
    positions = None if weights is None else counted(weights)
    return row_operations.run(call, logits, labels, mask, positions), weights


def loss_call(
    function: Function,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    axis: checks.Axis,
    mask: tuple[int, ...] | None,
    has_positions: bool,
    implementation: Name | None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Call:
    """The forward of a call with these arguments, after the checks; `mask` is a shape."""
    view = RowView(shape, checks.axes(function, axis, shape, of="logits"), mask=mask or ())
    checks.implementation(function, implementation)
    smoothing = checks.number(function, "label_smoothing", label_smoothing, minimum=0, maximum=1)
    if smoothing and mask is not None:
        raise ValueError(
            f"{function}: label_smoothing={label_smoothing!r} with a mask of classes (where has as "
            "many axes as logits), which says nothing of the targets of the others; expected 0, or "
            "a mask of positions with the axes of labels; leave one of both out"
        )
    op = FUNCTIONS[function].op
    spec = Spec(
        op=op,
        direction="fwd",
        outputs=(*OPERATIONS[op].results,),
        rows=view.rows,
        cols=view.cols,
        x_dtype=dtype,
        y_dtype=checks.arithmetic_dtype(dtype),
        options=LossOptions(
            has_mask=mask is not None,
            has_positions=has_positions,
            label_smoothing=smoothing,
            z_loss=checks.number(function, "z_loss", z_loss, minimum=0),
            logits_scale=checks.positive(function, "logits_scale", logits_scale),
            logit_softcap=softcap(function, logit_softcap),
        ),
    )
    check_numbers(
        function,
        spec.compute_dtype,
        spec.logits.logits_scale,
        spec.loss.logit_softcap,
        spec.loss.z_loss,
    )
    return Call.of(function, spec, view, implementation).on(view)


def check_numbers(
    function: str, dtype: np.dtype, logits_scale: float, logit_softcap: float | None, z_loss: float
) -> None:
    """Raises unless the dtype of the arithmetic holds the numbers of a loss."""
    checks.finite_in(function, dtype, {"z_loss": z_loss})
    positive: dict[str, float | None] = {
        "logits_scale": logits_scale,
        "logit_softcap": logit_softcap,
    }
    if logit_softcap is not None:
        positive["logits_scale / logit_softcap"] = logits_scale / logit_softcap
    checks.finite_in(function, dtype, positive, above_zero=True)


def softcap(function: str, value: float | None) -> float | None:
    """`value`, a number above 0, or None."""
    return None if value is None else checks.positive(function, "logit_softcap", value)


def counted(weights: jax.Array) -> jax.Array:
    """Whether positions have a weight."""
    return weights if weights.dtype == bool else weights != 0


def weighted(loss: jax.Array, weights: jax.Array) -> jax.Array:
    """Losses times the weights of their positions; those that do not count are 0 already."""
    return loss if weights.dtype == bool else loss * weights


def _masks(
    function: str, where: jax.Array, view: RowView
) -> tuple[jax.Array | None, jax.Array | None]:
    """`where` as a mask of classes, or as what it is of positions, by its axes."""
    shape, of_labels = view.shape, view.shape_of("label")
    if where.ndim == len(shape):
        also = ", or give weights of positions the axes of labels"
        mask = checks.boolean(function, "where", where, also)
        return checks.broadcastable(function, "where", mask, shape, "logits'"), None
    if not checks.fits(where.shape, of_labels):
        raise ValueError(
            f"{function}: where has shape {where.shape}; expected one that broadcasts to labels' "
            f"shape {of_labels}, with {len(of_labels)} axes, for positions, or to logits' {shape}, "
            f"with {len(shape)} axes, for a mask of classes; reshape where, e.g. where[None]"
        )
    return None, jnp.broadcast_to(where, of_labels)


_LOG_PROB: Function = "log_prob_and_entropy"


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
        _LOG_PROB,
        logits,
        labels,
        axis,
        where,
        implementation,
        logits_scale=logits_scale,
        logit_softcap=logit_softcap,
    )
    return log_prob, entropy
