"""The CSV files of results, and what they were measured on.

Rows are dicts of text, as the csv module has them. Measuring a cell again appends a row: the last
one counts.
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
    """All rows, or none where there is no file; ValueError where its columns are others."""
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
    """The last row of each key, in the order in which the keys came first."""
    return {tuple(row[name] for name in key): row for row in rows}


def append(file: Path, columns: Sequence[str], row: Row) -> None:
    """Appends a row at once: what was measured survives whatever comes next."""
    fresh = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def rounded(suite: Suite, figures: dict[str, float | None]) -> Row:
    """The suite's figures as text; those that were not measured are empty."""

    def text(name: str, decimals: int) -> str:
        value = figures.get(name)
        return "" if value is None else f"{value:.{decimals}f}"

    return {name: text(name, decimals) for name, decimals in suite.figures.items()}


@dataclasses.dataclass(frozen=True)
class Table:
    """One suite's CSV in a folder."""

    folder: Path
    suite: Suite

    @property
    def file(self) -> Path:
        return path(self.folder, self.suite.name)

    def rows(self) -> list[Row]:
        """The row that counts of each cell, whatever software measured it."""
        cell = [name for name in self.suite.key if name != "software"]
        return list(latest(read(self.file, self.suite.columns), cell).values())

    def keys(self) -> set[tuple[str, ...]]:
        """The keys (device, software and cell) that have a row."""
        return set(latest(read(self.file, self.suite.columns), self.suite.key))

    def append(self, row: Row) -> None:
        append(self.file, self.suite.columns, row)


# GPU, driver, and the commit of the kernels.


@dataclasses.dataclass(frozen=True)
class Machine:
    """Attributes: the device's name, the GPU driver's version ("" on a CPU)."""

    device: str
    driver: str = ""

    @property
    def folder(self) -> str:
        """Its name as a folder of results: "NVIDIA H200" is nvidia_h200."""
        return re.sub(r"\W+", "_", self.device.lower())


def this_machine() -> Machine:
    """The first NVIDIA GPU, or the CPU. Asks the driver: JAX would take the GPU's memory."""
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
    """Short hash of HEAD, with "-dirty" where the kernels differ from it; "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *_KERNELS) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    asked = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
