"""Tests of `make demo`: short training runs, wrong arguments, its checks, and the docs on it."""

import pydoc_data.topics
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = ["--layers=2", "--width=32", "--heads=2", "--seq=16", "--batch=4", "--steps=25"]


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Return the demo's main function. It runs in a temporary folder."""
    # Create all virtual devices now. Otherwise, the demo would create only as many as its mesh has.
    jax.devices()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import train_transformer

    return train_transformer.main


OPTIONS = [["--dtype", "bfloat16"], ["--no-scan", "--layers=1", "--mesh", "data=2,fsdp=2"]]


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_short_run(options, main, tmp_path, monkeypatch, capsys):
    """A short run prints its results. A model with more of jaxnorm's functions saves fewer bytes.

    The text on which the demo trains is cut to a tenth. Otherwise, evaluating the model on this
    text would take most of the time of a short run.
    """
    topics = pydoc_data.topics.topics
    monkeypatch.setattr(pydoc_data.topics, "topics", dict([*topics.items()][::10]))
    assert main([*SMALL, *options, "--markdown", "table.md"]) == 0
    out = capsys.readouterr().out
    for expected in ["Flax", "first 20 losses", "bigram", "xla (", "compared with the row above"]:
        assert expected in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "demo.png") in out
    rows = (tmp_path / "table.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:5]]
    assert [label for label, *_ in cells] == [
        "Flax",
        "jaxnorm's norms and loss",
        "and activation_linear",
    ]
    saved = [float(row[4]) for row in cells]
    assert sorted(saved, reverse=True) == saved  # each row has fewer saved bytes than the row above
    assert cells[0][5:] == ["-", "-"]
    assert all(float(row[6]) > 0 for row in cells[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 0", "--layers: got '0'; expected an integer of at least 1"),
        ("--seq 1000000", "--seq: got 1000000; expected less than"),
        (
            "--mesh data=2,rows=2",
            "--mesh: got 'data=2,rows=2'; expected AXIS=N,... with axes out of",
        ),
        ("--mesh data=3", "--batch: got 16; expected a multiple of the 3 devices of --mesh"),
        ("--out nowhere/plot.png", "expected a file in a folder that exists"),
    ],
)
def test_bad_values(arguments, message, main, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import report

    return report


def runs(report, *curves):
    return [
        report.Run(str(i), np.asarray(c, float), float(c[-1]), 1.0, 1, 1)
        for i, c in enumerate(curves)
    ]


def test_checks_can_fail(report):
    good = np.linspace(5, 2, 100)
    early, late, broken = good.copy(), good.copy(), good.copy()
    early[7] += 2e-4
    late[-10:] *= 1.04
    broken[50:] = np.nan

    def outcome(curve):
        return [
            c.passed for c in report.agreement_checks(runs(report, good, good, curve), 20, 1e-4)
        ]

    assert outcome(good) == [True, True]
    assert outcome(early) == [False, True]
    assert outcome(late) == [True, False]
    assert outcome(broken) == [True, False]
    learned = [
        [c.passed for c in report.learning_checks(runs(report, good), bigram, 2.6, enough=enough)]
        for bigram, enough in [(2.3, True), (1.9, True), (2.3, False)]
    ]
    assert learned == [[True, True], [True, False], [None, None]]


# `make demo ARGS="--markdown examples/demo.md"` writes the table.
def test_the_docs_show_what_the_demo_printed():
    page = (ROOT / "docs" / "memory.md").read_text()
    for line in (EXAMPLES / "demo.md").read_text().splitlines():
        assert line in page
