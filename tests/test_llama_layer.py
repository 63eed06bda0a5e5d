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
    assert f"the equivalent of {plain} activations (tokens x width) instead of {least}" in readme


def test_each_step_is_what_the_advice_says():
    """Following all advice reduces the saved bytes by the number that the report states.

    The resulting layer, the last one of the example, gets no more advice.
    """
    before, *_, after = map(llama_layer.report_of, llama_layer.LAYERS_OF.values())
    assert before.total - after.total == pytest.approx(sum(row.saves for row in before), rel=0.01)
    assert not [row for row in after if row.advice]


def test_it_prints_the_report_and_the_table(capsys):
    llama_layer.main()
    printed = capsys.readouterr().out
    assert "gated_linear saves 8192 of" in printed
    for name, number in llama_layer.units().items():
        assert f"| {name} | {number:.1f} |" in printed
