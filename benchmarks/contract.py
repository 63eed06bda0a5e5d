"""Workloads that call the kernels of an implementation directly, not through public functions."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from benchmarks.linear import LinearWorkload
from benchmarks.workloads import ITEMSIZE, Workload
from jaxnorm_kernels import xla
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, Op
from jaxnorm_kernels.specs import Direction, NormOptions, Shared, SoftmaxOptions, Spec

#: Maps each pass (operation, direction) to a pair of numbers. They count the arrays of x's shape
#: that the pass loads or stores: first the arrays with the dtype of x, then the arrays with the
#: dtype of y. Backward passes are assumed to read the saved output.
_ARRAYS: dict[tuple[Op, str], tuple[int, int]] = {
    # x, residual and h have x_dtype; y has y_dtype.
    ("add_norm", "fwd"): (3, 1),
    # dh and dx have x_dtype; y and dy have y_dtype.
    ("add_norm", "bwd"): (2, 2),
    # x, residual and their sum have the dtype of x.
    ("norm_add", "fwd"): (3, 0),
    # x, residual and h have x_dtype; y has y_dtype.
    ("norm_add_norm", "fwd"): (3, 1),
    # x, dh, dx and dresidual have the dtype of x; y and dy have the dtype of y.
    ("norm_add_norm", "bwd"): (4, 2),
}


def call(implementation: Any, spec: Spec, *operands: Any, **schedule: Any) -> tuple[Any, ...]:
    """Run one pass of an implementation. The arrays are in the order of the table `OPERATIONS`.

    A forward pass takes the operands. It returns the results, followed by a tuple of the
    statistics. A backward pass takes the residuals, followed by the cotangents, and returns the
    gradients. Among the residuals, the statistics are a single entry, which is a tuple. An absent
    array is None. The residual `logits_scale` is left out, because no timed call has it.
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
    def bytes(self) -> int:
        arrays = _ARRAYS.get((self.operation, self.direction))
        if arrays is None:
            return super().bytes
        of_x, of_y = arrays
        itemsizes = of_x * ITEMSIZE[self.x_dtype] + of_y * ITEMSIZE[self.y_dtype]
        return math.prod(self.shape) * itemsizes

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
        saved = of_rows(self.y_dtype if spec.norm.saved == "output" else self.x_dtype)
        kept = map(operand, operation.keeps)
        return (*x, saved, tuple(rstd), *kept, of_rows(self.y_dtype), *dh)

    @property
    def _subtracts_mean(self) -> bool:
        return FUNCTIONS[self.op].subtract_mean

    @property
    def _adds_dh(self) -> bool:
        return self.direction == "bwd" and "h" in OPERATIONS[self.operation].results


class LinearKernelWorkload(LinearWorkload):
    """The forward kernel that fuses a norm and the matmul after it, run on one shape."""

    @property
    def cols(self) -> int:
        return self.sizes[1]

    def function(self, implementation: Any) -> Callable[..., Any]:
        """Return a function of x, weight and scale that runs the implementation.

        For the implementation xla, it computes the norm and the matmul in plain JAX.
        """
        if implementation is xla:
            return functools.partial(jaxnorm.rms_norm_linear, implementation="xla")
        return functools.partial(
            implementation.rms_norm_linear_fwd, dtype=jnp.dtype(self.dtype), epsilon=1e-6
        )

    def operands(self, seed: int) -> tuple[jax.Array, ...]:
        """Return random operands.

        They are not zeros, because a GPU's clock frequency depends on the values that it
        multiplies. A matmul of zeros could run faster than the same matmul in a model.
        """
        keys = jax.random.split(jax.random.key(seed), 3)
        (x, dtype), (weight, _, deviation) = self.row_operands
        scales = [1 + 0.1 * jax.random.normal(keys[2], shape) for shape in self.parameter_shapes]
        of_weight = jax.random.normal(keys[1], weight, dtype) * jnp.asarray(deviation, dtype)
        return jax.random.normal(keys[0], x, dtype), of_weight, *scales


@dataclasses.dataclass(frozen=True)
class HeadsKernelWorkload:
    """The kernel of an RMSNorm of attention heads followed by a rotation (RoPE).

    The kernel computes a forward pass, or a backward pass that reads the saved output.

    Attributes:
      shape: the shape of x: (batch, length, number of heads, columns of a head). All columns are
        rotated.
    """

    direction: Direction
    shape: tuple[int, int, int, int]
    x_dtype: str

    op = "rms_norm_rope"

    @property
    def y_dtype(self) -> str:
        return self.x_dtype

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def bytes(self) -> int:
        return (
            (2 if self.direction == "fwd" else 3) * math.prod(self.shape) * ITEMSIZE[self.x_dtype]
        )

    @property
    def spec(self) -> Spec:
        batch, length, heads, cols = self.shape
        dtype, parameter = jnp.dtype(self.x_dtype), np.dtype(np.float32)
        return Spec(
            "norm_rope",
            self.direction,
            *(batch * length * heads, cols),
            *(dtype, dtype),
            outputs=("y",),
            options=NormOptions(
                scale_dtype=parameter,
                epsilon=1e-6,
                table_dtype=parameter,
                rotated=cols,
                table_rows=Shared(
                    ((batch, False), (length, True), (heads, False)), has_columns=True
                ),
            ),
        )

    def function(self, implementation: Any) -> Callable[..., Any]:
        """Return a function that runs the implementation on the arrays that `operands` returns."""
        spec = self.spec
        if implementation is not xla:
            return functools.partial(self._in_rows, functools.partial(call, implementation, spec))
        return lambda *operands: call(xla, spec, *operands)[: 1 if self.direction == "fwd" else 2]

    def operands(self, seed: int) -> tuple[Any, ...]:
        """Return random operands in the shapes that the public function takes."""
        keys = iter(jax.random.split(jax.random.key(seed), 5))
        _, length, _, cols = self.shape
        angle = jax.random.uniform(next(keys), (1, length, 1, cols // 2), jnp.float32, 0, 6)
        shared = (1 + 0.1 * jax.random.normal(next(keys), (cols,)), jnp.cos(angle), jnp.sin(angle))
        x = jax.random.normal(next(keys), self.shape, self.x_dtype)
        if self.direction == "fwd":
            return x, *shared
        rstd = 1 + jax.random.uniform(next(keys), self.shape[:-1], jnp.float32)
        return x, (rstd,), *shared, jax.random.normal(next(keys), self.shape, self.x_dtype)

    def _in_rows(self, function: Callable[..., Any], *operands: Any) -> list[Any]:
        """Reshape the operands to rows, run `function` on them, and reshape its result back."""
        views = [
            jax.tree.map(lambda a: a.reshape(-1), a)
            if isinstance(a, tuple)
            else a.reshape(-1, a.shape[-1])
            if a.ndim > 1
            else a
            for a in operands
        ]
        first, *others = function(*views)
        return [first.reshape(self.shape), *others[: int(self.direction == "bwd")]]
