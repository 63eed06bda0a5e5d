"""A process of one side, which compiles a batch of cells and measures them on request.

    python -m benchmarks.worker jax 2

JAX and torch each take the GPU's memory, and a bad kernel can crash its process, so each side has
separate processes. The number is how many cells a process compiles at once.

The parent writes a line for each step. The process answers with JSON objects, one per line:

    {"suite": name, "cells": [...]}   ->  {} when the cells are compiled
    anything: its turn                ->  {"figures": {...}, "status": "ok" or a reason} for each
                                          cell, in order; {} when it has given back their memory

This continues until there are no more lines.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from benchmarks import program_folders
from benchmarks.suites import SUITES, Cell

RESTART = 75  # exit code: the remaining cells need another process
REASON_LENGTH = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal; QuACK's errors contain some


@dataclasses.dataclass(frozen=True)
class Failed:
    """The part of an error that is kept. The error itself would keep its frames' operands alive."""

    status: str
    restart: bool  # the GPU's context is lost


class Absent:
    """A side that cannot be imported: each of its cells reports the reason."""

    THREADS = 1

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def prepare(self, suite: str, cell: Cell) -> Any:
        raise self.error

    def release(self) -> None:
        pass

    def needs_restart(self, error: Exception) -> bool:
        return False

    def crowds_others(self) -> bool:
        return False


def import_side(name: str) -> Any:
    try:
        if name in program_folders.SIDES:
            triton_programs = importlib.import_module("benchmarks.triton_programs")
            triton_programs.replay(program_folders.of_side(name))
            name = "jax"
        return importlib.import_module(f"benchmarks.{name}_side")
    except ImportError as error:
        return Absent(error)


def reason(error: BaseException) -> str:
    """Return one line that describes the error; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = _COLOUR.sub("", str(error)).strip().splitlines() or [""]
    is_missing = isinstance(error, ImportError) or isinstance(error.__cause__, ImportError)
    kind = "missing" if is_missing else "failed"
    return f"{kind}: {type(error).__name__}: {lines[0]}"[:REASON_LENGTH]


def attempt(side: Any, step: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a step, or Failed if it raises: a failure must not end the run."""
    try:
        return step(*arguments)
    except Exception as error:
        failed = Failed(reason(error), side.needs_restart(error))
    side.release()  # free the memory of the failed cell, now that its error is gone
    return failed


def prepared(side: Any, suite: str, cells: Sequence[Cell], threads: int) -> list[Any]:
    """Compile the cells. Return, for each, a function that measures it, or Failed."""

    def prepare(cell: Cell) -> Any:
        return attempt(side, side.prepare, suite, cell)

    if threads == 1 or len(cells) == 1:
        return [prepare(cell) for cell in cells]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(prepare, cells))


def say(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


def turn(side: Any, measures: Sequence[Any], out: TextIO) -> bool:
    """Answer each cell; return False if a cell lost the GPU's context, which all others need."""
    for measure in measures:
        got = measure if isinstance(measure, Failed) else attempt(side, measure)
        if isinstance(got, Failed):
            say(out, {"figures": {}, "status": got.status})
            if got.restart:
                return False
        else:
            say(out, {"figures": got, "status": "ok"})
    return True


def work(side: Any, requests: TextIO, out: TextIO, threads: int) -> int:
    """Serve batches until there are no more; return the exit code."""
    threads = min(threads, side.THREADS)
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        suite = SUITES[request["suite"]]
        cells = [suite.cell(**cell) for cell in request["cells"]]
        measures = prepared(side, suite.name, cells, 1 if suite.alone or suite.in_turn else threads)
        lost = any(isinstance(m, Failed) and m.restart for m in measures)
        if lost and len(cells) > 1:  # the parent then runs them one at a time
            return RESTART
        side.release()
        say(out, {})
        if not requests.readline():
            break
        if not turn(side, measures, out):
            return RESTART
        del measures
        side.release()
        if side.crowds_others():
            return RESTART
        say(out, {})
    return 0


def main() -> int:
    # Libraries must neither read the parent's messages nor print into the answers.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)  # reports where a process crashed, or was aborted
    return work(import_side(sys.argv[1]), requests, out, threads=int(sys.argv[2]))


if __name__ == "__main__":
    os._exit(main())  # libraries' own clean-up can hang after the GPU's context is lost
