"""Losses: cross-entropies of integer labels, of logits and of what logits are made of.

A new loss is an entry here, and a function in each adapter of `benchmarks/providers` that has it.

Free of JAX and torch, as `workloads` is.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from benchmarks.workloads import ITEMSIZE, Array, Direction, Shape, of_as_many_axes

#: Positions x classes: vocabularies of a power of two, GPT-2, Llama 3 and Gemma.
LOGITS: tuple[Shape, ...] = (
    *((8192, classes) for classes in (32768, 50257, 128256, 262144)),
    (4096, 128256),
)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is asked of one loss. A shape is x's, then the classes where weight makes the logits.

    Attributes:
      shapes: rows x classes; or rows x features x classes, of x (rows, features) and weight
        (features, classes).
      dtypes: of x and weight. The loss is float32.
      mean: over the positions, whose gradients are asked as they are; else the loss of each
        position, with a cotangent of each.
    """

    shapes: tuple[Shape, ...]
    directions: tuple[Direction, ...]
    dtypes: tuple[str, ...]
    mean: bool


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(LOGITS, ("fwd", "fwd+bwd"), ("bfloat16", "float32"), mean=False),
    # A model's last layer and its loss. `products` is what it is measured by.
    "linear_cross_entropy": Loss(((8192, 4096, 128256),), ("fwd+bwd",), ("bfloat16",), mean=True),
}


@dataclasses.dataclass(frozen=True)
class LossWorkload:
    """One loss in one direction on one shape.

    Attributes:
      op: the loss's name.
      direction: ``"fwd+bwd"`` returns the loss and the gradients of x and weight, from one call.
      shape: as text: "8192x32768", "8192x4096x128256".
      dtype: of x and weight.
    """

    op: str
    direction: Direction
    shape: str
    dtype: str

    mixed = False

    @property
    def loss(self) -> Loss:
        return LOSSES[self.op]

    @property
    def sizes(self) -> Shape:
        return tuple(map(int, self.shape.split("x")))

    @property
    def x_dtype(self) -> str:
        return self.dtype

    @property
    def y_dtype(self) -> str:
        return "float32"

    @property
    def row_operands(self) -> tuple[Array, ...]:
        """x, weight if there is one, labels. Logits are near normal, whoever makes them."""
        rows, *_, classes = self.sizes
        x, *weights = itertools.pairwise(self.sizes)
        return (
            (x, self.dtype),
            *((shape, self.dtype, shape[0] ** -0.5) for shape in weights),
            ((rows,), "int32", classes),
        )

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def cotangents(self) -> tuple[Array, ...]:
        """None for a mean: a training step differentiates it as it is, and libraries use that."""
        return () if self.loss.mean else (((self.sizes[0],), self.y_dtype),)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Which operands have a gradient: all but labels."""
        return tuple(range(len(self.sizes) - 1))

    @property
    def bound_by_products(self) -> bool:
        """Whether matrix products set its time, and not the bytes that move."""
        return len(self.sizes) > 2

    @property
    def bytes(self) -> int:
        """Least traffic: operands and loss once; backwards the same, and the gradients."""
        operands = [(shape, dtype) for shape, dtype, *_ in self.row_operands]
        loss = (() if self.loss.mean else self.sizes[:1], self.y_dtype)
        arrays = [*operands, loss]
        if self.direction == "fwd+bwd":
            arrays += [*arrays, *(operands[i] for i in self.gradients)]
        return sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in arrays)


def grid(
    ops: Sequence[str],
    directions: Sequence[Direction],
    dtypes: Sequence[str],
    shapes: Sequence[Shape] | None = None,
    *,
    quick: bool = False,
) -> Iterator[LossWorkload]:
    """Every workload asked for; of `shapes` those of as many axes as the loss's own have."""
    for op in (name for name in ops if name in LOSSES):
        loss = LOSSES[op]
        if shapes is not None:
            its = of_as_many_axes(shapes, loss.shapes)
        else:
            its = list(loss.shapes[: 1 if quick else None])
        for direction, dtype, shape in itertools.product(directions, dtypes, its):
            if direction in loss.directions and dtype in loss.dtypes:
                yield LossWorkload(op, direction, "x".join(map(str, shape)), dtype)
