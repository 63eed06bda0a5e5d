"""Measures cells in separate processes. If a process crashes, a new process takes over.

The processes of a *side* run either JAX or torch (see `providers`). Most of the time is spent on
compiling. Much of the compiler is Python code, and a process runs only one thread of Python at a
time. So several processes may compile at the same time. Each process compiles a batch of cells,
measures the batch when no other process uses the GPU, and ends.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from benchmarks.providers import Side
from benchmarks.results import ROOT
from benchmarks.suites import Cell, Suite
from benchmarks.worker import COMPILED, REASON_LENGTH, RESTART, STAGES, WAITS

# The time limit, in seconds, for a process to compile its batch, and to measure a cell.
LIMIT_S = 900.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of measuring a cell.

    If `status` is "ok", `figures` has the measured numbers. Otherwise, `status` says what failed.
    """

    cell: Cell
    figures: dict[str, Any]
    status: str


def outcomes(
    side: Side, suite: Suite, cells: Sequence[Cell], *, workers: int = 1, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """Yield an outcome for each cell.

    If a process dies or hangs, only the cell that it was running fails. Another process runs the
    remaining cells, so the outcomes may be in a different order than `cells`.
    """
    found: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
    with tempfile.NamedTemporaryFile() as lock:
        threads = 1 if suite.in_turn else max(1, _cores() // workers)
        run = _Run((side, suite.name, str(threads), lock.name), workers, limit_s)

        def measure(batch: Sequence[Cell]) -> None:
            try:
                for outcome in run.outcomes(batch):
                    found.put(outcome)
            except BaseException as error:
                found.put(error)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for batch in batches(cells, workers, suite.batch):
                pool.submit(measure, batch)
            try:
                for _ in cells:
                    outcome = found.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
            finally:  # end the processes even if the run is interrupted
                pool.shutdown(wait=False, cancel_futures=True)
                run.stop()


def batches(cells: Sequence[Cell], workers: int, most: int) -> list[list[Cell]]:
    """Split the cells into batches of about equal size, with at most about `most` cells each.

    All workers get the same number of batches. Cells with the same workload are in the same
    batch, because they share operands.
    """
    rounds = math.ceil(len(cells) / (workers * most))
    parts: list[list[Cell]] = []
    for _, group in itertools.groupby(cells, lambda cell: getattr(cell, "workload", cell)):
        if not parts or len(parts[-1]) * rounds * workers >= len(cells):
            parts.append([])
        parts[-1] += group
    return parts


def default_workers(device: str) -> int:
    """Return the default number of processes: half of the cores, but at most 8; without a GPU, 1.

    The number is limited because each process holds GPU memory.
    """
    return 1 if device == "cpu" else max(1, min(8, _cores() // 2))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Run:
    """The processes of a run, which `worker.py` describes."""

    def __init__(self, arguments: Sequence[str], workers: int, limit_s: float) -> None:
        shares_memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if workers > 1 else {}
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, _cores() // workers))}
        self.environment = {**os.environ, **threads, **shares_memory}
        self.command = [sys.executable, "-m", "benchmarks.worker", *arguments]
        self.limit_s = limit_s
        self.processes: list[subprocess.Popen[str]] = []
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True
        for process in self.processes:
            process.kill()

    def outcomes(self, batch: Sequence[Cell]) -> Iterator[Outcome]:
        """Yield an outcome for each cell of a batch. Start a new process if one ends early."""
        todo = [list(batch)]
        while todo:
            todo += yield from self._process(todo.pop(0))

    def _process(self, cells: list[Cell]) -> Generator[Outcome, None, list[list[Cell]]]:
        """Run cells in one process. Yield outcomes, and return batches for further processes."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self.processes.append(process)
            if self.is_stopped:
                process.kill()
            is_late = threading.Event()
            answers = 0
            with process:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as requests:
                    json.dump([*map(dataclasses.asdict, cells)], requests)
                while line := self._line(process, None if answers in WAITS else is_late):
                    answers += 1
                    if answers > STAGES:
                        yield Outcome(cells[answers - STAGES - 1], **json.loads(line))
            log.seek(0)
            said = [line.strip() for line in log if line.strip()] or ["it said nothing"]
        left = cells[max(0, answers - STAGES) :]
        if self.is_stopped or not left:
            return []
        if answers < COMPILED and len(cells) > 1:  # compile each alone, to find which one crashes
            return [[cell] for cell in cells]
        if process.returncode != RESTART:
            why = f"no answer in {self.limit_s:.0f} s" if is_late.is_set() else said[-1]
            status = f"failed: its process ended with code {process.returncode}: {why}"
            yield Outcome(left.pop(0), {}, status[:REASON_LENGTH])
        return [left] if left else []

    def _line(self, process: subprocess.Popen[str], is_late: threading.Event | None) -> str:
        """Return the process's next line, or "" if it has ended.

        If `is_late` is given, a process that exceeds the time limit is killed, and the event set.
        """
        assert process.stdout is not None
        if is_late is None:
            return process.stdout.readline()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self.limit_s, end)
        timer.start()
        try:
            return process.stdout.readline()
        finally:
            timer.cancel()
