"""Times alternative schedules of kernels. The schedule tables are based on such sweeps.

    python -m benchmarks.sweep benchmarks/sweeps/backward.py --ops layer_norm --out sweep.csv

The file defines ``workloads()``, which returns workloads, and ``schedules(workload)``, which
returns schedules. Each schedule is compiled, its results are compared with XLA's on the same
operands, and it is timed as in `benchmarks.run`. The column `worst` is the largest difference from
XLA's result, relative to the result's largest element. If `worst` is much larger for one schedule
than for the others, this schedule computes wrong results.
"""

import argparse
import csv
import dataclasses
import functools
import importlib
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from benchmarks import calls, timing
from benchmarks.contract import KernelWorkload, LinearKernelWorkload
from benchmarks.results import ROOT
from jaxnorm_kernels import mosaic, xla

KernelCall = KernelWorkload | LinearKernelWorkload

PROCESSES = os.cpu_count() or 1
# The custom calls of Mosaic kernels, which jax.export refuses by default.
_MOSAIC_CALLS = ("mosaic_gpu", "mosaic_gpu_v2")
_PASSES = ("forward", "backward", "rms_norm_linear_fwd")
# For each workload, this many of the fastest schedules are printed.
SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one schedule. If it failed, numbers are NaN and `status` is the reason."""

    op: str
    direction: str
    shape: str
    x_dtype: str
    y_dtype: str
    schedule: str
    us: float
    main_us: float
    roof: float
    vs_xla: float
    worst: float
    status: str


def with_schedule(schedule: Any) -> types.SimpleNamespace:
    """Return an object with the forward and backward functions of an implementation.

    These functions use `schedule` instead of the default schedule. The class of the schedule
    determines the implementation.
    """
    package = ".".join(type(schedule).__module__.split(".")[:2])
    implementation = importlib.import_module(package)
    passes = [n for n in _PASSES if hasattr(implementation, n)]
    return types.SimpleNamespace(
        **{n: functools.partial(getattr(implementation, n), schedule=schedule) for n in passes}
    )


def lowered(workload: KernelCall, schedule: Any) -> bytearray:
    """Lower a call for CUDA, and return it serialised.

    This takes seconds of Python and needs no GPU, so it runs in separate processes.
    """
    jax.config.update("jax_platforms", "cpu")
    call = jax.jit(workload.function(with_schedule(schedule)))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _MOSAIC_CALLS]
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=checks)
    return exported(*shapes(workload)).serialize()


def compiled(function: Callable[..., Any], workload: KernelCall) -> Any:
    return jax.jit(function).lower(*shapes(workload)).compile()


def shapes(workload: KernelCall) -> Any:
    return jax.eval_shape(lambda: workload.operands(0))


def difference(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in wide)


def measured(workload: KernelCall, programs: dict[str, Future[Any]]) -> Iterator[Row]:
    """Measure XLA and then each schedule, on the same operands, and yield a row for each."""
    roof = timing.copy_roof(workload.bytes).us
    operands = [workload.operands(i) for i in range(calls.buffers_for(workload.bytes))]
    reference, xla_us = None, float("nan")
    call, shape = (workload.op, workload.direction), text_of(workload)
    for name, future in programs.items():
        identity = (*call, shape, workload.x_dtype, workload.y_dtype, name)
        try:
            program = future.result()
            out = program(*operands[0])
            reference = out if reference is None else reference
            worst = difference(out, reference)
            timed = timing.measure(program, operands)
        except Exception as error:  # any failure is recorded in the schedule's row
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            nan = float("nan")
            yield Row(
                *identity, us=nan, main_us=nan, roof=nan, vs_xla=nan, worst=nan, status=reason
            )
            continue
        xla_us = timed.us if name == "xla" else xla_us
        yield Row(
            *identity,
            us=round(timed.us, 2),
            main_us=round(timed.main_us, 2),
            roof=round(roof / timed.us, 4),
            vs_xla=round(xla_us / timed.us, 3),
            worst=worst,
            status="ok",
        )


def sweep(jobs: Sequence[tuple[KernelCall, Sequence[Any]]]) -> Iterator[list[Row]]:
    """Yield a list of rows for each workload. No call is compiled while another is timed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn) as others, ThreadPoolExecutor(PROCESSES) as pool:

        def build(workload: KernelCall, schedule: Any) -> Any:
            if type(schedule).__module__.startswith(mosaic.__name__):
                call = others.submit(lowered, workload, schedule).result()
                return compiled(jax.export.deserialize(call).call, workload)
            return compiled(workload.function(with_schedule(schedule)), workload)

        programs = [
            {"xla": pool.submit(compiled, w.function(xla), w)}
            | {str(s): pool.submit(build, w, s) for s in each}
            for w, each in jobs
        ]
        wait([future for own in programs for future in own.values()])
        for (workload, _), own in zip(jobs, programs):
            yield list(measured(workload, own))


def text_of(call: Row | KernelCall) -> str:
    """Return the shape of a call as text, such as "8192x4096"."""
    shape = call.shape
    return shape if isinstance(shape, str) else "x".join(map(str, shape))


def name_of(call: Row | KernelCall) -> str:
    return f"{call.op} {call.direction} {text_of(call)} {call.x_dtype}"


def show(rows: Sequence[Row]) -> str:
    first, *others = rows
    ranked = sorted((r for r in others if r.status == "ok"), key=lambda r: r.us)
    lines = [f"{name_of(first)}: xla {first.roof}, {len(ranked)} of {len(others)} ran"]
    for r in ranked[:SHOWN]:
        lines.append(f"  {r.roof:6.3f} {r.us:9.1f} us  worst {r.worst:.0e}  {r.schedule}")
    lines += [f"  failed: {r.schedule}: {r.status}" for r in others if r.status != "ok"][:1]
    return "\n".join(lines)


def definitions(file: Path) -> dict[str, Any]:
    """Return the definitions in a Python file.

    If the file belongs to this repository, it is imported as a module, so that other processes can
    unpickle its classes.
    """
    if not file.resolve().is_relative_to(ROOT):
        return runpy.run_path(str(file))
    name = ".".join(file.resolve().relative_to(ROOT).with_suffix("").parts)
    return vars(importlib.import_module(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="Python file with workloads() and schedules()")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("sweep.csv"),
        help="CSV file for the results (default: %(default)s)",
    )
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="only these operations")
    parser.add_argument("--cols", nargs="+", type=int, metavar="N", help="only these widths")
    given = parser.parse_args(argv)
    if jax.devices()[0].platform != "gpu":
        print("benchmarks.sweep times GPU kernels; there is no GPU", file=sys.stderr)
        return 2
    chosen = definitions(given.file)
    jobs = [
        (w, schedules)
        for w in chosen["workloads"]()
        if w.op in (given.ops or [w.op]) and w.cols in (given.cols or [w.cols])
        if (schedules := chosen["schedules"](w))
    ]
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
        writer.writeheader()
        for rows in sweep(jobs):
            print(show(rows), flush=True)
            writer.writerows(map(dataclasses.asdict, rows))
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
