"""What is timed: operations, shapes and dtypes, and the least bytes that each must move."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.specs import Direction, Spec

Operation = Literal["softmax", "log_softmax", "layer_norm", "rms_norm"]
OPERATIONS: tuple[Operation, ...] = ("softmax", "log_softmax", "layer_norm", "rms_norm")
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")

# rows x cols. A row of the table is one question.
GRID: dict[str, list[tuple[int, int]]] = {
    "narrow rows": [(32768, n) for n in (128, 256, 512, 768)],
    "powers of two": [
        *((32768, n) for n in (1024, 2048, 4096)),
        (16384, 8192),
        (8192, 16384),
        (4096, 32768),
        (4096, 65536),
        (1024, 131072),
    ],
    "model widths": [(4096, 5120), (8192, 5120), (8192, 12288)],
    "odd rows": [(8192, n) for n in (1000, 3000, 4095, 50257)],
    "few rows": [(m, n) for m in (1, 128, 2048) for n in (4096, 8192)],
    "pair representations": [(m * m, n) for m in (384, 768) for n in (64, 128)],
}
QUICK = [(32768, 1024), (16384, 8192)]

# x, y. Parameters are float32. The mixed pair is a float32 residual stream with 16-bit matmuls.
DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One function of the contract on one shape."""

    op: Operation
    direction: Direction
    rows: int
    cols: int
    x_dtype: str
    y_dtype: str

    @property
    def is_norm(self) -> bool:
        return self.op.endswith("norm")

    @property
    def bytes(self) -> int:
        """Least traffic: x in and y out; or the saved y and its cotangent in and dx out."""
        x, y = (jnp.dtype(d).itemsize for d in (self.x_dtype, self.y_dtype))
        return self.rows * self.cols * (x + y if self.direction == "fwd" else 2 * y + x)

    @property
    def spec(self) -> Spec:
        parameter = np.dtype(np.float32)
        return Spec(
            op="norm" if self.is_norm else self.op,  # type: ignore[arg-type]
            direction=self.direction,
            rows=self.rows,
            cols=self.cols,
            x_dtype=jnp.dtype(self.x_dtype),
            y_dtype=jnp.dtype(self.y_dtype),
            scale_dtype=parameter if self.is_norm else None,
            bias_dtype=parameter if self.op == "layer_norm" else None,
            epsilon=1e-6 if self.is_norm else 0.0,
            subtract_mean=self.op == "layer_norm",
        )

    def function(self, implementation: ModuleType) -> Callable[..., Any]:
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

        def normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
            return jax.random.normal(key, shape, dtype)

        if self.is_norm:
            scale = 1 + 0.1 * normal(keys[0], (self.cols,), "float32")
            bias = normal(keys[1], (self.cols,), "float32") if self.op == "layer_norm" else None
        if self.direction == "fwd":
            x = normal(keys[2], shape, self.x_dtype)
            return (x, scale, bias) if self.is_norm else (x,)
        dy = normal(keys[3], shape, self.y_dtype)
        if not self.is_norm:
            function = jax.nn.softmax if self.op == "softmax" else jax.nn.log_softmax
            return function(normal(keys[2], shape, self.y_dtype)), dy
        rstd = 1 + jax.random.uniform(keys[4], (self.rows,))
        return normal(keys[2], shape, self.y_dtype), dy, rstd, scale, bias


def grid(
    operations: tuple[Operation, ...] = OPERATIONS,
    directions: tuple[Direction, ...] = DIRECTIONS,
    dtypes: list[tuple[str, str]] | None = None,
    shapes: list[tuple[int, int]] | None = None,
) -> Iterator[Workload]:
    """Every workload asked for; the mixed dtypes for the norms alone."""
    shapes = list(itertools.chain(*GRID.values())) if shapes is None else shapes
    for op, direction, (x, y), (rows, cols) in itertools.product(
        operations, directions, dtypes or DTYPES, shapes
    ):
        if x == y or op.endswith("norm"):
            yield Workload(op, direction, rows, cols, x, y)
