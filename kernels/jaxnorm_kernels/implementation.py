"""The contract between the API and every implementation (``xla``, ``mosaic``, ``triton``).

An implementation is an :class:`Implementation`: a function for each pass, which runs every
operation of `operations.OPERATIONS`. It gets two-dimensional arrays ``(rows, cols)`` whose last
axis is the normalised one, and one frozen :class:`~jaxnorm_kernels.specs.Spec` that says everything
else about the call. It does not depend on autodiff, sharding or Flax. If ``takes_inner(spec)``, it
also gets ``(outer, cols, inner)`` with ``Spec.inner``, the view that needs no transpose; its
statistics are those of ``(outer, inner)``, flat.

The ``xla`` implementation alone also takes arrays of any shape with ``Spec.axes``: XLA partitions
them over a mesh as they are, where a reshape to rows could make it gather them. It alone has
``tangent``, and a backward that takes the cotangents of the statistics: what forward mode and
second derivatives ask for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxnorm_kernels.linear_spec import LinearSpec
from jaxnorm_kernels.specs import Spec, Stats

# Arrays that every call of an operation has are typed without None.
_ABSENT: Any = None


class Operands(NamedTuple):
    """The operands of a forward, or their tangents or gradients. Absent ones are None.

    Attributes:
      x, residual, gate: ``(rows, cols)``.
      scale, bias, next_scale, branch_scale: ``(cols,)``, or ``(n, cols)`` for groups of rows;
        next_scale is the second norm's, branch_scale that of x in a sum.
      mask, logits_bias: boolean and float, as `LogitsOptions.mask_rows` and
        `SoftmaxOptions.logits_bias_rows` say, and so is the gradient of the bias. The xla
        implementation takes arrays that broadcast to x's shape by numpy's rules.
      labels: of any integer dtype, ``(rows,)``.
      positions: a boolean mask, ``(rows,)``.
      cos, sin: as `NormOptions.table_rows` says, with a column for each pair of x's columns. The
        xla implementation takes tables that broadcast to x's other axes, and returns their
        gradients.
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


class Residuals(NamedTuple):
    """The residuals of a tangent and a backward. Absent ones are None.

    Attributes:
      saved: the operand or result that `Spec.starts_from` names.
      x: that of the norm before a sum, or of its scale.
      stats: the row statistics.
      scale, bias, next_scale, mask, labels, cos, sin, gate, branch_scale: as in
        :class:`Operands`.
      entropy: the result of that name.
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


class Results(NamedTuple):
    """The results of a forward, or their tangents or cotangents. Absent ones are None.

    Attributes:
      y: ``(rows, cols)`` in ``spec.y_dtype``, which a y that is the sum has in
        ``spec.norm.residual_dtype``; of a loss, or a label's log-probability, that of each row,
        ``(rows,)``.
      h: the sum, in ``spec.norm.residual_dtype``, of which y is the norm as it is rounded. As a
        cotangent of a plain norm, it is another cotangent of x.
      stats: the row statistics, if ``spec.has_stats``.
      entropy: of each row, ``(rows,)``, in ``spec.y_dtype``.
    """

    y: jax.Array = _ABSENT
    h: jax.Array | None = None
    stats: Stats = ()
    entropy: jax.Array = _ABSENT


def _none(*_: Spec | LinearSpec) -> None:
    """Return None: there is nothing to say about any call."""


def _takes_no_inner(spec: Spec) -> bool:
    del spec
    return False


class Implementation(NamedTuple):
    """The functions of a backend: the constant ``IMPLEMENTATION`` of its package.

    Attributes:
      forward: returns the results that are in ``spec.outputs``; the others are None.
      backward: returns the gradients, each in the dtype of its operand. A bias of logits has one if
        the spec has its dtype. With a residual, the gradient of the residual is that of h, rounded
        to its dtype. The gradient of x is this array in x's dtype, and the same array if both
        dtypes agree. With two norms, the backward of the first may start from the gradient of the
        residual before it is rounded, and so may the gradients of x and its branch_scale: a kernel
        of both norms never stores it. Without y's cotangent they are the gradients of h's.
      why_unsupported: None, or a sentence for the user that says why it cannot run a call.
      why_not_default: None, or a sentence that says why the default leaves a call to ``xla``.
      takes_inner: True if it takes the view of a call with ``spec.inner``.
      platforms: the platforms that it can run on ("cpu", "cuda", "rocm", "tpu"); None for all.
      caveat: None, or what is unknown about its kernels for a call on the GPU at hand.
      tangent: of the xla implementation alone: returns the tangents of the results; a tangent of
        None stands for 0. For a plain norm, h's tangent is x's.
    """

    forward: Callable[[Operands, Spec], Results]
    backward: Callable[[Residuals, Results, Spec], Operands]
    why_unsupported: Callable[[Spec | LinearSpec], str | None] = _none
    why_not_default: Callable[[Spec], str | None] = _none
    takes_inner: Callable[[Spec], bool] = _takes_no_inner
    platforms: Callable[[], tuple[str, ...] | None] = _none
    caveat: Callable[[Spec], str | None] = _none
    tangent: Callable[[Residuals, Operands, Spec], Results] | None = None
