"""Calls that an implementation refuses: the reasons that tests expect, and the number of calls.

A test is skipped if the implementation refuses its call. If an implementation refused everything,
all of its tests would be skipped. So a test lists the reasons that it expects, and a run on a GPU
compares the number of refused calls with `refused.json` (written by ``pytest --write-refusals``).
"""

import collections
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# Parts of the sentences with which implementations refuse calls.
SOME_COLUMNS = "along some normalised axes but not all"
FLOAT64 = "an array is float64"
EMPTY = "an array has size 0"
NARROW = "rows of at least 8 elements"
FEW_SHORT_ROWS = "needs at least 64 rows this short"
GROUPS = "groups of"
LONG = "support no rows of this length"
UNALIGNED = "norm backward needs rows of a multiple of 16 bytes"
SHORT_LOGITS = "rows of at least 128 columns"
CLASSES = "support no mask of classes"
NO_KERNEL = "there is no kernel for this operation yet"

#: The mark of a test that expects refusals: ``@refused.expect(EMPTY, FLOAT64)``.
expect = pytest.mark.refused

COUNTS = Path(__file__).with_name("refused.json")

#: Maps a test and an implementation to a pair of numbers: how many cases were tried, and how many
#: of these cases the implementation refused.
Counts = dict[str, tuple[int, int]]

_REFUSAL = re.compile(
    r"\w+: implementation='(mosaic|triton)' cannot run the \w+ of \([^)]*\): (.*); leave "
)


def reason(error: ValueError) -> str | None:
    """Return the sentence with which an implementation refused a call; None for another error."""
    match = _REFUSAL.match(str(error))
    return match[2] if match else None


def count(stats: Mapping[str, Sequence[Any]]) -> Counts:
    """Return the numbers of cases and of refused cases, for each test and implementation."""
    counted: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for outcome in ("passed", "failed", "skipped"):
        for report in stats.get(outcome, ()):
            name = re.search(r"\b(mosaic|triton)\b", report.nodeid.partition("[")[2])
            refusal = outcome == "skipped" and _REFUSAL.search(str(report.longrepr))
            if name is None or (outcome == "skipped" and not refusal):
                continue
            counts = counted[f"{report.nodeid.partition('[')[0]} {name[1]}"]
            counts[0] += 1
            counts[1] += bool(refusal)
    return {test: (cases, refusals) for test, (cases, refusals) in sorted(counted.items())}


def differences(counted: Counts) -> list[str]:
    """Return a message for each test whose number of refusals is not that of `refused.json`.

    Tests are left out if not all of their cases ran.
    """
    committed = read()
    return [
        f"{test}: {refusals} of {cases} cases refused; expected {committed[test][1]} "
        f"({COUNTS.name}); if that is right, run pytest --write-refusals"
        for test, (cases, refusals) in counted.items()
        if test in committed and committed[test][0] == cases and committed[test][1] != refusals
    ]


def summary(counted: Counts) -> Iterable[str]:
    for name in ("mosaic", "triton"):
        of_name = [counts for test, counts in counted.items() if test.endswith(name)]
        if of_name:
            cases, refusals = map(sum, zip(*of_name))
            yield f"{name}: {refusals} of {cases} cases refused, for reasons that tests expect"
    yield from differences(counted)


def read() -> Counts:
    if not COUNTS.exists():
        return {}
    return {test: tuple(counts) for test, counts in json.loads(COUNTS.read_text()).items()}


def write(counted: Counts) -> None:
    """Update the committed numbers with those of this run."""
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in (read() | counted).items())
    COUNTS.write_text(f"{{\n{lines}\n}}\n")
