"""Prints tables of results.

python -m benchmarks.tables                           the committed results
python -m benchmarks.tables blocks compile            the committed results of two suites
python -m benchmarks.tables training --results DIR    the results in another folder
"""

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.blocks import BlockWorkload
from benchmarks.losses import LossWorkload
from benchmarks.models import COMPILED
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, RESULTS, Row, Table
from benchmarks.suites import SUITES
from benchmarks.workloads import Workload

#: The folders of committed results. For each suite, the first folder that has results of it is
#: used.
SHOWN = (RESULTS / "nvidia_h200", RESULTS / "nvidia_h100_80gb_hbm3")
#: The providers that represent jaxnorm in comparisons. The first one that was measured is used.
OWN = ("jaxnorm", "mosaic")
WORKLOADS: dict[str, type[Any]] = {
    "kernels": Workload,
    "api": Workload,
    "blocks": BlockWorkload,
    "loss": LossWorkload,
}


def rows_of(suite: str, folders: Sequence[Path]) -> list[Row]:
    """Return the rows of a suite whose status is OK, from the first folder that has such rows.

    Folders may have older rows of the suite `compile`, for single operations. They are left out.
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
    """The microseconds of a call, and of a copy of its bytes (None if no copy was timed)."""

    us: float
    copy_us: float | None = None


def figures(suite: str, folders: Sequence[Path]) -> dict[Any, dict[str, Figure]]:
    """Return a nested dict: ``figures[workload][provider]`` has the times.

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

    A column stands for a provider. Each entry is the median over the shapes, with the smallest
    ratio in brackets. A ratio below 1 means that the provider is faster than jaxnorm.
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
    names = [name for name in ("copy", *PROVIDERS) if any(name in row for row in ratios.values())]
    body = [
        [f"{op} {direction}, {dtype}", *(_range(row.get(name)) for name in names)]
        for (direction, op, dtype), row in sorted(ratios.items(), key=lambda each: each[0][0])
    ]
    return table(["time / jaxnorm's time", *names], body)


def _range(ratios: Sequence[float] | None) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f})" if ratios else "-"


def listing(suite: str, folders: Sequence[Path]) -> str:
    """Return a table with a row for each cell of a suite, and a column for each figure."""
    names = [field.name for field in dataclasses.fields(SUITES[suite].cell)]
    body = [
        [" ".join(row[name] for name in names), *(_text(n, row[n]) for n in SUITES[suite].figures)]
        for row in rows_of(suite, folders)
    ]
    return table([suite, *(n.replace("_bytes", "_gb") for n in SUITES[suite].figures)], body)


def _text(column: str, value: str) -> str:
    return f"{float(value) / 1e9:.2f}" if value and column.endswith("_bytes") else value or "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)}")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="a folder with CSV files of benchmarks.run"
    )
    given = parser.parse_args(argv)
    if unknown := {*given.tables} - {*SUITES}:
        parser.error(f"got {', '.join(unknown)}; expected one of {', '.join(SUITES)}")
    if given.results is not None and not given.results.is_dir():
        parser.error(f"argument --results: got {str(given.results)!r}; expected a folder")
    folders = SHOWN if given.results is None else (given.results,)
    for suite in given.tables or SUITES:
        if rows := rows_of(suite, folders):
            text = (speeds if suite in WORKLOADS else listing)(suite, folders)
            print(f"## {suite}\n\n{source(rows)}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
