"""Measures jaxnorm and other libraries, and writes reports.

    python -m benchmarks.run                      everything, on one GPU; then the report
    python -m benchmarks.run --quick              a few shapes of everything
    python -m benchmarks.run kernels --ops layer_norm --directions bwd --shapes 8192x4096
    python -m benchmarks.run training --bars      only the steps that bars.py compares

Suites:

* `kernels`: the forward and the backward pass of norms and softmaxes, timed separately
* `api`: both passes of norms and softmaxes in one call
* `blocks`: norms and softmaxes with a model's elementwise work before and after them
* `loss`: cross-entropies, log-probabilities and divergences
* `linear`: a matmul alone, and a matmul after a norm
* `training`: steps of GPT-2 small and Llama 3.2 1B, also with QK norms: time, memory and losses
* `capacity`: the largest batch with which a training step fits in 80 GB
* `stacks`: programs of many small norms
* `compile`: the seconds to trace, lower and compile operations and training steps
* `cpu`: jaxnorm's plain JAX code on the machine's CPU, compared with optax, jax.nn and Flax

Kernel times are measured with CUPTI. Successive calls use different sets of operands, so that no
operand is in the GPU's cache. These are columns of the results:

* `gbps`: GB/s, computed from the minimum memory traffic: each pass loads or stores each of its
  arrays once
* `roof`: the time of a copy of as many bytes in the same process, divided by the measured time
* `tflops`: TFLOP/s, computed from 2 * M * N * K operations per matmul; forward and backward pass
  together have three matmuls
* `kernels`: the number of kernels of a call
* `extra_passes`: the number of copies, casts and transposes of whole arrays. The GPU driver may
  perform a copy without a kernel; the measured time does not include such a copy
* `temp_bytes`: the memory for intermediates, without operands and results: planned by XLA, or
  allocated by torch

Several processes compile calls at the same time (--workers), but nothing compiles while a call is
timed. `compile_s` is the compile time of a call; for torch, it includes the first run. Calls of
`linear` are compiled one after the other, because compilers time matmuls on the GPU.

On a machine without an NVIDIA GPU, times are wall-clock times of the CPU. Rows that are already in
the CSV files are not measured again.
"""

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import processes, report, report_tables, results, workloads
from benchmarks.models import LAYERS, REMATS, VARIANTS
from benchmarks.processes import Outcome
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, Machine, Row, Table
from benchmarks.suites import OPS, SUITES, Cell, Selection, Suite, provider_name, provider_of


@dataclasses.dataclass(frozen=True)
class Run:
    """The machine and software that are measured, and the folder for the results."""

    folder: Path
    machine: Machine
    commit: str
    software: dict[str, str]  # maps the name of each installed provider to its software

    def key(self, cell: Cell) -> tuple[str, ...]:
        fields = map(str, dataclasses.astuple(cell))
        return (self.machine.device, self.software[provider_name(cell)], *fields)

    def row(self, suite: Suite, outcome: Outcome) -> Row:
        cell = {name: str(value) for name, value in dataclasses.asdict(outcome.cell).items()}
        return {
            "device": self.machine.device,
            "software": self.software[provider_name(outcome.cell)],
            "commit": self.commit,
            **cell,
            **results.rounded(suite, outcome.figures),
            "status": outcome.status,
        }

    def rows(self, suite: str) -> list[Row]:
        return Table(self.folder, SUITES[suite]).rows()

    def todo(self, suite: Suite, cells: Iterable[Cell], *, again: bool) -> list[Cell]:
        """Return the cells that remain to be measured with the installed software."""
        done = set() if again else Table(self.folder, suite).keys()
        installed = (cell for cell in cells if provider_name(cell) in self.software)
        return [cell for cell in installed if self.key(cell) not in done]


def installed(
    folder: Path, on: Machine, commit: str, names: Iterable[str], console: Console
) -> dict[str, str]:
    """Return a dict from each installed provider to its software: names and versions of packages.

    For every provider, providers.csv gets a row with the software, or with the package that is
    missing.
    """
    found = {}
    for name in names:
        status = OK
        try:
            found[name] = PROVIDERS[name].software
        except ModuleNotFoundError as error:
            status = f"missing: {error}"
            console.print(f"{name}: {status}")
        row = {
            "device": on.device,
            "driver": on.driver,
            "commit": commit,
            "provider": name,
            "side": PROVIDERS[name].side,
            "software": found.get(name, ""),
            "status": status,
        }
        file = results.path(folder, "providers")
        if row not in results.read(file, results.PROVIDER_COLUMNS):
            results.append(file, results.PROVIDER_COLUMNS, row)
    return found


def measure(
    run: Run,
    todo: Mapping[str, Sequence[Cell]],
    progress: Progress,
    *,
    workers: int,
    limit_s: float,
) -> None:
    """Measure the cells of each suite, and append a row for each cell to the suite's CSV file."""
    task = progress.add_task("", total=sum(map(len, todo.values())))
    for name, cells in todo.items():
        suite = SUITES[name]
        progress.update(task, description=suite.name)
        for outcome in _on_each_side(suite, cells, workers=workers, limit_s=limit_s):
            row = run.row(suite, outcome)
            Table(run.folder, suite).append(row)
            progress.console.print(line(suite, row))
            progress.advance(task)


def _on_each_side(
    suite: Suite, cells: Sequence[Cell], *, workers: int, limit_s: float
) -> Iterator[Outcome]:
    workers = 1 if suite.alone else workers
    for side in suite.sides:
        of_side = [cell for cell in cells if provider_of(cell).side == side]
        yield from processes.outcomes(side, suite, of_side, workers=workers, limit_s=limit_s)


def line(suite: Suite, row: Row) -> str:
    """Return a row of results as text for the terminal."""
    asked = " ".join(row[f.name] for f in dataclasses.fields(suite.cell))
    got = (f"{name} {row[name]}" for name in suite.figures if row[name])
    return f"{suite.name}: {asked}: {', '.join(got) if row['status'] == OK else row['status']}"


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(),
        console=console,
    )


# The command line.


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. If they are invalid, print an error and exit with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        type=suite_name,
        default=list(SUITES),
        help=f"a suite: one of {', '.join(SUITES)} (default: all)",
    )
    names: dict[str, tuple[list[str], str]] = {
        "providers": (list(PROVIDERS), "the providers whose functions are measured"),
        "ops": (
            list(OPS),
            "the operations, blocks, losses, products and models that are measured",
        ),
        "directions": (
            list(workloads.DIRECTIONS),
            "the passes that are measured: fwd and bwd in kernels, fwd+bwd in api, fwd and fwd+bwd "
            "in blocks, loss and linear",
        ),
        "dtypes": (
            ["bfloat16", "float32", "mixed"],
            "the dtypes of operands; mixed is float32 x and bfloat16 output for norms, and float32 "
            "residual and bfloat16 x for blocks",
        ),
        "variants": (
            list(VARIANTS),
            "variants of the models in training and capacity, which differ in their functions",
        ),
        "remats": (list(REMATS), "which residuals a layer rematerialises in training and capacity"),
        "layers": (list(LAYERS), "how the layers are stacked in training and capacity"),
    }
    for name, (choices, meaning) in names.items():
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
        "each sample has parameters, ROWSxFEATURESxCLASSES for losses with a weight, MxKxN for "
        "linear",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        type=count,
        metavar="N",
        help="numbers of devices over which training shards parameters and batches (FSDP); each "
        "device gets the same number of sequences (default: 1, and all GPUs of the machine)",
    )
    parser.add_argument(
        "--bars",
        action="store_true",
        help="in training and capacity, measure only those of the selected steps that "
        "benchmarks/bars.py compares",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure few shapes, and one training step per variant"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also measure cells that have a row; the last row counts",
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="number of processes (for each of JAX and torch) that compile at the same time; they "
        "measure one after the other (default: with a GPU half of the cores, at most 8; else 1)",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        metavar="SECONDS",
        default=processes.LIMIT_S,
        help="time limit for a process to compile its batch or to measure a cell; if it takes "
        "longer, it is ended, and the row says where it was (default: %(default).0f)",
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="FOLDER",
        help="folder of the CSV files (default: benchmarks/results/ and the device's name)",
    )
    parser.add_argument(
        "--commit",
        metavar="HASH",
        help="commit of the kernels for the CSV files (default: from git)",
    )
    return parser.parse_args(argv)


def selected(given: argparse.Namespace) -> Selection:
    return Selection(
        providers=tuple(given.providers),
        ops=tuple(given.ops),
        directions=tuple(given.directions),
        dtypes=tuple(
            ("float32", "bfloat16") if name == "mixed" else (name, name) for name in given.dtypes
        ),
        shapes=None if given.shapes is None else tuple(given.shapes),
        quick=given.quick,
        variants=tuple(given.variants),
        remats=tuple(given.remats),
        layers=tuple(given.layers),
        devices=tuple(given.devices or dict.fromkeys((1, results.gpus() or 1))),
        bars=given.bars,
    )


def suite_name(text: str) -> str:
    if text not in SUITES:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected one of {', '.join(SUITES)}")
    return text


def shape(text: str) -> workloads.Shape:
    sizes = text.split("x")
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected ROWSxCOLS, such as 8192x4096")
    return tuple(map(int, sizes))


def positive(kind: type[int] | type[float], expected: str) -> Callable[[str], Any]:
    """Return a parser of positive numbers for argparse; its error text says what was expected."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected {expected}")
        return value

    return parse


count = positive(int, "a number, 1 or more")
seconds = positive(float, "seconds, more than 0")


def folder(text: str) -> Path:
    path = Path(text)
    if path.is_file() or path.suffix == ".csv":
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected a folder, which gets a CSV for each suite"
        )
    return path


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    selection = selected(given)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    on = results.this_machine()
    folder = given.out or report.RESULTS / on.folder
    folder.mkdir(parents=True, exist_ok=True)
    commit = given.commit or results.commit()
    suites = [SUITES[name] for name in given.suites]
    try:
        software = installed(folder, on, commit, selection.providers, console)
        run = Run(folder, on, commit, software)
        todo = {s.name: run.todo(s, s.cells(selection), again=given.again) for s in suites}
    except ValueError as error:  # a CSV file has other columns than the suite
        console.print(str(error))
        return 2
    console.print(f"{on.device}, commit {commit}: {sum(map(len, todo.values()))} cells to measure")
    # If the run is interrupted, report the results so far. The next run continues from there.
    with bar(console) as progress, contextlib.suppress(KeyboardInterrupt):
        workers = given.workers or processes.default_workers(on)
        measure(run, todo, progress, workers=workers, limit_s=given.limit)
    if "training" in given.suites and (bars := report_tables.bars(run.rows("training"))):
        console.print(bars)
    if "compile" in given.suites:
        console.print(report_tables.compile_times(run.rows("compile")))
    for file in report.write(folder):
        console.print(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
