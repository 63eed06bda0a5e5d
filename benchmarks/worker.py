"""One side's process: measures cells that its parent sends, and answers with a line for each.

    python -m benchmarks.worker jax < request

JAX and torch each take the GPU's memory, and a bad kernel takes its process with it: so each side
has a process of its own. The request is one JSON object, {"suite": name, "cells": [...]}; each
answer is {"figures": {...}, "status": "ok" or a reason}, in the order of the cells.
"""

import importlib
import json
import os
import sys
from typing import Any, TextIO

from benchmarks.suites import SUITES

RESTART = 75  # exit code: the GPU's context is lost, and the cells that are left need a new one
REASON_LENGTH = 200


def reason(error: BaseException) -> str:
    """One line that names the error; of a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).strip().splitlines() or [""]
    kind = "missing" if isinstance(error, ImportError) else "failed"
    return f"{kind}: {type(error).__name__}: {lines[0]}"[:REASON_LENGTH]


def answer(out: TextIO, figures: dict[str, Any], status: str) -> None:
    print(json.dumps({"figures": figures, "status": status}), file=out, flush=True)


def work(side_name: str, suite_name: str, cells: list[Any], out: TextIO) -> int:
    """Answers every cell, whatever happens to it; returns the exit code."""
    try:
        side = importlib.import_module(f"benchmarks.{side_name}_side")
    except ImportError as error:
        for _ in cells:
            answer(out, {}, reason(error))
        return 0
    for measure in side.measures(suite_name, cells):
        try:
            figures = measure()
        except Exception as error:  # a failing cell is a row, not the end of the run
            answer(out, {}, reason(error))
            if side.needs_restart(error):
                return RESTART
        else:
            answer(out, figures, "ok")
    return 0


def main() -> int:
    # What libraries print is not part of the answer.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    cell_type = SUITES[request["suite"]].cell
    cells = [cell_type(**cell) for cell in request["cells"]]
    return work(sys.argv[1], request["suite"], cells, out)


if __name__ == "__main__":
    os._exit(main())  # libraries' own clean-up can hang where the GPU's context is lost
