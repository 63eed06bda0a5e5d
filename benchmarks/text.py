"""Text for reports: Markdown tables, names, numbers, and the source of results."""

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.figures import Figure, Figures
from benchmarks.models import MODELS, VARIANTS
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row

DTYPES = {"bfloat16": "bf16", "float32": "f32"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose other columns are numbers."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def dtypes(x: str, y: str) -> str:
    return DTYPES[x] if x == y else f"{DTYPES[x]} to {DTYPES[y]}"


def digits(value: float) -> str:
    """Format a number with three significant digits, but at most two decimals."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def share(figure: Figure) -> str:
    return "-" if math.isnan(figure.roof) else f"{figure.roof:.2f}"


def gigabytes(size: str) -> str:
    return f"{float(size) / 1e9:.1f}"


def ratio(row: Row, plain: Mapping[str, str], column: str) -> str:
    """Return the value of `row` in a column, divided by the value in the row `plain`, as text.

    `plain` is the row of the provider jnp. If one of the values is missing, return "-".
    """
    if not row[column] or not plain.get(column):
        return "-"
    return f"{float(row[column]) / float(plain[column]):.2f}"


def model(row: Row) -> str:
    """Return the name of a training step: model, batch, length, mesh, and stacking of layers."""
    size = f"{row['model']}, {row['batch']} x {MODELS[row['model']].seq}"
    size = f"{size}, {row['mesh']}" if row["mesh"] else size
    return size if row["layers"] == "scan" else f"{size}, {row['layers']}"


def variants(rows: Iterable[Row]) -> list[str]:
    """Return the variants of models that occur in the rows, in the order of VARIANTS."""
    there = {row["provider"] for row in rows}
    return [name for name in VARIANTS if name in there]


def provenance(rows: Sequence[Row]) -> str:
    """Return a sentence that names the device, the software and the commits of the rows."""
    return f"One {_device(rows)}; {_software(rows)}."


def source(rows: Sequence[Row]) -> str:
    """Return the device, software and commits of the rows, worded for the middle of a sentence.

    The result is "one <device> (<software, commits>)".
    """
    return f"one {_device(rows)} ({_software(rows)})"


def _device(rows: Sequence[Row]) -> str:
    return _values(rows, "device")


def _software(rows: Sequence[Row]) -> str:
    versions: dict[str, list[str]] = {}
    for package in sorted({package for row in rows for package in row["software"].split(" + ")}):
        name, _, version = package.partition(" ")
        versions.setdefault(name, []).append(version)
    packages = [f"{name} {' and '.join(found)}" for name, found in versions.items()]
    commits = _values(rows, "commit")
    noun = "commits" if "," in commits else "commit"
    return f"{', '.join(packages)}; jaxnorm's kernels of {noun} {commits}"


def _values(rows: Sequence[Row], column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows))


def notes(measured: Figures) -> str:
    """Return the notes of the measured providers: caveats that apply to their results."""
    there = {name for answers in measured.values() for name in answers}
    return " ".join(p.note for name, p in PROVIDERS.items() if name in there and p.note)
