"""The contract between the API and every implementation (``xla``, ``mosaic``, ``triton``).

An implementation is a module with the functions of :class:`Implementation`: one for each pass of
every operation of `operations.OPERATIONS`. It sees two-dimensional arrays ``(rows, cols)`` whose
last axis is the normalised one, and one frozen :class:`~jaxnorm_kernels.specs.Spec` that says
everything else about the call. It knows nothing of autodiff, sharding or Flax. One whose
``takes_inner`` says so also takes ``(outer, cols, inner)`` with ``Spec.inner``, the view that needs
no transpose; its statistics are those of ``(outer, inner)``, flat.

The ``xla`` implementation alone also takes arrays of any shape with ``Spec.axes``: XLA partitions
them over a mesh as they are, where a reshape to rows could make it gather them. It alone has
``tangent``, and a backward that takes the cotangents of the statistics: what forward mode and
second derivatives ask for.
"""

from typing import Any, NamedTuple, Protocol

import jax

from jaxnorm_kernels.linear_spec import LinearSpec
from jaxnorm_kernels.specs import Spec, Stats

# What an operation has in every call is no Optional for its functions.
_ABSENT: Any = None


class Operands(NamedTuple):
    """What a forward takes; or the tangents or gradients of it. None for what there is not.

    Attributes:
      x, residual, gate: ``(rows, cols)``.
      scale, bias, next_scale, branch_scale: ``(cols,)``, or ``(n, cols)`` for groups of rows;
        next_scale is the second norm's, branch_scale that of x in a sum.
      mask, logits_bias: boolean and float, as `Spec.mask_rows` and `Spec.logits_bias_rows` say, and
        so is the bias' gradient; xla's, who has the call as it is, broadcast to x's shape by
        numpy's rules.
      labels: of any integer dtype, ``(rows,)``.
      positions: a boolean mask, ``(rows,)``.
      cos, sin: as `Spec.table_rows` says, and their gradients, which xla's alone returns; for it
        broadcast to x's shape, but for the columns, of which there is one for each pair.
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
    """What a tangent and a backward start from. None for what there is not.

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
    """What a forward returns; or the tangents or cotangents of it. None for what there is not.

    Attributes:
      y: ``(rows, cols)`` in ``spec.y_dtype``, which a y that is the sum has in
        ``spec.residual_dtype``; of a loss, or a label's log-probability, that of each row,
        ``(rows,)``.
      h: the sum, in ``spec.residual_dtype``, of which y is the norm as it is rounded. As a
        cotangent (``spec.adds_dh``), of a plain norm, it is another one of x.
      stats: the row statistics, where ``spec.want_stats`` says so.
      entropy: of each row, ``(rows,)``, in ``spec.y_dtype``.
    """

    y: jax.Array = _ABSENT
    h: jax.Array | None = None
    stats: Stats = ()
    entropy: jax.Array = _ABSENT


class Implementation(Protocol):
    """What an implementation module provides."""

    def forward(self, operands: Operands, spec: Spec) -> Results:
        """The results; None for what is ``spec.unused``."""
        ...

    def backward(self, residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
        """The gradients, each in the dtype of what it is of; of logits' bias where it has one.

        With a residual, its gradient is that of h, rounded to its dtype, and x's is that, as
        rounded, in x's dtype: the same array where their dtypes agree. Of two norms, the first
        one's backward may start from the residual's before it is rounded, and so may the gradients
        of x and its branch_scale: a kernel of both has never stored it. Without y's cotangent
        (``spec.unused``) they are those of h's.
        """
        ...

    def supports(self, spec: Spec | LinearSpec) -> str | None:
        """None, or a sentence for the user that says why this call cannot run here."""
        ...

    def prefers(self, spec: Spec) -> str | None:
        """None, or a sentence that says why the default should leave this call to ``xla``."""
        ...

    def takes_inner(self, spec: Spec) -> bool:
        """Whether it takes the view with ``spec.inner``; may be missing, for False."""
        ...

    def platforms(self) -> tuple[str, ...] | None:
        """The platforms that it can run on ("cpu", "cuda", "rocm", "tpu"); None for all."""
        ...


class WithTangent(Implementation, Protocol):
    """What the xla implementation provides beyond that."""

    def tangent(self, residuals: Residuals, tangents: Operands, spec: Spec) -> Results:
        """The tangents of the results; a tangent of None stands for 0.

        Of a plain norm's h where ``spec.adds_dh``: x's, as it is.
        """
        ...
