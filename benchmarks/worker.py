"""A process that compiles a batch of cells, then measures them, and ends.

    python -m benchmarks.worker SIDE SUITE THREADS LOCK

Each batch has a separate process, which imports only one side (JAX or torch). The reasons are that
JAX and torch reserve GPU memory, and that a wrong kernel can crash its process. The process
compiles THREADS cells at the same time.

The parent writes the cells to standard input, as a JSON list. The answers are lines of JSON: {} at
each of three stages (it begins to compile, the cells are compiled, it begins to measure), and then
{"figures": {...}, "status": "ok" or a reason} for each cell, in order.

XLA and torch also time kernels on the GPU when they compile. So a process holds a shared lock on
the file LOCK while it compiles, and an exclusive lock while it measures.
"""

import dataclasses
import fcntl
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.suites import SUITES, Cell

RESTART = 75  # exit code: another process must run the remaining cells
REASON_LENGTH = 200
#: The indices of the answers for which the process waits until it may use the GPU.
WAITS = (0, 2)
#: The number of answers until the cells are compiled, and until the measurements begin.
COMPILED, STAGES = 2, 3
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


def work(side: Any, cells: Sequence[Cell], say: Callable[..., None]) -> int:
    """Compile and measure the cells, and send the answers with `say`. Return the exit code."""
    _, _, suite, threads, lock = sys.argv
    with open(lock, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        say()
        with ThreadPoolExecutor(min(int(threads), side.THREADS)) as pool:
            measures = [*pool.map(lambda cell: attempt(side, side.prepare, suite, cell), cells)]
        side.release()
        if len(cells) > 1 and any(isinstance(m, Failed) and m.restart for m in measures):
            return RESTART
        say()
        fcntl.flock(file, fcntl.LOCK_EX)
        say()
        for measure in measures:
            got = measure if isinstance(measure, Failed) else attempt(side, measure)
            if not isinstance(got, Failed):
                say(figures=got, status="ok")
                continue
            say(figures={}, status=got.status)
            if got.restart:
                return RESTART
    return 0


def main() -> int:
    # Answers use standard output. Redirect it for the libraries, so that they do not print into the
    # answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    suite = SUITES[sys.argv[2]]
    cells = [suite.cell(**cell) for cell in json.load(sys.stdin)]
    side = importlib.import_module(f"benchmarks.{sys.argv[1]}_side")
    return work(side, cells, lambda **answer: print(json.dumps(answer), file=out, flush=True))


if __name__ == "__main__":
    os._exit(main())  # after a GPU error, clean-up of libraries can hang
