"""The suites of measurements. A suite defines the cells that it measures, and columns of results.

A cell is one measurement: a workload (operation, direction, shape and dtypes) and the provider
(library) that runs it. Each suite has a CSV file with a row for each measured cell. The fields of
the cell are columns of the file, followed by the results.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import models, workloads
from benchmarks.blocks import BLOCKS, BlockWorkload
from benchmarks.losses import LOSSES, OF_LAYERS, OF_LOGITS, LossWorkload
from benchmarks.models import (
    LAYERS,
    LOSS_STEPS,
    MODELS,
    REMATS,
    VARIANTS,
    CompileCell,
    TrainingCell,
)
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.workloads import DTYPES, GRID, Direction, Shape, Workload

Shapes = Sequence[Shape] | None
Timeable = Workload | BlockWorkload | LossWorkload


@dataclasses.dataclass(frozen=True)
class TimedCell(Workload):
    """A cell that measures a norm or a softmax."""

    provider: str

    @property
    def workload(self) -> Workload:
        """The workload of the cell, which is the cell without its provider."""
        fields = dataclasses.asdict(self)
        del fields["provider"]
        return Workload(**fields)

    @property
    def dtype(self) -> str:
        return "mixed" if self.mixed else self.x_dtype


@dataclasses.dataclass(frozen=True)
class ShapedCell:
    """A cell that measures a block or a loss."""

    op: str
    direction: Direction
    shape: str
    dtype: str
    provider: str

    @property
    def workload(self) -> BlockWorkload | LossWorkload:
        """The workload of the cell, which is the cell without its provider."""
        kind = BlockWorkload if self.op in BLOCKS else LossWorkload
        return kind(self.op, self.direction, self.shape, self.dtype)


Timed = TimedCell | ShapedCell
Cell = Timed | TrainingCell | CompileCell

OPS = (*workloads.OPERATIONS, *BLOCKS, *LOSSES, *MODELS)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The cells that the command line selects.

    `ops` may have names of operations, blocks, losses and models. If `shapes` is None, each suite
    uses its own shapes. Otherwise, an operation uses those entries of `shapes` that have the
    operation's number of axes.
    """

    providers: Sequence[str] = tuple(PROVIDERS)
    ops: Sequence[str] = OPS
    directions: Sequence[str] = workloads.DIRECTIONS
    dtypes: Sequence[str] = ("bfloat16", "float32", "mixed")
    variants: Sequence[str] = VARIANTS
    remats: Sequence[str] = REMATS
    layers: Sequence[str] = LAYERS
    shapes: Shapes = None

    def takes(self, cell: Cell) -> bool:
        if provider_name(cell) not in self.providers or cell.dtype not in self.dtypes:
            return False
        if isinstance(cell, TrainingCell):
            is_of_layers = cell.remat in self.remats and cell.layers in self.layers
            return cell.model in self.ops and cell.provider in self.variants and is_of_layers
        return cell.op.split()[0] in self.ops and cell.direction in self.directions


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of measurements, with a CSV file.

    Attributes:
      name: the name of the suite and of its CSV file.
      cell: the class of its cells, whose fields are columns of the file.
      figures: maps each column of numbers in the results to its number of decimals.
      all_cells: a function that yields all of its cells. Its argument is a list of shapes that
        replace the suite's own shapes, or None.
      batch: the maximum number of cells that a process compiles before it measures them.
      in_turn: True if a process must compile its cells one after the other. This is needed if the
        compile time is measured. There may still be several processes.
    """

    name: str
    cell: type[Any]
    figures: Mapping[str, int]
    all_cells: Callable[[Shapes], Iterator[Cell]]
    batch: int = 32
    in_turn: bool = False

    def cells(self, selection: Selection) -> Iterator[Cell]:
        return filter(selection.takes, self.all_cells(selection.shapes))

    @property
    def key(self) -> tuple[str, ...]:
        return ("device", "software", *(f.name for f in dataclasses.fields(self.cell)))

    @property
    def columns(self) -> tuple[str, ...]:
        cell = (f.name for f in dataclasses.fields(self.cell))
        return ("device", "software", "commit", *cell, *self.figures, "status")


def provider_name(cell: Cell) -> str:
    """Return the name of a cell's provider.

    For example, the provider of a cell with the model variant "jaxnorm-norms" is "jaxnorm".
    """
    return cell.provider.split("-")[0]


def provider_of(cell: Cell) -> Provider:
    return PROVIDERS[provider_name(cell)]


def _of_providers(cell: Any) -> Iterator[Cell]:
    for name, provider in PROVIDERS.items():
        if provider.offers(cell.workload):
            yield dataclasses.replace(cell, provider=name)


def _timed(
    groups: Sequence[str], directions: Sequence[Direction]
) -> Callable[[Shapes], Iterator[Cell]]:
    """Return a function that yields cells of norms and softmaxes. Only norms have mixed dtypes."""
    own = list(itertools.chain(*(GRID[group] for group in groups)))

    def cells(shapes: Shapes) -> Iterator[Cell]:
        shapes = own if shapes is None else [shape for shape in shapes if len(shape) == 2]
        for op, way, (x, y), (rows, cols) in itertools.product(
            workloads.OPERATIONS, directions, DTYPES, shapes
        ):
            yield from _of_providers(TimedCell(op, way, rows, cols, x, y, ""))

    return cells


def _shaped(table: Mapping[str, Any]) -> Callable[[Shapes], Iterator[Cell]]:
    """Return a function that yields cells of blocks or losses."""

    def cells(shapes: Shapes) -> Iterator[Cell]:
        for op, entry in table.items():
            axes = len(entry.shapes[0])
            its = entry.shapes if shapes is None else [s for s in shapes if len(s) == axes]
            for way, dtype, shape in itertools.product(entry.directions, entry.dtypes, its):
                sizes = "x".join(map(str, shape))
                yield from _of_providers(ShapedCell(op, way, sizes, dtype, ""))

    return cells


_TIME = {"us": 2, "roof": 4, "compile_s": 2}
_TIME_OF_LAYERS = {"us": 2, "compile_s": 2, "temp_bytes": 0}
_COMPILE = {"trace_s": 3, "lower_s": 3, "compile_s": 3, "total_s": 3}
_STEP = {"ms": 2, "tokens_per_s": 0, "temp_bytes": 0, "peak_bytes": 0}
_LOSSES = {f"loss_{step}": 4 for step in LOSS_STEPS}

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("kernels", TimedCell, _TIME, _timed([*GRID], ("fwd", "bwd"))),
        Suite("api", TimedCell, _TIME, _timed(("powers of two", "model widths"), ("fwd+bwd",))),
        Suite("blocks", ShapedCell, {**_TIME, "kernels": 0}, _shaped(BLOCKS)),
        Suite("loss", ShapedCell, {**_TIME, "temp_bytes": 0}, _shaped(OF_LOGITS)),
        Suite("linear_loss", ShapedCell, _TIME_OF_LAYERS, _shaped(OF_LAYERS)),
        Suite("training", TrainingCell, _STEP | _LOSSES, models.cells, batch=4),
        Suite("compile", CompileCell, _COMPILE, models.compile_cells, in_turn=True),
    )
}
