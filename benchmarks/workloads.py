"""Workloads: the timed operations, shapes and dtypes, and their minimum memory traffic.

This module imports neither JAX nor torch. It is imported by processes with JAX, by processes with
torch, and by the process that starts them.
"""

import dataclasses
from typing import ClassVar, Literal

Operation = Literal["softmax", "log_softmax", "layer_norm", "rms_norm"]
Direction = Literal["fwd", "bwd", "fwd+bwd"]
Shape = tuple[int, ...]
# A tuple that describes an array: (shape, dtype) or (shape, dtype, number). For an array of
# integers, the number is n, and the integers are drawn from range(n). For a weight, the number is
# the standard deviation of its elements.
Array = tuple[Shape, str] | tuple[Shape, str, float]

OPERATIONS: tuple[Operation, ...] = ("softmax", "log_softmax", "layer_norm", "rms_norm")
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
PARAMETERS = {"softmax": 0, "log_softmax": 0, "rms_norm": 1, "layer_norm": 2}

# Shapes (rows, cols) of x for norms and softmaxes. A key describes a kind of shape.
GRID: dict[str, list[Shape]] = {
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

# Pairs of x's and y's dtype. The mixed pair occurs in models with a float32 residual stream and
# bfloat16 matmuls.
DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]
ITEMSIZE = {"bool": 1, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload: one operation, which of its passes run, and the shape and dtypes of its arrays.

    Attributes:
      op: the name of the operation, a norm or a softmax.
      direction: ``"fwd"`` is the forward pass; ``"bwd"`` is the backward pass, which takes the
        residuals that the provider's forward pass saves; ``"fwd+bwd"`` is a call that returns the
        output and all gradients.
      rows, cols: the shape of x.
      x_dtype: the dtype of x and its gradient.
      y_dtype: the dtype of the output and its cotangent.
    """

    op: Operation
    direction: Direction
    rows: int
    cols: int
    x_dtype: str
    y_dtype: str

    has_matmul = False
    constants: ClassVar[tuple[int, ...]] = ()

    @property
    def mixed(self) -> bool:
        return self.x_dtype != self.y_dtype

    @property
    def row_operands(self) -> tuple[Array, ...]:
        return (((self.rows, self.cols), self.x_dtype),)

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ((self.cols,),) * PARAMETERS[self.op]

    @property
    def cotangents(self) -> tuple[Array, ...]:
        return (((self.rows, self.cols), self.y_dtype),)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Indices into `row_operands`. A call returns the gradients of these operands."""
        return (0,)

    @property
    def bytes(self) -> int:
        """The minimum memory traffic in bytes.

        The forward pass loads x and stores y. The backward pass loads dy and a saved array of y's
        dtype, and stores dx.
        """
        x, y = ITEMSIZE[self.x_dtype], ITEMSIZE[self.y_dtype]
        each = {"fwd": x + y, "bwd": 2 * y + x, "fwd+bwd": 2 * x + 3 * y}
        return self.rows * self.cols * each[self.direction]


@dataclasses.dataclass(frozen=True)
class ShapedWorkload:
    """A workload that runs one operation. The shapes of all its arrays follow from `shape`.

    Attributes:
      op: the operation's name in the table of blocks or losses.
      direction: ``"fwd"`` is the forward pass; ``"fwd+bwd"`` is a call that returns the results and
        all gradients.
      shape: the sizes as text, such as "8192x4096".
      dtype: the dtype of its arrays, or "mixed".
    """

    op: str
    direction: Direction
    shape: str
    dtype: str

    @property
    def mixed(self) -> bool:
        return False

    @property
    def has_matmul(self) -> bool:
        """True if matmuls limit the speed, False if memory traffic does."""
        return False

    @property
    def constants(self) -> tuple[int, ...]:
        """The float operands that need no gradient in training, as indices into `row_operands`."""
        return ()

    @property
    def sizes(self) -> Shape:
        return tuple(map(int, self.shape.split("x")))

    @property
    def x_dtype(self) -> str:
        return self.dtype

    @property
    def y_dtype(self) -> str:
        return self.dtype
