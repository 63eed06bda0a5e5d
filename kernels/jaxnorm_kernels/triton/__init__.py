"""Triton kernels for NVIDIA GPUs since Ampere, called through jax-triton: the extra ``triton``."""

from jaxnorm_kernels.triton import extra

extra.check()  # Before the modules below import what may not be there.

from jaxnorm_kernels.triton.cross_entropy import cross_entropy_bwd as cross_entropy_bwd  # noqa: E402
from jaxnorm_kernels.triton.cross_entropy import cross_entropy_fwd as cross_entropy_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm import add_norm_fwd as add_norm_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm import norm_add_fwd as norm_add_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm import norm_add_norm_fwd as norm_add_norm_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm import norm_fwd as norm_fwd  # noqa: E402
from jaxnorm_kernels.triton.norm_backward import add_norm_bwd as add_norm_bwd  # noqa: E402
from jaxnorm_kernels.triton.norm_backward import norm_add_norm_bwd as norm_add_norm_bwd  # noqa: E402
from jaxnorm_kernels.triton.norm_backward import norm_bwd as norm_bwd  # noqa: E402
from jaxnorm_kernels.triton.softmax import log_softmax_bwd as log_softmax_bwd  # noqa: E402
from jaxnorm_kernels.triton.softmax import log_softmax_fwd as log_softmax_fwd  # noqa: E402
from jaxnorm_kernels.triton.softmax import softmax_bwd as softmax_bwd  # noqa: E402
from jaxnorm_kernels.triton.softmax import softmax_fwd as softmax_fwd  # noqa: E402
from jaxnorm_kernels.triton.support import platforms as platforms  # noqa: E402
from jaxnorm_kernels.triton.support import prefers as prefers  # noqa: E402
from jaxnorm_kernels.triton.support import supports as supports  # noqa: E402
