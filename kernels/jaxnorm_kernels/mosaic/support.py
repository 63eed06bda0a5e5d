"""Reasons why the kernels cannot run a call, or why the default implementation leaves it to XLA."""

from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.mosaic.cross_entropy.passes import BACKWARD
from jaxnorm_kernels.mosaic.device.launch import is_interpreted
from jaxnorm_kernels.mosaic.device.layouts import LEAST_VECTOR, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.schedules import forward, heads
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.columns import row_vector
from jaxnorm_kernels.mosaic.schedules.norm_backward import is_copied, norm_schedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.refusals import BETTER_FUSED, NO_ROWS, Table, first
from jaxnorm_kernels.specs import Spec

# Maximum number of rows of x. It is also the maximum number of blocks in the backward pass of a
# loss, where each row has several blocks. Rows and blocks have int32 indices, which must be less
# than 2^31. The limit is 2^16 lower, because the last block may start up to one tile beyond the
# last row.
_MAX_ROWS = 2**31 - 2**16
_MIN_COLS = 8

_TOO_OLD: Table = (
    (
        "its kernels need compute capability 9.0 (Hopper) or newer",
        lambda s: (local_capability() or 90) < 90,
    ),
)

_CANNOT: Table = (
    *_TOO_OLD,
    *NO_ROWS,
    (
        f"its loss kernels need rows of at least {WARPGROUP_THREADS} columns",
        lambda s: s.cols < WARPGROUP_THREADS and s.is_loss,
    ),
    (
        f"its rows have more parts than the {_MAX_ROWS} blocks that 32-bit indices allow",
        lambda s: s.direction == "bwd" and s.is_loss and s.rows * BACKWARD.parts(s) > _MAX_ROWS,
    ),
    (f"its kernels need rows of at least {_MIN_COLS} elements", lambda s: s.cols < _MIN_COLS),
    (
        f"x has more rows than the {_MAX_ROWS} that 32-bit indices allow",
        lambda s: s.rows > _MAX_ROWS,
    ),
    (
        "its softmax backward needs at least 64 rows this short",
        lambda s: (
            s.direction == "bwd"
            and s.rows < 64
            and s.is_softmax
            and s.cols < WARPGROUP_THREADS * row_vector(s)
        ),
    ),
    (
        "its norm backward needs at least 64 rows this short (in each of the groups of rows with "
        "separate parameters)",
        lambda s: (
            _norm_bwd(s)
            and s.cols < WARPGROUP_THREADS * min(row_vector(s), LEAST_VECTOR)
            and s.rows // s.groups < 64
        ),
    ),
    (
        "its norm backward needs rows of a multiple of 16 bytes",
        lambda s: _norm_bwd(s) and not is_copied(s),
    ),
    (
        "its kernels do not compute the gradient of a bias with one value for each row if masked "
        "logits are replaced by a number",
        lambda s: (
            s.direction == "bwd"
            and s.is_softmax
            and s.softmax.logits_bias_rows is not None
            and not s.softmax.logits_bias_rows.has_columns
            and not s.drops_masked
        ),
    ),
    (
        "its norm with a rotation supports no groups of rows with separate scales, and needs "
        "tables with all pairs",
        lambda s: bool(_rotated(s)) and (s.groups > 1 or s.norm.table_rows is None),
    ),
    (
        f"its norm with a rotation needs at least {heads.LEAST_ROWS} rows this short",
        lambda s: bool(_rotated(s)) and s.rows < heads.LEAST_ROWS,
    ),
    (
        "its norm with a rotation must divide a head's pairs, and its other columns, among the "
        "threads of a row, at least two, and needs heads of a multiple of 16 bytes",
        lambda s: 0 < _rotated(s) <= s.cols <= heads.MOST_COLS and not _is_held(s),
    ),
    ("its kernels support no rows of this length", lambda s: not _is_held(s)),
)

# Reasons to leave a call to XLA by default: the whole program is faster with XLA's code, or the
# kernels were not timed on this GPU or for the call's shape. The kernels of all other calls were at
# least as fast as XLA's code on an H200 and an H100 with jax 0.11.2 (`python -m benchmarks.run`;
# the committed results are in benchmarks/results). `tests/test_defaults.py` checks this, and lists
# the two exceptions.
_LEFT_TO_XLA: Table = (
    *BETTER_FUSED,
    (
        "its kernels have run only on GPUs of compute capability 9.0 (H100, H200)",
        lambda s: local_capability() not in (90, None),
    ),
    (
        # In calls with 1 to 128 rows, the kernels were faster than XLA for rows of up to 8192
        # columns. Longer rows were not timed.
        "x has few, long rows: XLA distributes a norm's backward pass over more multiprocessors",
        lambda s: (
            _norm_bwd(s)
            and s.rows < 128
            and s.cols > 8192
            and not (s.norm.subtract_mean and s.y_dtype.itemsize == 4)
        ),
    ),
)


def platforms() -> tuple[str, ...]:
    """Return the names of the platforms on which the kernels can run."""
    return ("cuda", "cpu") if is_interpreted() else ("cuda",)


def takes_inner(spec: Spec) -> bool:
    """Return True if the kernels for an axis other than the last can run this call.

    Such a call needs no transpose of its operands.
    """
    return strip_schedule.refusal(spec) is None


def why_unsupported(spec: Spec) -> str | None:
    """Return the reason why the kernels cannot run this call on this GPU, or None if they can."""
    if spec.inner > 1:
        return first(_TOO_OLD, spec) or strip_schedule.refusal(spec)
    return first(_CANNOT, spec)


def why_not_default(spec: Spec) -> str | None:
    """Return the reason why the default implementation uses XLA for this call, or None."""
    return first(_LEFT_TO_XLA, spec)


def _is_held(spec: Spec) -> bool:
    """Return True if the rows of this call fit in the registers and shared memory of a block."""
    if spec.is_loss:
        return True  # A loss kernel loops over parts of a row, so rows of any length fit.
    if _rotated(spec):
        return (heads.forward if spec.direction == "fwd" else heads.backward)(spec) is not None
    if spec.direction == "fwd":
        return forward.choose(spec) is not None
    if len(spec.operation.norms) > 1:
        return True  # If rows are too long for one kernel, each norm is run by a separate kernel.
    schedule = norm_schedule if spec.is_norm else softmax_schedule
    return schedule(spec) is not None


def _rotated(spec: Spec) -> int:
    """Return the number of columns that the call rotates."""
    return spec.norm.rotated if spec.is_norm else 0


def _norm_bwd(spec: Spec) -> bool:
    """Return True if the limits of `norm_schedule` apply to the call.

    The limits apply to backward passes of norms. There are two exceptions:

    * Calls that add a residual without a branch scale. Their backward pass consists of the backward
      passes of their norms. `refusals.first` applies the limits to each of these norms, so the call
      itself need not be checked.
    * Norms with a rotation, because other kernels run them.
    """
    is_plain_sum = spec.has("residual") and not spec.has("branch_scale")
    has_own_rows = is_plain_sum or spec.op == "norm_rope"
    return spec.is_norm and spec.direction == "bwd" and not has_own_rows
