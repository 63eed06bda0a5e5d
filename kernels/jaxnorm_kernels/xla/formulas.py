"""What an operation is in plain JAX: a function for each of its passes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec

_ANOTHER_S: Any = None


class Formulas(NamedTuple):
    """See `Implementation`; forward alone where the table names another operation's derivative."""

    forward: Callable[[Operands, Spec], Results]
    tangent: Callable[[Residuals, Operands, Spec], Results] = _ANOTHER_S
    backward: Callable[[Residuals, Results, Spec], Operands] = _ANOTHER_S
