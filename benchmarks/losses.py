"""Losses: cross-entropies of integer labels, of logits and of what logits are made of.

A new loss is an entry here, and a function in each adapter of `benchmarks/providers` that has it.

Free of JAX and torch, as `workloads` is.
"""

import dataclasses
import functools
import itertools

from benchmarks.workloads import Array, Direction, OneResult, Shape, shaped

#: Positions x classes: vocabularies of a power of two, GPT-2, Llama 3 and Gemma.
LOGITS: tuple[Shape, ...] = (
    *((8192, classes) for classes in (32768, 50257, 128256, 262144)),
    (4096, 128256),
)


#: Of Gemma 2's logits: SOFTCAP tanh(logits / SOFTCAP).
SOFTCAP = 30.0


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

    @property
    def quick(self) -> tuple[Shape, ...]:
        return self.shapes[:1]


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(LOGITS, ("fwd", "fwd+bwd"), ("bfloat16", "float32"), mean=False),
    "capped_cross_entropy": Loss(
        ((8192, 32768), (8192, 128256)), ("fwd", "fwd+bwd"), ("bfloat16", "float32"), mean=False
    ),
    # A model's last layer and its loss. `products` is what it is measured by.
    "linear_cross_entropy": Loss(((8192, 4096, 128256),), ("fwd+bwd",), ("bfloat16",), mean=True),
    "capped_linear_cross_entropy": Loss(
        ((8192, 4096, 128256),), ("fwd+bwd",), ("bfloat16",), mean=True
    ),
}


class LossWorkload(OneResult):
    """One loss in one direction on one shape. The dtype is that of x and weight."""

    @property
    def loss(self) -> Loss:
        return LOSSES[self.op]

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
    def result(self) -> tuple[Shape, str]:
        return () if self.loss.mean else self.sizes[:1], self.y_dtype

    @property
    def cotangents(self) -> tuple[Array, ...]:
        """None for a mean: a training step differentiates it as it is, and libraries use that."""
        return () if self.loss.mean else (self.result,)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Which operands have a gradient: all but labels."""
        return tuple(range(len(self.sizes) - 1))

    @property
    def flops(self) -> int:
        """Of the products of x, weight and their gradients, where there is a weight."""
        return self.product_flops if len(self.sizes) > 2 else 0


grid = functools.partial(shaped, LossWorkload, LOSSES)
