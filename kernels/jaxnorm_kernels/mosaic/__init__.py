"""Pallas kernels for NVIDIA GPUs with the Mosaic GPU backend (Hopper and newer)."""

from jaxnorm_kernels.mosaic.launch import interpreted as interpreted
from jaxnorm_kernels.mosaic.norm import norm_fwd as norm_fwd
from jaxnorm_kernels.mosaic.norm_backward import norm_bwd as norm_bwd
from jaxnorm_kernels.mosaic.softmax import log_softmax_fwd as log_softmax_fwd
from jaxnorm_kernels.mosaic.softmax import softmax_fwd as softmax_fwd
from jaxnorm_kernels.mosaic.softmax_backward import log_softmax_bwd as log_softmax_bwd
from jaxnorm_kernels.mosaic.softmax_backward import softmax_bwd as softmax_bwd
from jaxnorm_kernels.mosaic.support import prefers as prefers
from jaxnorm_kernels.mosaic.support import supports as supports
