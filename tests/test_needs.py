"""Cases that cannot run on this machine are deselected and counted."""

import subprocess
import sys
from pathlib import Path

import jax
import needs
import pytest

HERE = Path(__file__).parent


class Config:
    """A fake of pytest's config. It has only the attributes that `needs` reads."""

    def __init__(self):
        self.stash = pytest.Stash()
        self.hook = self
        self.deselected = []

    def pytest_deselected(self, items):
        self.deselected += items


class Item:
    def __init__(self, *marks, fixtures=()):
        self.marks, self.fixturenames = marks, fixtures

    def get_closest_marker(self, name):
        return name if name in self.marks else None


@pytest.fixture
def missing(monkeypatch):
    """Replace the requirements of the tests by three: "a", "b" and "c".

    A test has requirement "a" or "b" if it has a mark of this name, and requirement "c" if it uses
    a fixture of this name. Return a dict that maps a requirement to what is missing, or to None if
    it is met.
    """
    found = {"a": "needs a", "b": None, "c": "needs c"}

    def need(name):
        place = "fixtures" if name == "c" else "marks"
        return needs.Need(lambda: found[name], **{place: [name]})

    monkeypatch.setattr(needs, "NEEDS", [need(name) for name in found])


@pytest.mark.usefixtures("missing")
def test_cases_are_left_out_for_what_they_lack_first():
    config = Config()
    items = [Item(), Item("a"), Item("a", fixtures="c"), Item("b"), Item("b", fixtures=["c"])]
    rest, left_out = [items[0], items[3]], [items[i] for i in (1, 2, 4)]
    needs.leave_out(config, items)
    assert items == rest
    assert config.deselected == left_out
    assert needs.summary(config) == "left out: 2 cases (needs a); 1 cases (needs c)"


@pytest.mark.usefixtures("missing")
def test_nothing_is_said_where_nothing_is_left_out():
    config = Config()
    needs.leave_out(config, items := [Item(), Item("b")])
    assert len(items) == 2
    assert needs.summary(config) is None


def test_files_are_left_out(monkeypatch):
    config, path = Config(), HERE / "triton" / "test_compile.py"
    monkeypatch.setattr(needs, "FILES", {"triton/test_compile*.py": lambda: "needs t"})
    assert needs.leaves_out_file(config, path)
    assert not needs.leaves_out_file(config, path.with_name("test_schedules.py"))
    assert needs.summary(config) == "left out: 1 files (needs t)"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_cannot_run_alone_is_no_success(processes):
    """If no selected case can run on this machine, pytest's exit status is not 0.

    This holds with and without worker processes.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-n",
        processes,
        "test_overflow.py",
    ]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout
    assert "left out: " in run.stdout
    assert "cases (needs an NVIDIA GPU of capability 9.0 or newer)" in run.stdout
