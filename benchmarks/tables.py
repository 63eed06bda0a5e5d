"""Prints tables of results.

python -m benchmarks.tables                           the committed results
python -m benchmarks.tables blocks compile            two of the tables
python -m benchmarks.tables training --results DIR    the results in another folder
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.blocks import BlockWorkload
from benchmarks.losses import LossWorkload
from benchmarks.models import COMPILED, LOSS_STEPS, VARIANTS
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, RESULTS, Row, Table
from benchmarks.suites import SUITES
from benchmarks.workloads import Workload

#: The folders of committed results. The results of a suite are those of the first folder that has
#: the suite.
SHOWN = (RESULTS / "nvidia_h200", RESULTS / "nvidia_h100_80gb_hbm3")
#: The providers that represent jaxnorm in comparisons. The first that was measured counts.
OWN = ("jaxnorm", "mosaic")
WORKLOADS: dict[str, type[Any]] = {
    "kernels": Workload,
    "api": Workload,
    "blocks": BlockWorkload,
    "loss": LossWorkload,
}


def rows_of(suite: str, folders: Sequence[Path]) -> list[Row]:
    """Return the rows of a suite without failures, from the first folder that has such rows.

    Committed rows of single operations, which the suite `compile` once had, are left out.
    """
    for folder in folders:
        rows = [row for row in Table(folder, SUITES[suite]).rows() if row["status"] == OK]
        if found := [row for row in rows if suite != "compile" or row["op"] in COMPILED]:
            return found
    return []


def source(rows: Sequence[Row]) -> str:
    """Return a sentence that names the device, the software and the commits of the rows."""

    def values(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    packages = sorted({package for row in rows for package in row["software"].split(" + ")})
    return f"One {values('device')}; {', '.join(packages)}; jaxnorm's commits {values('commit')}."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose other columns are numbers."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# Times of workloads.


@dataclasses.dataclass(frozen=True)
class Figure:
    """The microseconds of a call, and of a copy of as many bytes (None for matmuls)."""

    us: float
    copy_us: float | None = None


def figures(suite: str, folders: Sequence[Path]) -> dict[Any, dict[str, Figure]]:
    """Return a dict from each workload to a dict from each provider to its times.

    The time of a copy is the median over all processes that timed a copy of this size.
    """
    kind = WORKLOADS[suite]
    fields = [(f.name, int if f.type is int else str) for f in dataclasses.fields(kind)]
    measured = [
        (kind(*(of(row[name]) for name, of in fields)), row) for row in rows_of(suite, folders)
    ]
    copies: dict[int, list[float]] = defaultdict(list)
    for workload, row in measured:
        if row["roof"]:
            copies[workload.bytes].append(float(row["us"]) * float(row["roof"]))
    found: dict[Any, dict[str, Figure]] = defaultdict(dict)
    for workload, row in measured:
        copied = statistics.median(copies[workload.bytes]) if row["roof"] else None
        found[workload][row["provider"]] = Figure(float(row["us"]), copied)
    return found


def speeds(suite: str, folders: Sequence[Path]) -> str:
    """Return a table of times divided by jaxnorm's time, with a row for each pass and dtype.

    A cell has the median over the shapes, and in brackets the smallest ratio. Below 1, the column's
    code is faster than jaxnorm.
    """
    ratios: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for workload, answers in figures(suite, folders).items():
        mine = next((answers[name] for name in OWN if name in answers), None)
        if mine is None:
            continue
        dtype = workload.x_dtype if suite in ("kernels", "api") else workload.dtype
        if workload.mixed:
            dtype = "mixed"
        row = ratios[workload.direction, workload.op, dtype]
        if mine.copy_us is not None:
            row["copy"].append(mine.copy_us / mine.us)
        for name, other in answers.items():
            if name not in OWN:
                row[name].append(other.us / mine.us)
    labels = {"copy": "a copy"} | {name: provider.label for name, provider in PROVIDERS.items()}
    names = [name for name in labels if any(name in row for row in ratios.values())]
    body = [
        [f"{op} {direction}, {dtype}", *(_range(row.get(name)) for name in names)]
        for (direction, op, dtype), row in sorted(ratios.items(), key=lambda each: each[0][0])
    ]
    return table(["time / jaxnorm's time", *(labels[name] for name in names)], body)


def _range(ratios: Sequence[float] | None) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f})" if ratios else "-"


def linear_losses(folders: Sequence[Path]) -> str:
    """Return a table with milliseconds and GB of temporary memory of losses of linear layers."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    rows = rows_of("linear_loss", folders)
    for row in rows:
        figure = f"{float(row['us']) / 1e3:.2f} / {float(row['temp_bytes'] or 'nan') / 1e9:.2f}"
        found[f"{row['op']}, {PROVIDERS[row['provider']].label}"][row["shape"]] = figure
    shapes = dict.fromkeys(row["shape"] for row in rows)
    body = [[name, *(of.get(shape, "-") for shape in shapes)] for name, of in found.items()]
    return table(["ms / GB", *shapes], body)


# Training steps and compile times.


def training(folders: Sequence[Path]) -> str:
    """Return a table of training steps: time, memory, losses, and the largest batch in 80 GB."""
    ends = LOSS_STEPS[0], LOSS_STEPS[-1]
    steps: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for suite in ("training", "capacity"):
        for row in rows_of(suite, folders):
            functions = VARIANTS.get(row["provider"], row["provider"])
            names = (row["layers"], row["remat"], row["mesh"], functions)
            steps[f"{row['model']}, batch {row['batch']}", *names] |= row

    def figure(row: Mapping[str, str], column: str, unit: float = 1.0, decimals: int = 1) -> str:
        return f"{float(row[column]) / unit:.{decimals}f}" if row.get(column) else "-"

    body = [
        [
            *(", ".join(filter(None, names)), figure(row, "ms"), figure(row, "kernels_ms")),
            *(figure(row, f"{kind}_bytes", 1e9) for kind in ("temp", "peak")),
            *(figure(row, f"loss_{n}", decimals=3) for n in ends),
            row.get("batch_in_80gb", "-"),
        ]
        for names, row in sorted(steps.items())
    ]
    header = ["training step", "ms", "kernels ms", "temp GB", "peak GB"]
    return table([*header, *(f"loss of step {n}" for n in ends), "largest batch"], body)


def compile_times(folders: Sequence[Path]) -> str:
    """Return a table of the seconds to trace, lower and compile training steps."""
    parts = ("trace", "lower", "compile", "total")
    body = [
        [f"{row['op']}, {VARIANTS[row['provider']]}", *(row[f"{part}_s"] or "-" for part in parts)]
        for row in rows_of("compile", folders)
    ]
    return table(["training step", *(f"{part} s" for part in parts)], body)


# Maps the name of each table to its suite and to a function of the folders of results.
TABLES: dict[str, tuple[str, Callable[[Sequence[Path]], str]]] = {
    **{suite: (suite, functools.partial(speeds, suite)) for suite in WORKLOADS},
    "linear_loss": ("linear_loss", linear_losses),
    "training": ("training", training),
    "compile": ("compile", compile_times),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"one of {', '.join(TABLES)}")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="a folder with CSV files of benchmarks.run"
    )
    given = parser.parse_args(argv)
    if unknown := {*given.tables} - {*TABLES}:
        parser.error(f"got {', '.join(unknown)}; expected one of {', '.join(TABLES)}")
    if given.results is not None and not given.results.is_dir():
        parser.error(f"argument --results: got {str(given.results)!r}; expected a folder")
    folders = SHOWN if given.results is None else (given.results,)
    for name in given.tables or TABLES:
        suite, text = TABLES[name]
        if rows := rows_of(suite, folders):
            print(f"## {name}\n\n{source(rows)}\n\n{text(folders)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
