"""A workload as the implementations see it: a function of their contract, and its operands."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import PARAMETERS, Workload
from jaxnorm_kernels.specs import Spec


@dataclasses.dataclass(frozen=True)
class KernelWorkload(Workload):
    """One function of the contract on one shape, forward or backward from the output."""

    @property
    def is_norm(self) -> bool:
        return PARAMETERS[self.op] > 0

    @property
    def spec(self) -> Spec:
        parameter = np.dtype(np.float32)
        return Spec(
            op="norm" if self.is_norm else self.op,  # type: ignore[arg-type]
            direction=self.direction,  # type: ignore[arg-type]
            rows=self.rows,
            cols=self.cols,
            x_dtype=jnp.dtype(self.x_dtype),
            y_dtype=jnp.dtype(self.y_dtype),
            scale_dtype=parameter if self.is_norm else None,
            bias_dtype=parameter if self.op == "layer_norm" else None,
            epsilon=1e-6 if self.is_norm else 0.0,
            subtract_mean=self.op == "layer_norm",
        )

    def function(self, implementation: Any) -> Callable[..., Any]:
        """The implementation's function over what `operands` gives."""
        spec, name = self.spec, "norm" if self.is_norm else self.op
        call = getattr(implementation, f"{name}_{self.direction}")
        if not self.is_norm and self.direction == "fwd":
            return lambda x: call(x, None, spec=spec)
        if not self.is_norm:
            return lambda y, dy: call(y, None, dy, spec=spec)
        if self.direction == "fwd":
            return lambda x, scale, bias: call(x, scale, bias, spec=spec)[0]
        return lambda y, dy, rstd, scale, bias: call(y, (rstd,), scale, bias, dy, spec=spec)

    def operands(self, seed: int) -> tuple[jax.Array | None, ...]:
        """Random operands, as large as they are in use: never constants, which compress."""
        keys = jax.random.split(jax.random.key(seed), 5)
        shape = (self.rows, self.cols)
        scale = 1 + 0.1 * jax.random.normal(keys[0], shape[1:], jnp.float32)
        bias = jax.random.normal(keys[1], shape[1:], jnp.float32)
        bias = bias if self.op == "layer_norm" else None
        if self.direction == "fwd":
            x = jax.random.normal(keys[2], shape, self.x_dtype)
            return (x, scale, bias) if self.is_norm else (x,)
        y, dy = (jax.random.normal(key, shape, self.y_dtype) for key in keys[2:4])
        if not self.is_norm:
            function = jax.nn.softmax if self.op == "softmax" else jax.nn.log_softmax
            return function(y), dy
        rstd = 1 + jax.random.uniform(keys[4], shape[:1], jnp.float32)
        return y, dy, rstd, scale, bias
