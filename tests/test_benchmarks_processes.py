"""Tests of the benchmark harness's processes.

They check which process compiles and which one measures, and what happens if a process fails.

A *side* is JAX or torch. Its workers are processes that prepare (compile) benchmark cells (cases)
in parallel, and measure them on the GPU one after the other.
"""

import collections
import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import processes, worker
from benchmarks.results import Machine
from benchmarks.suites import SUITES, Selection, TimedCell

KERNELS = SUITES["kernels"]
CELL = TimedCell("rms_norm", "fwd", 4, 32, "float32", "float32", "xla")


# The output of a worker.


class Side:
    """A stand-in for the module that runs the benchmarks of JAX or torch. Its cells can fail.

    `errors` has a pair for each cell: the error that is raised while the cell is prepared, and the
    error that is raised while it is measured. None means that no error is raised.
    """

    THREADS = 1

    def __init__(self, *errors, crowds=False):
        self.errors = errors
        self.crowds = crowds
        self.measured = 0

    def prepare(self, suite, cell):
        def measure(error):
            self.measured += 1
            return raised(error) or {"us": 1.0}

        at_once, later = self.errors[cell.cols]
        raised(at_once)
        return lambda: measure(later)

    def release(self):
        pass

    def needs_restart(self, error):
        return "illegal address" in str(error)

    def crowds_others(self):
        return self.crowds


def raised(error):
    if error is not None:
        raise error


def spoken(side, cells, *, turn=True, threads=1):
    """Return the exit code and the output of a worker for one batch of cells.

    A worker first prepares (compiles) all cells of the batch. It measures them after a second
    request, `{}`. If `turn` is False, no second request is sent, and nothing is measured.
    """
    request = {"suite": "kernels", "cells": [*map(dataclasses.asdict, cells)]}
    requests = [json.dumps(request), *(["{}"] if turn else [])]
    out = io.StringIO()
    code = worker.work(side, io.StringIO("".join(f"{r}\n" for r in requests)), out, threads)
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def cells_of(cols, provider="xla"):
    return [dataclasses.replace(CELL, cols=n, provider=provider) for n in cols]


def test_an_absent_side_is_named_for_every_cell(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.torch_side", None)
    code, got = spoken(worker.import_side("torch"), [CELL, CELL])
    assert code == 0
    assert got[0] == got[-1] == {}
    assert len(got) == 4
    assert all(a["status"].startswith("missing: ModuleNotFoundError") for a in got[1:-1])


def test_failures_are_answers():
    group = ExceptionGroup("all failed", [NotImplementedError("\x1b[1monly f32\x1b[0m\nand more")])
    memory = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    lost = RuntimeError("illegal address")
    errors = [(None, None), (None, memory), (group, None), (ImportError("no"), None)]
    errors += [(None, lost), (None, None)]
    code, got = spoken(Side(*errors), cells_of(range(6)))
    assert code == worker.RESTART  # The worker exits before it measures the last cell.
    assert got[0] == {}
    assert got[1] == {"figures": {"us": 1.0}, "status": "ok"}
    assert [a["status"] for a in got[2:]] == [
        "failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "failed: NotImplementedError: only f32",
        "missing: ImportError: no",
        "failed: RuntimeError: illegal address",
    ]


def test_an_implementation_whose_packages_lack_is_missing():
    error = ValueError("rms_norm: implementation='triton' cannot be imported")
    error.__cause__ = ImportError("no Triton")
    assert worker.reason(error) == f"missing: ValueError: {error}"


def test_a_context_that_is_lost_in_preparation():
    """If the GPU's context is lost while several cells are prepared, no cell counts as failed.

    It is unknown which of them caused the error, so the worker is restarted. If only one cell is
    prepared, it counts as failed.
    """
    side = Side((None, None), (RuntimeError("illegal address"), None))
    assert spoken(side, cells_of([0, 1])) == (worker.RESTART, [])
    code, (prepared, answer) = spoken(side, cells_of([1]))
    assert code == worker.RESTART
    assert prepared == {}
    assert answer["status"] == "failed: RuntimeError: illegal address"


def test_a_worker_that_crowds_others_goes_after_its_turn():
    code, got = spoken(Side((None, None), crowds=True), cells_of([0]))
    assert code == worker.RESTART
    assert [a.get("status") for a in got] == [None, "ok"]


def test_a_worker_without_a_parent_measures_nothing():
    side = Side((None, None))
    assert spoken(side, cells_of([0]), turn=False) == (0, [{}])
    assert side.measured == 0


def test_cells_are_prepared_in_as_many_threads_as_the_side_can():
    class Meeting(Side):
        THREADS = 2
        barrier = threading.Barrier(2)

        def prepare(self, suite, cell):
            self.barrier.wait(timeout=20)  # until another thread waits, too
            return super().prepare(suite, cell)

    class Alone(Side):
        def prepare(self, suite, cell):
            assert threading.current_thread() is threading.main_thread()
            return super().prepare(suite, cell)

    for side in (Meeting, Alone):
        _, got = spoken(side((None, None), (None, None)), cells_of([0, 1]), threads=16)
        assert [a["status"] for a in got[1:-1]] == ["ok", "ok"]


# In the tests below, several worker processes run the following script instead of the benchmarks'
# own. A cell is one measurement. The name of its provider tells the worker what to do: for example,
# to crash when the cell is measured.

WORKER = """
import os, sys, time
from benchmarks import worker

def log(*words):
    with open(os.environ["LOG"], "a") as file:
        print(os.getpid(), time.monotonic(), *words, file=file)

def others():
    with open(os.environ["LOG"]) as file:
        return len({line.split()[0] for line in file})

class Side:
    THREADS = 1
    release = lambda self: None
    needs_restart = lambda self, error: "illegal address" in str(error)
    crowds_others = lambda self: False

    def prepare(self, suite, cell):
        self.step("prepared", cell)
        return lambda: self.step("measured", cell)

    def step(self, name, cell):
        log("begin", name, cell.cols)
        if cell.provider == f"dies when {name}":
            print("segmentation fault", file=sys.stderr, flush=True)
            os._exit(139)
        if cell.provider == f"hangs when {name}":
            time.sleep(60)
        if cell.provider == f"is lost when {name}":
            raise RuntimeError("illegal address")
        if cell.provider == "meets two" and name == "prepared":
            give_up = time.monotonic() + 10
            while others() < 3:
                assert time.monotonic() < give_up, "the others do not prepare"
                time.sleep(0.01)
            time.sleep(0.1 * cell.cols)  # the first to be ready has to wait
        time.sleep(0.02)
        log("end", name, cell.cols)
        return {"us": cell.cols}

sys.modules["benchmarks.jax_side"] = Side()
os._exit(worker.main())
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Make the harness start the script WORKER instead of its own worker program.

    Return a list, to which each process is added when it is started. The attribute `asked` of a
    process is the command that the harness would run without this fixture.
    """
    found = []

    def popen(command, *, real=subprocess.Popen, **options):
        process = real([sys.executable, "-c", WORKER, *command[3:]], **options)
        process.asked = command
        found.append(process)
        return process

    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    return found


@dataclasses.dataclass(frozen=True)
class Span:
    """The time during which a worker prepared or measured a cell."""

    process: str
    name: str
    cols: int
    begin: float
    end: float


def spans(folder):
    begun, found = {}, []
    for line in (folder / "log").read_text().splitlines():
        process, at, what, name, cols = line.split()
        if what == "begin":
            begun[process] = float(at)
        else:
            found.append(Span(process, name, int(cols), begun[process], float(at)))
    return found


def test_all_compile_at_once_and_measure_alone(started, tmp_path, monkeypatch):
    suite = dataclasses.replace(KERNELS, batch=2)
    cells = [
        dataclasses.replace(CELL, cols=n, provider=p) for n in range(6) for p in ("meets two", "")
    ]
    got = list(processes.outcomes("jax", suite, cells, workers=3))
    assert [(o.cell, o.status) for o in got] == [(cell, "ok") for cell in cells]
    assert [o.figures["us"] for o in got] == [cell.cols for cell in cells]
    assert len(started) == 3  # The same workers run both batches.

    done = spans(tmp_path)
    assert len(done) == 2 * len(cells)
    for one, other in itertools.permutations(done, 2):
        if one.name == "measured":
            assert other.end <= one.begin or one.end <= other.begin, (one, other)
    of_workload = collections.defaultdict(set)
    for span in done:
        of_workload[span.cols].add(span.process)
    assert all(len(by) == 1 for by in of_workload.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_costs_one_cell(started, workers):
    bad = {
        1: "dies when prepared",
        3: "dies when measured",
        5: "is lost when prepared",
        7: "is lost when measured",
    }
    cells = [dataclasses.replace(CELL, cols=n, provider=bad.get(n, "")) for n in range(9)]
    outcomes = list(processes.outcomes("jax", KERNELS, cells, workers=workers))
    assert sorted(o.cell.cols for o in outcomes) == list(range(9))
    got = {o.cell.cols: o for o in outcomes}
    assert [n for n in got if got[n].status == "ok" and got[n].figures == {"us": n}] == [
        n for n in got if n not in bad
    ]
    for n in (1, 3):
        assert got[n].status == "failed: its process ended with code 139: segmentation fault"
    for n in (5, 7):
        assert got[n].status == "failed: RuntimeError: illegal address"
    assert all(process.poll() is not None for process in started)
    if workers == 1:
        assert [o.cell for o in outcomes] == cells  # in this order, even if some ran twice


@pytest.mark.parametrize("when", ["prepared", "measured"])
@pytest.mark.usefixtures("started")
def test_a_process_that_hangs_costs_one_cell(when):
    cells = [*cells_of([1], ""), *cells_of([2], f"hangs when {when}"), *cells_of([3, 4], "")]
    outcomes = processes.outcomes("jax", KERNELS, cells, workers=2, limit_s=4)
    got = {o.cell.cols: o for o in outcomes}
    assert {n: o.figures.get("us") for n, o in got.items()} == {1: 1, 2: None, 3: 3, 4: 4}
    where = r"in attempt, benchmarks/worker\.py:\d+"
    status = rf"failed: its process ended with code -6 {where}: no answer in 4 s"
    assert re.fullmatch(status, got[2].status)


def test_an_interrupted_run_leaves_no_process(started):
    cells = [*cells_of([8, 9], ""), *cells_of([1, 2], "hangs when measured")]
    several = processes.outcomes("jax", KERNELS, cells, workers=2)
    assert next(several).status == "ok"
    start = time.monotonic()
    several.close()  # One worker is measuring, and the other waits.
    assert time.monotonic() - start < 30
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_the_workers_share_the_cores(started, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 16)
    list(processes.outcomes("jax", KERNELS, cells_of([1, 2]), workers=2))
    assert [process.asked[1:] for process in started] == [
        ["-m", "benchmarks.worker", "jax", "8"]
    ] * 2


def test_the_workers_share_the_memory(monkeypatch):
    """If there are several workers, JAX does not preallocate GPU memory.

    With one worker, the user's setting remains.
    """
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr(processes, "cores", lambda: 16)
    alone, beside = processes.environment(1), processes.environment(8)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in alone
    assert beside["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert [e["TORCHINDUCTOR_COMPILE_THREADS"] for e in (alone, beside)] == ["16", "2"]
    assert beside["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("device", "cores", "workers"),
    [("cpu", 64, 1), ("NVIDIA H200", 16, 8), ("NVIDIA H200", 64, 8), ("NVIDIA H200", 1, 1)],
)
def test_how_many_workers(device, cores, workers, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: cores)
    assert processes.default_workers(Machine(device)) == workers


def test_batches_are_even_and_keep_workloads_together():
    cells = [
        dataclasses.replace(CELL, cols=n, provider=p) for n in range(100) for p in ("xla", "jnp")
    ]
    parts = processes.batches(cells, 3, 32)
    assert [cell for part in parts for cell in part] == cells
    assert len(parts) == 9  # three rounds, in each of which three workers get up to 32 cells
    assert {len(part) for part in parts} <= {8, 24}
    assert all(part[0].provider == "xla" for part in parts)
    assert processes.batches([], 3, 32) == []
    assert processes.batches(cells[:2], 3, 32) == [cells[:2]]
    steps = list(SUITES["training"].cells(Selection()))
    assert processes.batches(steps, 8, SUITES["training"].batch) == [[step] for step in steps]
