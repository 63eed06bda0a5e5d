"""What the kernels cannot do, and where the default leaves a call to XLA: tables of sentences."""

from collections.abc import Callable

from jaxnorm_kernels.specs import Spec

# Rows and columns are numbered in int32, and the last step goes over the end by so much at most.
_MOST = 2**31 - 2**21

_Table = tuple[tuple[str, Callable[[Spec], bool]], ...]

_CANNOT: _Table = (
    (
        "its kernels need sizes that are known when the call is traced, not symbolic ones",
        lambda s: not all(isinstance(size, int) for size in (s.rows, s.cols)),
    ),
    ("its kernels take no `where` mask", lambda s: s.has_mask),
    (
        "its kernels compute in float32, and float64 arrays ask for more",
        lambda s: any(
            dtype is not None and dtype.itemsize > 4
            for dtype in (s.x_dtype, s.y_dtype, s.scale_dtype, s.bias_dtype)
        ),
    ),
    ("there is nothing to compute in an array of size 0", lambda s: s.rows == 0 or s.cols == 0),
    (
        f"its kernels number rows and columns in 32 bits, up to {_MOST}",
        lambda s: max(s.rows, s.cols) > _MOST,
    ),
)

# Sentences like those above, once the kernels have been timed against XLA's.
_LEFT_TO_XLA: _Table = ()


def supports(spec: Spec) -> str | None:
    """None, or why this call cannot run here."""
    return _first(_CANNOT, spec)


def prefers(spec: Spec) -> str | None:
    """None, or why the default leaves this call to xla."""
    return _first(_LEFT_TO_XLA, spec)


def _first(table: _Table, spec: Spec) -> str | None:
    return next((reason for reason, applies in table if applies(spec)), None)
