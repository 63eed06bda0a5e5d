"""How `make docs` builds these pages: Sphinx, Markdown by MyST, the API from the docstrings."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
jaxnorm = importlib.import_module("jaxnorm")

project = "jaxnorm"
author = "the jaxnorm authors"
release = jaxnorm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Pages of modules that are not here, or whose library is not.
_MODULES = {"equinox": ("equinox", "jaxnorm.equinox"), "linen": ("flax",), "nnx": ("flax",)}
exclude_patterns = [
    f"api/{page}.md"
    for page, needed in _MODULES.items()
    if not all(importlib.util.find_spec(name) for name in needed)
]

html_theme = "furo"
html_title = f"jaxnorm {release}"
html_show_copyright = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_preserve_defaults = True
# Docstrings say types and shapes; annotations would repeat them, at length.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Markdown files outside `docs` are no pages: links to them are links to files."""
    source[0] = re.sub(r"\]\((\.\./[^)]*\.md)\)", r"](path:\1)", source[0])


def show_arguments(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """Those of `__init__`, where a class's metaclass hides them (nnx)."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = inspect.Signature(parameters)
    return stringify_signature(shown, show_annotation=False), returns


def setup(app: Sphinx) -> None:
    """What Sphinx calls first."""
    app.connect("source-read", link_files)
    app.connect("autodoc-process-signature", show_arguments)
