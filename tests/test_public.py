"""The package as users see it: names, help, docstrings and types."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

#: The kind and the name of everything that the API page documents.
_LISTED = re.findall(
    r"^\.\. auto(\w+):: (\w+)$",
    (Path(__file__).parent.parent / "docs/api/jaxnorm.md").read_text(),
    re.MULTILINE,
)
FUNCTIONS = {name for kind, name in _LISTED if kind == "function"}
TYPES = {name for kind, name in _LISTED if kind == "class"}
VALUES = {name for kind, name in _LISTED if kind == "data"}


def test_all_names_are_listed():
    assert len(FUNCTIONS) >= 20
    assert len(TYPES) >= 5
    assert {"save_policy"} == VALUES
    assert set(jaxnorm.__all__) == FUNCTIONS | TYPES | VALUES
    for module, conversion in ((jaxnorm.linen, "converted"), (jaxnorm.nnx, "convert")):
        norms = {"GroupNorm", "LayerNorm", "RMSNorm", "RMSNormDense"}
        names = norms | {"auto_remat", "dot_product_attention", conversion}
        assert set(module.__all__) == names
        for name in module.__all__:
            assert getattr(module, name).__module__ == module.__name__


def test_help_lists_functions():
    text = pydoc.render_doc(jaxnorm, renderer=pydoc.plaintext)
    functions = text[text.index("FUNCTIONS") :]
    for name in FUNCTIONS:
        assert f"{name}(" in functions
        assert getattr(jaxnorm, name).__module__ == "jaxnorm"


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signatures_name_types(name):
    """Signatures in `help` show short names of types, not the unions that they stand for."""
    first, *_ = pydoc.render_doc(getattr(jaxnorm, name), renderer=pydoc.plaintext).splitlines()[2:]
    shown = first.split(" -> ")[0]
    assert shown.startswith(f"{name}(")
    for part in ("numpy", "StandsForArray", "SupportsDType"):
        assert part not in shown
    expected = {"check_params": "dtype: DTypeLike", "implementation_for": "dtype: DTypeLike"}
    if name not in ("auto_remat", "fit_memory", "memory_report", "remat_plan"):
        assert expected.get(name, ": ArrayLike") in shown


@pytest.mark.parametrize("module", [jaxnorm.linen, jaxnorm.nnx], ids=lambda m: m.__name__)
def test_signatures_of_flax_functions_name_types(module):
    shown = str(inspect.signature(module.dot_product_attention))
    assert "dtype: DTypeLike | None" in shown
    assert "numpy" not in shown
    assert "SupportsDType" not in shown


@pytest.mark.parametrize("name", sorted(FUNCTIONS | TYPES))
def test_docstrings(name):
    doc = inspect.getdoc(getattr(jaxnorm, name))
    assert len(doc) > 50
    if name in FUNCTIONS:
        assert "Args:" in doc
        assert "Returns:" in doc


def test_type_checkers_know_the_arguments():
    """mypy finds exactly the errors that `typed_code.py` marks."""
    pytest.importorskip("mypy")
    code = Path(__file__).with_name("typed_code.py")
    command = [sys.executable, "-m", "mypy", "--strict", str(code)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=code.parent.parent)
    assert run.returncode == 0, run.stdout
