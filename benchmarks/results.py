"""The CSV files of results, and the machine on which they were measured.

A row is a dict from column names to text, as in the csv module. Measuring a cell again appends a
row, and the last row of a cell is the valid one.
"""

import csv
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites import Suite

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]
OK = "ok"
_KERNELS = ("jaxnorm", "kernels")


def read(file: Path, columns: Sequence[str]) -> list[Row]:
    """Return all rows of a CSV file. Raise ValueError if it lacks one of `columns`.

    If the file does not exist, there are no rows.
    """
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if not {*columns} <= {*(reader.fieldnames or ())}:
            raise ValueError(
                f"{file}: got columns {','.join(reader.fieldnames or ())}; expected "
                f"{','.join(columns)}; write to another folder with --out, or delete the file"
            )
        return list(reader)


def append(file: Path, columns: Sequence[str], row: Row) -> None:
    """Append a row to a file immediately, so that it survives a crash of this process.

    If the file also has other columns, the row leaves them empty.
    """
    with file.open("a+", newline="", encoding="utf-8") as lines:
        lines.seek(0)
        header = next(csv.reader(lines), None)
        writer = csv.DictWriter(lines, header or columns, lineterminator="\n")
        if header is None:
            writer.writeheader()
        writer.writerow(row)


@dataclasses.dataclass(frozen=True)
class Table:
    """The CSV file of a suite in a folder."""

    folder: Path
    suite: Suite

    @property
    def file(self) -> Path:
        return self.folder / f"{self.suite.name}.csv"

    def _latest(self, key: Sequence[str]) -> dict[tuple[str, ...], Row]:
        rows = read(self.file, self.suite.columns)
        return {tuple(row[name] for name in key): row for row in rows}

    def rows(self) -> list[Row]:
        """Return a list of rows: for each cell, the row that was measured last.

        It may have been measured with any version of the software.
        """
        return list(self._latest([n for n in self.suite.key if n != "software"]).values())

    def keys(self) -> set[tuple[str, ...]]:
        """Return the keys of all rows. A key consists of the device, the software and the cell."""
        return {*self._latest(self.suite.key)}

    def append(self, row: Row) -> None:
        append(self.file, self.suite.columns, row)


# The machine, and the commit of the kernels.


def folder_of(device: str) -> str:
    """Return the name of a device's folder of results: nvidia_h200 for an "NVIDIA H200"."""
    return re.sub(r"\W+", "_", device.lower())


def device() -> str:
    """Return the name of this machine's first NVIDIA GPU, or "cpu" without one.

    The name is read from nvidia-smi instead of JAX, because JAX would reserve the GPU's memory.
    """
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return "cpu" if answer.returncode else answer.stdout.strip()


def commit() -> str:
    """Return the short hash of the commit, or "unknown" without git.

    "-dirty" is appended if kernels have changes that are not committed.
    """
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *_KERNELS) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    asked = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
