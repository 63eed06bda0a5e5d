"""Losses: cross-entropies and log-probabilities, of logits and of linear layers.

A new loss is an entry here, and a function in each adapter of `benchmarks/providers` that has it.
This module does not import JAX or torch, like `workloads`.
"""

import dataclasses
import functools
import itertools
import math

from benchmarks.workloads import Array, Direction, FewParameters, Shape, shaped

#: Shapes of logits, positions x classes: vocabularies of a power of two, GPT-2, Llama 3 and Gemma.
LOGITS: tuple[Shape, ...] = (
    *((8192, classes) for classes in (32768, 50257, 128256, 262144)),
    (4096, 128256),
)
FEW_LOGITS: tuple[Shape, ...] = ((8192, 32768), (8192, 128256))
#: Shapes of the last layers of Llama 3 8B and Llama 3.2 1B, of one with GPT-2's vocabulary, and of
#: one with Llama 2's: rows, features, classes.
LINEAR_LOGITS: tuple[Shape, ...] = (
    (8192, 4096, 128256),
    (8192, 2048, 128256),
    (16384, 2048, 50257),
    (4096, 8192, 32000),
)

#: Gemma 2's cap of the logits: SOFTCAP tanh(logits / SOFTCAP).
SOFTCAP = 30.0


@dataclasses.dataclass(frozen=True)
class Loss:
    """The measured cells of one loss.

    Attributes:
      shapes: rows x classes; or rows x features x classes, for x (rows, features) and weight
        (features, classes).
      dtypes: the dtypes of x and weight. Results are float32.
      mean: True if the mean over the positions is differentiated; otherwise, each position has a
        result and a cotangent.
      results: the number of results.
      products: the number of matmuls, forward and backward.
      logit_bytes: bytes per logit that the passes between the matmuls may load and store, for the
        bar. 6 are a read and a write of 16-bit logits, and a read of their gradient.
    """

    shapes: tuple[Shape, ...]
    directions: tuple[Direction, ...]
    dtypes: tuple[str, ...]
    mean: bool = False
    results: int = 1
    products: int = 0
    logit_bytes: int = 0

    @property
    def quick(self) -> tuple[Shape, ...]:
        return self.shapes[:1]


_BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")
_DTYPES = ("bfloat16", "float32")
_LINEAR = Loss(LINEAR_LOGITS, ("fwd+bwd",), ("bfloat16",), mean=True, products=3, logit_bytes=6)

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(LOGITS, _BOTH, _DTYPES),
    "capped_cross_entropy": Loss(FEW_LOGITS, _BOTH, _DTYPES),
    # A model's last layer and its loss. They are compared with the provider `products`.
    "linear_cross_entropy": _LINEAR,
    "capped_linear_cross_entropy": dataclasses.replace(_LINEAR, shapes=LINEAR_LOGITS[:1]),
    # The label's log-probability and the entropy of each position. Positions have separate
    # cotangents, so the backward pass recomputes the logits, which are not saved, by a fourth
    # matmul.
    "log_prob_and_entropy": Loss(FEW_LOGITS, _BOTH, _DTYPES, results=2),
    "linear_log_prob_and_entropy": dataclasses.replace(
        _LINEAR, mean=False, results=2, products=4, logit_bytes=10
    ),
}
CROSS_ENTROPIES = tuple(op for op in LOSSES if op.endswith("cross_entropy"))


class LossWorkload(FewParameters):
    """One loss in one direction on one shape. The dtype is that of x and weight."""

    @property
    def loss(self) -> Loss:
        return LOSSES[self.op]

    @property
    def y_dtype(self) -> str:
        return "float32"

    @property
    def row_operands(self) -> tuple[Array, ...]:
        """x, weight if there is one, and labels. The logits are near normal in either case."""
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
    def results(self) -> tuple[tuple[Shape, str], ...]:
        shape = () if self.loss.mean else self.sizes[:1]
        return ((shape, self.y_dtype),) * self.loss.results

    @property
    def cotangents(self) -> tuple[Array, ...]:
        """The cotangents of the results.

        A mean has none: a training step differentiates it directly, and libraries rely on that.
        """
        return () if self.loss.mean else self.results

    @property
    def gradients(self) -> tuple[int, ...]:
        """The indices of the operands that have a gradient: all but labels."""
        return tuple(range(len(self.sizes) - 1))

    @property
    def logits_bytes(self) -> int:
        """Bytes that the passes between the matmuls load and store; 0 without a weight."""
        return self.loss.logit_bytes * self.sizes[0] * self.sizes[-1]

    @property
    def flops(self) -> int:
        """Number of operations of the matmuls, also for gradients; 0 without a weight."""
        products = self.loss.products
        made = products if self.direction == "fwd+bwd" else min(products, 1)
        return 2 * made * math.prod(self.sizes)


#: The bar of a linear loss is the time of its matmuls alone, and this many times the time in which
#: a copy moves `LossWorkload.logits_bytes`.
BAR = 1.15

grid = functools.partial(shaped, LossWorkload, LOSSES)
