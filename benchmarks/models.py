"""The measured models, and the measurements (cells) of training steps and of layer stacks.

This module does not import JAX, because it is also imported by the process that only starts the
measuring processes.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from benchmarks.workloads import ITEMSIZE, PARAMETERS, Direction, Operation, Shape

# The memory of an H100 in bytes. The column batch_in_80gb of the results has the largest batch that
# fits into this memory.
BUDGET_BYTES = 80 * 10**9
# The numbers of the training steps whose loss is recorded. The first step has the number 1.
# Training ends after the last of these steps.
LOSS_STEPS = (1, 10, 20, 30, 40)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model in language_models.py.

    Attributes:
      hidden: the number of hidden features of the MLP.
      batch: the number of sequences per training step.
      qk_norm: True if an RMSNorm is applied to each head of queries and keys before the rotation.
    """

    kind: Literal["gpt2", "llama"]
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    seq: int
    batch: int
    qk_norm: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads


_LLAMA_1B = Size("llama", 16, 2048, 32, 8, 8192, 128256, seq=2048, batch=4)
MODELS = {
    "gpt2-small": Size("gpt2", 12, 768, 12, 12, 3072, 50257, seq=1024, batch=16),
    "llama-1b": _LLAMA_1B,
    "llama-1b-qk": dataclasses.replace(_LLAMA_1B, qk_norm=True),
}
Layers = Literal["scan", "unrolled"]
LAYERS: tuple[Layers, ...] = ("scan", "unrolled")
Remat = Literal["none", "dots", "block"]
# What each layer saves for its backward pass: all residuals, the results of its matmuls, or only
# its input.
REMATS: tuple[Remat, ...] = ("none", "dots", "block")
# The variants of the models, and their names in tables. A variant's name begins with the name of
# its provider. Each variant except the last uses more of jaxnorm's functions than the one before
# it.
PLAIN = "jnp"
VARIANTS = {
    PLAIN: "plain JAX and optax",
    "jaxnorm-norms": "jaxnorm's norms",
    "jaxnorm-norms-loss": "jaxnorm's norms and loss",
    "jaxnorm-everything": "jaxnorm's residual norms and loss",
    "jaxnorm-products": "all of jaxnorm (norms, loss, linear layers)",
    "jaxnorm-whole-logits": "all of jaxnorm, with whole logits",
}


@dataclasses.dataclass(frozen=True)
class TrainingCell:
    """A training step.

    Attributes:
      batch: number of sequences in a step, over all devices.
      mesh: "" for one device; "fsdp=2" for parameters and batches that are sharded over two
        devices.
    """

    model: str
    remat: Remat
    layers: Layers
    dtype: str
    batch: int
    provider: str
    mesh: str = ""

    @property
    def size(self) -> Size:
        return MODELS[self.model]

    @property
    def devices(self) -> int:
        return int(self.mesh.removeprefix("fsdp=") or 1)


def cells(
    providers: Sequence[str],
    names: Sequence[str],
    variants: Sequence[str],
    remats: Sequence[Remat],
    layers: Sequence[Layers],
    devices: Sequence[int] = (1,),
    *,
    quick: bool,
) -> Iterator[TrainingCell]:
    """Yield the training steps of the models in `names`.

    If `quick` is True, use only the first model, the first element of `layers` (how the layers are
    stacked, such as by scan), and the first element of `remats` (rematerialisation policies).
    """
    few = slice(1 if quick else None)
    asked = [name for name in MODELS if name in names]
    each = itertools.product(asked[few], layers[few], remats[few], devices)
    for model, its_layers, remat, count in each:
        for variant in variants:
            if variant.split("-")[0] in providers:
                yield cell(model, remat, its_layers, variant, count)


def cell(model: str, remat: Remat, layers: Layers, variant: str, devices: int = 1) -> TrainingCell:
    """Return a training step in bfloat16. `MODELS` has the number of sequences per device."""
    batch, mesh = MODELS[model].batch * devices, "" if devices == 1 else f"fsdp={devices}"
    return TrainingCell(model, remat, layers, "bfloat16", batch, variant, mesh)


STACK_LAYERS = 24
STACK_BYTES = 4 * 2**20  # maximum number of bytes of x
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
    """A stack of small pre-norm layers.

    The direction ``"fwd"`` computes the output. ``"fwd+bwd"`` computes a loss and its gradients.
    """

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
    """Yield the stacks that are measured.

    All are measured with jaxnorm's default implementation. For such small arrays, the default may
    be XLA's code. Forward passes are also measured with the Mosaic kernels.
    """
    for op in ops:
        for direction in directions:
            for dtype in dtypes:
                for rows, cols in shapes:
                    for name in ("jaxnorm", "mosaic") if direction == "fwd" else ("jaxnorm",):
                        is_small = rows * cols * ITEMSIZE[dtype] <= STACK_BYTES
                        if PARAMETERS[op] and name in providers and is_small:
                            yield StackCell(op, direction, rows, cols, dtype, name)
