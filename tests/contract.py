"""Workloads that call the kernels of an implementation directly, not through public functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Workload
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, Op
from jaxnorm_kernels.specs import NormOptions, SoftmaxOptions, Spec


def call(implementation: Any, spec: Spec, *operands: Any, **schedule: Any) -> tuple[Any, ...]:
    """Run one pass of an implementation. The arrays are in the order of the table `OPERATIONS`.

    A forward pass takes the operands. It returns the results, followed by a tuple of the
    statistics. A backward pass takes the residuals, followed by the cotangents, and returns the
    gradients. Among the residuals, the statistics are a single entry, which is a tuple. An absent
    array is None. The residual `logits_scale` is left out, because no test of kernels has it.
    """
    operation = spec.operation
    statistics = ("stats",) if operation.statistics else ()
    if spec.direction == "fwd":
        given = Operands(**dict(zip(operation.operands, operands)))
        results = implementation.forward(given, spec, **schedule)
        return tuple(getattr(results, name) for name in (*operation.results, *statistics))
    x = ("x",) if operation.starts_from_x else ()
    kept = (name for name in operation.keeps if name != "logits_scale")
    names = (*x, "saved", *statistics, *kept)
    residuals = Residuals(**dict(zip(names, operands)))
    of_results = dict.fromkeys(("y", *operation.results, "h"))
    cotangents = Results(**dict(zip(of_results, operands[len(names) :])))
    gradients = implementation.backward(residuals, cotangents, spec, **schedule)
    return tuple(getattr(gradients, name) for name in operation.differentiable)


@dataclasses.dataclass(frozen=True)
class KernelWorkload(Workload):
    """One kernel, run on one shape of x.

    The kernel computes a forward pass, or a backward pass that reads the saved output. If the
    operation has a residual, the residual has x's dtype.
    """

    @property
    def operation(self) -> Op:
        return FUNCTIONS[self.op].op

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def is_norm(self) -> bool:
        return "norm" in self.op

    @property
    def spec(self) -> Spec:
        op = self.operation
        types = jnp.dtype(self.x_dtype), jnp.dtype(self.y_dtype)
        if not self.is_norm:
            return Spec(
                op,
                self.direction,  # type: ignore[arg-type]
                self.rows,
                self.cols,
                *types,
                outputs=("y",),
                options=SoftmaxOptions(),
            )
        backward_of_sum = op == "add_norm" and self.direction == "bwd"
        parameter = np.dtype(np.float32)
        operation = OPERATIONS[op]
        has_residual = "residual" in operation.operands and not backward_of_sum
        return Spec(
            "norm" if backward_of_sum else op,
            self.direction,  # type: ignore[arg-type]
            self.rows,
            self.cols,
            *types,
            outputs=("y", "h") if self._adds_dh else tuple(operation.results),
            options=NormOptions(
                scale_dtype=parameter,
                bias_dtype=parameter if self._subtracts_mean else None,
                residual_dtype=types[0] if has_residual else None,
                next_scale_dtype=parameter if "next_scale" in operation.operands else None,
                saved="input" if operation.saves[0] == "x" else "output",
                epsilon=1e-6,
                subtract_mean=self._subtracts_mean,
            ),
        )

    def function(self, implementation: Any) -> Callable[..., Any]:
        """Return a function that runs the implementation on the arrays that `operands` returns."""
        spec, results = self.spec, len(self.spec.operation.results)
        if self.direction == "bwd":
            return lambda *operands: call(implementation, spec, *operands)
        return lambda *operands: call(implementation, spec, *operands)[:results]

    def operands(self, seed: int) -> tuple[Any, ...]:
        """Return random operands. A GPU would compress constant arrays, which changes the time."""
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        spec, backward = self.spec, self.direction == "bwd"

        def normal(shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
            return jax.random.normal(next(keys), shape, dtype)

        def of_rows(dtype: str) -> jax.Array:
            return normal(self.shape, dtype)

        if not self.is_norm and not backward:
            return (of_rows(self.x_dtype),)
        if not self.is_norm:
            function = jax.nn.softmax if self.op == "softmax" else jax.nn.log_softmax
            return function(of_rows(self.y_dtype)), None, of_rows(self.y_dtype)

        def operand(name: str) -> jax.Array | None:
            if OPERANDS[name] == "array":
                return of_rows(self.x_dtype)
            if OPERANDS[name] == "bias":
                return normal((self.cols,)) if self._subtracts_mean else None
            return 1 + 0.1 * normal((self.cols,))

        operation = spec.operation
        if not backward:
            return tuple(map(operand, operation.operands))
        rstd = [1 + jax.random.uniform(next(keys), (self.rows,), jnp.float32) for _ in spec.norms]
        dh = [of_rows(self.x_dtype)] if self._adds_dh else []
        x = [of_rows(self.x_dtype)] * operation.starts_from_x
        saved = of_rows(self.y_dtype if not spec.saves_input else self.x_dtype)
        kept = map(operand, operation.keeps)
        return (*x, saved, tuple(rstd), *kept, of_rows(self.y_dtype), *dh)

    @property
    def _subtracts_mean(self) -> bool:
        return FUNCTIONS[self.op].subtract_mean

    @property
    def _adds_dh(self) -> bool:
        return self.direction == "bwd" and "h" in OPERATIONS[self.operation].results
