"""The training steps whose memory and speed are measured: sizes, and whose norms they use."""

import dataclasses
from collections.abc import Iterator, Sequence

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
