"""The contract in plain ``jax.numpy``: the reference, the fallback, the path for CPU and TPU."""

from jaxnorm_kernels.specs import LinearSpec, Spec
from jaxnorm_kernels.xla.cross_entropy import cross_entropy_bwd as cross_entropy_bwd
from jaxnorm_kernels.xla.cross_entropy import cross_entropy_fwd as cross_entropy_fwd
from jaxnorm_kernels.xla.cross_entropy import cross_entropy_tan as cross_entropy_tan
from jaxnorm_kernels.xla.norm import add_norm_bwd as add_norm_bwd
from jaxnorm_kernels.xla.norm import add_norm_fwd as add_norm_fwd
from jaxnorm_kernels.xla.norm import add_norm_tan as add_norm_tan
from jaxnorm_kernels.xla.norm import norm_add_fwd as norm_add_fwd
from jaxnorm_kernels.xla.norm import norm_add_norm_bwd as norm_add_norm_bwd
from jaxnorm_kernels.xla.norm import norm_add_norm_fwd as norm_add_norm_fwd
from jaxnorm_kernels.xla.norm import norm_add_norm_tan as norm_add_norm_tan
from jaxnorm_kernels.xla.norm import norm_bwd as norm_bwd
from jaxnorm_kernels.xla.norm import norm_fwd as norm_fwd
from jaxnorm_kernels.xla.norm import norm_tan as norm_tan
from jaxnorm_kernels.xla.softmax import log_softmax_bwd as log_softmax_bwd
from jaxnorm_kernels.xla.softmax import log_softmax_fwd as log_softmax_fwd
from jaxnorm_kernels.xla.softmax import log_softmax_tan as log_softmax_tan
from jaxnorm_kernels.xla.softmax import softmax_bwd as softmax_bwd
from jaxnorm_kernels.xla.softmax import softmax_fwd as softmax_fwd
from jaxnorm_kernels.xla.softmax import softmax_tan as softmax_tan


def platforms() -> None:
    """It runs on all."""


def supports(spec: Spec | LinearSpec) -> str | None:
    """Every call is supported."""
    del spec
    return None


def prefers(spec: Spec) -> str | None:
    """There is nothing to fall back to."""
    del spec
    return None
