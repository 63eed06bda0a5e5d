"""Times jaxnorm's implementations over the grid, against a copy of the same bytes and against XLA.

    python -m benchmarks.run --quick
    python -m benchmarks.run --ops layer_norm --directions bwd --out results.csv

Kernel time by CUPTI on rotating buffers larger than the cache; GB/s by the least bytes that must
move. `roof` is the time of a copy of as many bytes over the time measured, `vs xla` XLA's time over
it: both of the same run, as absolute figures drift. Rows already in the CSV are not measured again.
"""

import argparse
import csv
import dataclasses
import importlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from benchmarks import timing, workloads
from benchmarks.workloads import Workload
from jaxnorm import _implementation

COMPILERS = 16
BATCH = 32  # workloads that are compiled together


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    device: str
    jax: str
    op: str
    direction: str
    rows: int
    cols: int
    x_dtype: str
    y_dtype: str
    provider: str
    us: float
    main_us: float
    gbps: float
    roof: float
    vs_xla: float
    compile_s: float
    status: str

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, f)) for f in KEY)


KEY = ("device", "jax", "op", "direction", "rows", "cols", "x_dtype", "y_dtype", "provider")
FIELDS = [f.name for f in dataclasses.fields(Row)]
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Program:
    function: Any
    compile_s: float


def compiled(workload: Workload, provider: str) -> Program:
    """Compiles; raises where the implementation refuses or fails."""
    module = importlib.import_module(_implementation._MODULES[provider])
    refusal = module.supports(workload.spec)
    if refusal is not None:
        raise ValueError(f"refused: {refusal}")
    shapes = jax.eval_shape(lambda: workload.operands(0))
    start = time.perf_counter()
    function = jax.jit(workload.function(module)).lower(*shapes).compile()
    return Program(function, time.perf_counter() - start)


def compile_in_batches(
    items: Sequence[tuple[Workload, list[str]]],
) -> Iterator[tuple[Workload, dict[str, Future[Program]]]]:
    """The workloads in order. Nothing compiles while one is timed: XLA tunes on the same GPU."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        for batch in itertools.batched(items, BATCH):
            compiling = [
                (workload, {p: pool.submit(compiled, workload, p) for p in providers})
                for workload, providers in batch
            ]
            wait([future for _, programs in compiling for future in programs.values()])
            yield from compiling


def run(workload: Workload, programs: dict[str, Future[Program]]) -> Iterator[Row]:
    """Times each program on the same operands."""
    device = jax.devices()[0].device_kind
    identity = (device, jax.__version__, *dataclasses.astuple(workload))
    roof = timing.copy_roof(workload.bytes)
    operands = [workload.operands(i) for i in range(timing.buffers_for(workload.bytes))]
    xla_us = NAN
    for provider, future in programs.items():
        try:
            program = future.result()
            measured = timing.measure(program.function, operands)
        except Exception as error:  # a failing cell is a row, not the end of the run
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield Row(*identity, provider, NAN, NAN, NAN, NAN, NAN, NAN, reason)
            continue
        xla_us = measured.us if provider == "xla" else xla_us
        yield Row(
            *identity,
            provider,
            us=round(measured.us, 2),
            main_us=round(measured.main_us, 2),
            gbps=round(measured.gbps(workload.bytes), 1),
            roof=round(roof.us / measured.us, 4),
            vs_xla=round(xla_us / measured.us, 3),
            compile_s=round(program.compile_s, 2),
            status="ok",
        )


def show(row: Row) -> str:
    dtypes = row.x_dtype if row.x_dtype == row.y_dtype else f"{row.x_dtype}->{row.y_dtype}"
    head = f"{row.op:12}{row.direction:4}{row.rows:>7} x {row.cols:<7}{dtypes:18}{row.provider:8}"
    if row.status != "ok":
        return head + row.status
    return head + (
        f"{row.us:9.1f} us{row.gbps:7.0f} GB/s  roof {row.roof:5.3f}  vs xla {row.vs_xla:5.2f}"
        f"  compile {row.compile_s:4.1f} s"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    some = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument(
        "--ops", **some, choices=workloads.OPERATIONS, default=list(workloads.OPERATIONS)
    )
    parser.add_argument(
        "--directions", **some, choices=workloads.DIRECTIONS, default=list(workloads.DIRECTIONS)
    )
    parser.add_argument(
        "--dtypes",
        **some,
        choices=[x for x, y in workloads.DTYPES if x == y] + ["mixed"],
        default=["bfloat16", "float32", "mixed"],
        help="mixed: float32 x with bfloat16 output (norms)",
    )
    parser.add_argument(
        "--shapes", nargs="+", type=shape, metavar="ROWSxCOLS", help="instead of the whole grid"
    )
    names = _implementation.names()
    parser.add_argument("--providers", **some, choices=names, default=list(names))
    parser.add_argument("--quick", action="store_true", help="two shapes: about a minute")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmark.csv"), help="CSV to append to (%(default)s)"
    )
    return parser.parse_args(argv)


def shape(text: str) -> tuple[int, int]:
    try:
        rows, cols = map(int, text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected ROWSxCOLS, such as 8192x4096")
    return rows, cols


def done_before(path: Path) -> set[tuple[str, ...]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(row[f] for f in KEY) for row in csv.DictReader(file)}


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(
            f"benchmarks.run times GPU kernels; JAX's default device is {device}", file=sys.stderr
        )
        return 2
    mixed = ("float32", "bfloat16")
    shapes = given.shapes or (workloads.QUICK if given.quick else None)
    dtypes = [mixed if d == "mixed" else (d, d) for d in given.dtypes]
    done = done_before(given.out)

    def todo(w: Workload) -> list[str]:
        identity = (device.device_kind, jax.__version__, *dataclasses.astuple(w))
        missing = [p for p in given.providers if (*map(str, identity), p) not in done]
        return given.providers if missing else []  # XLA's time of the same run goes with each

    items = [
        (w, todo(w))
        for w in workloads.grid(tuple(given.ops), tuple(given.directions), dtypes, shapes)
    ]
    items = [(w, providers) for w, providers in items if providers]
    fresh = not given.out.exists()
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()
        for row in itertools.chain.from_iterable(run(*item) for item in compile_in_batches(items)):
            print(show(row), flush=True)
            writer.writerow(dataclasses.asdict(row))
            file.flush()
    print(f"{len(items)} workloads; CSV: {given.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
