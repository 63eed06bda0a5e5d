"""Tables of sentences: why a kernel cannot, or should not, run a call."""

from collections.abc import Callable

from jaxnorm_kernels.specs import Spec

Table = tuple[tuple[str, Callable[[Spec], bool]], ...]

#: What no kernel here can do.
NO_KERNEL: Table = (
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
)


def first(table: Table, spec: Spec) -> str | None:
    """The first sentence that applies to `spec`, if there is one."""
    return next((reason for reason, applies in table if applies(spec)), None)
