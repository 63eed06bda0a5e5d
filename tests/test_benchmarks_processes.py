"""Tests of the benchmarks' processes: which process compiles, which measures, what fails."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

from benchmarks import processes
from benchmarks.suites import SUITES, TimedCell

KERNELS = SUITES["kernels"]
CELL = TimedCell("rms_norm", "fwd", 4, 32, "float32", "float32", "xla")
BEGIN, END = ("begin", "measured"), ("end", "measured")


# Workers run this script instead of the benchmarks' own. The name of a cell's provider tells the
# worker what to do: for example, to crash when the cell is measured.
WORKER = """
import os, sys, time
from benchmarks import worker

def log(*words):
    with open(os.environ["LOG"], "a") as file:
        print(time.monotonic(), *words, file=file)

class Side:
    THREADS = 1
    release = lambda self: None
    needs_restart = lambda self, error: "illegal address" in str(error)

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
        if cell.provider == f"lacks memory when {name}":
            raise ExceptionGroup("all", [RuntimeError("\x1b[1mout of memory\x1b[0m\\nand more")])
        if cell.provider == f"misses when {name}":
            raise ValueError("cannot be imported") from ImportError("no Triton")
        time.sleep(0.02)
        log("end", name, cell.cols)
        return {"us": cell.cols}

sys.modules["benchmarks.jax_side"] = Side()
os._exit(worker.main())
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Make the harness start the script WORKER. Return a list of the processes that it starts."""
    found = []

    def popen(command, *, real=subprocess.Popen, **options):
        found.append(real([sys.executable, "-c", WORKER, *command[3:]], **options))
        return found[-1]

    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    return found


def test_a_failure_costs_one_cell(started, tmp_path):
    """A cell whose worker fails costs no other cell, and each cell is measured alone."""
    doing = ["", "dies when prepared", "is lost when measured", "", "hangs when measured"]
    doing += ["misses when prepared", "lacks memory when measured", *[""] * 6]
    cells = [dataclasses.replace(CELL, cols=n, provider=what) for n, what in enumerate(doing)]
    outcomes = list(processes.outcomes("jax", KERNELS, cells, workers=2, limit_s=4))
    got = {o.cell.cols: o for o in outcomes}
    assert len(outcomes) == len(got) == len(doing)
    statuses = {
        "dies": "failed: its process ended with code 139: segmentation fault",
        "hangs": "failed: its process ended with code -9: no answer in 4 s",
        "is": "failed: RuntimeError: illegal address",
        "misses": "missing: ValueError: cannot be imported",
        "lacks": "failed: RuntimeError: out of memory",
    }
    for n, what in enumerate(doing):
        assert got[n].status == (statuses[what.split()[0]] if what else "ok")
        assert got[n].figures == ({} if what else {"us": n})
    assert all(process.poll() is not None for process in started)
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    begun = {cell: float(at) for at, what, name, cell in log if (what, name) == BEGIN}
    ended = {cell: float(at) for at, what, name, cell in log if (what, name) == END}
    for a, b in itertools.permutations(ended, 2):
        assert ended[a] <= begun[b] or ended[b] <= begun[a]
