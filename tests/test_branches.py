"""Branch coverage: which branches count, and that those of a process are recorded."""

import json
import os
import subprocess
import sys
import textwrap

import branches


def test_branches_that_count():
    """Two ways on one line, assertions and exceptions do not count."""
    code = compile(
        textwrap.dedent("""\
            def f(a):
                assert a
                for x in a:
                    if x and a > 1:
                        a = 1
                try:
                    return a if a else 2
                except ValueError:
                    return 3
            """),
        "f.py",
        "exec",
    )
    (function,) = (c for c in code.co_consts if hasattr(c, "co_code"))
    assert {line for _, line in branches._branches_of(function)} == {3, 4}


def test_branches_of_several_processes(tmp_path):
    """A process adds its branches to those of the file."""
    path = tmp_path / "build" / "branches.json"
    program = """
import sys
import branches
from jaxnorm.operations import checks
try:
    checks.positive("f", "a", float(sys.argv[1]))
except ValueError:
    pass
print(*branches.report())
"""
    for value, count in (("1.0", 1), ("0.0", 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, value],
            env=os.environ | {"BRANCHES": str(path), "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith("branches: ")
        found = [ways for branch, ways in json.loads(path.read_text()) if branch[2] == "positive"]
        assert [len(ways) for ways in found] == [count]
