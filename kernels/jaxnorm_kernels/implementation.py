"""The interface between the API and its implementations (``xla``, ``mosaic``, ``triton``).

An implementation is an object of the class :class:`Implementation`. It has one function for each
pass (forward, tangent, backward), which handles all operations. The functions get two-dimensional
arrays ``(rows, cols)`` whose last axis is normalised, and a frozen
:class:`~jaxnorm_kernels.specs.Spec` that describes everything else about the call. The functions do
not depend on autodiff, sharding or Flax.

If ``takes_inner(spec)`` is True, the functions also get arrays of shape ``(outer, cols, inner)``
and normalise them over the middle axis. This avoids a transpose; see ``Spec.inner``. The statistics
of such arrays have the shape ``(outer * inner,)``.

Only the ``xla`` implementation also takes arrays of any shape, normalised over ``Spec.axes``. Such
arrays may be sharded, and XLA might gather them if they were reshaped to rows. Only the ``xla``
implementation has a ``tangent``, and a backward pass that also takes cotangents of the statistics.
Forward mode and second derivatives use these two passes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxnorm_kernels.specs import Spec, Stats

# Default value of a field that is required in some operations and absent in all other operations.
# It is None, declared as Any, so that the field can be annotated as jax.Array. Operations that
# require the field then need not check for None.
_ABSENT: Any = None


class Operands(NamedTuple):
    """The operands of a forward pass, or their tangents or gradients. Absent entries are None.

    Attributes:
      x, teacher_logits, residual, gate: arrays ``(rows, cols)``.
      scale, bias, next_scale, branch_scale: arrays ``(cols,)``, or ``(n, cols)`` for n groups of
        rows. next_scale is the scale of the second norm. branch_scale multiplies x in h = residual
        + branch_scale * x.
      mask: a boolean array, ``(n, cols)`` or ``(n, 1)``. `LogitsOptions.mask_rows` describes which
        of the mask's n rows applies to each row of x. For the xla implementation, the mask
        broadcasts to x's shape by numpy's rules instead.
      logits_bias: a float array, ``(n, cols)`` or ``(n, 1)``. `SoftmaxOptions.logits_bias_rows`
        describes which of the bias's n rows is added to each row of x. For the xla implementation,
        the bias broadcasts to x's shape by numpy's rules instead. The gradient of the bias has the
        bias's shape.
      labels: an array ``(rows,)`` of any integer dtype.
      candidates: an array ``(rows, k)`` with k labels for each row.
      positions: a boolean array ``(rows,)``. The loss is 0 in rows where it is False.
      logits_scale: an array ``(rows,)``. Each number multiplies the logits of its row. Absent if
        all logits are multiplied by the same static number.
      cos, sin: the tables of a rotation. They have one column for each pair of x's columns that is
        rotated. `NormOptions.table_rows` maps rows of x to rows of the tables. For the xla
        implementation, the leading axes of the tables instead broadcast, by numpy's rules, to the
        leading axes of x. Only this implementation returns the gradients of the tables.
    """

    x: jax.Array = _ABSENT
    residual: jax.Array = _ABSENT
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    next_scale: jax.Array | None = None
    mask: jax.Array | None = None
    logits_bias: jax.Array | None = None
    labels: jax.Array = _ABSENT
    positions: jax.Array | None = None
    cos: jax.Array = _ABSENT
    sin: jax.Array = _ABSENT
    gate: jax.Array = _ABSENT
    branch_scale: jax.Array = _ABSENT
    teacher_logits: jax.Array = _ABSENT
    candidates: jax.Array = _ABSENT
    logits_scale: jax.Array | None = None


class Residuals(NamedTuple):
    """The residuals that a tangent or a backward pass takes. Absent entries are None.

    Attributes:
      saved: the operand or result from which the derivative recomputes all arrays that are not
        saved. `Spec.starts_from` is its name.
      x: the operand x, if the derivative needs it in addition to `saved`. An operation with two
        norms needs x because x is the input of the first norm. An operation with branch_scale needs
        x for the gradient of branch_scale.
      stats: the row statistics.
      scale, bias, next_scale, mask, labels, cos, sin, gate, branch_scale, teacher_logits,
        candidates, logits_scale: as in :class:`Operands`.
      entropy, y: as in :class:`Results`.
    """

    saved: jax.Array
    x: jax.Array = _ABSENT
    stats: Stats = ()
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    next_scale: jax.Array | None = None
    mask: jax.Array | None = None
    labels: jax.Array = _ABSENT
    cos: jax.Array = _ABSENT
    sin: jax.Array = _ABSENT
    gate: jax.Array = _ABSENT
    branch_scale: jax.Array = _ABSENT
    entropy: jax.Array = _ABSENT
    y: jax.Array = _ABSENT
    teacher_logits: jax.Array = _ABSENT
    candidates: jax.Array = _ABSENT
    logits_scale: jax.Array | None = None


class Results(NamedTuple):
    """The results of a forward pass, or their tangents or cotangents. Absent entries are None.

    Attributes:
      y: the output. It is an array ``(rows, cols)`` for a norm or softmax, ``(rows,)`` for a loss,
        a divergence or a label's log-probability, and ``(rows, k)`` for the log-probabilities of k
        labels. Its dtype is ``spec.y_dtype``, or ``spec.norm.residual_dtype`` if y is the sum of a
        residual and a norm.
      h: the sum that is normalised, rounded to ``spec.norm.residual_dtype``. y is the norm of the
        rounded sum. A plain norm has no h. In the cotangents of a plain norm, this field is an
        extra cotangent of x, or None.
      stats: the row statistics, if ``spec.has_stats`` is True.
      entropy: the entropy of each row, an array ``(rows,)`` in ``spec.y_dtype``.
    """

    y: jax.Array = _ABSENT
    h: jax.Array | None = None
    stats: Stats = ()
    entropy: jax.Array = _ABSENT


def _none(*_: Spec) -> None:
    """Return None: there is no reason, no caveat, or no limit on the platforms."""


def takes_no_inner(spec: Spec) -> bool:
    """Return False: the implementation does not support ``Spec.inner``."""
    del spec
    return False


class Implementation(NamedTuple):
    """The functions of an implementation. Its package defines them as ``IMPLEMENTATION``.

    Attributes:
      forward: a function that runs a forward pass. It returns a `Results` with the results that
        ``spec.outputs`` names. The other fields are None.
      backward: a function that runs a backward pass. It returns an `Operands` with the gradients,
        each in the dtype of its operand. The gradient of logits_bias is returned only if the spec
        has a `logits_bias_dtype`. If the call computes a sum h, the gradient of h is rounded to the
        residual's dtype. The rounded array is the gradient of the residual. If h = x + residual,
        the gradient of x is the rounded array, too, cast to x's dtype. If x is normalised or scaled
        before it is added to the residual, the gradients of x, scale and branch_scale may be
        computed from the unrounded gradient of h. If y has no cotangent, the gradient of h is the
        cotangent of h.
      why_unsupported: a function that returns the reason why the implementation cannot run a call,
        as a sentence for users. It returns None if the implementation can run the call.
      why_not_default: a function that returns the reason why the implementation is not the default
        for a call, as a sentence for users. It returns None if the implementation is the default.
      takes_inner: a function that returns True if the implementation takes the ``(outer, cols,
        inner)`` arrays of a call with ``spec.inner``.
      platforms: a function that returns the supported platforms ("cpu", "cuda", "rocm", "tpu"), or
        None if all platforms are supported.
      caveat: a function that returns a warning for the user, as a sentence, if something about a
        call's kernel is unknown, such as its time on the local GPU. It returns None if there is
        nothing to warn about.
      tangent: a function that takes residuals and the tangents of the operands (None stands for 0),
        and returns the tangents of the results. For a plain norm, the tangent of h is the tangent
        of x. Only the xla implementation has this function. In all others, the attribute is None.
    """

    forward: Callable[[Operands, Spec], Results]
    backward: Callable[[Residuals, Results, Spec], Operands]
    why_unsupported: Callable[[Spec], str | None] = _none
    why_not_default: Callable[[Spec], str | None] = _none
    takes_inner: Callable[[Spec], bool] = takes_no_inner
    platforms: Callable[[], tuple[str, ...] | None] = _none
    caveat: Callable[[Spec], str | None] = _none
    tangent: Callable[[Residuals, Operands, Spec], Results] | None = None
