"""Branch coverage: how many ways of the branches in the library's code the tests have taken.

    BRANCHES=build/branches.json make test
    BRANCHES=build/branches.json make test ARGS=--rest

The first command writes the ways that were taken to a file and prints their share; the second one
adds to them. `python tests/branches.py build/branches.json` prints the ways that are missing.

Python (`sys.monitoring`) reports each branch instruction until both of its ways were taken, so that
the tests take as long as without. A branch counts if its two ways lead to different lines. The
branches of `assert` and of exceptions that are not expected do not count.
"""

import collections
import dis
import itertools
import json
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxnorm", "kernels/jaxnorm_kernels/xla")
_OURS = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
#: Names of the instructions before a branch that is not counted.
_UNEXPECTED = ("CHECK_EXC_MATCH", "WITH_EXCEPT_START")

#: A file, a line in it, the name of a function, and the offset of an instruction in its code.
Branch = tuple[str, int, str, int]

# Map branches to the offsets of the instructions that followed them: branches of this process, and
# those of all processes.
_seen: dict[tuple[types.CodeType, int], set[int]] = collections.defaultdict(set)
_found: dict[Branch, set[int]] = collections.defaultdict(set)


def start() -> None:
    """Record branches from now on, if the environment has the name of a file for them."""
    if "BRANCHES" not in os.environ:
        return
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.COVERAGE_ID, "branches")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.BRANCH, _note)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.BRANCH)


def _note(code: types.CodeType, offset: int, destination: int) -> object:
    if code.co_filename.startswith(_OURS):
        ways = _seen[code, offset]
        ways.add(destination)
        if len(ways) < 2:
            return None
    return sys.monitoring.DISABLE


def taken() -> list[tuple[Branch, list[int]]]:
    """Return the branches of this process, in a form that can be sent to another process."""
    return [(_branch(code, at), sorted(ways)) for (code, at), ways in _seen.items()]


def _branch(code: types.CodeType, offset: int) -> Branch:
    file = str(Path(code.co_filename).relative_to(ROOT))
    return file, code.co_firstlineno, code.co_qualname, offset


def possible() -> Iterator[tuple[Branch, int]]:
    """Yield all branches that count, with their lines."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        codes = [compile(path.read_text(), str(path), "exec")]
        while codes:
            code = codes.pop()
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            yield from ((_branch(code, at), line) for at, line in _branches_of(code))


def _branches_of(code: types.CodeType) -> Iterator[tuple[int, int]]:
    instructions = [*dis.get_instructions(code)]
    lines = {i.offset: i.positions.lineno for i in instructions if i.positions}
    kinds = {i.offset: i.opname for i in instructions}
    before = ["", "", *(i.opname for i in instructions)]
    for i, (this, after) in enumerate(itertools.pairwise(instructions)):
        if not this.opname.startswith(("POP_JUMP_IF", "FOR_ITER")):
            continue
        if {*before[i : i + 2]} & {*_UNEXPECTED} or after.opname == "LOAD_ASSERTION_ERROR":
            continue
        if kinds.get(this.argval) == "LOAD_ASSERTION_ERROR":
            continue
        line = lines[this.offset]
        if line and (this.opname == "FOR_ITER" or lines[after.offset] != lines[this.argval]):
            yield this.offset, line


def add(branches: Iterable[tuple[Branch, list[int]]]) -> None:
    """Add branches that another process has taken."""
    for branch, ways in branches:
        _found[tuple(branch)] |= {*ways}


def report() -> Iterator[str]:
    """Add the branches of this run to the file, and yield a line with their share."""
    if path := os.environ.get("BRANCHES"):
        add(taken())
        add(_read(path))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps([(b, sorted(ways)) for b, ways in _found.items()]))
        yield _summary()


def _read(path: str) -> list[tuple[Branch, list[int]]]:
    return json.loads(Path(path).read_text()) if Path(path).exists() else []


def _summary() -> str:
    counts = [min(len(_found[branch]), 2) for branch, _ in possible()]
    share = 100 * sum(counts) / (2 * len(counts))
    return f"branches: {share:.1f} % of {2 * len(counts)} ways taken, in {', '.join(FOLDERS)}"


def main() -> None:
    add(_read(sys.argv[1]))
    for branch, line in possible():
        if len(_found[branch]) < 2:
            print(f"{branch[0]}:{line}: {branch[2]}: {len(_found[branch])} of 2")
    print(_summary())


# `conftest` imports this module before the library, so that all of the library's code is recorded.
start()

if __name__ == "__main__":
    main()
