"""The contract between the API and every implementation (``xla``, ``mosaic``, ``triton``).

An implementation is a module with the functions of :class:`Implementation`. It sees two-dimensional
arrays ``(rows, cols)`` whose last axis is the normalised one, and one frozen
:class:`~jaxnorm_kernels.specs.Spec` that says everything else about the call. It knows nothing of
autodiff, sharding or Flax. One whose ``takes_inner`` says so also takes ``(outer, cols, inner)``
with ``Spec.inner``, the view that needs no transpose; its statistics are those of
``(outer, inner)``, flat.

The ``xla`` implementation alone also takes arrays of any shape with ``Spec.axes``: XLA partitions
them over a mesh as they are, where a reshape to rows could make it gather them. It alone has the
tangents (``softmax_tan``, ``log_softmax_tan``, ``cross_entropy_tan``, ``norm_tan``), and a backward
that takes the cotangents of the statistics: what forward mode and second derivatives ask for.
"""

from typing import Protocol

import jax

from jaxnorm_kernels.specs import LinearSpec, Spec, Stats


class Implementation(Protocol):
    """What an implementation module provides. Arrays: ``(rows, cols)``; parameters: ``(cols,)``.

    A mask or a bias of logits is as `Spec.mask_rows` and `Spec.logits_bias_rows` say, and so is the
    bias' gradient; xla's, who has the call as it is, broadcast to x's shape by numpy's rules.
    """

    def softmax_fwd(
        self, x: jax.Array, mask: jax.Array | None, bias: jax.Array | None, spec: Spec
    ) -> jax.Array:
        """Returns y in ``spec.y_dtype``."""
        ...

    def softmax_bwd(
        self, y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns dx in ``spec.x_dtype``, and the bias' gradient where the spec has its dtype."""
        ...

    def log_softmax_fwd(
        self, x: jax.Array, mask: jax.Array | None, bias: jax.Array | None, spec: Spec
    ) -> jax.Array:
        """Returns y in ``spec.y_dtype``."""
        ...

    def log_softmax_bwd(
        self, y: jax.Array, mask: jax.Array | None, dy: jax.Array, spec: Spec
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns dx in ``spec.x_dtype``, and the bias' gradient where the spec has its dtype."""
        ...

    def cross_entropy_fwd(
        self,
        x: jax.Array,
        labels: jax.Array,
        mask: jax.Array | None,
        positions: jax.Array | None,
        spec: Spec,
    ) -> tuple[jax.Array, Stats]:
        """Returns the loss of each row in ``spec.y_dtype`` and the statistics.

        `labels` are of any integer dtype, `positions` a boolean mask, ``(rows,)`` each.
        """
        ...

    def cross_entropy_bwd(
        self,
        x: jax.Array,
        stats: Stats,
        labels: jax.Array,
        mask: jax.Array | None,
        dloss: jax.Array,
        *,
        spec: Spec,
    ) -> tuple[jax.Array]:
        """Returns dx in ``spec.x_dtype``."""
        ...

    def norm_fwd(
        self, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, spec: Spec
    ) -> tuple[jax.Array, Stats]:
        """Returns y in ``spec.y_dtype`` and the statistics."""
        ...

    def add_norm_fwd(
        self,
        x: jax.Array,
        residual: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        spec: Spec,
    ) -> tuple[jax.Array | None, jax.Array | None, Stats]:
        """Returns y in ``spec.y_dtype``, h in ``spec.residual_dtype`` and the statistics.

        y is the norm of h as rounded. None for what is ``spec.unused``.
        """
        ...

    def norm_add_fwd(
        self, x: jax.Array, residual: jax.Array, scale: jax.Array | None, spec: Spec
    ) -> tuple[jax.Array, Stats]:
        """Returns y in ``spec.residual_dtype`` and the statistics."""
        ...

    def norm_add_norm_fwd(
        self,
        x: jax.Array,
        residual: jax.Array,
        scale: jax.Array | None,
        next_scale: jax.Array | None,
        spec: Spec,
    ) -> tuple[jax.Array | None, jax.Array | None, Stats]:
        """Returns y in ``spec.y_dtype``, h in ``spec.residual_dtype`` and each norm's rstd.

        y is the norm of h as rounded. None for what is ``spec.unused``.
        """
        ...

    def norm_bwd(
        self,
        saved: jax.Array,
        stats: Stats,
        scale: jax.Array | None,
        bias: jax.Array | None,
        dy: jax.Array,
        dh: jax.Array | None = None,
        *,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns dx, dscale and dbias in the dtypes of ``spec``; None for an absent parameter."""
        ...

    def add_norm_bwd(
        self,
        saved: jax.Array,
        stats: Stats,
        scale: jax.Array | None,
        bias: jax.Array | None,
        dy: jax.Array,
        dh: jax.Array | None = None,
        *,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """Returns dx, dresidual, dscale and dbias.

        dresidual, the cotangent of h, is rounded to ``spec.residual_dtype``. dx is that, as
        rounded, in ``spec.x_dtype``: the same array where their dtypes agree.
        """
        ...

    def norm_add_norm_bwd(
        self,
        x: jax.Array,
        saved: jax.Array,
        stats: Stats,
        scale: jax.Array | None,
        next_scale: jax.Array | None,
        dy: jax.Array,
        dh: jax.Array | None = None,
        *,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """Returns dx, dresidual, dscale and dnext_scale in the dtypes of ``spec``.

        The first norm's backward may start from dresidual before it is rounded: a kernel of both
        norms has never stored it.
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
