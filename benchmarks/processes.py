"""Measures cells in separate processes. If a process crashes, a new process takes over.

The processes of a *side* run either JAX or torch (see `providers`). Most of the time is spent on
compiling. Much of the compiler is Python code, and a process runs only one thread of Python at a
time, so a side may have several processes. They work in rounds: all of them compile a batch of
cells at the same time; then each measures its batch, one process after the other. No process
compiles while another one measures, because XLA and torch also time kernels on the GPU when they
compile.
"""

import collections
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
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from benchmarks.providers import Side
from benchmarks.results import ROOT, Machine
from benchmarks.suites import Cell, Suite
from benchmarks.worker import REASON_LENGTH, RESTART

# The time limit, in seconds, for each answer of a process. The first answer to a batch comes only
# when the batch is compiled.
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
    todo = collections.deque(batches(cells, workers, suite.batch))
    running: list[_Worker] = []
    try:
        while todo:
            turns = [todo.popleft() for _ in range(min(workers, len(todo)))]
            running = [worker for worker in running if not worker.ended]
            while len(running) < len(turns):
                running.append(_Worker(side, workers))
            left = yield from _round(suite, list(zip(running, turns)), limit_s)
            todo.extendleft(reversed(left))
    finally:  # end the processes even if the run is interrupted, or if the caller stops early
        for worker in running:
            if not worker.ended:
                worker.end()


def batches(cells: Sequence[Cell], workers: int, most: int) -> list[list[Cell]]:
    """Split the cells into batches of about equal size.

    The workers process the batches in rounds. In each round, every worker processes one batch, so
    all workers finish at about the same time. Cells with the same workload are in the same batch,
    because they share operands. The number of rounds is chosen so that a batch would have at most
    `most` cells if all batches had the same size. The largest batches can have a few cells more.
    """
    rounds = math.ceil(len(cells) / (workers * most))
    parts: list[list[Cell]] = []
    for _, group in itertools.groupby(cells, lambda cell: getattr(cell, "workload", cell)):
        if not parts or len(parts[-1]) * rounds * workers >= len(cells):
            parts.append([])
        parts[-1] += group
    return parts


def default_workers(on: Machine) -> int:
    """Return the default number of processes: half of the cores, but at most 8; without a GPU, 1.

    The number is limited because each process holds GPU memory.
    """
    return 1 if on == Machine("cpu") else max(1, min(8, cores() // 2))


def environment(workers: int) -> dict[str, str]:
    """Return the environment variables for a process, if `workers` processes run at a time."""
    shares_memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if workers > 1 else {}
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(_threads(workers))}
    return {**os.environ, **threads, **shares_memory}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(workers: int) -> int:
    return max(1, cores() // workers)


class _Worker:
    """A process of one side (see the module docstring). It measures cells.

    It receives requests and sends answers as lines of JSON; see `worker.py`.
    """

    def __init__(self, side: Side, workers: int) -> None:
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.log = log  # the process writes its output to this file
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", side, str(_threads(workers))],
            cwd=ROOT,
            env=environment(workers),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.why = ""  # set when the process ends
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put("")  # an empty line marks the end of the answers

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the process has died, `answer` reports it
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self, limit_s: float, since: float | None = None) -> dict[str, Any] | None:
        """Return the process's next answer.

        Return None if the process has ended, or has not answered within the time limit.
        """
        waited = 0.0 if since is None else time.monotonic() - since
        try:
            line = self.lines.get(timeout=max(0.0, limit_s - waited))
        except queue.Empty:
            self.end()
            self.why = f"no answer in {limit_s:.0f} s"
            return None
        if line:
            return json.loads(line)
        self.process.wait()
        self.end()
        return None

    def end(self) -> None:
        """End the process. Store the last line that it printed."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with self.log:
            self.log.seek(0)
            said = [line.strip() for line in self.log if line.strip()]
        self.why = said[-1] if said else "it said nothing"

    @property
    def status(self) -> str:
        """The status of the cell that was running when the process ended."""
        code = self.process.returncode
        return f"failed: its process ended with code {code}: {self.why}"[:REASON_LENGTH]


def _round(
    suite: Suite, turns: Sequence[tuple[_Worker, list[Cell]]], limit_s: float
) -> Generator[Outcome, None, list[list[Cell]]]:
    """Let all workers compile their batches at the same time, then measure one after the other.

    Yield the outcomes of the cells. If a process ends early, some of its cells are not measured.
    The generator returns these cells at its end, as a list of batches for another round.
    """
    start = time.monotonic()
    for worker, cells in turns:
        worker.send({"suite": suite.name, "cells": [*map(dataclasses.asdict, cells)]})
    for worker, _ in turns:
        worker.answer(limit_s, since=start)
    left: list[list[Cell]] = []
    for worker, cells in turns:
        if worker.ended and len(cells) > 1:  # measure each cell alone, to find which cell crashes
            left += ([cell] for cell in cells)
        else:
            rest = yield from _turn(worker, cells, limit_s)
            left += [rest] if rest else []
    return left


def _turn(
    worker: _Worker, cells: list[Cell], limit_s: float
) -> Generator[Outcome, None, list[Cell]]:
    """Yield the outcomes of a worker's cells. Return the cells that another worker must run."""
    answered = 0
    if not worker.ended:
        worker.send({})
        while answered < len(cells) and (answer := worker.answer(limit_s)):
            yield Outcome(cells[answered], answer["figures"], answer["status"])
            answered += 1
    left = cells[answered:]
    if not left:
        worker.answer(limit_s)  # wait until it has freed its memory, or has ended
    elif answered == 0 or worker.process.returncode != RESTART:
        yield Outcome(left.pop(0), {}, worker.status)
    return left
