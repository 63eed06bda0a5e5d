"""The suite `linear`: a norm with the matmul after it, and the matmul alone as the reference.

Like `workloads`, this module imports neither JAX nor torch.
"""

import dataclasses
import functools
import itertools
import math

from benchmarks.workloads import Array, Direction, FewParameters, Shape, shaped

SQUARES: tuple[Shape, ...] = tuple((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192))
TOKENS = 8192
#: Maps each size of Llama to the width of the model, and to a tuple of numbers of output features.
#: The first number is for the matmul that computes queries, keys and values. The last number is for
#: the matmul that computes gate and up.
LLAMA: dict[str, tuple[int, tuple[int, ...]]] = {
    "1B": (2048, (3072, 16384)),
    "8B": (4096, (6144, 14336, 28672)),  # 14336: the gate projection without the up projection
    "70B": (8192, (10240, 57344)),
}
PROJECTIONS: dict[Shape, str] = {
    (TOKENS, hidden, features): f"{model}\n{hidden}x{features}"
    for model, (hidden, projected) in LLAMA.items()
    for features in projected
}


@dataclasses.dataclass(frozen=True)
class Linear:
    """The shapes, dtypes and directions in which one operation is measured.

    A shape M x K x N means x (M, K) and weight (K, N).
    """

    normalises: bool
    shapes: tuple[Shape, ...] = (*SQUARES, *PROJECTIONS)
    quick: tuple[Shape, ...] = ((8192, 2048, 3072), (8192, 4096, 6144), (8192, 4096, 14336))
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    dtypes: tuple[str, ...] = ("bfloat16",)


LINEAR: dict[str, Linear] = {
    # x @ weight, without a norm. Its time with the provider jnp is the reference for the other
    # operations.
    "product": Linear(normalises=False),
    # rms_norm(x, scale) @ weight.
    "rms_norm_linear": Linear(normalises=True),
}


class LinearWorkload(FewParameters):
    """A workload with one matmul, as described by its fields (see `ShapedWorkload`).

    x, weight and y have the dtype `dtype`.
    """

    @property
    def row_operands(self) -> tuple[tuple[Shape, str], tuple[Shape, str, float]]:
        """Shapes and dtypes of x and weight, and the weight's standard deviation.

        The weight's standard deviation is chosen so that y has a standard deviation near 1. Values
        must be realistic, because a GPU's clock frequency depends on them.
        """
        x, weight = itertools.pairwise(self.sizes)
        return (x, self.dtype), (weight, self.dtype, weight[0] ** -0.5)

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return (self.sizes[1:2],) if LINEAR[self.op].normalises else ()

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        return (((self.sizes[0], self.sizes[-1]), self.dtype),)

    @property
    def cotangents(self) -> tuple[Array, ...]:
        return self.results

    @property
    def gradients(self) -> tuple[int, ...]:
        return 0, 1

    @property
    def flops(self) -> int:
        """The number of floating-point operations of all matmuls.

        A forward pass has one matmul. "fwd+bwd" has three.
        """
        products = 3 if self.direction == "fwd+bwd" else 1
        return 2 * products * math.prod(self.sizes)


grid = functools.partial(shaped, LinearWorkload, LINEAR)
