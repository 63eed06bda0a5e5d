"""A loss as the implementations see it: a function of their contract, and its operands."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.contract import call
from benchmarks.workloads import ITEMSIZE, Direction, Shape
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS
from jaxnorm_kernels.specs import LossOptions, Spec


@dataclasses.dataclass(frozen=True)
class LossKernelWorkload:
    """A function of logits and labels on one shape; forward with statistics, as in training.

    Attributes:
      op: name of the function.
      softcap: of the logits.
    """

    op: str
    direction: Direction
    shape: Shape
    x_dtype: str
    softcap: float | None = None

    y_dtype = "float32"

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def bytes(self) -> int:
        arrays = 1 if self.direction == "fwd" else 2
        return arrays * math.prod(self.shape) * ITEMSIZE[self.x_dtype]

    @property
    def spec(self) -> Spec:
        rows, cols = self.shape
        op = FUNCTIONS[self.op].op
        outputs = tuple(OPERATIONS[op].results)
        if self.direction == "fwd":
            outputs += OPERATIONS[op].statistics
        return Spec(
            op,
            self.direction,  # type: ignore[arg-type]
            rows,
            cols,
            jnp.dtype(self.x_dtype),
            jnp.dtype(self.y_dtype),
            outputs,
            LossOptions(logit_softcap=self.softcap),
        )

    def function(self, implementation: Any) -> Callable[..., Any]:
        """The implementation's function over what `operands` gives."""
        return functools.partial(call, implementation, self.spec)

    def operands(self, seed: int) -> tuple[Any, ...]:
        """Random operands; statistics near those of such logits."""
        keys = jax.random.split(jax.random.key(seed), 3)
        rows, cols = self.shape
        x = jax.random.normal(keys[0], self.shape, self.x_dtype)
        labels = jax.random.randint(keys[1], (rows,), 0, cols)
        if self.direction == "fwd":
            return x, labels
        d = jax.random.normal(keys[2], (rows,))
        stats = (jnp.zeros(rows), jnp.full(rows, math.log(cols)))
        if not self.spec.returns_entropy:
            return x, stats, labels, None, d
        return x, stats, labels, None, stats[1], d, d
