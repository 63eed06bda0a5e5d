"""Runs cells in processes of their side, and replaces one that a cell brings down.

Compiling takes longer than measuring, and most of it is Python, which holds a process: so a side
may have several. They go in rounds. All compile a batch of cells at the same time; then one after
the other measures its batch. Nothing compiles while a call is timed: XLA and torch tune on the
same GPU.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any

from benchmarks.providers import Side
from benchmarks.results import ROOT, Machine
from benchmarks.suites import Cell, Suite
from benchmarks.worker import REASON_LENGTH, RESTART

LIMIT_S = 900.0  # for one answer; the first of a batch waits for its compilations
ABORT_S = 10.0  # that a process has to say where it was
# A line of the project in what faulthandler writes, not one of a virtual environment in its folder.
_FRAME = re.compile(rf'File "{re.escape(str(ROOT))}/([^.].*)", line (\d+) in (\S+)')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell: figures where `status` is "ok", else a reason."""

    cell: Cell
    figures: dict[str, Any]
    status: str


def outcomes(
    side: Side, suite: Suite, cells: Sequence[Cell], *, workers: int = 1, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """One for each cell, in the order of the cells but for what a process leaves to another.

    A process that dies or hangs costs the cell it was at.
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
    finally:  # also where the run is interrupted, or its caller has enough
        for worker in running:
            if not worker.ended:
                worker.end()


def batches(cells: Sequence[Cell], workers: int, most: int) -> list[list[Cell]]:
    """Equal parts of the cells, for whole rounds. Those of one workload share their operands."""
    rounds = math.ceil(len(cells) / (workers * most))
    parts: list[list[Cell]] = []
    for _, group in itertools.groupby(cells, lambda cell: getattr(cell, "workload", cell)):
        if not parts or len(parts[-1]) * rounds * workers >= len(cells):
            parts.append([])
        parts[-1] += group
    return parts


def default_workers(on: Machine) -> int:
    """Half of the cores, at most 8, where there is a GPU: each holds a part of its memory."""
    return 1 if on == Machine("cpu") else max(1, min(8, cores() // 2))


def environment(workers: int) -> dict[str, str]:
    """Of a process that has so many beside it, itself included."""
    shares_memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if workers > 1 else {}
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(_threads(workers))}
    return {**os.environ, **threads, **shares_memory}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(workers: int) -> int:
    return max(1, cores() // workers)


class _Worker:
    """A process of a side, which answers lines with lines."""

    def __init__(self, side: Side, workers: int) -> None:
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.log = log  # until it ends
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
        self.why = self.where = ""  # it ended
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put("")  # there are no more

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: the next answer tells
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self, limit_s: float, since: float | None = None) -> dict[str, Any] | None:
        """The next one; None where it has ended, or took too long and was killed."""
        waited = 0.0 if since is None else time.monotonic() - since
        try:
            line = self.lines.get(timeout=max(0.0, limit_s - waited))
        except queue.Empty:
            self.end(signal.SIGABRT)
            self.why = f"no answer in {limit_s:.0f} s"
            return None
        if line:
            return json.loads(line)
        self.process.wait()
        self.end()
        return None

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it if it has not ended, and keeps its last words and where it was."""
        assert self.process.stdin is not None
        self.process.send_signal(how)
        try:
            self.process.wait(ABORT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with self.log:
            self.why, self.where = _last_words(self.log)

    @property
    def status(self) -> str:
        """Of the cell that it was at when it ended."""
        code = self.process.returncode
        return f"failed: its process ended with code {code}{self.where}: {self.why}"[:REASON_LENGTH]


def _round(
    suite: Suite, turns: Sequence[tuple[_Worker, list[Cell]]], limit_s: float
) -> Generator[Outcome, None, list[list[Cell]]]:
    """Each worker's batch, compiled by all and then measured by one after the other.

    Returns the batches that are left for another round.
    """
    start = time.monotonic()
    for worker, cells in turns:
        worker.send({"suite": suite.name, "cells": [*map(dataclasses.asdict, cells)]})
    for worker, _ in turns:
        worker.answer(limit_s, since=start)
    left: list[list[Cell]] = []
    for worker, cells in turns:
        if worker.ended and len(cells) > 1:  # one of them did it: the one that does it alone
            left += ([cell] for cell in cells)
        else:
            rest = yield from _turn(worker, cells, limit_s)
            left += [rest] if rest else []
    return left


def _turn(
    worker: _Worker, cells: list[Cell], limit_s: float
) -> Generator[Outcome, None, list[Cell]]:
    """What the worker measures; returns the cells that it leaves to another process."""
    answered = 0
    if not worker.ended:
        worker.send({})
        while answered < len(cells) and (answer := worker.answer(limit_s)):
            yield Outcome(cells[answered], answer["figures"], answer["status"])
            answered += 1
    left = cells[answered:]
    if not left:
        worker.answer(limit_s)  # it has given back the memory, or has ended
    elif answered == 0 or worker.process.returncode != RESTART:
        yield Outcome(left.pop(0), {}, worker.status)
    return left


def _last_words(log: IO[str]) -> tuple[str, str]:
    """The last line before Python's own, and out of those the project's line that it was at."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    said = list(itertools.takewhile(lambda line: not line.startswith("Fatal Python error"), lines))
    frames = (_FRAME.search(line) for line in lines[len(said) :])
    where = next((f" in {f[3]}, {f[1]}:{f[2]}" for f in frames if f), "")
    return said[-1] if said else "it said nothing", where
