"""Tables of the reasons why kernels cannot run a call, or why XLA should run it instead."""

from collections.abc import Callable

from jaxnorm_kernels.specs import Spec

Table = tuple[tuple[str, Callable[[Spec], bool]], ...]

#: Reasons why no kernel can run a call. Each entry of the table is a pair: the text of a reason,
#: which is shown to users, and a function that returns True if the reason applies.
NO_KERNEL: Table = (
    ("there is no kernel for this operation yet", lambda s: not s.operation.has_kernels),
    (
        "kernels need sizes that are known when the call is traced, and x has a symbolic size",
        lambda s: not all(isinstance(size, int) for size in (s.rows, s.cols)),
    ),
    (
        "an array is float64, and kernels compute in float32",
        lambda s: any(
            dtype is not None and dtype.itemsize > 4
            for dtype in (s.compute_dtype, s.y_dtype, *map(s.dtype, s.operation.operands))
        ),
    ),
    ("an array has size 0, so there is nothing to compute", lambda s: s.rows == 0 or s.cols == 0),
    (
        "only plain JAX computes tangents, second derivatives, gradients of rotary tables, and "
        "sums whose norm is not used",
        lambda s: s.xla_only,
    ),
    (
        "its softmax kernels need a scale that is a number, and scale is an array",
        lambda s: s.is_softmax and s.logits.has_scale,
    ),
    (
        "its loss kernels need a scale of logits above 0",
        lambda s: s.is_loss and s.logits.logits_scale <= 0,
    ),
    (
        "only plain JAX supports parameters for groups of rows that are not consecutive, and "
        "parameters that are broadcast along normalised axes",
        lambda s: s.is_norm and s.norm.scattered,
    ),
    (
        "scale and bias have values for groups of different sizes",
        lambda s: (
            s.is_norm
            and len({s.norm.scale_groups, s.norm.bias_groups, s.norm.branch_scale_groups} - {1}) > 1
        ),
    ),
)

#: Reasons why no kernel can run a call on two-dimensional arrays, ``(rows, cols)``.
NO_ROWS: Table = (
    *NO_KERNEL,
    (
        "its loss kernels support no mask of classes",
        lambda s: s.is_loss and s.logits.has_mask,
    ),
    (
        "the mask or the bias is broadcast along some normalised axes but not all",
        lambda s: (
            (s.has("mask") and s.logits.mask_rows is None)
            or (s.has("logits_bias") and s.softmax.logits_bias_rows is None)
        ),
    ),
    (
        "the columns, or the rows of a causal softmax, are sharded",
        lambda s: bool(s.cols_over or (s.is_softmax and s.softmax.queries_over)),
    ),
)

# If x has at most this many bytes, the forward pass of a norm takes a GPU only a few microseconds.
# The launch of a separate kernel takes the host at least as long. So XLA's code is faster: it can
# fuse the norm with other operations, without an additional launch.
_SMALL_BYTES = 4 * 2**20

# If x has at most this many bytes, XLA's code is also faster for the two passes of a norm that is
# differentiated. In a training step with arrays this small, the GPU waits for the host. Under
# `jax.lax.scan`, kernels cost the host even more: to pass the address of a layer's residuals to a
# kernel, the host waits until the GPU has computed the index of the layer.
_TINY_BYTES = 2**18

#: Reasons to let XLA run a call that a kernel supports. In these cases, XLA fuses the call with the
#: operations around it, and the whole program is faster than with the kernel. This was measured in
#: larger programs (`blocks.csv` and `stacks.csv` in benchmarks/results).
BETTER_FUSED: Table = (
    (
        "the normalised axes are not the last ones, so a kernel would need transposed copies of x "
        "and of the result",
        lambda s: s.moved_axis,
    ),
    (
        "the same rows are normalised with several scales: XLA's code reads them once, and a "
        "kernel would need a copy of them for each scale",
        lambda s: s.direction == "fwd" and s.is_norm and s.norm.repeated,
    ),
    (
        "x is at most 4 MiB and is not differentiated: launching the kernel takes longer than it "
        "saves",
        lambda s: (
            s.is_norm
            and s.direction == "fwd"
            and not s.has_stats
            and s.rows * s.cols * s.x_dtype.itemsize <= _SMALL_BYTES
        ),
    ),
    (
        "x is at most 256 KiB: launching the kernels of both passes takes longer than they save",
        lambda s: s.is_norm and s.rows * s.cols * s.x_dtype.itemsize <= _TINY_BYTES,
    ),
)


def first(table: Table, spec: Spec) -> str | None:
    """Return the first reason in the table that applies to `spec`, or None if no reason applies.

    If a call has a residual, its backward pass consists of the residual's gradient and the backward
    passes of the call's norms (one or two). So if a reason applies to one of these norms, it
    applies to the call, too.
    """
    has_residual = spec.direction == "bwd" and spec.has("residual")
    specs = [spec, *(spec.norms if has_residual else [])]
    return next((reason for reason, applies in table if any(map(applies, specs))), None)
