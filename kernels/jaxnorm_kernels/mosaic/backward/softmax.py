"""Backward passes of softmax and log_softmax from the output. With d = dy, sums over the row:

softmax       dx = y (d - sum(d y))
log_softmax   dx = d - exp(y) sum(d)
"""

import dataclasses

import jax

from jaxnorm_kernels.mosaic import elementwise
from jaxnorm_kernels.mosaic.backward import schedule as schedules
from jaxnorm_kernels.mosaic.backward.formulas import Arrays, Operands
from jaxnorm_kernels.mosaic.backward.in_registers import InRegisters, in_registers_backward
from jaxnorm_kernels.mosaic.device.launch import found
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class SoftmaxFormula:
    """The equations above, for elements of a row."""

    spec: Spec
    summed: int = 2
    row_sums: int = 1
    column_sums: int = 0

    def columns(self, params: Arrays) -> list[jax.Array]:
        return list(params)

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        y, d = elements
        return [d] if self._is_log else [d * y]

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        (y, d), (total,) = elements, totals
        return [d - self._exp(y) * total if self._is_log else y * (d - total)], []

    def _exp(self, y: jax.Array) -> jax.Array:
        widest = max(self.spec.x_dtype.itemsize, self.spec.y_dtype.itemsize)
        return elementwise.exp(is_wide=widest > 2)(y)

    @property
    def _is_log(self) -> bool:
        return self.spec.op == "log_softmax"


def softmax_bwd(
    y: jax.Array,
    mask: jax.Array | None,
    dy: jax.Array,
    spec: Spec,
    *,
    schedule: InRegisters | None = None,
) -> tuple[jax.Array, None]:
    """dx, and no gradient of a bias; `schedule` stands in for the one of the table."""
    del mask  # `supports_backward` lets none through.
    formula = SoftmaxFormula(spec)
    schedule = found(schedule or schedules.softmax_schedule(spec), spec)
    (dx,) = in_registers_backward(
        formula,
        Operands([y, dy]),
        schedule=schedule,
        results=[spec.x_dtype],
        name=f"jaxnorm_{spec.op}_bwd",
    )
    return dx, None


#: The op is in the spec.
log_softmax_bwd = softmax_bwd
