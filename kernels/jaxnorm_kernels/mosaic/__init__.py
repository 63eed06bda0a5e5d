"""Pallas kernels for NVIDIA GPUs with the Mosaic GPU backend (Hopper and newer)."""

from jaxnorm_kernels.mosaic.backward.cross_entropy import cross_entropy_bwd as cross_entropy_bwd
from jaxnorm_kernels.mosaic.backward.norm import add_norm_bwd as add_norm_bwd
from jaxnorm_kernels.mosaic.backward.norm import norm_bwd as norm_bwd
from jaxnorm_kernels.mosaic.backward.softmax import log_softmax_bwd as log_softmax_bwd
from jaxnorm_kernels.mosaic.backward.softmax import softmax_bwd as softmax_bwd
from jaxnorm_kernels.mosaic.backward.two_norms import norm_add_norm_bwd as norm_add_norm_bwd
from jaxnorm_kernels.mosaic.device.launch import interpreted as interpreted
from jaxnorm_kernels.mosaic.forward.cross_entropy import cross_entropy_fwd as cross_entropy_fwd
from jaxnorm_kernels.mosaic.forward.linear import rms_norm_linear_fwd as rms_norm_linear_fwd
from jaxnorm_kernels.mosaic.forward.norm import add_norm_fwd as add_norm_fwd
from jaxnorm_kernels.mosaic.forward.norm import norm_add_fwd as norm_add_fwd
from jaxnorm_kernels.mosaic.forward.norm import norm_add_norm_fwd as norm_add_norm_fwd
from jaxnorm_kernels.mosaic.forward.norm import norm_fwd as norm_fwd
from jaxnorm_kernels.mosaic.forward.softmax import log_softmax_fwd as log_softmax_fwd
from jaxnorm_kernels.mosaic.forward.softmax import softmax_fwd as softmax_fwd
from jaxnorm_kernels.mosaic.support import caveat as caveat
from jaxnorm_kernels.mosaic.support import platforms as platforms
from jaxnorm_kernels.mosaic.support import prefers as prefers
from jaxnorm_kernels.mosaic.support import supports as supports
from jaxnorm_kernels.mosaic.support import takes_inner as takes_inner
