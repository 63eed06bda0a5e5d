"""Times and speeds from the rows of result files, and comparisons of providers.

A *question* is a workload (operation, direction, shape, dtypes) without its provider. The *answers*
to a question are a dict from the provider's name to its :class:`Figure`.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import workloads
from benchmarks.blocks import BLOCKS
from benchmarks.linear import PROJECTIONS, SQUARES, LinearWorkload
from benchmarks.models import LAYERS, MODELS, REMATS, TrainingCell
from benchmarks.results import OK, Row
from benchmarks.workloads import Shape, Workload

# The providers that represent jaxnorm, in order of preference: a call of jaxnorm with its default
# implementation, then the Mosaic kernel. The first provider that has a measurement is used.
OWN = ("jaxnorm", "mosaic")
# The shapes (rows, N) in plots and tables. Each has enough rows to fill a GPU.
PLOTTED = [
    shape
    for group in ("narrow rows", "powers of two", "model widths", "odd rows")
    for shape in workloads.GRID[group]
]
ODD = {cols for _, cols in workloads.GRID["odd rows"]}
# A provider is ahead of jaxnorm if jaxnorm's time divided by the provider's time is larger than
# this number.
AHEAD = 1.02

# The values of the fields of a Workload (op, direction, rows, cols, x_dtype, y_dtype) or of a
# ShapedWorkload (op, direction, shape, dtype).
Question = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Time and speed of one provider in one workload.

    Attributes:
      us: the time in microseconds.
      speed: the speed in GB/s or, for matmuls, in TFLOP/s.
      roof: the time of a copy that loads and stores as many bytes as the workload, divided by `us`.
        For matmuls, the time of XLA's matmul without a norm, divided by `us`.
      extra_passes: the number of copies, casts and transposes of large arrays. Copies that the GPU
        driver performs without a kernel are counted here, but their time is not part of `us`.
    """

    us: float
    speed: float
    roof: float
    extra_passes: int = 0

    @property
    def roof_speed(self) -> float:
        return self.speed / self.roof


Figures = dict[Question, dict[str, Figure]]


def of(rows: Iterable[Row], kind: type[Any] = Workload) -> Figures:
    """Return the times and speeds of a suite's successful rows, by workload and provider.

    The result maps each question (a workload) to its answers (a dict from each provider to its
    `Figure`).

    `Figure.roof` is the time of a copy that loads and stores as many bytes, divided by the time of
    the workload. The time of the copy is the median over all processes that timed it, because
    the time of a single process can be wrong. For example, copies of 100 MB or more were timed 28
    times on an H200. Each of these 28 measurements was compared with the median for copies of the
    same size. One of them was at least 7 % above this median.
    """
    measured = [(_question(row, kind), row) for row in rows if row["status"] == OK]
    size_of = {question: kind(*question).bytes for question, _ in measured}
    copies: dict[int, list[float]] = {}
    for question, row in measured:
        copies.setdefault(size_of[question], []).append(float(row["us"]) * float(row["roof"]))
    copy_us = {size: statistics.median(each) for size, each in copies.items()}
    figures: Figures = {}
    for question, row in measured:
        us = float(row["us"])
        roof = copy_us[size_of[question]] / us
        extra_passes = int(row.get("extra_passes") or 0)
        figure = Figure(us, float(row["gbps"]), roof, extra_passes)
        figures.setdefault(question, {})[row["provider"]] = figure
    return figures


def _question(row: Row, kind: type[Any]) -> Question:
    fields = dataclasses.fields(kind)
    return tuple(int(row[f.name]) if f.type is int else row[f.name] for f in fields)


def of_products(rows: Iterable[Row]) -> Figures:
    """Return the times and speeds of matmuls.

    The result maps each workload to a dict from each provider to its `Figure`.

    `Figure.roof` is the time of XLA's matmul without a norm, divided by the time of the workload.
    The provider jnp measures this matmul. If it was not measured, `roof` is NaN.
    """
    measured = {
        (_question(row, LinearWorkload), row["provider"]): row
        for row in rows
        if row["status"] == OK
    }
    figures: Figures = {}
    for (question, provider), row in measured.items():
        alone = measured.get((("product", *question[1:]), "jnp"))
        us = float(row["us"])
        roof = math.nan if alone is None else float(alone["us"]) / us
        figure = Figure(us, float(row["tflops"]), roof, int(row["extra_passes"] or 0))
        figures.setdefault(question, {})[provider] = figure
    return figures


def step_of(cell: TrainingCell) -> dict[str, str]:
    """Return a dict from the names of a training step's fields to their values as text.

    The provider is the last field.
    """
    fields = {name: str(value) for name, value in dataclasses.asdict(cell).items()}
    return fields | {"provider": fields.pop("provider")}


def steps(rows: Iterable[Row]) -> dict[tuple[str, ...], Row]:
    """Return a dict from each training step (the values of its fields) to its row of results.

    The steps are sorted by model.
    """
    names = [*step_of(TrainingCell("", "none", "scan", "", 0, ""))]
    choices: dict[str, Sequence[str]] = {"model": [*MODELS], "layers": LAYERS, "remat": REMATS}

    def place(row: Row) -> list[int]:
        return [of.index(row[name]) for name, of in choices.items()]

    return {tuple(row[name] for name in names): row for row in sorted(rows, key=place)}


def bytes_of(question: Question) -> int:
    return Workload(*question).bytes


def own(answers: dict[str, Figure]) -> Figure | None:
    """Return jaxnorm's time and speed in a workload, or None if jaxnorm was not measured.

    `answers` maps each provider to its `Figure` in this workload.
    """
    return next((answers[name] for name in OWN if name in answers), None)


def times_faster(answers: dict[str, Figure], peer: str) -> float | None:
    """Return the time of the provider `peer` divided by jaxnorm's time in the same workload.

    Return None if one of the two was not measured.
    """
    mine, other = own(answers), answers.get(peer)
    return None if mine is None or other is None else other.us / mine.us


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A provider that is faster than jaxnorm by more than 2 % in one workload."""

    question: Question
    peer: str
    ratio: float  # jaxnorm's time divided by the provider's


def ahead(figures: Figures) -> Iterator[Ahead]:
    """Yield an `Ahead` for each workload in which a provider is faster than jaxnorm.

    If several providers are faster in a workload, each of them has its own `Ahead`.
    """
    for question, answers in figures.items():
        mine = own(answers)
        if mine is None:
            continue
        for peer, other in answers.items():
            if peer not in OWN and mine.us > AHEAD * other.us:
                yield Ahead(question, peer, mine.us / other.us)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Statistics of a ratio: another provider's time divided by jaxnorm's time in one workload.

    Attributes:
      cells: the number of workloads that were measured with both providers.
      ahead: the number of these workloads in which the other provider is more than 2 % faster.
      median: the median of the ratios.
      least: the smallest ratio.
      greatest: the largest ratio.
    """

    cells: int
    ahead: int
    median: float
    least: float
    greatest: float


def comparison(figures: Figures, peer: str) -> Comparison | None:
    """Compare jaxnorm with the provider `peer`. Return None if they have no common workload."""
    each = [times_faster(answers, peer) for answers in figures.values()]
    ratios = [ratio for ratio in each if ratio is not None]
    if not ratios:
        return None
    ahead = sum(AHEAD * ratio < 1 for ratio in ratios)
    return Comparison(len(ratios), ahead, statistics.median(ratios), min(ratios), max(ratios))


def along_n(
    figures: Figures, op: str, direction: str, x_dtype: str, y_dtype: str
) -> dict[int, dict[str, Figure]]:
    """Return a dict that maps the row length N of each plotted shape to its measurements.

    The measurements of a shape are a dict that maps each provider to its `Figure`.

    If several shapes have the same N, the shape with the most rows is used.
    """
    result = {}
    for rows, cols in sorted(PLOTTED, key=lambda shape: (shape[1], shape[0])):
        question = (op, direction, rows, cols, x_dtype, y_dtype)
        if question in figures:
            result[cols] = figures[question]
    return result


def along_shapes(
    figures: Figures, op: str, direction: str, dtype: str
) -> dict[str, dict[str, Figure]]:
    """Return the measurements of a block for each measured shape.

    The result maps each shape to a dict from provider to `Figure`. The shapes in the table `BLOCKS`
    come first, then all other measured shapes.
    """
    own = ["x".join(map(str, shape)) for shape in BLOCKS[op].shapes]
    measured = {
        shape: answers
        for (*asked, shape, its_dtype), answers in figures.items()
        if asked == [op, direction] and its_dtype == dtype
    }
    return {shape: measured[shape] for shape in (*own, *measured) if shape in measured}


def along_squares(
    figures: Figures, op: str, direction: str, dtype: str
) -> dict[int, dict[str, Figure]]:
    """Return the measurements of square matmuls, which have M = N = K.

    The result maps each size M to a dict from provider to `Figure`.
    """
    return _of_shapes(figures, (op, direction), dtype, {shape: shape[0] for shape in SQUARES})


def along_projections(
    figures: Figures, op: str, direction: str, dtype: str
) -> dict[str, dict[str, Figure]]:
    """Return the measurements of matmuls of models.

    The result maps the name of each matmul to a dict from provider to `Figure`.
    """
    return _of_shapes(figures, (op, direction), dtype, PROJECTIONS)


def _of_shapes(
    figures: Figures, asked: tuple[str, str], dtype: str, names: Mapping[Shape, Any]
) -> dict[Any, dict[str, Figure]]:
    questions = {name: (*asked, "x".join(map(str, shape)), dtype) for shape, name in names.items()}
    return {name: figures[q] for name, q in questions.items() if q in figures}


def failures(rows: Iterable[Row]) -> Counter[tuple[str, str]]:
    """Return the number of failed measurements for each pair of provider and reason."""
    return Counter((row["provider"], row["status"]) for row in rows if row["status"] != OK)
