"""Softmax, LayerNorm and RMSNorm for JAX that save their output, not their input."""

from jaxnorm._check import ParamReport as ParamReport
from jaxnorm._check import check_params as check_params
from jaxnorm._norm import layer_norm as layer_norm
from jaxnorm._norm import rms_norm as rms_norm
from jaxnorm._plan import Plan as Plan
from jaxnorm._plan import implementation_for as implementation_for
from jaxnorm._remat import save_policy as save_policy
from jaxnorm._softmax import log_softmax as log_softmax
from jaxnorm._softmax import softmax as softmax

__version__ = "0.1.0"
