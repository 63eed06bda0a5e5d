"""What is timed: operations, shapes and dtypes, and the least bytes that each must move.

Free of JAX and torch: both sides, and the process that starts them, share it.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

Operation = Literal["softmax", "log_softmax", "layer_norm", "rms_norm"]
Direction = Literal["fwd", "bwd", "fwd+bwd"]
Shape = tuple[int, ...]  # rows x cols, but for blocks, losses and products
# Shape and dtype; and of integers how many there are, from 0, of weights their deviation.
Array = tuple[Shape, str] | tuple[Shape, str, float]

OPERATIONS: tuple[Operation, ...] = ("softmax", "log_softmax", "layer_norm", "rms_norm")
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
PARAMETERS = {"softmax": 0, "log_softmax": 0, "rms_norm": 1, "layer_norm": 2}

# rows x cols. A row of the table is one question.
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
QUICK: list[Shape] = [(32768, 1024), (16384, 8192)]

# x, y. The mixed pair is a float32 residual stream with 16-bit matmuls.
DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]
ITEMSIZE = {"bool": 1, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operation in one direction on one shape.

    Attributes:
      op: the operation, over the last axis.
      direction: ``"bwd"`` starts from what the provider's own forward saved; ``"fwd+bwd"`` returns
        the output and all gradients.
      rows, cols: shape of x; ``cols`` is the normalised length.
      x_dtype: of x and its gradient.
      y_dtype: of the output and its cotangent.
    """

    op: Operation
    direction: Direction
    rows: int
    cols: int
    x_dtype: str
    y_dtype: str

    flops = 0  # the bytes that move set its time
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
        """Which row operands have a gradient that a call returns."""
        return (0,)

    @property
    def bytes(self) -> int:
        """Least traffic: x in and y out; one array of y's dtype and its cotangent in, dx out."""
        x, y = ITEMSIZE[self.x_dtype], ITEMSIZE[self.y_dtype]
        each = {"fwd": x + y, "bwd": 2 * y + x, "fwd+bwd": 2 * x + 3 * y}
        return self.rows * self.cols * each[self.direction]


def grid(
    operations: Sequence[Operation] = OPERATIONS,
    directions: Sequence[Direction] = ("fwd", "bwd"),
    dtypes: Sequence[tuple[str, str]] | None = None,
    shapes: Sequence[Shape] | None = None,
) -> Iterator[Workload]:
    """Every workload asked for; the mixed dtypes for the norms alone."""
    shapes = list(itertools.chain(*GRID.values())) if shapes is None else shapes
    for op, direction, (x, y), (rows, cols) in itertools.product(
        operations, directions, DTYPES if dtypes is None else dtypes, shapes
    ):
        if x == y or PARAMETERS[op]:
            yield Workload(op, direction, rows, cols, x, y)


@dataclasses.dataclass(frozen=True)
class ShapedWorkload(abc.ABC):
    """One operation in one direction, on arrays that a shape tells.

    Attributes:
      op: a name in the table of its kind: of blocks, of losses, of products.
      direction: ``"fwd+bwd"`` returns the results and all gradients, from one call.
      shape: as text: "8192x4096".
      dtype: of its arrays, or "mixed".
    """

    op: str
    direction: Direction
    shape: str
    dtype: str

    @property
    @abc.abstractmethod
    def row_operands(self) -> tuple[Array, ...]: ...

    @property
    @abc.abstractmethod
    def parameter_shapes(self) -> tuple[Shape, ...]: ...

    @property
    @abc.abstractmethod
    def cotangents(self) -> tuple[Array, ...]: ...

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Least traffic."""

    @property
    def mixed(self) -> bool:
        return False

    @property
    def flops(self) -> int:
        """Of matrix products, where they set its time and not the bytes that move."""
        return 0

    @property
    def constants(self) -> tuple[int, ...]:
        """Which row operands a training step does not differentiate, though they are floats."""
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


class FewParameters(ShapedWorkload):
    """One without parameters, or with few, whose backward reads all that its forward does."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[tuple[Shape, str], ...]: ...

    @property
    @abc.abstractmethod
    def gradients(self) -> tuple[int, ...]:
        """Which row operands have a gradient."""

    @property
    def bytes(self) -> int:
        """Least traffic: operands and results once; backwards the same, and the gradients."""
        operands = [array[:2] for array in self.row_operands]
        arrays = [*operands, *self.results]
        if self.direction == "fwd+bwd":
            arrays += [*arrays, *(operands[i] for i in self.gradients)]
        return sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in arrays)


def shaped(
    kind: Callable[..., Any],
    table: Mapping[str, Any],
    ops: Sequence[str],
    directions: Sequence[Direction],
    dtypes: Sequence[str],
    shapes: Sequence[Shape] | None = None,
    *,
    quick: bool = False,
) -> Iterator[Any]:
    """Every workload asked for; of `shapes` those of as many axes as the operation's own have.

    `kind` is its class, a ShapedWorkload. `table` has what can be asked of each operation: shapes,
    quick (of them), directions and dtypes.
    """
    for op in (name for name in ops if name in table):
        asked = table[op]
        its = asked.quick if quick else asked.shapes
        if shapes is not None:
            its = [shape for shape in shapes if len(shape) == len(asked.shapes[0])]
        for direction, dtype, shape in itertools.product(directions, dtypes, its):
            if direction in asked.directions and dtype in asked.dtypes:
                yield kind(op, direction, "x".join(map(str, shape)), dtype)
