"""The programs whose memory and speed are measured: training steps, and stacks of small layers.

Free of JAX: the process that starts the measuring ones has these, too.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.workloads import ITEMSIZE, PARAMETERS, Direction, Operation, Shape

BUDGET_BYTES = 80 * 10**9  # an H100's memory; the column batch_in_80gb is named after it


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the demo's transformer (examples/transformer.py): its vocabulary is bytes."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int  # sequences per step


MODELS = {
    "gpt2-small": Size(layers=12, width=768, heads=12, seq=1024, batch=8),
    "llama-1b": Size(layers=16, width=2048, heads=32, seq=2048, batch=4),
}
STACKS = ("scan", "unrolled")
# By provider: the demo's variants (examples/transformer.py), and what each saves.
VARIANTS = {
    "flax": "Flax",
    "jaxnorm-input": "jaxnorm, save='input'",
    "jaxnorm-output": "jaxnorm, save='output'",
}


@dataclasses.dataclass(frozen=True)
class TrainingCell:
    model: str
    stack: str
    dtype: str
    batch: int
    provider: str

    @property
    def size(self) -> Size:
        return MODELS[self.model]


def cells(providers: Sequence[str], *, quick: bool) -> Iterator[TrainingCell]:
    """Every model and stack with the variants of `providers`; the first of each if `quick`."""
    for model in list(MODELS)[: 1 if quick else None]:
        for stack in STACKS[: 1 if quick else None]:
            for variant in VARIANTS:
                if variant.split("-")[0] in providers:
                    yield TrainingCell(model, stack, "bfloat16", MODELS[model].batch, variant)


STACK_LAYERS = 24
STACK_BYTES = 4 * 2**20  # of x, at most
STACK_SHAPES: list[Shape] = [
    (8, 512),
    (8, 2048),
    (64, 1024),
    (256, 768),
    (512, 1536),
    (1024, 512),
    (1024, 1024),
    (1024, 2048),
]


@dataclasses.dataclass(frozen=True)
class StackCell:
    """Pre-norm residual layers over a small x; ``"fwd+bwd"`` is a loss and its gradients."""

    op: Operation
    direction: Direction
    rows: int
    cols: int
    dtype: str
    provider: str


def stacks(
    providers: Sequence[str],
    ops: Sequence[Operation],
    directions: Sequence[Direction],
    dtypes: Sequence[str],
    shapes: Sequence[Shape],
) -> Iterator[StackCell]:
    """Of norms: what a call gets by default and, forward, the kernels that it may leave to XLA."""
    for op in ops:
        for direction in directions:
            for dtype in dtypes:
                for rows, cols in shapes:
                    for name in ("jaxnorm", "mosaic") if direction == "fwd" else ("jaxnorm",):
                        is_small = rows * cols * ITEMSIZE[dtype] <= STACK_BYTES
                        if PARAMETERS[op] and name in providers and is_small:
                            yield StackCell(op, direction, rows, cols, dtype, name)
