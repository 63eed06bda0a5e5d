"""The CSV files of results, and the machine on which they were measured.

Rows are dicts of text, as in the csv module. Measuring a cell again appends a row; the last row
counts.
"""

import csv
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.suites import Suite

ROOT = Path(__file__).parent.parent
Row = dict[str, str]
OK = "ok"
_KERNELS = ("jaxnorm", "kernels")
PROVIDER_COLUMNS = ("device", "driver", "commit", "provider", "side", "software", "status")


def path(folder: Path, name: str) -> Path:
    return folder / f"{name}.csv"


def read(file: Path, columns: Sequence[str]) -> list[Row]:
    """Return all rows of a file; none if it does not exist; ValueError if its columns differ."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise ValueError(
                f"{file}: got columns {','.join(reader.fieldnames or ())}; expected "
                f"{','.join(columns)}; write to another folder with --out, or delete the file"
            )
        return list(reader)


def latest(rows: Iterable[Row], key: Sequence[str]) -> dict[tuple[str, ...], Row]:
    """Return the last row for each key, in the order in which the keys first occurred."""
    return {tuple(row[name] for name in key): row for row in rows}


def append(file: Path, columns: Sequence[str], row: Row) -> None:
    """Append a row at once, so that it survives a crash."""
    fresh = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def rounded(suite: Suite, figures: dict[str, float | None]) -> Row:
    """Return the suite's figures as text; one that was not measured is empty."""

    def text(name: str, decimals: int) -> str:
        value = figures.get(name)
        return "" if value is None else f"{value:.{decimals}f}"

    return {name: text(name, decimals) for name, decimals in suite.figures.items()}


@dataclasses.dataclass(frozen=True)
class Table:
    """The CSV file of one suite in a folder."""

    folder: Path
    suite: Suite

    @property
    def file(self) -> Path:
        return path(self.folder, self.suite.name)

    def rows(self) -> list[Row]:
        """The valid row of each cell: the last one, for any version of the software."""
        cell = [name for name in self.suite.key if name != "software"]
        return list(latest(read(self.file, self.suite.columns), cell).values())

    def keys(self) -> set[tuple[str, ...]]:
        """Return the keys of all rows; a key is the device, the software and the cell."""
        return set(latest(read(self.file, self.suite.columns), self.suite.key))

    def append(self, row: Row) -> None:
        append(self.file, self.suite.columns, row)


# GPU, driver, and the commit of the kernels.


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine: its device's name, and its GPU driver's version ("" on a CPU)."""

    device: str
    driver: str = ""

    @property
    def folder(self) -> str:
        """The device's name as a folder: "NVIDIA H200" is nvidia_h200."""
        return re.sub(r"\W+", "_", self.device.lower())


def this_machine() -> Machine:
    """Return the first NVIDIA GPU (from the driver: JAX would reserve its memory), or the CPU."""
    if shutil.which("nvidia-smi") is None:
        return Machine("cpu")
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        return Machine("cpu")
    device, driver = answer.stdout.strip().split(", ")
    return Machine(device, driver)


def gpus() -> int:
    """Return the number of NVIDIA GPUs of the machine; 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return 0 if answer.returncode else len(answer.stdout.split("\n")) - 1


def commit() -> str:
    """Return HEAD's short hash, with "-dirty" if the kernels differ, or "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *_KERNELS) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    asked = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
