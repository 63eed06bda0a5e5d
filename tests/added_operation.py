"""A complete example of adding an operation in plain JAX: ``factor * norm(x)``.

Here, the whole example is in one file. In the library, its parts would be in several files (see
CONTRIBUTING.md). The comment above each part names the file.
"""

import dataclasses

from jaxnorm.operations import norm
from jaxnorm.tools import references
from jaxnorm_kernels.operations import OPERATIONS, Function
from jaxnorm_kernels.specs import NormOptions
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.norm import norm_bwd, norm_fwd

# kernels/jaxnorm_kernels/operations.py

OPERATION = dataclasses.replace(
    OPERATIONS["norm"],
    operands=("x", "scale"),
    saves=("x", "x"),
    also_saved=("scale",),
    statistics=("rstd",),
    through_h=(),
    has_kernels=False,
)
FUNCTION = Function("norm_scaled")


# specs.py: a new field of NormOptions


@dataclasses.dataclass(frozen=True)
class OptionsWithFactor(NormOptions):
    factor: float = 1.0


# xla/norm.py


def norm_scaled_fwd(operands, spec):
    """Compute ``y = factor * norm(x)``."""
    results = norm_fwd(operands, _unrounded(spec))
    return results._replace(y=(spec.norm.factor * results.y).astype(spec.y_dtype))


def norm_scaled_bwd(residuals, cotangents, spec):
    dy = spec.norm.factor * cotangents.y.astype(spec.compute_dtype)
    return norm_bwd(residuals, cotangents._replace(y=dy), _unrounded(spec))


def _unrounded(spec):
    return dataclasses.replace(spec, y_dtype=spec.compute_dtype)


FORMULAS = Formulas(norm_scaled_fwd, norm_scaled_bwd)

# jaxnorm/operations/norm.py


def rms_norm_scaled(x, scale=None, *, factor=1.0, axis=-1, epsilon=1e-6, implementation=None):
    options = OptionsWithFactor(epsilon=epsilon, saved="input", factor=factor)
    (y,) = norm.normalise(
        "rms_norm_scaled", options, x, {"scale": scale}, axis, None, implementation
    )
    return y


# jaxnorm/tools/references.py


def reference(x, scale, *, factor=1.0):
    return factor * references.norm(x, scale)
