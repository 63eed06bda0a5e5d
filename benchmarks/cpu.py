"""The suite `cpu`: jaxnorm's plain JAX code on a CPU, compared with other libraries.

jaxnorm and the other library are timed in the same process. This module defines the cells, and
`cpu_times` measures them. Like `workloads`, this module imports neither JAX nor torch.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.blocks import BLOCKS, BlockWorkload
from benchmarks.losses import LOSSES, LossWorkload
from benchmarks.workloads import Array, FewParameters, Shape, Workload

DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("fwd", "fwd+bwd")
ROWS: tuple[Shape, ...] = ((4096, 1024), (1024, 4096))
# Shapes (rows, hidden features, output features) for the second half of an MLP, which is the
# activation and the down projection.
PRODUCTS: tuple[Shape, ...] = ((512, 512, 512),)


@dataclasses.dataclass(frozen=True)
class Beside:
    """How an operation is timed: its shapes, and the providers with which jaxnorm is compared.

    If `is_eager` is True, the operation runs outside `jax.jit`. A library may then trace or compile
    its gradient again at each call.
    """

    shapes: tuple[Shape, ...]
    peers: tuple[str, ...]
    is_eager: bool = False


# The provider "flax" computes a variance as E[x^2] - E[x]^2. The provider "flax-two_pass" is Flax
# with the option use_fast_variance=False: it computes the mean first, and then E[(x - mean)^2].
CPU: dict[str, Beside] = {
    "cross_entropy": Beside(
        ((2048, 1024), (1024, 8192), (128, 50257), (8, 128256)), peers=("optax",)
    ),
    "linear_cross_entropy": Beside(((1024, 512, 8192),), peers=("optax",)),
    "softmax": Beside(ROWS, peers=("jnp",)),
    "log_softmax": Beside((*ROWS, (2048, 1024)), peers=("jnp",)),
    "causal_softmax": Beside(((16, 512, 512), (8, 256, 256)), peers=("jnp",)),
    "rms_norm_rope": Beside(((16, 256, 8, 64), (4, 256, 8, 64)), peers=("jnp",)),
    "layer_norm": Beside(ROWS, peers=("flax", "flax-two_pass")),
    "rms_norm": Beside(ROWS, peers=("flax",)),
    "gated_linear": Beside(PRODUCTS, peers=("jnp",), is_eager=True),
    "activation_linear": Beside(PRODUCTS, peers=("jnp",), is_eager=True),
}


class ProductWorkload(FewParameters):
    """A workload of `gated_linear` (gate, up, weight) or `activation_linear` (x, weight, bias)."""

    @property
    def row_operands(self) -> tuple[Array, ...]:
        rows, hidden, features = self.sizes
        x, weight = ((rows, hidden), self.dtype), ((hidden, features), self.dtype)
        return (
            (x, x, weight) if self.op == "gated_linear" else (x, weight, ((features,), self.dtype))
        )

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        return ()

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        rows, _, features = self.sizes
        return (((rows, features), self.dtype),)

    @property
    def cotangents(self) -> tuple[Array, ...]:
        return self.results

    @property
    def gradients(self) -> tuple[int, ...]:
        return (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class CpuCell:
    """A comparison of the times of jaxnorm and `provider` for one workload on a CPU.

    `direction` means the same as in `Workload`. Losses are averaged over the rows.
    """

    op: str
    direction: str
    shape: str
    dtype: str
    provider: str

    @property
    def workload(self) -> Workload | LossWorkload | BlockWorkload | ProductWorkload:
        for table, kind in (
            (LOSSES, LossWorkload),
            (BLOCKS, BlockWorkload),
            (("gated_linear", "activation_linear"), ProductWorkload),
        ):
            if self.op in table:
                return kind(self.op, self.direction, self.shape, self.dtype)  # type: ignore[arg-type]
        rows, cols = map(int, self.shape.split("x"))
        return Workload(self.op, self.direction, rows, cols, self.dtype, self.dtype)  # type: ignore[arg-type]


def cells(
    providers: Sequence[str],
    ops: Sequence[str],
    directions: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Shape] | None,
    *,
    quick: bool,
) -> Iterator[CpuCell]:
    """Yield the selected cells.

    If `shapes` is None, each operation is measured with its default shapes. Otherwise, it is
    measured with the entries of `shapes` that have the same number of axes as its default shapes.
    """
    for op, beside in CPU.items():
        its = beside.shapes[: 1 if quick else None]
        if shapes is not None:
            its = tuple(shape for shape in shapes if len(shape) == len(its[0]))
        for dtype in DTYPES:
            for shape in its:
                for direction in DIRECTIONS:
                    for peer in beside.peers:
                        asked = op in ops and direction in directions and dtype in dtypes
                        if asked and peer.split("-")[0] in providers:
                            text = "x".join(map(str, shape))
                            yield CpuCell(op, direction, text, dtype, peer)
