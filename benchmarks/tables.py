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
from benchmarks.compile_times import LIMIT_S, STEPS
from benchmarks.losses import LossWorkload
from benchmarks.models import LAYERS, LOSS_STEPS, MODELS, PLAIN, REMATS, VARIANTS
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
_STEP = ("model", "remat", "layers", "dtype", "batch", "mesh")
# The variants of models that `steps` compares.
_COMPARED = (PLAIN, "jaxnorm-products")


def rows_of(suite: str, folders: Sequence[Path]) -> list[Row]:
    """Return the rows of a suite without failures, from the first folder that has the suite."""
    found = (Table(folder, SUITES[suite]).rows() for folder in folders)
    return [row for row in next(filter(None, found), []) if row["status"] == OK]


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


# Training steps.


def _by_step(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, Row]]:
    """Return a dict from each training step to a dict from each variant to its row."""
    choices: dict[str, Sequence[str]] = {"model": [*MODELS], "layers": LAYERS, "remat": REMATS}
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: [of.index(row[n]) for n, of in choices.items()]):
        found[tuple(row[name] for name in _STEP)][row["provider"]] = row
    return found


def _name(row: Row) -> str:
    size = f"{row['model']}, {row['batch']} x {MODELS[row['model']].seq}"
    size = f"{size}, {row['mesh']}" if row["mesh"] else size
    return size if row["layers"] == "scan" else f"{size}, {row['layers']}"


def _gigabytes(size: str) -> str:
    return f"{float(size) / 1e9:.1f}"


def training(folders: Sequence[Path]) -> str:
    """Return a table of the time, memory and losses of training steps, relative to plain JAX."""

    def share(row: Row, plain: Mapping[str, str], column: str) -> str:
        if not row[column] or not plain.get(column):
            return "-"
        return f"{float(row[column]) / float(plain[column]):.2f}"

    ends = (LOSS_STEPS[0], LOSS_STEPS[-1])
    body = []
    for variants in _by_step(rows_of("training", folders)).values():
        plain = variants.get(PLAIN, {})
        for variant, row in variants.items():
            losses = (float(row[f"loss_{step}"]) for step in ends)
            body.append(
                [
                    *(_name(row), row["remat"], VARIANTS[variant]),
                    *(f"{float(row['ms']):.1f}", share(row, plain, "ms")),
                    *(row["kernels_ms"] or "-", share(row, plain, "kernels_ms")),
                    *(_gigabytes(row["temp_bytes"]), share(row, plain, "temp_bytes")),
                    _gigabytes(row["peak_bytes"]),
                    " to ".join(f"{loss:.3f}" for loss in losses),
                ]
            )
    header = ["ms/step", "of jnp's", "kernels ms", "of jnp's", "temp GB", "of jnp's", "peak GB"]
    header.append(f"loss, step {ends[0]} to {ends[-1]}")
    return table(["model, batch x length", "remat", "norms and loss", *header], body)


def capacity(folders: Sequence[Path]) -> str:
    """Return a table of the largest batch of each training step, with a column for each variant."""
    found = _by_step(rows_of("capacity", folders))
    there = [name for name in VARIANTS if any(name in variants for variants in found.values())]
    body = []
    for (model, remat, layers, *_), variants in found.items():
        name = f"{model}, length {MODELS[model].seq}" + f", {layers}" * (layers != LAYERS[0])
        batches = (variants[v]["batch_in_80gb"] if v in variants else "-" for v in there)
        body.append([name, remat, *batches])
    return table(["model", "remat", *(VARIANTS[name] for name in there)], body)


def steps(folders: Sequence[Path]) -> str:
    """Return a table of scanned training steps in plain JAX and with all of jaxnorm."""
    batches = _by_step(rows_of("capacity", folders))
    body = []
    for step, variants in _by_step(rows_of("training", folders)).items():
        if step in batches:
            rows = [variants.get(name) for name in _COMPARED]
            ms = (f"{float(row['ms']):.1f}" if row else "-" for row in rows)
            temp = (_gigabytes(row["temp_bytes"]) if row else "-" for row in rows)
            fitting = (batches[step].get(name, {}).get("batch_in_80gb", "-") for name in _COMPARED)
            body.append([_name(variants[PLAIN]), step[1], *ms, *temp, *fitting])
    columns = ("ms", "temp GB", "largest batch")
    header = [f"{what}, {which}" for what in columns for which in ("without", "jaxnorm")]
    return table(["model, batch x length", "remat", *header], body)


# Compile times.


def compile_times(folders: Sequence[Path]) -> str:
    """Return tables of seconds to trace, lower and compile: operations, and training steps."""
    rows = rows_of("compile", folders)
    by_op: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["op"] not in STEPS:
            name = f"{row['op']} {row['shape']} {row['dtype']}"
            for op in ("all", row["op"]):
                by_op[row["provider"], op][name] = float(row["total_s"])
    body = []
    for (provider, op), taken in sorted(by_op.items(), key=lambda each: each[0][0]):
        longest = max(taken, key=lambda name: taken[name])
        above = sum(value > LIMIT_S for value in taken.values())
        seconds = (f"{statistics.median(taken.values()):.2f}", f"{taken[longest]:.2f}")
        body.append([f"{provider}: {op}", *seconds, longest, f"{above} of {len(taken)}"])
    header = ["operations", "median s", "longest s", "of", f"above {LIMIT_S:.0f} s"]
    parts = ("trace", "lower", "compile", "total")
    of_steps = [
        [
            f"{row['op']}, {row['shape'].replace('x', ' x ')}",
            VARIANTS[row["provider"]],
            *(row[f"{part}_s"] or "-" for part in parts),
        ]
        for row in rows
        if row["op"] in STEPS
    ]
    header_of_steps = ["training step", "functions", *(f"{part} s" for part in parts)]
    both = ((header, body), (header_of_steps, of_steps))
    return "\n\n".join(table(*each) for each in both if each[1])


# Maps the name of each table to its suite and to a function of the folders of results.
TABLES: dict[str, tuple[str, Callable[[Sequence[Path]], str]]] = {
    **{suite: (suite, functools.partial(speeds, suite)) for suite in WORKLOADS},
    "linear_loss": ("linear_loss", linear_losses),
    "steps": ("training", steps),
    "training": ("training", training),
    "capacity": ("capacity", capacity),
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
