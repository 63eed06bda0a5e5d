"""Cases that cannot run on this machine are deselected and counted."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_cannot_run_alone_is_no_success(processes):
    """If no selected case can run on this machine, pytest's exit status is not 0.

    This holds with and without worker processes.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu"),
        *("-n", processes, "test_overflow.py"),
    ]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout
    assert "left out: " in run.stdout
    assert "cases (needs an NVIDIA GPU of capability 9.0 or newer)" in run.stdout
