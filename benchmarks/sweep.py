"""Times alternative schedules of kernels. The schedule tables are based on such sweeps.

    python -m benchmarks.sweep benchmarks/sweeps/backward.py --ops layer_norm

The file defines ``workloads()``, which returns workloads, and ``schedules(workload)``, which
returns schedules. Each schedule is compiled, its results are compared with XLA's on the same
operands, and it is timed as in `benchmarks.run`. For each workload, the fastest schedules are
printed: the time of a copy of as many bytes divided by the schedule's time, the time, and the
largest difference from XLA's result, relative to the result's largest element. If this difference
is much larger for one schedule than for the others, this schedule computes wrong results.
"""

import argparse
import functools
import importlib
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from benchmarks import calls, timing
from benchmarks.contract import KernelWorkload
from benchmarks.results import ROOT
from jaxnorm_kernels import xla

PROCESSES = os.cpu_count() or 1
# The custom calls of Mosaic kernels, which jax.export refuses by default.
_MOSAIC_CALLS = ("mosaic_gpu", "mosaic_gpu_v2")
# For each workload, this many of the fastest schedules are printed.
SHOWN = 4


def with_schedule(schedule: Any) -> types.SimpleNamespace:
    """Return an object with the forward and backward functions of an implementation.

    These functions use `schedule` instead of the default schedule. The class of the schedule
    determines the implementation.
    """
    package = ".".join(type(schedule).__module__.split(".")[:2])
    implementation = importlib.import_module(package)
    passes = {name: getattr(implementation, name) for name in ("forward", "backward")}
    return types.SimpleNamespace(
        **{name: functools.partial(f, schedule=schedule) for name, f in passes.items()}
    )


def lowered(workload: KernelWorkload, schedule: Any) -> bytearray:
    """Lower a call for CUDA, and return it serialised.

    This takes seconds of Python and needs no GPU, so it runs in separate processes.
    """
    jax.config.update("jax_platforms", "cpu")
    call = jax.jit(workload.function(with_schedule(schedule)))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _MOSAIC_CALLS]
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=checks)
    return exported(*shapes(workload)).serialize()


def compiled(function: Callable[..., Any], workload: KernelWorkload) -> Any:
    return jax.jit(function).lower(*shapes(workload)).compile()


def shapes(workload: KernelWorkload) -> Any:
    return jax.eval_shape(lambda: workload.operands(0))


def difference(ours: Any, theirs: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in wide)


def measured(workload: KernelWorkload, programs: Mapping[str, Future[Any]]) -> str:
    """Measure XLA and then each schedule, on the same operands, and return the lines to print."""
    roof = timing.copy_roof(workload.bytes).us
    operands = [workload.operands(i) for i in range(calls.buffers_for(workload.bytes))]
    reference = programs["xla"].result()
    expected, xla_us = reference(*operands[0]), timing.measure(reference, operands).us
    ran: list[tuple[float, str]] = []
    failed: list[str] = []
    for name, future in programs.items():
        if name == "xla":
            continue
        try:
            program = future.result()
            worst = difference(program(*operands[0]), expected)
            us = timing.measure(program, operands).us
        except Exception as error:  # a schedule that fails must not hide the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            failed.append(f"  failed: {name}: {reason}")
            continue
        ran.append((us, f"  {roof / us:6.3f} {us:9.1f} us  worst {worst:.0e}  {name}"))
    shape = "x".join(map(str, workload.shape))
    title = (
        f"{workload.op} {workload.direction} {shape} {workload.x_dtype}: xla {roof / xla_us:.3f}"
    )
    best = [line for _, line in sorted(ran)[:SHOWN]]
    return "\n".join([f"{title}, {len(ran)} of {len(programs) - 1} ran", *best, *failed[:1]])


def sweep(jobs: Sequence[tuple[KernelWorkload, Sequence[Any]]]) -> None:
    """Measure and print each workload. No call is compiled while another is timed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn) as others, ThreadPoolExecutor(PROCESSES) as pool:

        def build(workload: KernelWorkload, schedule: Any) -> Any:
            call = others.submit(lowered, workload, schedule).result()
            return compiled(jax.export.deserialize(call).call, workload)

        programs = [
            {"xla": pool.submit(compiled, w.function(xla), w)}
            | {str(s): pool.submit(build, w, s) for s in each}
            for w, each in jobs
        ]
        wait([future for own in programs for future in own.values()])
        for (workload, _), own in zip(jobs, programs):
            print(measured(workload, own), flush=True)


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
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="only these operations")
    parser.add_argument("--cols", nargs="+", type=int, metavar="N", help="only these widths")
    given = parser.parse_args(argv)
    if jax.devices()[0].platform != "gpu":
        print("benchmarks.sweep times GPU kernels; there is no GPU", file=sys.stderr)
        return 2
    chosen = definitions(given.file)
    sweep(
        [
            (w, schedules)
            for w in chosen["workloads"]()
            if w.op in (given.ops or [w.op]) and w.cols in (given.cols or [w.cols])
            if (schedules := chosen["schedules"](w))
        ]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
