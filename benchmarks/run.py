"""Measures jaxnorm and its peers, and reports.

    python -m benchmarks.run                      everything, on one GPU; then the report
    python -m benchmarks.run --quick              a few shapes of everything
    python -m benchmarks.run kernels --ops layer_norm --directions bwd --shapes 8192x4096
    python -m benchmarks.run training --bars      the steps with a goal, and whether they reach it

Suites: `kernels`, kernel time forward and backward over the whole grid; `api`, forward and backward
in one call; `blocks`, norms with what a model does to the same rows before and after; `loss`,
cross-entropies, log-probabilities and divergences, and their memory; `linear`, a matmul alone and
after a norm; `training`, steps of GPT-2 small and Llama 3.2 1B, also with QK norms: time, memory
and losses; `capacity`, the largest batch of such a step that fits in 80 GB; `stacks`, programs of
many small norms; `compile`, seconds from a first call to its program, width by width, and of
training steps; `cpu`, jaxnorm's plain JAX on the machine's CPU next to optax, jax.nn and Flax.

Kernel times come from CUPTI, on rotating buffers larger than the cache. GB/s are based on the least
bytes that must move: for a block, each of its arrays once in each direction. `roof` is the time of
a copy of as many bytes in the same process, divided by the measured time. TFLOP/s are based on 2 M
N K per matmul; forward and backward are three matmuls. `kernels` is the number of kernels of a
call. `extra_passes` counts passes over whole arrays that copy, convert or transpose; a copy may not
be a kernel, and is then not timed. `temp_bytes` is memory beside operands and results: XLA's plan,
or torch's allocations.

Nothing compiles while a call is timed, but several processes compile calls at the same time
(--workers). `compile_s` is the compile time of a call; for torch, it includes the first run. Calls
of `linear` are compiled one after the other, because compilers time matmuls on the GPU.

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
    """The machine and software that are measured, and the folder that gets the figures."""

    folder: Path
    machine: Machine
    commit: str
    software: dict[str, str]  # of each installed provider

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
        """Return the cells without a row for this software, whose provider is installed."""
        done = set() if again else Table(self.folder, suite).keys()
        installed = (cell for cell in cells if provider_name(cell) in self.software)
        return [cell for cell in installed if self.key(cell) not in done]


def installed(
    folder: Path, on: Machine, commit: str, names: Iterable[str], console: Console
) -> dict[str, str]:
    """Return each provider's software, and write it to a CSV, also if it is missing."""
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
    """Measure the cells of each suite, one side after the other, and append a row for each."""
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
    """Return a row as text for the terminal."""
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
    """Return the parsed arguments; print an error and exit with 2 if they are invalid."""
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
        help=f"out of {', '.join(SUITES)} (default: all)",
    )
    names: dict[str, tuple[list[str], str]] = {
        "providers": (list(PROVIDERS), "whose functions"),
        "ops": (
            list(OPS),
            "which operations, blocks, losses, products and models",
        ),
        "directions": (
            list(workloads.DIRECTIONS),
            "fwd and bwd for kernels, fwd+bwd for api, fwd and fwd+bwd for blocks, loss and linear",
        ),
        "dtypes": (
            ["bfloat16", "float32", "mixed"],
            "mixed: float32 x, bfloat16 output (norms); float32 residual, bfloat16 x (blocks)",
        ),
        "variants": (list(VARIANTS), "of training and capacity: whose functions a model has"),
        "remats": (list(REMATS), "of training and capacity: what a layer keeps"),
        "layers": (list(LAYERS), "of training and capacity: in a scan, or one after the other"),
    }
    for name, (choices, meaning) in names.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            metavar="NAME",
            choices=choices,
            default=choices,
            help=f"{meaning}: out of {', '.join(choices)} (default: all)",
        )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="ROWSxCOLS",
        help="instead of the suites' own; of blocks with parameters of samples "
        "BATCHxLENGTHxCOLS, of linear_cross_entropy ROWSxFEATURESxCLASSES, of linear MxKxN",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        type=count,
        metavar="N",
        help="of training: over how many devices a mesh splits parameters and batches (FSDP), with "
        "as many sequences for each (default: 1, and all GPUs of the machine)",
    )
    parser.add_argument(
        "--bars",
        action="store_true",
        help="of training and capacity only the steps that the bars of benchmarks/bars.py compare, "
        "out of those selected",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, one training step of each variant"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what has a row already; the last row counts"
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes of a side that compile at the same time, and then measure one after the "
        "other (default: on a GPU half of the cores, at most 8; else 1)",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        metavar="SECONDS",
        default=processes.LIMIT_S,
        help="that a process may take to compile its batch, or to measure a cell; then it is ended "
        "and the row says where it was (default: %(default).0f)",
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="FOLDER",
        help="where the CSV files are (default: benchmarks/results/ and the device's name)",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="of the kernels, for the CSV (default: what git says)"
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
    """Return a parser of positive numbers for argparse, whose error says what was expected."""

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
    except ValueError as error:  # a CSV with other columns
        console.print(str(error))
        return 2
    console.print(f"{on.device}, commit {commit}: {sum(map(len, todo.values()))} cells to measure")
    # If it is interrupted, it reports the results so far; the next run continues from there.
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
