"""The suites of measurements. A suite defines the cells that it measures, and columns of results.

A cell is one measurement: a workload (operation, direction, shape and dtypes) and the provider
(library) that runs it. Each suite has a CSV file with a row for each measured cell. The fields of
the cell are columns of the file, followed by the results.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks import bars, blocks, compile_times, cpu, linear, losses, models, workloads
from benchmarks.blocks import BLOCKS, BlockWorkload
from benchmarks.compile_times import CompileCell, shaped_workload
from benchmarks.cpu import CpuCell
from benchmarks.linear import LINEAR, LinearWorkload
from benchmarks.losses import LOSSES, LossWorkload
from benchmarks.models import (
    LAYERS,
    LOSS_STEPS,
    MODELS,
    REMATS,
    VARIANTS,
    Layers,
    Remat,
    StackCell,
    TrainingCell,
)
from benchmarks.providers import PROVIDERS, SIDES, Provider, Side
from benchmarks.workloads import Direction, Shape, ShapedWorkload, Workload


@dataclasses.dataclass(frozen=True)
class TimedCell(Workload):
    provider: str

    @property
    def workload(self) -> Workload:
        """The workload of the cell, which is the cell without its provider."""
        names = [field.name for field in dataclasses.fields(Workload)]
        return Workload(*(getattr(self, name) for name in names))


@dataclasses.dataclass(frozen=True)
class ShapedCell:
    """A cell that measures a block, a loss, or a matmul."""

    op: str
    direction: Direction
    shape: str
    dtype: str
    provider: str

    @property
    def workload(self) -> BlockWorkload | LossWorkload | LinearWorkload:
        """The workload of the cell, which is the cell without its provider."""
        return shaped_workload(self.op, self.direction, self.shape, self.dtype)


Timed = TimedCell | ShapedCell
Cell = Timed | TrainingCell | StackCell | CompileCell | CpuCell


OPS = tuple(dict.fromkeys([*workloads.OPERATIONS, *BLOCKS, *LOSSES, *LINEAR, *MODELS, *cpu.CPU]))


@dataclasses.dataclass(frozen=True)
class Selection:
    """The cells that the command line selects.

    `ops` may have names of operations, blocks, losses, matmuls and models. If `shapes` is None,
    each suite uses its own shapes. `variants`, `remats`, `layers` and `devices` select training
    steps. If `bars` is True, only the training steps in `bars.BARS` are selected.
    """

    providers: tuple[str, ...] = tuple(PROVIDERS)
    ops: tuple[str, ...] = OPS
    directions: tuple[Direction, ...] = workloads.DIRECTIONS
    dtypes: tuple[tuple[str, str], ...] = tuple(workloads.DTYPES)
    shapes: tuple[Shape, ...] | None = None
    quick: bool = False
    variants: tuple[str, ...] = tuple(VARIANTS)
    remats: tuple[Remat, ...] = REMATS
    layers: tuple[Layers, ...] = LAYERS
    devices: tuple[int, ...] = (1,)
    bars: bool = False

    @property
    def operations(self) -> list[workloads.Operation]:
        return [op for op in workloads.OPERATIONS if op in self.ops]

    @property
    def rows_by_cols(self) -> list[Shape] | None:
        """The selected shapes that have two axes (rows, cols), or None if no shapes are selected.

        They are for the suites of plain norms and softmaxes. Selected shapes with more axes are for
        blocks, losses and matmuls.
        """
        return None if self.shapes is None else [s for s in self.shapes if len(s) == 2]

    def takes(self, cell: TrainingCell) -> bool:
        return (
            cell.model in self.ops
            and provider_name(cell) in self.providers
            and cell.provider in self.variants
            and cell.remat in self.remats
            and cell.layers in self.layers
        )

    def timed(
        self, shapes: Iterable[Shape], directions: tuple[Direction, ...]
    ) -> Iterator[TimedCell]:
        """Yield the selected cells of norms and softmaxes that have one of these directions.

        If the command line selects no shapes, `shapes` are used.
        """
        if self.rows_by_cols is not None:
            shapes = self.rows_by_cols
        elif self.quick:
            shapes = workloads.QUICK
        for workload in workloads.grid(
            self.operations,
            [d for d in directions if d in self.directions],
            self.dtypes,
            list(shapes),
        ):
            for name in self.providers:
                if PROVIDERS[name].offers(workload):
                    yield TimedCell(**dataclasses.asdict(workload), provider=name)


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of measurements, with a CSV file.

    Attributes:
      name: the name of the suite and of its CSV file.
      cell: the class of its cells, whose fields are columns of the file.
      figures: maps each column of numbers in the results to its number of decimals.
      cells: a function that returns the cells of a selection.
      sides: the groups of processes, such as JAX and torch, in which the suite can run.
      batch: the maximum number of cells that a process compiles before it measures them.
      alone: True if only one process at a time may run the suite. This is needed in two cases: if
        compilers time several matmuls on the GPU to choose the fastest, or if the suite measures
        the CPU.
      in_turn: True if a process must compile its cells one after the other. This is needed if the
        compile time is measured. There may still be several processes.
    """

    name: str
    cell: type[Any]
    figures: Mapping[str, int]
    cells: Callable[[Selection], Iterable[Cell]]
    sides: tuple[Side, ...] = SIDES
    batch: int = 32
    alone: bool = False
    in_turn: bool = False

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


def _kernels(selection: Selection) -> Iterable[Cell]:
    return selection.timed(itertools.chain(*workloads.GRID.values()), ("fwd", "bwd"))


def _api(selection: Selection) -> Iterable[Cell]:
    groups = ("powers of two", "model widths")
    return selection.timed(
        itertools.chain(*(workloads.GRID[group] for group in groups)), ("fwd+bwd",)
    )


def _training(selection: Selection) -> Iterable[Cell]:
    if selection.bars:
        return [cell for cell in bars.cells() if selection.takes(cell)]
    return models.cells(
        selection.providers,
        selection.ops,
        selection.variants,
        selection.remats,
        selection.layers,
        selection.devices,
        quick=selection.quick,
    )


def _stacks(selection: Selection) -> Iterable[Cell]:
    shapes = models.STACK_SHAPES[: 1 if selection.quick else None]
    return models.stacks(
        selection.providers,
        selection.operations,
        [d for d in ("fwd", "fwd+bwd") if d in selection.directions],
        [x for x, y in selection.dtypes if x == y],
        shapes if selection.rows_by_cols is None else selection.rows_by_cols,
    )


def _compile(selection: Selection) -> Iterable[Cell]:
    widths: Iterable[int] = compile_times.QUICK if selection.quick else compile_times.WIDTHS
    if selection.rows_by_cols is not None:
        widths = dict.fromkeys(cols for _, cols in selection.rows_by_cols)
    dtypes = [x if x == y else "mixed" for x, y in selection.dtypes]
    yield from compile_times.cells(
        selection.providers,
        selection.ops,
        [*dtypes, *["float16"] * ("bfloat16" in dtypes)],
        tuple(widths),
    )
    if "bfloat16" in dtypes and selection.shapes is None:
        yield from compile_times.steps(selection.providers, selection.ops)


def _cpu(selection: Selection) -> Iterable[Cell]:
    return cpu.cells(
        selection.providers,
        selection.ops,
        selection.directions,
        [x for x, y in selection.dtypes if x == y],
        selection.shapes,
        quick=selection.quick,
    )


def _shaped(grid: Callable[..., Iterator[ShapedWorkload]], selection: Selection) -> Iterator[Cell]:
    dtypes = [x if x == y else "mixed" for x, y in selection.dtypes]
    for workload in grid(
        selection.ops, selection.directions, dtypes, selection.shapes, quick=selection.quick
    ):
        for name in selection.providers:
            if PROVIDERS[name].offers(workload):
                yield ShapedCell(**dataclasses.asdict(workload), provider=name)


_blocks = functools.partial(_shaped, blocks.grid)
_losses = functools.partial(_shaped, losses.grid)
_linear = functools.partial(_shaped, linear.grid)

_TIME = {"us": 2, "main_us": 2, "gbps": 1, "roof": 4, "compile_s": 2}
_STACK = {"ms": 4, "jnp_ms": 4, "kernels_ms": 4, "jnp_kernels_ms": 4}
_COMPILE = {"trace_s": 3, "lower_s": 3, "compile_s": 3, "total_s": 3}
_CPU = {"ms": 3, "peer_ms": 3, "ratio": 3}

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("kernels", TimedCell, _TIME, _kernels),
        Suite("api", TimedCell, _TIME, _api),
        Suite("blocks", ShapedCell, {**_TIME, "kernels": 0, "extra_passes": 0}, _blocks),
        Suite("loss", ShapedCell, {**_TIME, "temp_bytes": 0}, _losses),
        Suite(
            "linear",
            ShapedCell,
            {
                **{"us": 2, "main_us": 2, "tflops": 1, "compile_s": 2},
                **{"kernels": 0, "extra_passes": 0, "temp_bytes": 0},
            },
            _linear,
            batch=1,
            alone=True,
        ),
        Suite(
            "training",
            TrainingCell,
            {
                **{"ms": 2, "kernels_ms": 2, "tokens_per_s": 0, "temp_bytes": 0, "peak_bytes": 0},
                **{f"loss_{step}": 4 for step in LOSS_STEPS},
            },
            _training,
            sides=("jax",),
            batch=1,
        ),
        Suite(
            "capacity",
            TrainingCell,
            {"batch_in_80gb": 0},
            lambda selection: _training(dataclasses.replace(selection, devices=(1,))),
            sides=("jax",),
            batch=1,
        ),
        Suite("stacks", StackCell, _STACK, _stacks, sides=("jax",)),
        Suite("compile", CompileCell, _COMPILE, _compile, sides=("jax",), in_turn=True),
        Suite("cpu", CpuCell, _CPU, _cpu, sides=("jax",), batch=1, alone=True),
    )
}
