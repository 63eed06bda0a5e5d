"""Softmax, LayerNorm and RMSNorm for JAX that save their output, not their input.

The norms come with the residual addition before or after them, too, in one pass. The functions are
drop-in for :mod:`jax.nn` and the usual norms; ``jaxnorm.linen`` and ``jaxnorm.nnx`` have Flax
modules made of them.
"""

from jaxnorm._check import NormReport, ParamReport, check_params
from jaxnorm._implementation import Choice
from jaxnorm._norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
)
from jaxnorm._plan import Plan, implementation_for
from jaxnorm._remat import save_policy
from jaxnorm._softmax import log_softmax, softmax

__all__ = [
    "Choice",
    "NormReport",
    "ParamReport",
    "Plan",
    "add_layer_norm",
    "add_rms_norm",
    "check_params",
    "implementation_for",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "save_policy",
    "softmax",
]

__version__ = "0.1.0"

# Where users find them: in signatures, tracebacks and help(jaxnorm), which lists what is defined
# in a module.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
