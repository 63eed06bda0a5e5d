"""The residuals of a Llama layer: the docs show the numbers that the example prints."""

import re
import sys

import pytest
from test_readme import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import llama_layer

pytestmark = pytest.mark.oldest_jax


def test_the_docs_have_its_figures():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = {name: f"{number:.1f}" for name, number in llama_layer.units().items()}
    assert dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) \|$", page, re.MULTILINE)) == rows
    plain, *_, least = rows.values()
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"saves {plain} activations (tokens x width) in plain JAX, and {least} with" in readme


def test_the_report_advises_to_save_least():
    """auto_remat saves no more than the last layer of the example, of which it frees little."""
    before, *_, after = map(llama_layer.report_of, llama_layer.LAYERS_OF.values())
    assert before.total - before.saves <= after.total
    assert after.saves < 0.1 * after.total


def test_it_prints_the_report_and_the_table(capsys):
    llama_layer.main()
    printed = capsys.readouterr().out
    assert "auto_remat saves" in printed
    for name, number in llama_layer.units().items():
        assert f"| {name} | {number:.1f} |" in printed
