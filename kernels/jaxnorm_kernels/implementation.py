"""The interface between the API and its implementations (``xla``, ``mosaic``, ``triton``).

An implementation is an :class:`Implementation`: one function for each pass, which runs every
operation of `operations.OPERATIONS`. The functions get two-dimensional arrays ``(rows, cols)``
whose last axis is normalised, and a frozen :class:`~jaxnorm_kernels.specs.Spec` that describes
everything else about the call. They do not depend on autodiff, sharding or Flax. If
``takes_inner(spec)`` is True, they also get arrays ``(outer, cols, inner)`` with ``Spec.inner``,
which need no transpose. The statistics of such arrays have the shape ``(outer * inner,)``.

Only the ``xla`` implementation takes arrays of any shape with ``Spec.axes``, because XLA might
gather sharded arrays for a reshape to rows. Only ``xla`` has a ``tangent``, and a backward pass
that also takes cotangents of the statistics. Forward mode and second derivatives need these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxnorm_kernels.specs import Spec, Stats

# The default of arrays that every call of certain operations has; their types exclude None.
_ABSENT: Any = None


class Operands(NamedTuple):
    """The operands of a forward pass, or their tangents or gradients. Absent entries are None.

    Attributes:
      x, teacher_logits, residual, gate: ``(rows, cols)``.
      scale, bias, next_scale, branch_scale: ``(cols,)``, or ``(n, cols)`` for n groups of rows.
        next_scale is the second norm's scale, branch_scale the factor of x in a sum.
      mask, logits_bias: boolean and float arrays whose rows are described by
        `LogitsOptions.mask_rows` and `SoftmaxOptions.logits_bias_rows`. The bias's gradient has the
        same shape. The xla implementation takes arrays that broadcast to x's shape by numpy's
        rules.
      labels: ``(rows,)``, of any integer dtype.
      candidates: several labels of each row, ``(rows, k)``.
      positions: a boolean mask, ``(rows,)``.
      logits_scale: the factor of each row's logits, ``(rows,)``, if it is not a static number.
      cos, sin: tables whose rows are described by `NormOptions.table_rows`, with a column for each
        pair of x's columns. The xla implementation takes tables that broadcast to x's other axes,
        and returns their gradients.
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
      saved: the operand or result that `Spec.starts_from` names.
      x: the input of the norm whose result is added to the residual, or the array that branch_scale
        multiplies.
      stats: the row statistics.
      scale, bias, next_scale, mask, labels, cos, sin, gate, branch_scale, teacher_logits,
        candidates, logits_scale: as in :class:`Operands`.
      entropy, y: the results with these names.
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
      y: ``(rows, cols)`` in ``spec.y_dtype``, or in ``spec.norm.residual_dtype`` if y is the sum of
        a residual and a norm. For a loss, a divergence or a label's log-probability, ``(rows,)``;
        for several labels, ``(rows, k)``.
      h: the sum, rounded to ``spec.norm.residual_dtype``; y is the norm of the rounded sum. As a
        cotangent of a plain norm, it is an extra cotangent of x.
      stats: the row statistics, if ``spec.has_stats``.
      entropy: the entropy of each row, ``(rows,)``, in ``spec.y_dtype``.
    """

    y: jax.Array = _ABSENT
    h: jax.Array | None = None
    stats: Stats = ()
    entropy: jax.Array = _ABSENT


def _none(*_: Spec) -> None:
    """Return None: no reason or caveat applies to any call."""


def takes_no_inner(spec: Spec) -> bool:
    """Return False: the implementation does not support ``Spec.inner``."""
    del spec
    return False


class Implementation(NamedTuple):
    """The functions of a backend, in the constant ``IMPLEMENTATION`` of its package.

    Attributes:
      forward: returns the results in ``spec.outputs``; the others are None.
      backward: returns the gradients, each in the dtype of its operand. A bias of logits has a
        gradient if the spec has its dtype. With a residual, the residual's gradient is that of h,
        rounded to the residual's dtype. The gradient of x is the same array if both dtypes agree;
        otherwise it is cast to x's dtype. With two norms, the first norm's backward pass may start
        from the residual's unrounded gradient, which a fused kernel holds in registers. The
        gradients of x and of its branch_scale may start from it too. If y has no cotangent, the
        cotangent of h is used instead of the gradient of h.
      why_unsupported: returns a sentence that tells the user why the implementation cannot run a
        call, or None.
      why_not_default: returns a sentence that says why the default leaves a call to ``xla``, or
        None.
      takes_inner: returns True if the implementation takes the ``(outer, cols, inner)`` arrays of a
        call with ``spec.inner``.
      platforms: returns the supported platforms ("cpu", "cuda", "rocm", "tpu"); None for all.
      caveat: returns what is unknown about its kernels for a call on the local GPU, or None.
      tangent: returns the tangents of the results, where a tangent of None is 0. For a plain norm,
        h's tangent is x's. Only the xla implementation has this function.
      both: returns a loss, and the gradient of x given the loss's cotangent, in one kernel. Only
        the mosaic implementation has this function.
    """

    forward: Callable[[Operands, Spec], Results]
    backward: Callable[[Residuals, Results, Spec], Operands]
    why_unsupported: Callable[[Spec], str | None] = _none
    why_not_default: Callable[[Spec], str | None] = _none
    takes_inner: Callable[[Spec], bool] = takes_no_inner
    platforms: Callable[[], tuple[str, ...] | None] = _none
    caveat: Callable[[Spec], str | None] = _none
    tangent: Callable[[Residuals, Operands, Spec], Results] | None = None
    both: Callable[[Operands, Results, Spec], tuple[Results, Operands]] | None = None
