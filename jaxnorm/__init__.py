"""jaxnorm makes training in JAX, Flax and equinox need less memory.

`auto_remat` lets any function save the least for its backward pass, and its norms, softmax, MLPs
and losses store few arrays, most of them as GPU kernels. ``jaxnorm.linen``, ``jaxnorm.nnx`` and
``jaxnorm.equinox`` have modules that use them, and convert existing models.
"""

from jaxnorm.calls.backends import Choice
from jaxnorm.operations.gated_linear import activation_linear, gated_linear
from jaxnorm.operations.linear_loss import (
    linear_kl_divergence,
    linear_log_prob_and_entropy,
    linear_softmax_cross_entropy,
)
from jaxnorm.operations.linear_loss_any import linear_loss
from jaxnorm.operations.loss import (
    kl_divergence,
    log_prob_and_entropy,
    softmax_cross_entropy_with_integer_labels,
)
from jaxnorm.operations.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_gated,
)
from jaxnorm.operations.norm_linear import rms_norm_linear
from jaxnorm.operations.norm_rope import rms_norm_rope
from jaxnorm.operations.softmax import log_softmax, softmax
from jaxnorm.primitives.remat import save_policy
from jaxnorm.remat.auto_remat import auto_remat
from jaxnorm.remat.fit_memory import fit_memory
from jaxnorm.tools.check_params import NormReport, ParamReport, check_params
from jaxnorm.tools.memory_report import MemoryReport, memory_report
from jaxnorm.tools.plan import Plan, implementation_for
from jaxnorm.tools.remat_plan import RematPlan, RematPoint, remat_plan

__all__ = [
    "Choice",
    "MemoryReport",
    "NormReport",
    "ParamReport",
    "Plan",
    "RematPlan",
    "RematPoint",
    "activation_linear",
    "add_layer_norm",
    "add_rms_norm",
    "auto_remat",
    "check_params",
    "fit_memory",
    "gated_linear",
    "implementation_for",
    "kl_divergence",
    "layer_norm",
    "linear_kl_divergence",
    "linear_log_prob_and_entropy",
    "linear_loss",
    "linear_softmax_cross_entropy",
    "log_prob_and_entropy",
    "log_softmax",
    "memory_report",
    "remat_plan",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_gated",
    "rms_norm_linear",
    "rms_norm_rope",
    "save_policy",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
]

__version__ = "0.5.0.dev0"

# Set `__module__` of the public objects to "jaxnorm", for signatures and tracebacks. help(jaxnorm)
# lists only objects with this value.
for _name in __all__:
    if _name != "save_policy":  # an object that belongs to JAX
        globals()[_name].__module__ = __name__
del _name
