"""Measures jaxnorm and other libraries, and writes the results to CSV files.

    python -m benchmarks.run                      everything, on one GPU
    python -m benchmarks.run kernels --ops layer_norm --directions bwd --shapes 8192x4096

docs/benchmarks.md describes the suites. `python -m benchmarks.tables` prints tables of the results.
These are columns of the results:

* `us`: the time of all kernels of a call, measured with CUPTI; without an NVIDIA GPU, wall-clock
  time. Successive calls use different sets of operands, so that no operand is in the GPU's cache
* `roof`: the time of a copy in the same process, divided by the measured time. The copy transfers
  the least number of bytes that the call needs, if each pass loads or stores each of its arrays
  once. Empty for torch
* `kernels`: the number of kernels of a call. The GPU driver may copy an array without a kernel;
  the measured time does not include such a copy
* `temp_bytes`: the memory for intermediates, without operands and results: planned by XLA, or
  allocated by torch
* `compile_s`: the compile time of a call; for torch, it includes the first run

Several processes compile calls at the same time (--workers), but nothing compiles while a call is
timed. Rows that are already in the CSV files are not measured again.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import processes, results, workloads
from benchmarks.models import LAYERS, REMATS, VARIANTS
from benchmarks.processes import Outcome
from benchmarks.providers import PROVIDERS, SIDES
from benchmarks.results import OK, Row, Table
from benchmarks.suites import OPS, SUITES, Cell, Selection, Suite, provider_name, provider_of


@dataclasses.dataclass(frozen=True)
class Run:
    """The device and software that are measured, and the folder for the results."""

    folder: Path
    device: str
    commit: str
    software: dict[str, str]  # maps the name of each installed provider to its software

    def key(self, cell: Cell) -> tuple[str, ...]:
        fields = map(str, dataclasses.astuple(cell))
        return (self.device, self.software[provider_name(cell)], *fields)

    def row(self, suite: Suite, outcome: Outcome) -> Row:
        cell = {name: str(value) for name, value in dataclasses.asdict(outcome.cell).items()}
        figures = {
            name: "" if (value := outcome.figures.get(name)) is None else f"{value:.{decimals}f}"
            for name, decimals in suite.figures.items()
        }
        return {
            "device": self.device,
            "software": self.software[provider_name(outcome.cell)],
            "commit": self.commit,
            **cell,
            **figures,
            "status": outcome.status,
        }

    def todo(self, suite: Suite, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells that remain to be measured with the installed software."""
        done = Table(self.folder, suite).keys()
        installed = (cell for cell in cells if provider_name(cell) in self.software)
        return [cell for cell in installed if self.key(cell) not in done]


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each installed provider to its software: names and versions of packages.

    Print which packages are missing.
    """
    found = {}
    for name in names:
        try:
            found[name] = PROVIDERS[name].software
        except ModuleNotFoundError as error:
            print(f"{name}: missing: {error}")
    return found


def measure(run: Run, todo: Mapping[str, Sequence[Cell]], workers: int) -> None:
    """Measure the cells of each suite, and append a row for each cell to the suite's CSV file."""
    count, total = 0, sum(map(len, todo.values()))
    for name, cells in todo.items():
        for outcome in _on_each_side(SUITES[name], cells, workers):
            row = run.row(SUITES[name], outcome)
            Table(run.folder, SUITES[name]).append(row)
            count += 1
            print(f"{count}/{total} {line(SUITES[name], row)}", flush=True)


def _on_each_side(suite: Suite, cells: Sequence[Cell], workers: int) -> Iterator[Outcome]:
    for side in SIDES:
        of_side = [cell for cell in cells if provider_of(cell).side == side]
        yield from processes.outcomes(side, suite, of_side, workers=workers)


def line(suite: Suite, row: Row) -> str:
    """Return a row of results as text for the terminal."""
    asked = " ".join(row[f.name] for f in dataclasses.fields(suite.cell))
    got = (f"{name} {row[name]}" for name in suite.figures if row[name])
    return f"{suite.name}: {asked}: {', '.join(got) if row['status'] == OK else row['status']}"


# The command line.

_CHOICES: dict[str, tuple[Sequence[str], str]] = {
    "providers": ([*PROVIDERS], "the libraries that are measured"),
    "ops": (OPS, "the operations, blocks, losses and models that are measured"),
    "directions": (
        workloads.DIRECTIONS,
        "the passes: fwd and bwd in kernels, fwd+bwd in api, fwd and fwd+bwd in blocks and loss",
    ),
    "dtypes": (
        Selection.dtypes,
        "the dtypes of operands; mixed is float32 x and bfloat16 output for norms, and float32 "
        "residual and bfloat16 x for blocks",
    ),
    "variants": (VARIANTS, "variants of the models, which differ in their functions"),
    "remats": (REMATS, "which residuals a layer of a model rematerialises"),
    "layers": (LAYERS, "how the layers of a model are stacked"),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. If they are invalid, print an error and exit with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    suites = f"suites: some of {', '.join(SUITES)} (default: all)"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=suites)
    for name, (choices, meaning) in _CHOICES.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            metavar="NAME",
            choices=choices,
            default=choices,
            help=f"{meaning}; choices: {', '.join(choices)} (default: all)",
        )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="ROWSxCOLS",
        help="use these shapes instead of the suites' own; BATCHxLENGTHxCOLS for blocks in which "
        "each sample has parameters, ROWSxFEATURESxCLASSES for losses with a weight",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes (for each of JAX and torch) that compile at the same time; they "
        "measure one after the other (default: with a GPU half of the cores, at most 8; else 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the CSV files (default: benchmarks/results/ and the device's name)",
    )
    given = parser.parse_args(argv)
    if unknown := [name for name in given.suites if name not in SUITES]:
        parser.error(f"got {', '.join(unknown)}; expected some of {', '.join(SUITES)}")
    return given


def selected(given: argparse.Namespace) -> Selection:
    return Selection(**{name: getattr(given, name) for name in (*_CHOICES, "shapes")})


def shape(text: str) -> workloads.Shape:
    sizes = text.split("x")
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected ROWSxCOLS, such as 8192x4096")
    return tuple(map(int, sizes))


def folder_of(given: argparse.Namespace) -> Path:
    """Return the folder of the CSV files."""
    return given.out or results.RESULTS / results.folder_of(results.device())


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    selection = selected(given)
    device, commit = results.device(), results.commit()
    folder = folder_of(given)
    folder.mkdir(parents=True, exist_ok=True)
    suites = [SUITES[name] for name in given.suites or SUITES]
    try:
        run = Run(folder, device, commit, installed(selection.providers))
        todo = {s.name: run.todo(s, s.cells(selection)) for s in suites}
    except ValueError as error:  # a CSV file has other columns than the suite
        print(error)
        return 2
    print(f"{device}, commit {commit}: {sum(map(len, todo.values()))} cells to measure")
    with contextlib.suppress(KeyboardInterrupt):  # the next run continues from there
        measure(run, todo, given.workers or processes.default_workers(device))
    print(f"results are in {folder}; python -m benchmarks.tables --results {folder} prints tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
