"""Limits that jaxnorm's training steps must meet: time and memory relative to plain JAX.

A bar is a limit on the ratio of two results of the suite `training`: of a step with jaxnorm and of
a step in plain JAX, both with scanned layers. This module does not import JAX.
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
    """A limit on the time or memory of a training step, divided by that of a plain JAX step.

    Attributes:
      most: the limit of the ratio.
      remat: which residuals the jaxnorm step rematerialises; see `models.REMATS`.
      plain_remat: the same for the plain JAX step.
    """

    model: str
    figure: Literal["ms", "temp_bytes"]
    most: float
    plain_remat: Remat
    remat: Remat = "none"

    @property
    def cells(self) -> tuple[TrainingCell, TrainingCell]:
        """The cell of the jaxnorm step and the cell of the plain JAX step."""
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
    """Yield each training step that a bar compares, once, in the order of the bars."""
    yield from dict.fromkeys(cell for bar in BARS for cell in bar.cells)
