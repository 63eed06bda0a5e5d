"""A process that measures cells: it compiles a batch of them, and measures them on request.

    python -m benchmarks.worker jax 2

JAX and torch reserve GPU memory, and a wrong kernel can crash its process, so each side (JAX or
torch) has separate processes. The last argument is the number of cells that the process compiles at
the same time.

The parent process sends two lines to standard input for each batch. This process answers with JSON
objects, one per line:

    {"suite": name, "cells": [...]}   ->  {} when the cells are compiled
    any line: measure the cells now   ->  {"figures": {...}, "status": "ok" or a reason} for each
                                          cell, in order; {} when the cells' memory is freed

This is repeated for each batch, until the input ends.
"""

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from benchmarks.suites import SUITES, Cell

RESTART = 75  # exit code: another process must run the remaining cells
REASON_LENGTH = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # terminal colours in QuACK's error texts


@dataclasses.dataclass(frozen=True)
class Failed:
    """A description of an error, which is stored instead of the exception.

    The exception would keep the arrays in its stack frames alive.
    """

    status: str
    restart: bool  # True if the process cannot use the GPU any more


def reason(error: BaseException) -> str:
    """Return a line that describes the error. For an exception group, describe its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = _COLOUR.sub("", str(error)).strip().splitlines() or [""]
    is_missing = isinstance(error, ImportError) or isinstance(error.__cause__, ImportError)
    kind = "missing" if is_missing else "failed"
    return f"{kind}: {type(error).__name__}: {lines[0]}"[:REASON_LENGTH]


def attempt(side: Any, step: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``step(*arguments)``, or Failed if it raises."""
    try:
        return step(*arguments)
    except Exception as error:
        failed = Failed(reason(error), side.needs_restart(error))
    side.release()  # after the exception is gone, free the memory of the failed cell
    return failed


def prepared(side: Any, suite: str, cells: Sequence[Cell], threads: int) -> list[Any]:
    """Compile the cells. Return a list with one entry for each cell.

    An entry is a function that measures the cell, or a `Failed` if the cell does not compile.
    """

    def prepare(cell: Cell) -> Any:
        return attempt(side, side.prepare, suite, cell)

    if threads == 1 or len(cells) == 1:
        return [prepare(cell) for cell in cells]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(prepare, cells))


def say(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


def turn(side: Any, measures: Sequence[Any], out: TextIO) -> bool:
    """Measure the cells, and write an answer for each.

    Return False if the GPU cannot be used any more after an error of a cell.
    """
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
    """Compile and measure batches until there are no more requests. Return the exit code."""
    threads = min(threads, side.THREADS)
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        suite = SUITES[request["suite"]]
        cells = [suite.cell(**cell) for cell in request["cells"]]
        measures = prepared(side, suite.name, cells, 1 if suite.in_turn else threads)
        lost = any(isinstance(m, Failed) and m.restart for m in measures)
        if lost and len(cells) > 1:  # the parent will start again, with one cell per batch
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
    # Requests and answers use standard input and output. Redirect both for the libraries, so that
    # they neither read requests nor print into the answers.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return work(
        importlib.import_module(f"benchmarks.{sys.argv[1]}_side"),
        requests,
        out,
        threads=int(sys.argv[2]),
    )


if __name__ == "__main__":
    os._exit(main())  # after a GPU error, clean-up of libraries can hang
