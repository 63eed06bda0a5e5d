"""The suite `loss`: losses, log-probabilities and divergences, with or without a linear layer.

To add a loss, add an entry here, and a function to each module of `benchmarks/providers` whose
library has the loss. Like `workloads`, this module imports neither JAX nor torch.
"""

import dataclasses
import itertools
import math

from benchmarks.workloads import ITEMSIZE, Array, Direction, Shape, ShapedWorkload

#: Shapes (positions, classes) of logits. The numbers of classes are a power of two (32768), and the
#: vocabulary sizes of GPT-2, Llama 3 and Gemma.
LOGITS: tuple[Shape, ...] = (
    *((8192, classes) for classes in (32768, 50257, 128256, 262144)),
    (4096, 128256),
)
FEW_LOGITS: tuple[Shape, ...] = ((8192, 32768), (8192, 128256))
#: Shapes (rows, features, classes) of last layers: of Llama 3 8B, Llama 3.2 1B, a model with
#: GPT-2's vocabulary, and a model with Llama 2's vocabulary.
LINEAR_LOGITS: tuple[Shape, ...] = (
    (8192, 4096, 128256),
    (8192, 2048, 128256),
    (16384, 2048, 50257),
    (4096, 8192, 32000),
)

#: The cap of Gemma 2's logits, which are ``SOFTCAP * tanh(logits / SOFTCAP)``.
SOFTCAP = 30.0


@dataclasses.dataclass(frozen=True)
class Loss:
    """The measured shapes and dtypes of one loss.

    Attributes:
      shapes: a tuple of shapes. For a loss of logits, a shape is (rows, classes). With a linear
        layer, a shape is (rows, features, classes): x is (rows, features), and weight is
        (features, classes).
      dtypes: the dtypes of x and weight. Results are float32.
      mean: True if the result is the mean over the positions; False if each position has a result
        and a cotangent.
      has_teacher: True if the logits are compared with the logits of a teacher, which have the same
        shape. False if they are compared with labels.
      results: the number of arrays that the function returns.
    """

    shapes: tuple[Shape, ...]
    directions: tuple[Direction, ...]
    dtypes: tuple[str, ...]
    mean: bool = False
    has_teacher: bool = False
    results: int = 1


_BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")
_DTYPES = ("bfloat16", "float32")
_LINEAR = Loss(LINEAR_LOGITS, ("fwd+bwd",), ("bfloat16",), mean=True)

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(LOGITS, _BOTH, _DTYPES),
    "capped_cross_entropy": Loss(FEW_LOGITS, _BOTH, _DTYPES),
    # A model's last layer and its loss.
    "linear_cross_entropy": _LINEAR,
    "capped_linear_cross_entropy": dataclasses.replace(_LINEAR, shapes=LINEAR_LOGITS[:1]),
    # The label's log-probability and the entropy of each position. Each position has a separate
    # cotangent, which is unknown in the forward pass. So only the backward pass can compute
    # gradients. The logits are not saved: the backward pass recomputes them with a fourth matmul.
    "log_prob_and_entropy": Loss(FEW_LOGITS, _BOTH, _DTYPES, results=2),
    "linear_log_prob_and_entropy": dataclasses.replace(_LINEAR, mean=False, results=2),
    # The teacher's logits are constants: their gradient is not computed.
    "kl_divergence": Loss(FEW_LOGITS, _BOTH, _DTYPES, has_teacher=True),
    "reverse_kl_divergence": Loss(FEW_LOGITS, _BOTH, _DTYPES, has_teacher=True),
    "linear_kl_divergence": dataclasses.replace(_LINEAR, has_teacher=True),
}
#: The losses of logits, and the losses that include a linear layer.
OF_LOGITS = {op: loss for op, loss in LOSSES.items() if len(loss.shapes[0]) == 2}
OF_LAYERS = {op: loss for op, loss in LOSSES.items() if op not in OF_LOGITS}
CROSS_ENTROPIES = tuple(op for op in LOSSES if op.endswith("cross_entropy"))


class LossWorkload(ShapedWorkload):
    """A workload that runs one entry of the table `LOSSES` (see `ShapedWorkload`).

    x and weight have the dtype `dtype`.
    """

    @property
    def loss(self) -> Loss:
        return LOSSES[self.op]

    @property
    def y_dtype(self) -> str:
        return "float32"

    @property
    def row_operands(self) -> tuple[Array, ...]:
        """Shapes and dtypes of x, the weight (if any), and the labels or the teacher's arrays.

        The standard deviation of the weight is chosen so that the logits have a standard deviation
        of about 1.
        """
        rows, *_, classes = self.sizes
        x, *weights = itertools.pairwise(self.sizes)
        logits: tuple[Array, ...] = (
            (x, self.dtype),
            *((shape, self.dtype, shape[0] ** -0.5) for shape in weights),
        )
        labels: Array = ((rows,), "int32", classes)
        return (*logits, *logits) if self.loss.has_teacher else (*logits, labels)

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        shape = () if self.loss.mean else self.sizes[:1]
        return ((shape, self.y_dtype),) * self.loss.results

    @property
    def cotangents(self) -> tuple[Array, ...]:
        """The shapes and dtypes of the arrays that are passed as cotangents of the results.

        The tuple is empty for a mean loss. There the cotangent is the constant 1, as in a training
        step. Some libraries compute the gradient in the forward pass, before they receive the
        cotangent. Their gradient is correct only if the cotangent is 1.
        """
        return () if self.loss.mean else self.results

    @property
    def gradients(self) -> tuple[int, ...]:
        """The indices of the operands that have a gradient: x and weight."""
        return tuple(range(len(self.sizes) - 1))

    @property
    def constants(self) -> tuple[int, ...]:
        """The indices of the teacher's arrays."""
        if not self.loss.has_teacher:
            return ()
        return tuple(range(len(self.gradients), len(self.row_operands)))

    @property
    def has_matmul(self) -> bool:
        return len(self.sizes) > 2

    @property
    def bytes(self) -> int:
        """The minimum memory traffic in bytes.

        The forward pass loads the operands and stores the results. The backward pass loads the
        operands and the cotangents of the results, and stores the gradients.
        """
        operands = [array[:2] for array in self.row_operands]
        arrays = [*operands, *self.results]
        if self.direction == "fwd+bwd":
            arrays += [*arrays, *(operands[i] for i in self.gradients)]
        return sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in arrays)
