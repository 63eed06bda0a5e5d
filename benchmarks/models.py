"""The measured models, and the measurements (cells) of training steps and of their compilation.

This module does not import JAX, because it is also imported by the process that only starts the
measuring processes.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

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
# What each layer saves for its backward pass: "none" saves all residuals, "dots" the results of
# its matmuls, and "block" only its input.
REMATS: tuple[Remat, ...] = ("none", "dots", "block")
# The variants of the models, which `variants` defines. A variant's name begins with the name of its
# provider. Each variant except the last uses more of jaxnorm's functions than the one before it.
PLAIN = "jnp"
VARIANTS = (
    *(PLAIN, "jaxnorm-norms", "jaxnorm-everything", "jaxnorm-products"),
    "jaxnorm-whole-logits",
)


@dataclasses.dataclass(frozen=True)
class TrainingCell:
    """A training step that is measured. `batch` is its number of sequences."""

    model: str
    remat: Remat
    layers: Layers
    dtype: str
    batch: int
    provider: str

    @property
    def size(self) -> Size:
        return MODELS[self.model]


def cells(shapes: Any = None) -> Iterator[TrainingCell]:
    """Yield the training steps of all models, or nothing if other shapes are requested."""
    for model, layers, remat in itertools.product(MODELS, LAYERS, REMATS):
        for variant in VARIANTS if shapes is None else ():
            yield cell(model, remat, layers, variant)


def cell(model: str, remat: Remat, layers: Layers, variant: str) -> TrainingCell:
    """Return a training step in bfloat16, with the model's number of sequences (`Size.batch`)."""
    return TrainingCell(model, remat, layers, "bfloat16", MODELS[model].batch, variant)


#: Maps the name of a compiled training step to three values: the model, how its layers are stacked,
#: and the number of sequences in a batch.
COMPILED: dict[str, tuple[str, Layers, int]] = {
    "gpt2-small scan": ("gpt2-small", "scan", 4),
    "gpt2-small unrolled": ("gpt2-small", "unrolled", 4),
    "llama-1b-qk scan": ("llama-1b-qk", "scan", 4),
}


@dataclasses.dataclass(frozen=True)
class CompileCell:
    """A training step that is compiled.

    Attributes:
      op: the name of the step in `COMPILED`.
      shape: the shape of its tokens.
      provider: a variant in `VARIANTS`.
    """

    op: str
    shape: str
    dtype: str
    provider: str

    direction = "fwd+bwd"

    @property
    def step(self) -> TrainingCell:
        model, layers, batch = COMPILED[self.op]
        return TrainingCell(model, "none", layers, self.dtype, batch, self.provider)


def compile_cells(shapes: Any = None) -> Iterator[CompileCell]:
    """Yield the training steps that are compiled, or nothing if other shapes are requested."""
    for name, (model, _, batch) in COMPILED.items() if shapes is None else ():
        for variant in (PLAIN, "jaxnorm-norms", "jaxnorm-products"):
            yield CompileCell(name, f"{batch}x{MODELS[model].seq}", "bfloat16", variant)
