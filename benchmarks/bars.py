"""Limits that jaxnorm's training steps must meet: time and memory relative to plain JAX.

Each limit is called a *bar*. It compares two training steps of the same model, one with jaxnorm and
one in plain JAX. The suite `training` measures both steps, and both scan over the layers. The bar
limits the ratio of their times, or the ratio of their temp memory (the memory that XLA plans for
intermediates). This module does not import JAX.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from benchmarks import models
from benchmarks.models import MODELS, PLAIN, Remat, TrainingCell

VARIANT = "jaxnorm-products"
_FIGURES = {"ms": "time", "temp_bytes": "temp"}
_REMATS: dict[Remat, str] = {
    "none": "",
    "dots": " with products saved",
    "block": " with blocks remade",
}


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit on a ratio: the time or temp memory of a jaxnorm step, divided by plain JAX's.

    Attributes:
      model: the name of the model in `models.MODELS`.
      figure: the quantity that is limited: "ms" (time) or "temp_bytes" (temp memory). This is also
        the name of a column of results.
      most: the largest allowed ratio.
      plain_remat: the rematerialisation policy of the plain JAX step, one of `models.REMATS`.
      remat: the rematerialisation policy of the jaxnorm step.
    """

    model: str
    figure: Literal["ms", "temp_bytes"]
    most: float
    plain_remat: Remat
    remat: Remat = "none"

    @property
    def cells(self) -> tuple[TrainingCell, TrainingCell]:
        """The two training steps whose ratio is limited. The step with jaxnorm comes first."""
        return (
            models.cell(self.model, self.remat, "scan", VARIANT),
            models.cell(self.model, self.plain_remat, "scan", PLAIN),
        )

    def __str__(self) -> str:
        step = f"{self.model}: {_FIGURES[self.figure]}{_REMATS[self.remat]}"
        return f"{step}, of plain JAX{_REMATS[self.plain_remat]}"


BARS = (
    Bar("llama-1b", "ms", 0.90, "none"),
    Bar("llama-1b", "ms", 0.94, "dots"),
    Bar("llama-1b", "temp_bytes", 0.45, "none"),
    Bar("llama-1b", "temp_bytes", 1.05, "dots"),
    Bar("gpt2-small", "ms", 0.83, "none"),
    Bar("gpt2-small", "ms", 0.92, "dots"),
    Bar("gpt2-small", "temp_bytes", 0.25, "none"),
    Bar("gpt2-small", "temp_bytes", 0.54, "dots"),
    Bar("llama-1b-qk", "ms", 0.90, "none"),
    *(Bar(model, "ms", 1.0, "block", "block") for model in MODELS),
)


def cells() -> Iterator[TrainingCell]:
    """Yield the training steps whose ratios are limited in `BARS`. No step is yielded twice."""
    yield from dict.fromkeys(cell for bar in BARS for cell in bar.cells)
