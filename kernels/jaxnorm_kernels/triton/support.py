"""Two tables of reasons: why Triton kernels cannot run a call, and why XLA runs it by default."""

import functools
import importlib
import os

from jaxnorm_kernels import timings
from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.refusals import BETTER_FUSED, NO_ROWS, Table, first
from jaxnorm_kernels.specs import Spec

# The maximum number of rows or columns. Indices are int32, whose maximum is 2**31 - 1. In the last
# step of a loop, an index may exceed the number of rows or columns by up to 2**21.
_MOST = 2**31 - 2**21

# The maximum number of columns of a norm with a rotation. The rows of these norms are attention
# heads. There is no schedule for wider heads.
_MOST_ROTATED = 1024

#: The maximum number of columns in the forward pass of a norm, which holds whole rows in registers.
MOST_NORMALISED = 16384

#: The maximum number of columns if a softmax's backward pass sums over rows of x. A program holds
#: whole rows.
MOST_SUMMED = 8192

# The minimum number of columns of a block in the backward pass of a cross-entropy. Only the first
# and the last block of a row may have fewer columns.
_LOSS_BLOCK = 2048


@functools.cache
def can_lower() -> bool:
    """Return True if JAX can lower Triton kernels, which requires JAX's CUDA plugin.

    A GPU is not required.
    """
    return hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel")


_CANNOT: Table = (
    *NO_ROWS,
    (
        "its kernels exclude masked logits, and here a number replaces them",
        lambda s: not s.drops_masked,
    ),
    (
        "its kernels need a scale of the logits that is a number, not an array",
        lambda s: s.has("logits_scale"),
    ),
    (
        "its kernel of two norms with a residual between them exists only for RMSNorm",
        lambda s: len(s.operation.norms) > 1 and s.norm.subtract_mean,
    ),
    (
        f"its norm with a rotation needs rows of at most {_MOST_ROTATED} columns",
        lambda s: s.op == "norm_rope" and s.cols > _MOST_ROTATED,
    ),
    (
        "its forward kernels of norms support no rows of this length: they hold rows of at most "
        f"{MOST_NORMALISED} columns in registers",
        lambda s: _norm(s, "fwd") and s.cols > MOST_NORMALISED,
    ),
    (
        "its gradient of a bias that has columns supports no rows of this length: it holds rows of "
        f"at most {MOST_SUMMED} columns in registers",
        lambda s: sums_columns(s) and s.cols > MOST_SUMMED,
    ),
    (
        "tables of size 0 rotate nothing",
        lambda s: s.op == "norm_rope" and s.norm.rotated == 0,
    ),
    (
        f"x has more rows or columns than the {_MOST} that 32-bit indices allow",
        lambda s: max(s.rows, s.cols) > _MOST,
    ),
    (
        f"its rows have more parts than the {_MOST} programs that 32-bit indices allow",
        lambda s: (
            s.is_loss
            and s.direction == "bwd"
            and s.cols > loss_block(s)
            and s.rows * (s.cols // loss_block(s) + 2) > _MOST
        ),
    ),
    (
        "its kernels need compute capability 8.0 (Ampere) or newer",
        lambda s: _is_too_old(),
    ),
)

# Reasons why XLA runs a call by default although a kernel supports it. Kernels were timed against
# XLA on one H200 with jax 0.11.2 and Triton 3.9 (`python -m benchmarks.run`; the committed results
# are in benchmarks/results/nvidia_h200). `tests/test_defaults.py` compares every rule with the
# committed times. Norms with a residual are treated like plain norms, because both distribute rows
# over programs in the same way.
_LEFT_TO_XLA: Table = (
    *BETTER_FUSED,
    (
        "JAX's CUDA plugin, which lowers its kernels, is not installed",
        lambda s: not can_lower(),
    ),
    (
        "x has few rows: XLA distributes a norm over more multiprocessors",
        lambda s: s.is_norm and s.rows < _few_rows(s),
    ),
    (
        "XLA's softmax of a few rows of float32 is faster",
        lambda s: (
            s.op == "softmax" and s.direction == "fwd" and s.rows < 128 and s.x_dtype.itemsize == 4
        ),
    ),
    (
        "a row is no multiple of 16 bytes long, so this norm reads 16-bit elements one by one",
        lambda s: _has_unaligned_rows(s) and _is_16_bit(s) and s.is_norm and not _is_rms(s, "bwd"),
    ),
    (
        "a long row is no multiple of 16 bytes long, so it is read twice, element by element",
        lambda s: (
            _has_unaligned_rows(s)
            and s.cols > 16384
            and s.is_softmax  # kernels of losses split a row at 16 bytes
            and (s.op, s.direction) != ("log_softmax", "fwd")
        ),
    ),
    (
        "the backward pass of a LayerNorm reads float32 rows of this width twice from memory",
        lambda s: _is_layer(s, "bwd") and not _is_16_bit(s) and 8192 < s.cols <= 16384,
    ),
    (
        "several programs share a row of this length, and exchange more than the programs of XLA",
        lambda s: _is_layer(s, "fwd") and 64 < s.cols <= 128 and _is_16_bit(s),
    ),
)


def sums_columns(spec: Spec) -> bool:
    """Return True for a backward pass that returns the gradient of a bias of shape `(n, cols)`."""
    shared = spec.softmax.logits_bias_rows if spec.has("logits_bias") else None
    return spec.direction == "bwd" and shared is not None and shared.has_columns


def loss_block(spec: Spec) -> int:
    """Return the minimum number of columns of a block in the backward pass of a loss.

    The first and the last block of a row may have fewer columns. A divergence reads two rows, the
    student's and the teacher's, so its blocks have half the number of columns.
    """
    return _LOSS_BLOCK // len(spec.operand_dtypes)


def platforms() -> tuple[str, ...]:
    """Return the supported platforms. The CPU is one of them if Triton interprets kernels."""
    return ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)


def why_unsupported(spec: Spec) -> str | None:
    """Return the reason why the kernels cannot run the call `spec`, or None if they can run it."""
    return first(_CANNOT, spec)


def why_not_default(spec: Spec) -> str | None:
    """Return the reason why XLA runs the call `spec` by default.

    Return None if the kernels run it by default.
    """
    return first(_LEFT_TO_XLA, spec) or timings.why_not_default(spec)


def caveat(spec: Spec) -> str | None:
    """Return a sentence that compares the kernel's time with XLA's, or None if it was not timed.

    The times were measured on another GPU; see `timings`.
    """
    return timings.caveat(spec)


def _is_too_old() -> bool:
    return (local_capability() or 80) < 80


def _few_rows(spec: Spec) -> int:
    """Return the minimum number of rows for which a norm's kernel is faster than XLA's code.

    Only norms of 1, 128, 1024 and 2048 rows were timed.
    """
    float32_layer_norm = spec.norm.subtract_mean and spec.y_dtype.itemsize == 4
    return 1024 if spec.direction == "fwd" or float32_layer_norm else 128


def _norm(spec: Spec, direction: str) -> bool:
    return spec.is_norm and spec.direction == direction


def _is_layer(spec: Spec, direction: str) -> bool:
    return _norm(spec, direction) and spec.norm.subtract_mean


def _is_rms(spec: Spec, direction: str) -> bool:
    return _norm(spec, direction) and not spec.norm.subtract_mean


def _is_16_bit(spec: Spec) -> bool:
    return _narrowest(spec) == 2


def _has_unaligned_rows(spec: Spec) -> bool:
    return bool(spec.cols * _narrowest(spec) % 16)


def _narrowest(spec: Spec) -> int:
    """Return the smallest element size in bytes.

    Only y and the operands that have x's shape count.
    """
    return min(dtype.itemsize for dtype in (*spec.operand_dtypes, spec.y_dtype))
