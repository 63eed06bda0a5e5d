"""What the kernels cannot do, and where the default leaves a call to XLA: tables of sentences."""

from jaxnorm_kernels.refusals import NO_KERNEL, Table, first
from jaxnorm_kernels.specs import Spec

# Rows and columns are numbered in int32, and the last step goes over the end by so much at most.
_MOST = 2**31 - 2**21

_CANNOT: Table = (
    *NO_KERNEL,
    (
        f"its kernels number rows and columns in 32 bits, up to {_MOST}",
        lambda s: max(s.rows, s.cols) > _MOST,
    ),
)

# Sentences like those above, once the kernels have been timed against XLA's.
_LEFT_TO_XLA: Table = ()


def supports(spec: Spec) -> str | None:
    """None, or why this call cannot run here."""
    return first(_CANNOT, spec)


def prefers(spec: Spec) -> str | None:
    """None, or why the default leaves this call to xla."""
    return first(_LEFT_TO_XLA, spec)
