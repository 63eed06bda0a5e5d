"""Runs cells in a process of their side, and starts it again where a cell brings it down."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from benchmarks.machine import ROOT
from benchmarks.providers import Side
from benchmarks.suites import Cell, Suite
from benchmarks.worker import REASON_LENGTH, RESTART

LIMIT_S = 900.0  # for one answer; the first waits for a batch of compilations


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell: figures where `status` is "ok", else a reason."""

    cell: Cell
    figures: dict[str, Any]
    status: str


def outcomes(
    side: Side, suite: Suite, cells: Sequence[Cell], *, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """One for each cell, in order. A process that dies or hangs costs the cell it was at."""
    left = list(cells)
    while left:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            answered = 0
            hung = threading.Event()
            with _process(side, log) as process:
                _send(process, {"suite": suite.name, "cells": [*map(dataclasses.asdict, left)]})
                for cell, answer in zip(left, _answers(process, limit_s, hung)):
                    yield Outcome(cell, answer["figures"], answer["status"])
                    answered += 1
            left = left[answered:]
            if left and (answered == 0 or process.returncode != RESTART):
                why = f"no answer in {limit_s:.0f} s" if hung.is_set() else _last_words(log)
                status = f"failed: its process ended with code {process.returncode}: {why}"
                yield Outcome(left.pop(0), {}, status[:REASON_LENGTH])


@contextlib.contextmanager
def _process(side: Side, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A worker that outlives neither an interrupt nor a caller that has enough."""
    command = [sys.executable, "-m", "benchmarks.worker", side]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=log, text=True
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _send(process: subprocess.Popen[str], request: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        json.dump(request, process.stdin)
        process.stdin.close()
    except BrokenPipeError:  # it died before it read: its exit code tells
        pass


def _answers(
    process: subprocess.Popen[str], limit_s: float, hung: threading.Event
) -> Iterator[dict[str, Any]]:
    """The answers as they come; sets `hung` and kills the process where one takes too long."""
    assert process.stdout is not None

    def give_up() -> None:
        hung.set()
        process.kill()

    while True:
        watchdog = threading.Timer(limit_s, give_up)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            return
        yield json.loads(line)


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "it said nothing"
